"""What a tick of *Start a run* costs with many jobs: processor time of the server, and how often Slurm is asked.

    python -m tests.benchmarks.queue_page                # 1,000 jobs of others in the scheduler, 3 of ours
    python -m tests.benchmarks.queue_page --ours 1000    # all of them ours

Slurm's squeue is a stand-in that prints that many lines; the page, the queue and the job files are real. The bar is
150 ms. Elapsed time says little on a busy machine, so processor time of this process is measured.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import pytest

from amp_core import jobs
from amp_core.jobs import backends
from amp_core.jobs.backends.slurm import Slurm
from pages.parts import warm_up
from pages.parts.library import run_list
from tests.app_test import app_test
from tests.jobs.fake_slurm import FakeSlurm

BAR_MS = 150.0


def main() -> None:
    """Print the cost of the first pass and of later ones."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--listed", type=int, default=1000, help="jobs in the scheduler (default %(default)s)")
    options.add_argument("--ours", type=int, default=3, help="how many of them are ours (default %(default)s)")
    options.add_argument("--passes", type=int, default=10, help="passes of the page (default %(default)s)")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        fake = FakeSlurm(Path(folder), patch, jobs=chosen.ours)
        fake.list_others(chosen.listed - chosen.ours)
        patch.setenv("AMPSCOPE_RUNS", str(fake.runs))
        patch.setattr(run_list, "SAMPLES", Path(folder) / "samples")
        patch.setattr(warm_up, "analyse_other_pages", lambda run: None)
        patch.setattr(jobs.queue, "SHARED_S", 0.0)  # each pass lists the jobs anew: the worst case
        patch.setitem(backends.BACKENDS, "slurm", Slurm())
        app, costs, began_s = app_test("pages/start_run.py"), [], time.monotonic()
        for _ in range(chosen.passes):
            before = time.process_time()
            app.run()
            costs.append((time.process_time() - before) * 1000)
            assert not app.exception, app.exception
        seconds, median, highest = time.monotonic() - began_s, statistics.median(costs[1:]), max(costs[1:])
        print(f"{chosen.listed} jobs in the scheduler, {chosen.ours} of ours; processor time of a pass in ms:")
        print(f"first {costs[0]:.0f}, then median {median:.0f}, highest {highest:.0f}; bar {BAR_MS:g}")
        print(f"squeue was run {fake.times_asked()} times in {seconds:.1f} s")


if __name__ == "__main__":
    main()
