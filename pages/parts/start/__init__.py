"""Start a run: the form, its presets, what a training would take, the queue."""
