"""What is counted per step in a profile of several windows."""

from pathlib import Path

import pytest

from amp_core import load_run
from amp_core.findings import diagnose
from tests.synthetic import write_rows


@pytest.mark.parametrize(("waits", "found"), [(1, None), (4, 4.0)])
def test_waits_are_counted_per_step_over_all_windows(tmp_path: Path, waits: int, found: float | None) -> None:
    """Three windows of two steps, each step with as many waits; none of them has a row in `windows`."""
    kernels = {
        "step": [10, 20, 30, 10],
        "steps": [2, 2, 2, 2],
        "name": ["cudaStreamSynchronize"] * 3 + ["gemm"],
        "count": [2 * waits] * 3 + [1],
        "total_us": [1.0] * 4,
        "device": ["cuda:0"] * 4,
    }
    run = load_run(write_rows(tmp_path / "run", kernels=kernels, config={"device": "cuda:0"}))
    assert [f.value for f in diagnose(run) if f.code == "host-syncs"] == ([] if found is None else [found])
