"""Settings of a training run: the settings with their checks (`training`), recipes and workloads (`catalog`).

Imports no torch: the job queue, the forms and the command line read it too.
"""
