"""Traces that name a device's work without its times."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, run_of


def untimed(marked_us: float = 0.0) -> Made:
    """Ten operators of the host, whose calls and kernels have neither start nor length."""
    trace = Made()
    for number in range(10):
        trace.op("aten::mul", 100 * number, 90)
        trace.kernel(made.RELU, 100 * number + 50, 40, 100 * number + 10)
    if marked_us:
        trace.event("gpu_user_annotation", "forward", 5, marked_us, "stream 7")
    for event in trace.events:
        if event["cat"] in ("kernel", "cuda_runtime"):
            event["ts"] = event["dur"] = 0.0
    return trace


def test_work_without_times_is_told_as_such(tmp_path):
    run = run_of(tmp_path, untimed())
    told = first_sentence(run)
    assert told == (
        "No kernel or copy of the device, 10 in all, has a time in the trace (each takes 0 µs), so which of them takes "
        "long cannot be told: record again."
    )
    (finding,) = [f for f in diagnose(run) if f.code == "device-not-recorded"]
    assert "no kernel or copy takes any, of 10 in all" in finding.title


def test_ranges_on_the_device_tell_which_side_is_the_limit(tmp_path):
    """The host's operators last 990 µs."""
    device = first_sentence(run_of(tmp_path / "device", untimed(20_000)))
    assert "last 20.0 ms, the host's operators 0.990 ms: the host launches far ahead, and the device is the" in device
    either = first_sentence(run_of(tmp_path / "either", untimed(1_100)))
    assert either.endswith("The ranges marked on the device last 1.10 ms, the host's operators 0.990 ms.")


def test_work_with_times_stays(tmp_path):
    """One kernel of no length at the trace's own time 0 is left out, and nothing is said of it."""
    trace = Made()
    trace.op("aten::mul", 0, 90)
    trace.kernel(made.RELU, 50, 40, 10)
    lost = dict(trace.events[-1], ts=0.0, dur=0.0)
    trace.events.append(lost)
    run = run_of(tmp_path, trace)
    assert run.kernels["count"].sum() == 1
    assert not [f for f in diagnose(run) if f.code == "device-not-recorded"]


@pytest.mark.parametrize("number", [1, 10])
def test_work_none_of_which_has_a_length_has_no_times(tmp_path, number):
    trace = Made()
    for at in range(0, 100 * number, 100):
        trace.op("aten::mul", at, 90)
        trace.kernel(made.RELU, at + 50, 0, at + 10)
    run = run_of(tmp_path, trace)
    assert f"No kernel or copy of the device, {number} in all, has a time in the trace" in first_sentence(run)
    assert [f.code for f in diagnose(run)] == ["device-not-recorded"]
