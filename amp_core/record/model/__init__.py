"""Reads the user's torch objects: parameters and modules under the names the user knows, the scaler, optimizers inside
framework wrappers. It changes nothing and runs no user code.
"""
