"""Small parts of a trace are not taken for the whole: a few nodes of autograd, series of unlike length, first calls."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from amp_core.findings.trace_findings import trains
from tests.traces.made import GEMM, RELU, Made, finding_of, run_of


@pytest.mark.parametrize(
    ("node", "back", "accumulates", "told"),
    [
        ("ClampBackward1", 1, False, False),  # a simulation that asks for one gradient
        ("ClampBackward1", 1, True, True),  # a loss whose forward computes gradients already
        ("ClampBackward1", 10, False, True),
        ("Optimizer.step#SGD.step", 1, False, True),
    ],
)
def test_a_few_nodes_of_autograd_are_no_training(tmp_path, node, back, accumulates, told):
    trace = Made()
    for number in range(30):
        at, is_back = 200 * number, number >= 30 - back
        if is_back:
            trace.event("mark" if "#" in node else "op", node, at, 90, 1)
        trace.op("aten::add_", at + 2, 80)
        trace.kernel(RELU, at + 20, 10, at + 10)
        trace.op("aten::_local_scalar_dense", at + 100, 60)
        trace.event("call", "cudaStreamSynchronize", at + 102, 50, 1, correlation=number + 1)
    name = "torch::autograd::AccumulateGrad"
    trace.op(f"autograd::engine::evaluate_function: {name}", 5990, 9)
    if accumulates:
        trace.op(name, 5991, 7)
    run = run_of(tmp_path, trace)
    assert trains(run) == told
    findings = [finding for finding in diagnose(run) if finding.code in ("host-syncs", "launch-bound", "host-bound")]
    assert any("losses" in finding.advice for finding in findings) <= told


OPERATIONS = (
    (9, (*["aten::ones_like"] * 6, *["aten::detach"] * 16, "aten::to")),
    (8, (*["aten::detach"] * 16, "aten::to")),
    (8, (*["aten::view"] * 3, *["aten::detach"] * 19, "aten::to")),
    (8, (*["aten::view"] * 3, *["aten::detach"] * 16, "aten::to")),
)
"""Passes and operators of groups of calls to one library."""


@pytest.mark.parametrize(("groups", "told"), [(OPERATIONS, False), (OPERATIONS[:1] * 4, True)])
def test_series_of_unlike_length_are_no_loop(tmp_path, groups, told):
    trace, at = Made(), 0.0
    for passes, names in groups:
        for _ in range(passes):
            for name in names:
                trace.op(name, at, 4)
                at += 5
            at += 800  # in Python
    trace.op("aten::mm", at, 8_000)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("A loop of Python" in sentence) == ("the same 23 operators" in sentence) == told


def waiting(place, calls):
    """A step in which the device waits for calls of a place, each of which takes as long as given."""
    trace, at = Made(), 400
    trace.op("aten::mm", 1, 8)
    trace.kernel(GEMM, 10, 300, 2)
    for us in calls:
        trace.event(*place, at, us, 1)
        at += us + 20
    trace.op("aten::mm", at, 8)
    trace.kernel(GEMM, at + 10, 15_000, at + 2)  # a range around nearly all of the window is not told
    return trace


PLACES = (("op", "k"), ("op", "aten::linalg_qr"), ("mark", "[Neighbors] kernel"))


@pytest.mark.parametrize(
    ("place", "calls", "told"),
    [
        (PLACES[0], (190, 80_000, 60, 40), "first 2 calls"),  # TorchScript compiles at the second call
        (PLACES[0], (190, 80_000, 60), None),
        (PLACES[0], (190, 60, 80_000, 60, 40), None),
        (PLACES[1], (190, 80_000, 60, 40), None),
        (PLACES[2], (80_000, 60, 40, 60), "first call"),
        (PLACES[2], (30_000, 10_000, 30_000, 10_000), None),
    ],
)
def test_first_calls_of_what_the_device_waits_for_are_told(tmp_path, place, calls, told):
    finding = finding_of(run_of(tmp_path, waiting(place, calls)), "host-bound")
    assert f"in {place[1]}" in finding.title
    assert (f"in {place[1]} (nearly all in its {told})" in finding.title) == (told is not None)
    assert ("first call of an operator" in finding.advice) == (told is not None)


@pytest.mark.parametrize(
    ("op", "shape", "us", "told"),
    [
        ("aten::_linalg_svd", [3000, 3, 3], 100, "aten::_linalg_svd takes 10 % of the step, on matrices of 3 × 3: "),
        ("aten::linalg_inv_ex", [8, 64, 2, 2], 100, "aten::linalg_inv_ex takes 10 % of the step, on matrices of 2 × 2"),
        ("aten::_linalg_svd", [3000, 3, 3], 30, None),
        ("aten::_linalg_svd", [3000, 32, 32], 100, None),
        ("aten::_linalg_svd", [3000, 3], 100, None),
        ("aten::_linalg_svd", [2, 3, 3], 100, None),
    ],
)
def test_decompositions_of_many_small_matrices_are_told(tmp_path, op, shape, us, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::relu", 0, 20)
    trace.kernel(RELU, 10, 990 - us, 2)
    trace.op("aten::linalg_pinv", 30, 40)
    trace.op(op, 32, 30, **{"Input Dims": [shape, []]})
    trace.kernel("void batched_svd_parallel_jacobi_32x16<float, float>(int)", 1000 - us, us, 40)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("closed formulas" in sentence) == (told is not None) and (told or "") in sentence


@pytest.mark.parametrize(("us", "told"), [(130, True), (30, False)])
def test_adapters_beside_the_weights_are_told(tmp_path, us, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 0, 20, **{"Input type": ["c10::BFloat16"] * 2})
    trace.kernel(GEMM, 10, 990 - us, 2)
    trace.event("call", "cudaGraphLaunch", 30, 5, 1)
    for number in range(10):
        name = "_chunked_lora_shrink_kernel" if number % 2 else "_chunked_lora_expand_kernel"
        trace.kernel(name, 1000 - us + us / 10 * number, us / 10, 30 + number)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("Low-rank adapters (LoRA) take at least 13 % of the step" in sentence) == told
