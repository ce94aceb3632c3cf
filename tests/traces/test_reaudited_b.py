"""Statements and advice that traces refuted: what waits for the host, what is left of a file, and what is most."""

import numpy as np
import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from amp_core.traces.thinned import sampled
from tests.traces import made
from tests.traces.made import GEMM, RELU, Made, finding_of, run_of
from tests.traces.test_collectives import collective, ddp
from tests.traces.test_collectives import run_of as run_of_ranks

A100 = ("NVIDIA A100-SXM4-40GB", (8, 0))


@pytest.mark.parametrize("top_op", ["aten::conv1d", "aten::conv2d"])
@pytest.mark.parametrize(("outputs", "pads"), [(8, False), (6, True)])
def test_channels_that_are_aligned_are_not_told_to_be_padded(tmp_path, outputs, top_op, pads):
    trace = Made()
    trace.op(top_op, 0, 10)
    shapes = {"Input Dims": [[512, 64, 1, 8256], [outputs, 64, 1, 1]], "Input type": ["c10::Half"] * 2}
    trace.op("aten::cudnn_convolution", 1, 8, **shapes)
    trace.kernel("implicit_convolve_sgemm<__half, 1024, 5, 5, 3, 3, 3, 1>", 10, 900, 2)
    finding = finding_of(run_of(tmp_path, trace, *A100), "kernels-off-tensor-cores")
    assert (
        ("multiples of 8, and use newer" in finding.advice) == pads == ("padding gains nothing" not in finding.advice)
    )
    assert "benchmark = True" in finding.snippet


@pytest.mark.parametrize(("us", "words"), [(500, "most of it in"), (350, "the largest part in")])
def test_most_is_more_than_half(tmp_path, us, words):
    trace, at = Made(), 10
    for kernel, its_us in ((1, us), (2, 300), (3, 160)):
        shapes = {"Input Dims": [[8, 60, 56, 56], [60 + 4 * kernel, 60, 3, 3]], "Input type": ["c10::Half"] * 2}
        trace.op("aten::cudnn_convolution", 10 * kernel, 8, **shapes)
        trace.kernel(f"implicit_convolve_sgemm<__half, 1024, 5, 5, 3, 3, {kernel}, 1>", at, its_us, 10 * kernel + 2)
        at += its_us
    assert words in finding_of(run_of(tmp_path, trace, *A100), "kernels-off-tensor-cores").title


def test_the_sizes_of_what_a_product_writes_count_too(tmp_path):
    trace = Made()
    trace.op("aten::mm", 0, 600, **{"Input Dims": [[60_000_000, 2], [2, 16]], "Input type": ["float"] * 2})
    trace.op("aten::relu", 600, 400, **{"Input Dims": [[60_000_000, 16]], "Input type": ["float"]})
    assert "on tensors of up to 3.58 GiB take 100 %" in first_sentence(run_of(tmp_path, trace))


def test_what_dropout_calls_is_part_of_elementwise_operators(tmp_path):
    trace = Made()
    trace.op("aten::mm", 0, 300, **{"Input Dims": [[64, 64], [64, 64]], "Input type": ["float"] * 2})
    for number in range(2):
        trace.op("aten::dropout", 300 + 300 * number, 300)
        trace.op("aten::empty_like", 310 + 300 * number, 100)
    trace.op("aten::relu", 900, 100)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "all elementwise operators take 70" in sentence


def late_ranks(shares):
    """Four ranks and ten collectives: of these, each rank enters as many last, 60 µs after the others."""
    last = [rank for rank, count in enumerate(shares) for _ in range(count)]
    leaves = [300 + 65 * place for place in range(1, 11)]
    return [
        ddp([leave - (5 if rank == late else 65) for leave, late in zip(leaves, last, strict=True)], leaves=leaves,
            rank=rank)
        for rank in range(4)
    ]  # fmt: skip


@pytest.mark.parametrize(("shares", "words"), [((1, 4, 1, 4), "others, most of it for ranks 1 and 3"),
                                               ((1, 7, 1, 1), "others, most of it for rank 1")])  # fmt: skip
def test_the_fewest_ranks_that_most_waiting_is_for_are_named(tmp_path, monkeypatch, shares, words):
    import amp_core.analysis.performance.communication_savings as savings

    table = savings.late_ranks
    monkeypatch.setattr(savings, "late_ranks", lambda run: table(run).head(1))
    monkeypatch.setattr(savings, "late_rank_saving", lambda run, unit: None)
    run = run_of_ranks(tmp_path, *late_ranks(shares))
    assert words in finding_of(run, "exposed-communication").title


@pytest.mark.parametrize("with_stack", [0, 1])
def test_late_ranks_with_stacks_are_not_told_to_record_them(tmp_path, with_stack):
    ranks = [ddp(enters, rank=rank, backward_us=20) for rank, enters in enumerate([(300, 710), (690, 940)])]
    run = run_of_ranks(tmp_path, *({**rank, "with_stack": with_stack} for rank in ranks))
    finding = finding_of(run, "exposed-communication")
    assert ("with_stack=True" in finding.snippet) != bool(with_stack)
    assert ("The traces have Python's stacks" in finding.advice) == bool(with_stack)


def backward(buckets):
    """A step of 10 ms: a backward of one kernel in 500 µs, whose buckets are reduced in the gaps at its end."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    trace.op("MmBackward0", 1, 9900, 2)
    each = 500
    for number in range(18):
        at = 20 + each * number
        trace.op("aten::mm", at, 8, 2)
        trace.kernel(GEMM, at + 10, 50, at + 2, 2)
    for number in range(buckets):
        at = 20 + each * (18 - buckets + number)
        collective(trace, at + 60, 300, at + 20, **{"Collective name": "allreduce", "dtype": "Float"})
    return trace.document(distributedInfo={"rank": 0, "world_size": 2})


@pytest.mark.parametrize(("buckets", "told"), [(4, False), (2, True)])
def test_buckets_beside_which_a_late_host_launches_nothing_save_nothing(tmp_path, buckets, told):
    run = run_of_ranks(tmp_path, backward(buckets))
    codes = {f.code for f in diagnose(run)}
    assert ("exposed-communication" in codes) == told and codes & {"host-bound", "launch-bound"}


@pytest.mark.parametrize(("call_us", "told"), [(3, False), (40, True)])
def test_an_event_that_is_over_is_no_wait(tmp_path, call_us, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 4000, 1)
    for number in range(20):
        at = 200 * number
        trace.op("aten::relu", at, 60)
        trace.kernel(RELU, at + 20, 5, at + 10)
        trace.event("call", "cudaEventSynchronize", at + 70, call_us, 1, correlation=number)
    run = run_of(tmp_path, trace, *A100)
    assert (float(run.windows["syncs"].sum()) > 0) == told
    assert any("The host waits for the GPU" in f.advice or "waits for it" in f.advice for f in diagnose(run)) == told


def test_a_file_without_most_launches_tells_no_idle_time(tmp_path):
    """Of 100 operators, one is left, with its kernel."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 60_000, 1)
    for number in range(200):
        trace.op("aten::relu", 300 * number, 20, **{"External id": 1000 + 100 * number})
        trace.kernel(RELU, 300 * number + 10, 5, 300 * number + 2)
        for event in trace.events[-3:]:
            key = "args" if "args" in event else "id"
            correlation = 50_000 + 400 * number
            event.update({"id": correlation} if key == "id" else {})
            event.setdefault("args", {})["correlation"] = correlation
    run = run_of(tmp_path, trace)
    assert first_sentence(run).startswith("The file holds about 1.0 % of the operators, and the launches and kernels")
    assert not {"host-bound", "launch-bound", "exposed-communication"} & {f.code for f in diagnose(run)}


def test_operators_alone_that_are_missing_leave_the_launches():
    ids, launches = np.arange(0, 300, 3), np.arange(0, 1000, 10)
    assert sampled(ids, launches, launches) is None
    assert sampled(np.arange(100), 40 * launches, 40 * launches) is None
    assert sampled(ids, 40 * launches, 40 * launches).operators_frac == pytest.approx(100 / 298)


@pytest.mark.parametrize(("op", "computes"), [("aten::to", False), ("aten::to", True), ("aten::relu_", True)])
def test_short_gaps_in_an_operator_that_copies_are_its_copies(tmp_path, op, computes):
    trace = Made()
    for number in range(20):
        at = 250 * number
        trace.op("Torch-Compiled Region: 0/0", at, 60)
        trace.kernel("triton_poi_fused_relu_0", at + 20, 20, at + 10)
        trace.op(op, at + 70, 170)
        trace.kernel(made.CAST if computes else made.COPY, at + 225, 5, at + 220, sort="kernel" if computes else "copy")
    codes = {f.code: f for f in diagnose(run_of(tmp_path, trace, *A100))}
    assert ("launch-bound" in codes) == computes
    assert computes or "aten::to, which copies and starts no kernel" in codes["host-bound"].title


def test_copies_beside_one_compiled_region_are_no_break_of_its_graph(tmp_path):
    trace = Made()
    for number in range(4):
        trace.event("mark", f"ProfilerStep#{number}", 1000 * number, 1000, 1)
        trace.op("Torch-Compiled Region: 0/0", 1000 * number + 40, 900)
        trace.kernel(made.COPY, 1000 * number + 10, 5, 1000 * number + 2, sort="copy")
        for kernel in range(4):
            at = 1000 * number + 50 + 200 * kernel
            trace.kernel("triton_poi_fused_relu_0", at + 20, 20, at + 10)
    finding = finding_of(run_of(tmp_path, trace, *A100), "launch-bound")
    assert "launched from compiled code already" in finding.advice and "graph_breaks" not in finding.snippet


@pytest.mark.parametrize("op", ["c10d::broadcast_", "c10d::allreduce_"])
def test_buffers_that_are_broadcast_before_forward_are_told_where_another_operator_takes_longer(tmp_path, op):
    trace = Made()
    for step in range(3):
        at = 20_000 * step
        trace.event("mark", f"ProfilerStep#{step}", at, 20_000, 1)
        trace.op("aten::flatten_dense_tensors", at, 900)
        trace.kernel(made.CAST, at + 890, 3, at + 880)
        trace.op(op, at + 900, 900)
        trace.kernel("ncclKernel_Broadcast_RING_LL_Sum_int8_t(args)", at + 1790, 3, at + 1780)
        for call in range(12):
            begins = at + 1800 + 1500 * call
            trace.op(f"aten::op{call}", begins, 1490, **{"Fwd thread id": 0, "Sequence number": 20 * step + call})
            trace.kernel(made.RELU, begins + 1485, 3, begins + 1480)
        trace.op("MmBackward0", at + 19_850, 100, 2, **{"Fwd thread id": 1, "Sequence number": 20 * step + 1})
        trace.kernel(GEMM, at + 19_900, 10, at + 19_860, 2)
    advice = finding_of(run_of(tmp_path, trace, *A100), "host-bound").advice
    assert ("broadcast_buffers=False" in advice) == (op == "c10d::broadcast_")
