"""GPU checks that the fake machine can run: their expectations can be met."""

from pathlib import Path

import pytest
import torch

from tests.gpu.checks import Place, all_checks

CHECKS = ("kernel-channels", "kernel-many", "devices", "cuda-graphs")
SLOW_CHECKS = ("watch-identical", "watch-memory", "memory-parts")


@pytest.mark.parametrize("name", [*CHECKS, *(pytest.param(name, marks=pytest.mark.whole) for name in SLOW_CHECKS)])
def test_a_gpu_check_passes(name: str, tmp_path: Path) -> None:
    (check,) = (check for check in all_checks() if check.name == name)
    rows = list(check.run(Place(torch.device("cuda:0"), True, tmp_path, 600)))
    assert rows and {row.verdict for row in rows} <= {"pass", "shown"}, [
        (row.check, row.measured) for row in rows if row.verdict not in ("pass", "shown")
    ]
