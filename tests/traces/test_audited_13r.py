"""Ranks, communication and uneven steps: statements that an audit of the output on public traces refuted."""

import pytest

from amp_core import diagnose
from amp_core.analysis.performance.rank_waiting import rank_waiting
from amp_core.findings import first_sentence
from tests.traces.made import GEMM, NCCL, RELU, Made, finding_of, run_of, runs_of
from tests.traces.test_collectives import collective
from tests.traces.test_collectives import run_of as run_of_ranks


def behind_a_host(rank, *, late_us=(0, 0, 500), gap_us=250, transfer_us=300):
    """A step of six collectives. Before each, the host of a rank launches four short kernels late, one after the other,
    and then is late by so much more; all leave the collective together."""
    trace, leave = Made(), 0
    trace.event("mark", "ProfilerStep#3", 0, 6 * (4 * gap_us + max(late_us) + transfer_us + 60), 1)
    for number in range(6):
        for each in range(4):
            at = leave + gap_us * each + 10
            trace.op("aten::mul" if each % 2 else "aten::add", at, gap_us - 20)
            trace.kernel(RELU, at + gap_us - 10, 6 + each, at + gap_us - 15)
        enter = leave + 4 * gap_us + 40 + late_us[rank] + 3 * ((rank + number) % 3)
        leave += 4 * gap_us + 50 + max(late_us) + transfer_us
        collective(trace, enter, leave - enter, enter - 25)
    return trace


@pytest.mark.parametrize("late_us", [500, 0])
def test_waiting_for_a_late_host_is_part_of_what_that_host_costs(tmp_path, late_us):
    """The transfers take too long for the waiting to be nearly all of what the others only communicate."""
    run = runs_of(tmp_path, [behind_a_host(rank, late_us=(0, 0, late_us)) for rank in range(3)])
    sentence, late = first_sentence(run), finding_of(run, "launch-bound")
    communication = finding_of(run, "exposed-communication")
    assert ("rank 2's GPU is idle for" in sentence) == bool(late_us)
    assert (" % of waiting for late ranks, because the host launches too late" in sentence) == bool(late_us)
    assert late.win_ms == pytest.approx(9.1 if late_us else 6.1, abs=0.2)  # of rank 2, or the mean
    assert communication.win_ms == pytest.approx(1.85, abs=0.1)  # the transfers
    assert ("ms are waiting for ranks whose hosts are late" in communication.title) == bool(late_us)
    assert communication.advice.startswith("Shorten what makes those hosts late first.") == bool(late_us)


def test_a_late_rank_that_is_idle_no_longer_than_the_others_is_none_of_its_host(tmp_path):
    """Rank 2 enters late since its kernels take longer."""
    traces = [behind_a_host(rank) for rank in range(3)]
    for event in traces[2].events:
        if event["name"] == RELU and event["args"].get("stream") and event["dur"] == 9:
            event["dur"] = 500
    run = runs_of(tmp_path, traces)
    assert "waiting for ranks whose hosts are late" not in " ".join(f.title for f in diagnose(run))


def test_collectives_that_ranks_enter_together_tell_of_no_late_rank(tmp_path):
    """Rank 2 enters four collectives 500 µs late; the others it enters 15 µs before or after the other ranks."""
    traces = []
    for rank in range(3):
        trace = Made()
        trace.event("mark", "ProfilerStep#3", 0, 12_000, 1)
        for number in range(12):
            at = 1_000 * number + 100
            late = 500 if number % 3 == 0 else (15 if (rank + number) % 3 == 2 else 0)
            enter = at + (late if rank == 2 or number % 3 else 0)
            trace.op("aten::mul", at - 90, 20)
            trace.kernel(RELU, at - 60, 40 + 2 * number, at - 75)
            collective(trace, enter, at + 800 - enter, enter - 30)
        traces.append(trace)
    table = rank_waiting(run := runs_of(tmp_path, traces)).set_index("rank")
    assert table.loc[2, ["collectives", "last_frac"]].tolist() == [4, 1.0]
    assert table["last_frac"].tolist() == [0.0, 0.0, 1.0]
    assert "rank 2 enters 4 of 4 collectives last" in finding_of(run, "exposed-communication").advice


def flushing(flushed_steps, *, steps=5, us=3_000):
    """Steps of products launched ahead of the device. In some, the host first frees and allocates memory for as long as
    such a step takes, in operators."""
    trace, at, free = Made(), 0, 0
    for number in range(steps):
        begins, flushes = at, number in flushed_steps
        if flushes:
            trace.op("aten::empty", at + 5, us - 10)
            for each in range(6):
                name = "cudaFree" if each < 4 else "cudaMalloc"
                trace.event(
                    "call", name, at + 10 + each * us // 6, us // 6 - 20, 1, correlation=900 + 10 * number + each
                )
            at += us
            free = max(free, at)
        for each in range(10):
            trace.op("aten::mm", at + 10 * each + 2, 7)
            start = max(free, at + 10 * each + 8)
            trace.kernel(GEMM, start, us / 10 - 5 + each % 3, at + 10 * each + 4)
            free = start + us / 10 - 5 + each % 3 + 1
        at += us
        trace.event("mark", f"ProfilerStep#{number + 5}", begins, at - begins, 1)
    return trace


@pytest.mark.parametrize("flushed_steps", [(2,), (0, 1, 2, 3, 4)])
def test_a_cause_that_lies_in_one_step_is_told_of_that_step(tmp_path, flushed_steps):
    run = run_of(tmp_path, flushing(flushed_steps))
    sentence, finding = first_sentence(run), finding_of(run, "host-bound")
    is_one = len(flushed_steps) == 1
    assert sentence.startswith("Step 7 takes 6.00 ms, the median step 3.00 ms") == is_one
    assert ("In it lies 96 % of the time for which the device is idle because the host" in sentence) == is_one
    assert ("and the longest part is GEMM/conv, on tensor cores, about" in sentence) == is_one
    assert ("Memory runs short here, after a step in which none was freed" in finding.advice) == is_one
    assert ("Profile after a warm-up" in finding.advice) != is_one


def decoding(rank, *, transfer_us=20, spread_us=2, first_us=0):
    """60 all-reduces of a rank of four, each after a product of its own length; rank 0 enters the first one early."""
    trace, at = Made(), 10
    for number in range(60):
        trace.kernel(GEMM, at, 30 + number % 4, at - 6)
        at += 30 + number % 4
        us = transfer_us + spread_us * (number % 3) + (first_us if number == 0 and rank == 0 else 0)
        trace.op("record_param_comms", at - 5, 3, **{"Collective name": "allreduce", "Group size": 4})
        trace.kernel(NCCL, at, us, at - 4)
        at += us
    return trace.document(distributedInfo={"rank": rank, "world_size": 4})


@pytest.mark.parametrize(("spread_us", "first_us", "told"), [(2, 200, True), (2, 0, True), (30, 0, False)])
def test_equal_calls_tell_how_much_waiting_there_is_at_most(tmp_path, spread_us, first_us, told):
    """Of 1.32 ms on each of two ranks, 0.12 are beyond the shortest call."""
    run = run_of_ranks(tmp_path, *(decoding(rank, spread_us=spread_us, first_us=first_us) for rank in range(2)))
    finding = finding_of(run, "exposed-communication")
    at_most = "at least 0.100 and at most 0.220 of 1.42 ms of it" if first_us else ", at most 0.120 of 1.32 ms of it"
    assert (f"{at_most} waiting for other ranks, if the shortest of 120 such calls" in finding.title) == told


def buckets(*, last_us, elements=4 * 2**20):
    """Steps of a rank of eight: products, an all-reduce beside them, and right after it a larger one of `last_us`."""
    trace, at = Made(), 0
    for number, us in enumerate(last_us):
        begins = at
        trace.op("MmBackward0", at + 5, 60, 2)
        for each in range(4):
            trace.kernel(GEMM, at + 20 + 400 * each, 380 + 3 * each, at + 8 + 10 * each, 2)
        message = {"Collective name": "allreduce", "dtype": "Float", "Group size": 8}
        for start, took, launched, part in ((500, 2_500, 100, 4), (3_015, us, 130, 1)):
            sizes = {"In msg nelems": elements // part, "Out msg nelems": elements // part}
            trace.op("record_param_comms", at + launched - 2, 20, 2, **message, **sizes)
            trace.kernel(NCCL, at + start, took, at + launched, 2, stream=9)
        at += 3_100 + us
        trace.event("mark", f"ProfilerStep#{number + 5}", begins, at - begins, 1)
    return trace


@pytest.mark.parametrize(
    ("last_us", "elements", "told"),
    [((8_000, 8_300, 8_100), 2**22, True), ((8_000, 19_000, 8_100), 2**22, False), ((8_000,) * 3, 2**26, False)],
)
def test_a_collective_right_after_another_tells_a_link_that_is_slow(tmp_path, last_us, elements, told):
    """16 MiB in 8.1 ms are 2.1 GB/s; one that waits for others varies; 256 MiB in this time are 34 GB/s."""
    trace = buckets(last_us=last_us, elements=elements)
    run = run_of(tmp_path, trace, distributedInfo={"rank": 0, "world_size": 8})
    finding = finding_of(run, "exposed-communication")
    assert finding.advice.startswith("An all-reduce of 16.0 MiB takes 8.10 ms, 2.07 GB/s, each time") == told
    assert ("NCCL_DEBUG=INFO" in finding.snippet) == told


@pytest.mark.parametrize(
    ("calls", "sizes", "says"), [(2, (1, 6), "late ranks"), (2, (6, 1), ""), (12, (1, 1), "in one")]
)
def test_merging_reductions_is_advised_only_where_many_follow_one_another(tmp_path, calls, sizes, says):
    """Reductions of the host that begin 5 ms apart and take equally long, whatever their size; or many short ones."""
    trace, at = Made(), 0
    for number in range(3):
        trace.event("mark", f"ProfilerStep#{number + 5}", at, 100_000, 1)
        trace.op("aten::mm", at + 10, 9_000 + 100 * number)
        trace.op("aten::relu", at + 9_200, 500)
        apart, us = (5_000, 80_000) if calls == 2 else (7_000, 6_500)
        for each in range(calls):
            shape = [[sizes[each % 2] * 2**18]]
            name, began = "gloo:all_reduce", at + 10_000 + each * apart
            trace.event("mark", name, began, us, 3 + each, **{"Input Dims": shape, "Input type": ["float"]})
        at += 100_000
    advice = finding_of(run_of(tmp_path, trace, gpu=""), "exposed-communication").advice
    assert ("ranks that are late do" in advice) == (says == "late ranks")
    assert ("several tensors in one call" in advice) == (says == "in one")
