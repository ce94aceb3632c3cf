"""The library: the list of runs, uploads, the table, and what can be done with a run."""
