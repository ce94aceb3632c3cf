"""The checks that are meant for a GPU, as far as the fake machine can carry them out: what they expect can be."""

from pathlib import Path

import pytest
import torch

from tests.gpu.checks import Place, all_checks

CHECKS = ("kernel-channels", "kernel-many", "devices")
SLOW_CHECKS = ("watch-identical", "watch-memory", "memory-parts")


@pytest.mark.parametrize("name", [*CHECKS, *(pytest.param(name, marks=pytest.mark.whole) for name in SLOW_CHECKS)])
def test_a_check_for_gpus_asks_what_can_be(name: str, tmp_path: Path) -> None:
    (check,) = (check for check in all_checks() if check.name == name)
    rows = list(check.run(Place(torch.device("cuda:0"), True, tmp_path, 600)))
    assert rows and {row.verdict for row in rows} <= {"pass", "shown"}, [
        (row.check, row.measured) for row in rows if row.verdict not in ("pass", "shown")
    ]
