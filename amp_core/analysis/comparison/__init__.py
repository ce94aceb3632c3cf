"""Runs side by side: speed ratios with intervals, parity of learning, repeats over seeds, differences of settings.

repeats, loss_curves, ratios, parity -> learned, answer -> compare (Comparison)
"""
