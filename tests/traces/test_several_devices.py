"""One process that uses several devices: whose figures are told."""

import pytest

from amp_core.findings import first_sentence
from amp_core.store.run import Run
from tests.traces import made
from tests.traces.made import Made, run_of


def on_two_devices(tmp_path, others_us: float) -> Run:
    """800 µs of products on device 0 and a kernel on device 1, in a step of 1,000 µs."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel(made.GEMM, 10, 800, 2)
    trace.kernel(made.RELU, 20, others_us, 15, device=1)
    trace.kernel(made.GEMM, 960, 30, 950)
    return run_of(tmp_path, trace)


def test_a_device_that_does_nearly_all_is_told_alone(tmp_path):
    sentence = first_sentence(on_two_devices(tmp_path, others_us=40))
    assert "Figures are those of cuda:0" in sentence and "0.0400 ms at most" in sentence and "means" not in sentence


@pytest.mark.parametrize("others_us", [200, 900])
def test_devices_that_share_the_work_are_told_as_a_mean(tmp_path, others_us):
    assert "Figures are means over the 2 devices of one process." in first_sentence(on_two_devices(tmp_path, others_us))
