"""The steps of a training loop, from the first hook to the rows that are written.

entry_points, hooks (what the loop calls) -> steps (numbers them) -> attempt (one optimizer step) -> rows
  -> row_writer -> the run's writer
loss_and_samples, phases, autocast_regions, sampling, sampled_tensors: what a step is asked
error_budget: how much may go wrong in watching before it ends
"""
