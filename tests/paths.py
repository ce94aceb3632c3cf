"""Paths that tests read: the checkout and its sample runs."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout. A process with this working directory imports `amp_core` and `tests` from it."""

SAMPLE_RUNS = ROOT / "sample_runs"
