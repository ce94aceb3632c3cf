"""Ranks that began apart, transfers that overlap can't hide, many small collectives, and pauses of equal length."""

import pytest

from amp_core.analysis.performance.rank_waiting import began_later_us, started_apart
from tests.traces import made
from tests.traces.made import GEMM, Made, run_of, runs_of
from tests.traces.test_collectives import collective
from tests.traces.test_refuted_ranks import finding_of

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def one_collective(began, enters, *, busy_us=0.0):
    """A trace without steps whose host begins at `began`, and whose one collective ends at 10,000 µs."""
    trace = Made()
    trace.op("aten::empty", began, 5)
    if busy_us:
        trace.op("aten::sort", began + 10, busy_us)
    trace.kernel(GEMM, enters - 100, 50, enters - 120)
    collective(trace, enters, 10_000 - enters, enters - 20)
    return trace


@pytest.mark.parametrize("later_us", [0, 4000])
def test_a_rank_whose_trace_begins_later_is_not_blamed_for_its_only_collective(tmp_path, later_us):
    """Rank 0 enters 8 ms after rank 1, as its trace begins so much later, or since its host works so long before."""
    run = runs_of(tmp_path, [one_collective(1000 + later_us, 9900, busy_us=4000), one_collective(1000, 1900)])
    finding = finding_of(run, "exposed-communication")
    assert started_apart(run) == bool(later_us) and began_later_us(run) == pytest.approx(later_us, abs=1)
    assert ("for rank 0, whose trace begins 4.00 ms later" in finding.title) == bool(later_us)
    assert ("Profile those ranks with stacks" in finding.advice) == (not later_us)
    assert ("begin what was recorded at different times" in finding.advice) == bool(later_us)
    assert "later ones" not in finding.advice and "{" not in finding.snippet


def gathers(*, computes_us, long_us):
    """A step of three all-gathers of DTensor, the last of which takes long."""
    trace, at = Made(), 10
    trace.event("mark", "ProfilerStep#3", 0, 2000, 1)
    trace.op("aten::mm", 1, 5, **{"Input type": ["float"] * 2})
    trace.kernel(GEMM, at, computes_us, 2)
    at += computes_us
    for n, us in enumerate((100, 100, long_us)):
        trace.op("_c10d_functional::all_gather_into_tensor", 20 + 30 * n, 25)
        trace.op("record_param_comms", 21 + 30 * n, 20, **{"Collective name": "allgather", "dtype": "Float"})
        trace.kernel(GATHER, at, us, 25 + 30 * n)
        at += us
    return trace


@pytest.mark.parametrize(("computes_us", "long_us"), [(50, 1700), (300, 110)])
def test_overlap_that_hides_a_small_part_is_not_what_is_advised(tmp_path, computes_us, long_us):
    finding = finding_of(run_of(tmp_path, gathers(computes_us=computes_us, long_us=long_us)), "exposed-communication")
    is_small = long_us == 1700
    assert (", 1.70 ms of it in one all-gather;" in finding.title) == is_small
    assert ("of it in one" in finding.title) == is_small
    assert ("keep results sharded" in finding.advice and "exchange 16 bits" in finding.advice) == is_small
    assert ("_micro_pipeline_tp" in finding.snippet) == (not is_small)


def one_by_one(count=60):
    """A step whose backward reduces each gradient of the model by itself, right behind its product, while the host
    launches each of both just before it runs."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 100 * count, 1)
    trace.op("MmBackward0", 5, 100 * count - 10, 2)
    for n in range(count):
        at = 100 * n
        trace.op("aten::mm", at + 10, 20, 2, **{"Input type": ["float"] * 2})
        trace.kernel(GEMM, at + 20, 30, at + 15, 2)
        message = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1000, "Group size": 2}
        collective(trace, at + 70, 20, at + 62, **message)
    return trace


@pytest.mark.parametrize(("gpu", "capability", "hook"), [("Tesla V100-SXM2-32GB", (7, 0), "fp16"),
                                                         ("NVIDIA A100-SXM4-80GB", (8, 0), "bf16")])  # fmt: skip
def test_small_collectives_save_the_idle_time_between_them_while_the_host_is_late(tmp_path, gpu, capability, hook):
    run = run_of(tmp_path, one_by_one(), gpu, capability, distributedInfo={"rank": 0, "world_size": 2})
    finding = finding_of(run, "exposed-communication")
    assert "is idle for 49 % between its 60 collectives" in finding.title
    assert finding.title.endswith("fewer calls save the idle time between them alone; could save up to 2.95 of 6.00 ms")
    assert f"default_hooks.{hook}_compress_hook" in finding.advice and "Reduce them in buckets" in finding.advice


@pytest.mark.parametrize("longer_us", [100, 9000])
def test_a_host_that_does_nothing_for_equally_long_in_each_step_may_sleep(tmp_path, longer_us):
    trace, at = Made(), 0
    for step in range(4):
        pause_us = 100_000 + (longer_us if step == 2 else 0)
        trace.event("mark", f"ProfilerStep#{step + 3}", at, pause_us + 1000, 1)
        trace.op("aten::mm", at + 5, 20)
        trace.kernel(GEMM, at + 20, 300, at + 10)
        trace.op("aten::mm", at + pause_us + 500, 20)
        trace.kernel(GEMM, at + pause_us + 520, 300, at + pause_us + 510)
        at += pause_us + 1000
    run = run_of(tmp_path, trace)
    advice = finding_of(run, "host-bound").advice
    assert ("does nothing for the same 100 ms" in advice and "as a sleep or a timeout would" in advice) == (
        longer_us == 100
    )
    assert ("preprocessing, logging" in advice) == (longer_us == 9000)
    assert (run.windows["pause_us"].max() > 0) == (longer_us == 100)


def test_the_beginning_of_a_window_is_that_of_its_first_step(tmp_path):
    assert run_of(tmp_path, made.products()).windows["began_us"].tolist() == [made.BASE]
