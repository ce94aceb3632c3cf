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
        "A loop of Python runs the same 3 operators, aten::ge, aten::lt and aten::nonzero, 60 times, for 2.69 of "
        "3.70 ms (72.8 %): compute its passes at once, or each in fewer operators. The trace contains no device "
        "activity"
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
    assert "aten::lt and aten::nonzero, 60 times per step, for 2.69 of 3.99 ms of one step (67.5 %)" in sentence


def stepping(*loops, rest_us=400.0, mark="", add_us=(20.0, 20.0, 20.0)):
    """Steps of loops of 60 passes each, over some operators of 20 µs, with a product after each loop; `add_us`: how
    long aten::add takes in each step."""
    trace = Made()
    for step, us in enumerate(add_us):
        at = begin = 20_000.0 * step
        for ops in loops:
            for _ in range(60):
                for name in ops:
                    its_us = us if name == "aten::add" else 20.0
                    trace.op(name, at, its_us)
                    at += its_us + 5
            trace.op("aten::mm", at, rest_us)
            at += rest_us
        trace.event("mark", f"ProfilerStep#{step}", begin, at - begin, 1)
    return trace


def test_the_longest_operators_of_a_loop_are_those_of_all_steps(tmp_path):
    """In the middle step, aten::mul takes longer."""
    pair = ("aten::add", "aten::mul")
    sentence = first_sentence(run_of(tmp_path, stepping(pair, add_us=(40.0, 15.0, 40.0))))
    assert "the same 2 operators, most in aten::add, 60 times per step" in sentence
    sentence = first_sentence(run_of(tmp_path / "alike", stepping(pair, add_us=(24.0, 17.0, 23.0))))
    assert "the same 2 operators, aten::add and aten::mul, 60 times per step" in sentence


def test_further_loops_of_a_step_are_part_of_the_time(tmp_path):
    run = run_of(tmp_path, stepping(("aten::add", "aten::mul"), ("aten::sub",)))
    (finding,) = [f for f in diagnose(run) if f.code == "operator-loop"]
    assert finding.title == (
        "Loops of Python run the same 2 operators, aten::add and aten::mul, 60 times per step, and aten::sub 60 "
        "times, for 4.49 of 5.30 ms of one step (84.7 %)"
    )
    assert finding.where == "aten::add, aten::mul, aten::sub"
    assert "each of their passes in fewer operators, or compile the loops." in first_sentence(run)


@pytest.mark.parametrize(
    "other",
    [("aten::add_",), ("aten::linalg_vector_norm",), ("aten::sqrt", "aten::addcdiv_"), ("aten::detach",)],
)
def test_operators_by_parameter_are_no_further_loop(tmp_path, other):
    sentence = first_sentence(run_of(tmp_path, stepping(("aten::add", "aten::mul", "aten::sin"), other)))
    assert "A loop of Python runs the same 3 operators" in sentence and "for 4.50 of " in sentence


@pytest.mark.parametrize(("other_us", "first"), [(1000.0, True), (4500.0, False)])
def test_a_loop_comes_first_if_no_operator_takes_longer(tmp_path, other_us, first):
    """It takes three or four tenths of the time; others after it do the rest."""
    trace = Made()
    for step in range(3):
        trace.event("mark", f"ProfilerStep#{step}", 10_000 * step, 9_900, 1)
        looping(*BOUNDS, passes=85, at=10_000.0 * step, rest_us=other_us, trace=trace)
        for place, name in enumerate(("aten::sort", "aten::bmm", "aten::cumsum", "aten::exp")):
            trace.op(name, 10_000 * step + 3_830 + other_us + 300 * place, 299)
        for place, name in enumerate(("aten::topk", "aten::einsum", "aten::mv")[: 3 * (other_us < 2000)]):
            trace.op(name, 10_000 * step + 6_030 + 900 * place, 899)
    assert first_sentence(run_of(tmp_path, trace)).startswith("A loop of Python runs") == first


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
