"""Robustness: faults that must not break a training or lose written rows, and untrusted files that must do no harm.

The tests are quick forms; the scripts `kills` and `fuzz` are their long forms.
"""
