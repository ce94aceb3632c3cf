"""What waits: launches for their kernels, ranks for others whose traces are missing, and passes for their first one."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of
from tests.traces.test_collectives import collective
from tests.traces.test_collectives import run_of as run_of_ranks

AMD = ("AMD Instinct MI300X", (9, 4))


def launches(kernel_us=40, call_us=44, count=30):
    """A step of kernels in 100 µs each, of which every tenth is waited for anew."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 100 * count, 1)
    for at in range(0, 100 * count, 100):
        trace.op("aten::relu", at + 10, 80)
        trace.kernel(made.RELU, at + 15, kernel_us, at + 13, call_us=call_us)
        if at % 1000 == 900:
            trace.op("aten::item", at + 91, 8)
            trace.event("call", "cudaStreamSynchronize", at + 92, 6, 1, correlation=at)
    return trace


@pytest.mark.parametrize(("gpu", "setting"), [((), "CUDA_LAUNCH_BLOCKING=1"), (AMD, "AMD_SERIALIZE_KERNEL=3")])
def test_launches_that_return_after_their_kernels_wait_for_them(tmp_path, gpu, setting):
    run = run_of(tmp_path, launches(), *gpu)
    told = f"Each launch returns only when its kernel has ended, as with {setting} or in a debugger"
    assert told in first_sentence(run)
    finding = finding_of(run, "launch-bound")
    assert "because the host, which waits for each kernel, launches too late" in finding.title
    assert "switch it off" in finding.advice and "The host waits for the GPU" not in finding.advice
    assert "host-syncs" not in {f.code for f in diagnose(run)}


@pytest.mark.parametrize(
    "trace",
    [
        launches(call_us=5),
        launches(kernel_us=3, call_us=9),  # so short that a launch that does not wait may return later
        launches(count=15),
    ],
)
def test_other_launches_are_not_said_to_wait_for_their_kernels(tmp_path, trace):
    run = run_of(tmp_path, trace)
    assert "launch_blocking" not in run.head.config and "returns only when" not in first_sentence(run)


@pytest.mark.parametrize(("calls", "says"), [(1, "so nothing breaks it"), (3, "find what breaks its graph")])
def test_steps_of_one_compiled_graph_are_not_told_to_have_breaks(tmp_path, calls, says):
    """Two steps with graphs forward and backward, and with small kernels that are launched beside them."""
    trace = Made()
    for number in range(2):
        at, graphs = 2000 * number, 2 * calls
        trace.event("mark", f"ProfilerStep#{number + 3}", at, 2000, 1)
        for n in range(graphs):
            start, correlation = at + 40 * n, 500 * number + n + 1
            forward = n < calls
            trace.op("CompiledFunction" if forward else "CompiledFunctionBackward", start, 30, 1 if forward else 2)
            trace.event("call", "cudaGraphLaunch", start + 5, 10, 1 if forward else 2, correlation=correlation)
            for k in range(30 // graphs):
                ids = {"correlation": correlation, "device": 0, "stream": 7}
                trace.event("kernel", "triton_poi_fused_relu_0", start + 10 + k, 1, "stream 7", **ids)
        for n in range(15):
            trace.op("aten::mul", at + 400 + 100 * n, 60)
            trace.kernel(made.RELU, at + 420 + 100 * n, 5, at + 410 + 100 * n)
    trace.op("MulBackward0", 350, 10, 2)
    trace.op("aten::mul", 350, 8, 2)
    trace.kernel(made.RELU, 356, 5, 352, 2)
    finding = finding_of(run_of(tmp_path, trace, "NVIDIA A100-SXM4-80GB", (8, 0)), "launch-bound")
    assert says in finding.advice


SMALL = 8


def of_equal(count, ms, host_us=0):
    """One of four ranks: equal all-reduces that take `ms` in turn, and before each a product; with `host_us` of idle
    time in several gaps, each before a small kernel, before that."""
    trace, at = Made(), 100.0
    message = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 2**21, "Group size": 4}
    for n in range(count):
        for _ in range(SMALL if host_us else 0):
            at += host_us / SMALL
            trace.op("aten::relu", at - 20, 8)
            trace.kernel(made.RELU, at, 2, at - 18)
            at += 2
        at += 25
        trace.op("aten::mm", at - 20, 8, **{"Input type": ["float"] * 2})
        trace.kernel(made.GEMM, at, 30, at - 18)
        collective(trace, at + 30, 1000 * ms[n % len(ms)], at + 5, **message, **{"Process Group Name": "tp"})
        at += 30 + 1000 * ms[n % len(ms)]
    return trace.document(distributedInfo={"rank": 0, "world_size": 4})


def test_many_equal_collectives_tell_the_transfer_by_the_shortest(tmp_path):
    """Half of 60 take 0.2 ms, which latency alone may explain where fewer do not show that all can."""
    run = run_of_ranks(tmp_path, of_equal(60, (0.2, 1.2)))
    finding = finding_of(run, "exposed-communication")
    assert "at least 30.0 of 42.0 ms of it waiting for other ranks" in finding.title
    assert "takes 1.20 ms, the shortest of 60 such 0.200 ms" in finding.title
    assert "which neither overlap nor fewer bytes shorten" in finding.advice


@pytest.mark.parametrize("document", [of_equal(40, (0.2, 1.2)), of_equal(60, (0.2, 0.5)), of_equal(60, (1.2,))])
def test_few_or_less_uneven_collectives_do_not(tmp_path, document):
    finding = finding_of(run_of_ranks(tmp_path, document), "exposed-communication")
    assert "does not show how much of that is waiting" in finding.title


@pytest.mark.parametrize(("host_us", "first"), [(900, True), (300, False)])
def test_a_host_that_is_late_for_longer_than_its_rank_surely_waits_comes_first(tmp_path, host_us, first):
    sentence = first_sentence(run_of_ranks(tmp_path, of_equal(60, (0.2, 1.2), host_us)))
    late, waits = (sentence.index(part) for part in ("the host launches too late", "waiting for other ranks"))
    assert (late < waits) == first


@pytest.mark.parametrize(("prefill_us", "says"), [(0, ", and read"), (3000, "")])
def test_products_of_other_passes_are_not_those_of_the_passes_that_decode(tmp_path, prefill_us, says):
    """Ten passes of 1 ms, nearly all of it in products, the last for fewer requests; before them a prefill."""
    trace = Made()
    marks = [("execute_new_4_cached_0", prefill_us)] * (prefill_us > 0)
    marks += [(f"execute_new_0_cached_{2 if n == 9 else 4}", 980) for n in range(10)]
    at = 0
    for number, (mark, us) in enumerate(marks):
        trace.event("mark", mark, at, us + 15, 1)
        trace.event("call", "cudaGraphLaunch", at + 1, 4, 1, correlation=number + 1)
        ids = {"correlation": number + 1, "device": 0, "stream": 7}
        trace.event("kernel", made.GEMM, at + 10, us, "stream 7", **ids)
        at += us + 20
    sentence = first_sentence(run_of(tmp_path, trace, "NVIDIA H100 80GB HBM3", (9, 0)))
    assert sentence.startswith("10 passes decode 2 to 4 tokens each: products in 16 bits take 98")
    assert ("in these passes, and read" in sentence) == bool(prefill_us)


@pytest.mark.parametrize(("others_us", "says"), [(0, "All of this happens once"), (2000, "That part happens once")])
def test_a_first_call_that_is_a_part_of_the_idle_time_is_not_all_of_it(tmp_path, others_us, says):
    trace, at = Made(), 400.0
    trace.op("aten::mm", 1, 8)
    trace.kernel(made.GEMM, 10, 300, 2)
    for n in range(8):
        sort_us = 20_000 if n == 0 else 20
        for op, us in (("aten::sort", sort_us), ("aten::unbind", others_us)):
            trace.op(op, at, us + 20)
            trace.kernel(made.RELU, at + us + 10, 100, at + us + 5)
            at += us + 120
    assert says in finding_of(run_of(tmp_path, trace), "host-bound").advice


@pytest.mark.parametrize(
    ("stream", "asks", "gap_us", "told"),
    [(13, True, 40, True), (13, False, 40, False), (7, True, 40, False), (13, True, 140, False)],
)
def test_a_hand_over_between_streams_is_no_wait_of_unknown_cause(tmp_path, stream, asks, gap_us, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for n in range(3):
        at = (260 + gap_us) * n
        trace.op("aten::gru", 20 * n, 8)
        trace.kernel(made.RELU, at + 100, 200, 20 * n + 2, stream=stream)
        if asks:
            trace.event("call", "cudaStreamWaitEvent", 20 * n + 9, 1, 1, correlation=900 + n)
        trace.op("aten::mm", 20 * n + 10, 8)
        trace.kernel(made.GEMM, at + 300 + gap_us, 60, 20 * n + 12)
    finding = finding_of(run_of(tmp_path, trace), "kernel-wait")
    assert ("it waits for an event of another stream" in finding.title) == told
    assert ("each hand-over between these" in finding.advice) == told
