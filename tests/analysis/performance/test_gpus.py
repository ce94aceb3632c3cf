"""The GPU of an imported trace, by its name or its chip."""

import pytest

from amp_core import load_run
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.traces import import_traces
from tests.traces.made import products, write


@pytest.mark.parametrize(
    ("name", "capability", "multiprocessors", "known"),
    [
        ("NVIDIA PG509-210", "8.0", 108, "NVIDIA A100"),
        ("", "7.0", 80, "NVIDIA V100"),
        ("NVIDIA A100-SXM4-40GB", "8.0", 108, "NVIDIA A100-SXM4-40GB"),
        ("NVIDIA PG506-230", "8.0", 56, "NVIDIA PG506-230"),
    ],
)
def test_a_board_without_a_name_of_its_own_is_known_by_its_chip(tmp_path, name, capability, multiprocessors, known):
    major, minor = map(int, capability.split("."))
    about = {"name": name, "computeMajor": major, "computeMinor": minor, "numSms": multiprocessors}
    trace = write(tmp_path / "t.json", products().document(deviceProperties=[about]))
    assert profiled_gpu(load_run(import_traces([trace], tmp_path / "run")), "cuda:0").name == known
