"""Run folders: everything that reads or writes one.

Writing, in the training process:

    record_batch -> segment_writer (one stream; sealing) -> open_segments (one per table) -> writer (RunWriter)
    -> resilient_writer (never blocks training)
    atomic: files that are whole or absent · shutdown: close every run however the process exits · resume · upload

Reading, anywhere, also while the run is being written:

    sources (folder, zip) | remote (object stores, urls) -> segment_reader -> run (Run, load_run)
    long_runs/: any number of tensor statistics in bounded memory
    untrusted/: runs of unknown origin, converted in a sandbox process
    packing: a run folder as one zip, and back
"""
