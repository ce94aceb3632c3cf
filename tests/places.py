"""Where things lie that tests read: the checkout, and in it the recorded runs."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout; as its working directory, a process of a test's own imports `amp_core` and `tests` from here."""

SAMPLE_RUNS = ROOT / "sample_runs"
