"""Work of a device whose times are none of the trace."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from amp_core.traces import import_notes
from tests.traces import made
from tests.traces.made import Made, run_of

DAYS_64_US = 64 * 86_400e6


def with_kernels_at(*starts: float) -> Made:
    """A host that waits for ten kernels of 10 ms with these starts, and copies at their right times."""
    trace = Made()
    for number in range(10):
        trace.op("aten::item", 11_000 * number, 10_900)
        trace.kernel(made.COPY, 11_000 * number + 10, 5, 11_000 * number + 5, sort="copy")
        trace.kernel("sdsc_fused_mm", starts[number % len(starts)], 10_000, 11_000 * number + 20)
    return trace


def test_of_kernels_with_invalid_times_only_their_length_is_told(tmp_path):
    run = run_of(tmp_path, with_kernels_at(-DAYS_64_US))
    sentence = first_sentence(run)
    assert sentence.startswith("The start times of 10 kernels and copies are invalid, 1536 h")
    assert "They take 100 of the 110 ms that the host's events last, 100 ms of it sdsc_fused_mm." in sentence
    assert "come before" not in sentence
    assert [f.code for f in diagnose(run)] == ["invalid-times"]
    assert "10 activities of the device start 1536 h" in " ".join(import_notes(run))


@pytest.mark.parametrize("starts", [(-1e6,), tuple(-DAYS_64_US + 11_000 * n for n in range(10))])
def test_work_of_before_the_trace_and_clocks_of_their_own_are_kept(tmp_path, starts):
    trace = with_kernels_at(*starts)
    trace.events = [event for event in trace.events if "Memcpy" not in event["name"]]
    assert "invalid" not in first_sentence(run_of(tmp_path, trace))


def test_a_few_invalid_times_are_noted_alone(tmp_path):
    trace = with_kernels_at(*(11_000 * n + 30 for n in range(10)))
    trace.kernel("sdsc_fused_mm", -DAYS_64_US, 100, 109_990)
    run = run_of(tmp_path, trace)
    assert "invalid" not in first_sentence(run) and any("left out" in note for note in import_notes(run))
    assert run.kernels["count"].sum() == 20


def test_a_correlation_of_0_names_no_launch(tmp_path):
    """All copies bear it, and a call of another kind does: they are not queued behind that."""
    trace = Made()
    trace.event("call", "aiuGetDevice", 0, 1, 1, correlation=0)
    for number in range(5):
        trace.op("aten::_copy_from", 10_000 * number, 9_900)
        trace.event("call", "aiuLaunchCopy", 10_000 * number + 9_800, 2, 1, correlation=number + 1)
        trace.kernel("Memset (Device)", 10_000 * number + 9_850, 40, 10_000 * number + 9_800, sort="copy", stream=400)
        trace.events[-1]["args"] |= {"correlation": 0, "External id": 0}
    trace.kernel(made.RELU, 50_010, 40, 50_000)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "because the host launches too late" in sentence and "in aten::_copy_from" in sentence
