"""Signals for findings: facts that tables do not hold, written as events.

start · call_order · nonfinite_outputs · loss_operators · risky_ops · backward · stale_gradients · state ·
unknown_scaler
"""
