"""Time, memory and kernels of a run: where a step's time goes, what tensor cores did, what memory is made of."""
