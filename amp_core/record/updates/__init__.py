"""The update ledger: what is lost to rounding in updates of weights, in weight decay and in averaged copies.

ledger (an observer: which steps) -> held (elements and state before the step) -> replay (the step on float64 copies)
-> losses (shares) -> rows of `updates`
"""
