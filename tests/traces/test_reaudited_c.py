"""Ranks of other jobs, late ranks, graphs that begin late, programs that sleep, and loops that only move elements."""

import numpy as np
import pytest

from amp_core import diagnose, load_run
from amp_core.analysis.performance.collectives import collective_rows
from amp_core.analysis.performance.rank_waiting import host_lag
from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings import first_sentence
from amp_core.traces import import_notes, import_traces, read_trace
from amp_core.traces.replay import Replay
from tests.findings.zoo.cpu_traces import looping
from tests.traces.made import GEMM, NCCL, RELU, Made, finding_of, run_of, write
from tests.traces.test_collectives import collective


def of_job(rank, ranks):
    return run_document(rank, ranks, Made())


def run_document(rank, ranks, trace):
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel(GEMM, 10, 900, 2)
    return trace.document(distributedInfo={"rank": rank, "world_size": ranks})


@pytest.mark.parametrize(("of_each", "kept"), [((1, 4, 4), [1, 2]), ((4, 4, 4), [0, 1, 2]), ((1, 4), [1])])
def test_a_trace_of_another_number_of_ranks_is_left_out(tmp_path, of_each, kept):
    files = [write(tmp_path / f"r{rank}.json", of_job(rank, ranks)) for rank, ranks in enumerate(of_each)]
    run = load_run(import_traces(files, tmp_path / "run"))
    assert sorted(run.windows["rank"].unique().tolist()) == kept
    told = [note for note in import_notes(run) if "of another job" in note]
    assert told == (
        ["r0.json is of another job, and left out: it states 1 rank, the others 4"] if 0 not in kept else []
    )


def late_rank(rank, *, slow):
    """Four collectives on one of three ranks, a wait for the device, and a last collective that all launch together.
    Rank 1 loads data for 4 ms instead of 1 ms, or if it is `slow`, launches each collective 1 ms later."""
    trace, is_late = Made(), rank == 1
    data = 4_000 if is_late and not slow else 1_000
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    trace.event("mark", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, data, 1)
    trace.op("aten::mm", data + 1, 8)
    trace.kernel(GEMM, data + 10, 40, data + 2)
    last = (1_000 if slow else 4_000) + 100
    for number in range(4):
        launched = data + 60 + (1_500 if is_late and slow else 500) * number
        leave = (1_000 + 1_500 * number if slow else 4_000 + 500 * number) + 100
        enter = max(launched + 15, last if number else 0)
        collective(trace, enter, leave - enter, launched)
        last = leave
    trace.event("call", "cudaStreamSynchronize", launched + 30, leave - launched, 1, correlation=5)
    collective(trace, 7_025, 10, 7_000)
    return trace.document(distributedInfo={"rank": rank, "world_size": 3})


@pytest.mark.parametrize("slow", [False, True])
def test_a_rank_that_is_as_late_at_the_first_collective_as_later_is_told_what_it_does_before(tmp_path, slow):
    files = [write(tmp_path / f"r{rank}.json", late_rank(rank, slow=slow)) for rank in range(3)]
    advice = finding_of(load_run(import_traces(files, tmp_path / "run")), "exposed-communication").advice
    told = "rank 1 is 3.00 ms behind at the first collective of the step, and hardly more later: it loads data for 4.00"
    assert (told in advice) != slow


def test_hosts_that_waited_for_the_late_rank_are_as_far_ahead_no_more(tmp_path):
    """They wait 2.5 ms for it before the last collective, and so need 4.5 of the 7.0 ms themselves."""
    files = [write(tmp_path / f"r{rank}.json", late_rank(rank, slow=False)) for rank in range(3)]
    run = load_run(import_traces(files, tmp_path / "run"))
    lag = host_lag(collective_rows(run), [1])
    assert (lag.first_us, lag.longest_us, lag.last_us) == pytest.approx((3_000, 3_000, 0))


@pytest.mark.parametrize(("mark", "told"), [("FSDP::pre_forward", True), ("forward_backward", False)])
def test_blocks_whose_weights_are_gathered_are_compiled_one_by_one(tmp_path, mark, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 2000, 1)
    trace.event("mark", mark, 1, 1990, 1)
    for n in range(20):
        trace.op("aten::relu", 100 * n + 2, 20)
        trace.kernel(RELU, 100 * n + 20, 5, 100 * n + 10)
    finding = finding_of(run_of(tmp_path, trace), "launch-bound")
    assert ("block.compile()" in finding.snippet) == told != ("reduce-overhead" in finding.snippet)


@pytest.mark.parametrize("collective_us", [0, 50_000])
def test_recomputation_is_a_share_of_what_is_computed(tmp_path, collective_us):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 100_000, 1)
    trace.op("autograd::engine::evaluate_function: CheckpointFunctionBackward", 100, 200, 2, **{"Sequence number": 1})
    trace.op("aten::linear", 110, 20, 2)
    trace.kernel(GEMM, 400, 1_000, 112, 2)
    trace.op("aten::layer_norm", 150, 20, 2)
    trace.kernel(RELU, 1_400, 1_000, 152, 2)
    trace.op("aten::mm", 400, 20, 2)
    trace.kernel(GEMM, 2_400, 8_000, 402, 2)
    if collective_us:
        collective(trace, 11_000, collective_us, 500, NCCL)
    found = read_trace(write(tmp_path / "t.json", trace.document())).recomputation
    assert found is not None and found.frac == pytest.approx(0.2)


@pytest.mark.parametrize(("copied_at", "launched", "lost"), [(304, 50, 0), (404, 402, 50)])
def test_a_copy_that_waits_for_another_stream_begins_sooner_with_it(copied_at, launched, lost):
    """Stream 7 could begin 50 us sooner. The host waits for a copy on stream 9, then launches on stream 7 again: sooner
    too if the copy was launched early and began as stream 7 ended, and not if the copy was launched late."""
    starts = np.array([100.0, copied_at, copied_at + 96])
    ends = np.array([300.0, copied_at + 46, copied_at + 146])
    calls = np.array([0.0, launched, copied_at + 94])
    waits = np.array([launched + 2.0]), np.array([copied_at + 47.0])
    replay = Replay.of(starts, ends, calls, calls + 1, np.array([7, 9, 7]), waits)
    assert replay.sooner_us(np.array([50.0, 0.0, 0.0])) == 50 - lost


def test_a_stream_that_waits_for_its_launch_alone_ends_no_gain():
    """The host waits for stream 7, then for a copy that it has just launched on stream 9, and launches again."""
    starts, ends = np.array([100.0, 320.0, 400.0]), np.array([300.0, 330.0, 500.0])
    launched, waits = np.array([0.0, 310.0, 398.0]), (np.array([10.0, 315.0]), np.array([302.0, 332.0]))
    replay = Replay.of(starts, ends, launched, launched + 1, np.array([7, 9, 7]), waits)
    assert replay.sooner_us(np.array([50.0, 0.0, 0.0])) == 50


@pytest.mark.parametrize(("inner", "says"), [("<built-in function sleep>", "The program sleeps"),
                                             ("<built-in function sorted>", "launches most of what")])  # fmt: skip
def test_a_function_that_launches_is_no_preparation_and_a_pause_is_told(tmp_path, inner, says):
    trace = Made()
    trace.event("python_function", "loop.py(5): run", 0, 9_000, 1)
    for at in (*range(0, 1_000, 100), *range(7_000, 8_000, 100)):
        trace.op("aten::mm", at, 20)
        trace.kernel(GEMM, at + 30, 60, at + 5)
    if "sleep" in inner:
        trace.event("python_function", inner, 1_000, 5_990, 1)
    finding = finding_of(run_of(tmp_path, trace), "host-bound")
    assert finding.where == f"loop.py(5): run{', asleep' if 'sleep' in inner else ''}"
    assert says in finding.advice and "prepare" not in finding.snippet


@pytest.mark.parametrize("has_overhead", [True, False])
def test_the_profilers_overhead_shows_that_the_device_was_requested(tmp_path, has_overhead):
    trace = Made()
    trace.op("aten::normal_", 0, 9_000)
    trace.op("aten::copy_", 9_000, 10)
    trace.op("aten::pow", 9_010, 40)
    trace.event("call", "cudaLaunchKernel", 9_020, 5, 1, correlation=3)
    if has_overhead:
        trace.event("overhead", "Instrumentation", 9_021, 3, 0)
    run = run_of(tmp_path, trace)
    finding = finding_of(run, "device-not-recorded")
    assert ("was not among the activities" in finding.advice) != has_overhead
    assert ("ProfilerActivity.CUDA" in finding.snippet) != has_overhead
    assert "launches nothing: what is copied to the device can be drawn there" in first_sentence(run)


MOVES = ("aten::select", "aten::index", "aten::clone", "aten::fill_")


@pytest.mark.parametrize(
    ("ops", "moves"), [(MOVES, True), ((*MOVES, "aten::mul"), False), (("aten::embedding", "aten::fill_"), None)]
)
def test_a_loop_that_only_moves_elements_is_told_to_index_once(tmp_path, ops, moves):
    run = run_of(tmp_path, looping(*ops, passes=12, us=8.0, rest_us=200.0))
    sentence, codes = first_sentence(run), [f.code for f in diagnose(run)]
    assert ("index all of them at once" in sentence) == bool(moves)
    assert ("operator-loop" in codes) == (moves is not None)
    assert "operator-loop" not in codes or "costly-calls" not in codes
    assert possible_savings(run) is None
