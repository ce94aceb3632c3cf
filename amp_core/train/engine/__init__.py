"""The training engine: `training.train` is the loop; the rest is what it needs.

recipes (autocast, scaler, dtypes) · model_changes · checkpoint, resume · processes, torchrun · progress, stopping
"""
