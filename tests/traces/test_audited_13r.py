"""Ranks, communication and uneven steps: statements that an audit of the output on public traces refuted."""

import pytest

from amp_core import diagnose
from amp_core.analysis.performance.rank_waiting import rank_waiting
from amp_core.findings import first_sentence
from tests.traces.made import RELU, Made, finding_of, runs_of
from tests.traces.test_collectives import collective


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
