"""Observers: what looks on beside the step itself. Each is told the moments it overrides (see `record.observer`).

defaults (which ones are attached) · device · memory, storages · profile · signals/ (what findings need to know)
"""
