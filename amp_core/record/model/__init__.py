"""The user's torch objects as watching reads them: parameters and modules under the names the user knows, the scaler,
optimizers inside of framework wrappers. Reads only; runs no user code.
"""
