"""The steps of a training loop, from the first hook to the rows that are written.

entry_points, hooks (what the loop calls) -> steps (numbers them) -> attempt (one optimizer step) -> rows
  -> row_writer -> the run's writer
loss_and_samples, autocast_regions, sampling, sampled_tensors: what is measured in a step
error_budget: how many errors of its own watching survives
"""
