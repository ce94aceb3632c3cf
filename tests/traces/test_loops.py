"""Loops of Python over small operators, and what is none: layers, the loop that is profiled, backward."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from tests.findings.zoo.cpu_traces import looping
from tests.traces import made
from tests.traces.made import Made, run_of

BOUNDS = ("aten::ge", "aten::lt", "aten::nonzero")


def is_loop(tmp_path, trace):
    run = run_of(tmp_path, trace)
    told = "A loop of Python runs" in first_sentence(run)
    assert told == bool([f for f in diagnose(run) if f.code == "operator-loop"])
    return told


def test_a_loop_is_told_with_its_passes_and_time(tmp_path):
    sentence = first_sentence(run_of(tmp_path, looping(*BOUNDS, passes=60)))
    assert sentence.startswith(
        "A loop of Python runs the same 3 operators, most in aten::ge, 60 times, for 2.69 of 3.70 ms (72.8 %): compute "
        "its passes at once, or each in fewer operators. The trace contains no device activity"
    )


@pytest.mark.parametrize(
    ("ops", "passes", "us", "rest_us", "told"),
    [
        (BOUNDS, 60, 10.0, 9000.0, False),  # little of the time
        (BOUNDS, 7, 10.0, 200.0, False),  # few passes
        (BOUNDS, 60, 10.0, 100.0, False),  # nearly all of the trace: the loop that is profiled
        (BOUNDS, 60, 120.0, 9000.0, False),  # operators that compute for long
        (("aten::linear", "aten::relu"), 60, 10.0, 1000.0, False),  # layers
        (("aten::linear", "aten::relu"), 240, 10.0, 3000.0, True),  # more than a model has
        (("aten::bmm", "aten::relu"), 60, 10.0, 1000.0, True),
        (("aten::select",), 100, 10.0, 1000.0, True),
        (("ReluBackward0", "MulBackward0"), 60, 10.0, 1000.0, False),
        (("Torch-Compiled Region: 0/0", "aten::select"), 60, 10.0, 1000.0, True),
        (("Torch-Compiled Region: 0/0",), 60, 10.0, 1000.0, False),
    ],
)
def test_layers_backward_and_what_is_little_or_all_are_no_loop(tmp_path, ops, passes, us, rest_us, told):
    assert is_loop(tmp_path, looping(*ops, passes=passes, us=us, rest_us=rest_us)) == told


def test_a_pass_may_differ_now_and_then(tmp_path):
    trace = looping(*BOUNDS, passes=60)
    for number, one in enumerate(trace.events[:180]):
        one["name"] = "aten::where" if number % 24 == 2 else one["name"]
    assert is_loop(tmp_path, trace)


def test_a_loop_within_each_step_is_counted_per_step(tmp_path):
    trace = Made()
    for step in range(3):
        trace.event("mark", f"ProfilerStep#{step}", 4000 * step, 3990, 1)
        looping(*BOUNDS, passes=60, at=4000.0 * step + 10, trace=trace)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "most in aten::ge, 60 times per step, for 2.69 of 3.99 ms (67.5 %)" in sentence


def test_on_a_device_the_loop_comes_after_what_it_makes_the_device_wait_for(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 4000, 1)
    looping(*BOUNDS, passes=60, at=10.0, trace=trace)
    for number in range(60):
        trace.kernel(made.RELU, 45 * number + 25, 3, 45 * number + 12)
    trace.kernel(made.GEMM, 2720, 900, 2715)
    run = run_of(tmp_path, trace)
    sentence, findings = first_sentence(run), diagnose(run)
    assert sentence.startswith("Largest possible saving: the GPU is idle") and "A loop of Python runs" in sentence
    assert findings[0].code == "launch-bound" and "operator-loop" in {f.code for f in findings}
