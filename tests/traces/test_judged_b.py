"""What judges of public traces refuted: idle time between blocking copies, products that end before copies, and advice
on memory and on models that a trace does not have."""

import numpy as np
import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from amp_core.traces.replay import Replay, reach_fracs
from tests.traces import made
from tests.traces.made import Made, run_of
from tests.traces.test_idle_causes import with_calls

TO_HOST, TO_DEVICE = "Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pageable -> Device)"


def copy(trace, name, start, us, launched, call_us, size=2**22):
    trace.op("aten::copy_", launched - 5, call_us + 10)
    trace.kernel(name, start, us, launched, sort="copy", call_us=call_us, stream=9)
    trace.events[-1]["args"]["bytes"] = size


def of_blocking_copies(count=10, *, size=2**22, name=TO_HOST, rest_us=40, product_us=1000):
    """A product, then copies that each keep the host for 500 us after them, and `rest_us` from call to call."""
    trace = Made()
    trace.op("aten::mm", 1, 8)
    trace.kernel(made.SIMT, 10, product_us, 2)
    at, each_us = product_us + 10, 700 + 500 + rest_us
    for number in range(count):
        begin = at + number * each_us
        copy(trace, name, begin, 700, begin - 20, 700 + 520, size)
    return trace


def finding_of(run, code):
    return next((f for f in diagnose(run) if f.code == code), None)


@pytest.mark.parametrize("rest_us", [40, 200])
def test_idle_time_between_copies_that_block_is_theirs(tmp_path, rest_us):
    run = run_of(tmp_path, of_blocking_copies(rest_us=rest_us))
    (window,) = run.windows.to_dict("records")
    idle_us = 9 * (500 + rest_us)
    assert window["idle_us"] == idle_us == window["idle_copy_us"] + window["idle_copy_sync_us"]
    assert window["idle_syncs"] == window["idle_sync_op_us"] == 0
    finding = finding_of(run, "copies")
    assert f"right before and after, it is idle for {idle_us / 1e3:.2f} ms" in finding.title
    assert finding_of(run, "host-syncs") is None and finding_of(run, "launch-bound") is None


def test_values_copied_one_by_one_stay_synchronizations(tmp_path):
    run = run_of(tmp_path, of_blocking_copies(60, rest_us=40, size=4))
    (window,) = run.windows.to_dict("records")
    assert window["idle_copy_sync_us"] == 0 and window["idle_syncs"] == 59
    finding = finding_of(run, "host-syncs")
    assert "after 59 synchronizations with the host (aten::copy_)" in finding.title
    assert "copies of 4 bytes on average to the host" in finding.title
    assert "right before and after" not in finding_of(run, "copies").title


def test_work_of_the_host_on_what_was_copied_is_its_own(tmp_path):
    run = run_of(tmp_path, of_blocking_copies(60, rest_us=900))
    (window,) = run.windows.to_dict("records")
    assert window["idle_copy_sync_us"] == window["idle_syncs"] == 0
    assert window["host_outside_us"] >= 0.5 * window["idle_us"]
    assert finding_of(run, "host-syncs") is None is not finding_of(run, "host-bound")


def test_a_copy_of_a_result_before_kernels_stays_a_synchronization(tmp_path):
    trace = Made()
    for number in range(10):
        at = 2000 * number
        trace.op("aten::mm", at + 1, 8)
        trace.kernel(made.GEMM, at + 10, 700, at + 2)
        copy(trace, TO_HOST, at + 710, 400, at + 20, 1_700)
    (window,) = run_of(tmp_path, trace).windows.to_dict("records")
    assert window["idle_copy_sync_us"] == 0 < window["idle_sync_us"]


def test_shorter_products_end_no_copies_that_block_the_host_sooner(tmp_path):
    """The host launched the products at once, and then stays in copies, beside which they run on another stream."""
    trace = of_blocking_copies(40, product_us=100)
    for number in range(50):
        trace.op("aten::mm", 11 + number, 0.9)
        trace.kernel(made.SIMT, 110 + 400 * number, 400, 11.1 + number, call_us=0.5)
    run = run_of(tmp_path, trace)
    (window,) = run.windows.to_dict("records")
    assert window["reach_all_frac"] < 0.05
    assert first_sentence(run).startswith("Largest possible saving: the GPU only copies and fills")


def replay_of(*work, copies=(), uploads=()):
    """Work as start, end, launch, return and stream; calls of 50 us and more may wait."""
    starts, ends, launched, returned, streams = np.array(work, dtype=float).T
    long, places = returned - launched >= 50, np.arange(len(work))
    stays, staged = np.isin(places, copies), np.isin(places, uploads)
    waits = (launched[long], returned[long])
    return Replay.of(starts, ends, launched, returned, streams, waits, stays, uploads=staged)


def test_a_call_that_copies_waits_for_its_copy_alone():
    """Products run on stream 7 beside two copies on stream 9; the host is in the first copy until the second."""
    products = [(10 + 100 * n, 110 + 100 * n, n, n + 0.5, 7) for n in range(5)]
    copies = [(30, 280, 20, 285, 9), (310, 560, 300, 565, 9)]
    replay = replay_of(*products, *copies, copies=(5, 6))
    shorter = np.array([90.0] * 5 + [0.0] * 2)
    assert replay.sooner_us(shorter) == 0
    assert set(reach_fracs(replay)) == {0.0}


@pytest.mark.parametrize(("uploads", "sooner_us"), [((1,), 0), ((), 90)])
def test_a_copy_that_its_call_stages_waits_for_no_kernel_that_ends_by_chance(uploads, sooner_us):
    """The call moves what it copies to pinned memory, until just after a kernel of another stream ends."""
    replay = replay_of((10, 110, 0, 1, 7), (112, 300, 20, 305, 9), copies=(1,), uploads=uploads)
    assert replay.sooner_us(np.array([90.0, 0.0])) == sooner_us


def test_a_slow_launch_waits_for_no_room_in_a_queue():
    replay = replay_of((10, 110, 0, 1, 7), (300, 400, 150, 320, 7), (420, 500, 410, 412, 7))
    assert replay.sooner_us(np.array([90.0, 0.0, 0.0])) == 0
    full = replay_of((10, 110, 0, 1, 7), (200, 300, 2, 100, 7), (320, 400, 310, 312, 7))
    assert full.sooner_us(np.array([0.0, 60.0, 0.0])) == 0


@pytest.mark.parametrize(
    ("names", "inside", "told", "missing"),
    [
        (["cudaFree", "cudaMalloc"] * 5, True, ["runs short"], ["empty_cache", "pinned"]),
        (["cudaFree", "cudaMalloc"] * 5, False, ["remove empty_cache(), and avoid"], ["pinned"]),
        (["cudaMalloc"] * 6 + ["cudaHostAlloc"] * 4, True, ["allocate pinned buffers once"], ["empty_cache"]),
        (["cudaHostAlloc"] * 10, True, ["Allocate pinned buffers once"], ["caching allocator", "fragmentation"]),
    ],
)
def test_advice_on_memory_is_of_the_calls_that_the_trace_has(tmp_path, names, inside, told, missing):
    trace = with_calls(names)
    if not inside:
        trace.events = [event for event in trace.events if event["name"] != "aten::empty"]
    advice = finding_of(run_of(tmp_path, trace), "host-bound").advice
    assert all(part in advice for part in told) and not any(part in advice for part in missing)


@pytest.mark.parametrize(("outer", "of_model"), [("aten::matmul", False), ("aten::linear", True)])
def test_a_program_of_plain_products_has_no_model(tmp_path, outer, of_model):
    trace = Made()
    for number in range(10):
        trace.op(outer, 20 * number, 18)
        trace.op("aten::mm", 20 * number + 1, 15)
        trace.kernel(made.SIMT, 400 + 1000 * number, 1000, 20 * number + 3)
    run = run_of(tmp_path, trace, "NVIDIA A100-SXM4-80GB", (8, 0))
    finding = finding_of(run, "fp32-products")
    assert "allow_tf32 = True" in finding.snippet
    assert ("model" in finding.advice + finding.snippet) == of_model
    assert ("c = a.to(torch.bfloat16) @ b.to(torch.bfloat16)" in finding.snippet) != of_model
