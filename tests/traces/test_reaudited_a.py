"""Statements and advice that audits of public traces refuted: first uses, late ranks, sizes and memory."""

import pytest

from tests.traces.made import RELU, Made, run_of
from tests.traces.test_refuted_advice import finding_of


@pytest.mark.parametrize(("call", "sets_up"), [("cudaStreamCreateWithFlags", True), ("cudaEventRecord", False)])
def test_an_operator_that_sets_up_its_library_is_told_as_a_first_call(tmp_path, call, sets_up):
    trace = Made()
    trace.kernel(RELU, 3, 5, 1)
    trace.op("aten::conv2d", 20, 9000)
    trace.op("aten::cudnn_convolution", 30, 8980)
    trace.event("call", call, 500, 40, 1, correlation=7)
    trace.kernel("void cudnn::cnn::conv2d_grouped_direct_kernel<float>", 9000, 10, 8990)
    finding = finding_of(run_of(tmp_path, trace), "host-bound")
    assert ("in aten::conv2d (nearly all in its first call)" in finding.title) == sets_up
    assert ("move that work out of the loop" in finding.advice) == (not sets_up)
    assert ("sets up its library" in finding.advice) == sets_up


@pytest.mark.parametrize(("step", "many"), [(0, False), (2, True)])
def test_a_host_that_is_slow_in_all_operators_is_told_to_launch_less(tmp_path, step, many):
    """One step of ten operators, each of which launches a kernel after 0.9 ms."""
    trace = Made()
    trace.event("mark", f"ProfilerStep#{step}", 0, 10_000, 1)
    for number, name in enumerate(("linear", "relu", "mse_loss", "add", "mul", "sum", "mean", "div", "sub", "exp")):
        trace.op(f"aten::{name}", 1000 * number + 10, 960)
        trace.kernel(RELU, 1000 * number + 950, 5, 1000 * number + 900)
    advice = finding_of(run_of(tmp_path, trace), "host-bound").advice
    assert ("The host is in many operators meanwhile" in advice) == many
    assert ("does something else" in advice) == (not many)
