"""Statements and advice that public traces refuted: each case that was wrong, and the neighbour that stays."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, run_of
from tests.traces.test_cpu_kinds import held_in_optimizer


@pytest.mark.parametrize(("reading_us", "told"), [(600, True), (20, False)])
def test_a_host_that_waits_in_the_optimizer_and_for_values_waits_in_all(tmp_path, reading_us, told):
    """The device is not recorded, and the optimizer's steps take less than all waits together."""
    trace = held_in_optimizer()
    trace.op("aten::item", 1010, reading_us)
    trace.op("aten::_local_scalar_dense", 1011, reading_us - 2)
    sentence = first_sentence(run_of(tmp_path, trace))
    waits = "waiting for the device takes at least 80.7 % of the time, 0.700 ms of it in one call of aten::addcdiv_, "
    assert (f"{waits}the rest in reading values (aten::item)." in sentence) == told
    assert ("the optimizer's steps take" in sentence) == (not told)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_backward_whose_threads_were_not_recorded_is_not_called_python(tmp_path, recorded):
    trace = Made()
    for number in range(5):
        trace.op("aten::cudnn_convolution", 20 * number, 10)
        trace.op("aten::relu", 20 * number + 10, 10)
    trace.event("mark", "## backward ##", 100, 400, 1)
    if recorded:
        for number in range(40):
            trace.op("aten::cudnn_convolution_backward" if number % 2 else "aten::mul", 102 + 9 * number, 8, 2)
    trace.event("mark", "## metrics ##", 500, 200, 1)
    trace.op("aten::add", 690, 10)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("for 57.1 % of the time backward runs and none of its operators is in the trace" in sentence) != recorded
    assert ("neither an operator" in sentence) == recorded


@pytest.mark.parametrize(("for_layout", "share"), [(True, "27.0 %"), (False, "37.3 %")])
def test_a_copy_for_the_layout_of_a_convolution_fuses_with_nothing(tmp_path, for_layout, share):
    """A copy that the program calls itself stays among elementwise operators."""
    trace = Made()
    trace.op("aten::conv1d", 0, 650)
    if for_layout:
        trace.op("aten::clone", 2, 148)
    trace.op("aten::copy_", 3 if for_layout else 900, 146)
    trace.op("aten::mkldnn_convolution", 150, 499)
    for number, name in enumerate(("aten::relu", "aten::add", "aten::mul", "aten::native_batch_norm")):
        trace.op(name, 650 + 60 * number, 60)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert f"lementwise operators and norms take {share}" in sentence
    copies = "Copies into another layout take 16.4 % of the operators' time, most in aten::conv1d"
    assert (copies in sentence) == for_layout


def advice_of(run, code):
    (finding,) = [f for f in diagnose(run) if f.code == code]
    return finding.advice


@pytest.mark.parametrize(("node", "share"), [("torch::autograd::AccumulateGrad", "30 %"), ("ReluBackward0", "50 %")])
def test_adding_to_gradients_is_nothing_that_compiling_fuses(tmp_path, node, share):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for number in range(3):
        trace.op("aten::relu", 10 * number, 9)
        trace.kernel(made.RELU, 10 + 100 * number, 100, 10 * number + 2)
    trace.op(f"autograd::engine::evaluate_function: {node}", 50, 40, 2)
    trace.op(node, 50, 39, 2)
    for number in range(2):
        trace.op("aten::add_", 52 + 10 * number, 9, 2)
        trace.kernel(made.RELU, 400 + 100 * number, 100, 54 + 10 * number, 2)
    trace.op("aten::mm", 95, 8)
    trace.kernel(made.GEMM, 610, 390, 97)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "memory-bound-kernels"]
    assert f"casts and reductions take {share} of the step" in finding.title
    adds = "Adding gradients to ones that exist already takes another 20 % of the step: with one backward per step"
    assert (adds in finding.advice) == (share == "30 %")


@pytest.mark.parametrize("op", ["aten::linear", "aten::layer_norm"])
@pytest.mark.parametrize(
    ("trains", "gemm_us", "says"), [(False, 40, "by model.half()"), (True, 4, "leave autocast out"), (True, 40, None)]
)
def test_casts_of_autocast_that_only_cost_launches_are_told(tmp_path, trains, gemm_us, says, op):
    """Where products are long, they gain more from 16 bits than the casts take."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for number in range(10):
        at = 100 * number
        trace.op(op, at, 80)
        trace.op("aten::copy_", at + 5, 10, **{"Input type": ["c10::Half", "float", "Scalar"]})
        trace.kernel(made.CAST, at + 20, 2, at + 6)
        trace.op("aten::addmm", at + 20, 20, **{"Input type": ["c10::Half"] * 3})
        trace.kernel(made.GEMM, at + 50, gemm_us, at + 22)
    if trains:
        trace.op("AddmmBackward0", 990, 5, 2)
        trace.kernel(made.RELU, 995, 2, 991, 2)
    advice = advice_of(run_of(tmp_path, trace), "launch-bound")
    assert ("of the launches are autocast's casts" in advice) == (says is not None)
    assert says is None or says in advice


@pytest.mark.parametrize("times", [1, 2])
def test_what_is_compiled_once_is_not_said_to_be_compiled_again(tmp_path, times):
    trace = Made()
    trace.kernel(made.GEMM, 10, 5, 2)
    for number in range(times):
        trace.event("mark", "_compile.compile_inner (dynamo_timed)", 20 + 600 // times * number, 600 // times, 1)
    trace.op("aten::addmm", 720, 250)
    trace.kernel(made.GEMM, 980, 5, 960)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "host-bound"]
    assert ("recompiles" in finding.snippet) == (times == 2)


def host_of_steps(step_us, idle_us):
    """Steps that the device is idle for at their end, each with 20 products launched just before they start."""
    trace, at = Made(), 0
    for number, us in enumerate(step_us):
        trace.event("mark", f"ProfilerStep#{number + 5}", at, us, 1)
        for each in range(20):
            begins = at + each * (us - idle_us[number]) / 20
            trace.op("aten::mm", begins, 8, **{"Input type": ["float"] * 2})
            trace.kernel(made.SIMT, begins + 10, 80, begins + 5)
        at += us
    return trace


def test_longer_gaps_and_steps_that_are_few_are_told_as_these(tmp_path):
    step_us = (3600, 2500, 2500, 2500, 3300, 2500)
    trace = host_of_steps(step_us, [max(0, us - 2500) for us in step_us])
    run = run_of(tmp_path, trace)
    sentence = first_sentence(run)
    assert "in gaps of 0.3 ms and more" not in sentence
    assert "Steps 5 and 9 take" in sentence and "Figures per step are means." in sentence


@pytest.mark.parametrize("idle", [True, False])
def test_a_first_step_in_which_the_host_runs_ahead_is_not_called_long(tmp_path, idle):
    step_us = (3500, 2500, 2500, 2500)
    trace = host_of_steps(step_us, (0,) * 4)
    if not idle:  # work beside it on another stream keeps the device busy
        trace.kernel(made.GEMM, 20, 10_900, 12, stream=9)
    assert ("Step 5 takes" in first_sentence(run_of(tmp_path, trace))) == idle


def test_products_that_wait_for_the_host_come_after_what_the_device_waits_for(tmp_path):
    run = run_of(tmp_path, host_of_steps((2500,) * 4, (0,) * 4))
    sentence = first_sentence(run)
    assert sentence.startswith("Largest possible saving while the device waits: the GPU is idle for")
    assert "The next: GEMM/conv takes 64 % of the step in FP32" in sentence
