"""Runs of any length in bounded memory.

segments -> live_steps (sampled rows of `steps`) and sealed_tensors (parts of one segment) -> extract -> Run
"""
