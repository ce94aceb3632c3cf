"""Signals for findings: facts that no number in a table tells, written as events.

start · call_order · nonfinite_outputs · risky_ops · backward · stale_gradients · state · unknown_scaler
"""
