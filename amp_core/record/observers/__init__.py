"""Observers of a recorded loop. Each is notified of the moments it overrides (see `record.observer`).

defaults (which ones are attached) · device · memory, storages · profile · signals/ (what findings need to know)
"""
