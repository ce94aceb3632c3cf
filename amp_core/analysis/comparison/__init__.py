"""Runs beside each other: speed ratios with intervals, parity of learning, repeats over seeds, what differs.

repeats, loss_curves, ratios, parity -> learned, answer -> compare (Comparison)
"""
