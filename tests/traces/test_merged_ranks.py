"""Traces of several ranks in one file: ranks are compared as if each had a file of its own."""

import pytest

from amp_core import diagnose, load_run
from amp_core.analysis.performance.rank_waiting import rank_waiting
from amp_core.findings import first_sentence
from amp_core.traces import import_traces
from tests.traces.made import GEMM, Made, write
from tests.traces.test_collectives import ddp
from tests.traces.test_collectives import run_of as run_of_ranks


def merged(*documents, named=False, own_numbers=True):
    """The documents as one file, each rank with processes of its own; with `named`, named after the rank. Without
    `own_numbers` the ranks use the same correlations, as before merging."""
    events = []
    for rank, document in enumerate(documents):
        for event in document["traceEvents"]:
            event["pid"] += 1000 * rank
            arguments = event.get("args", {})
            if own_numbers and "correlation" in arguments:
                arguments["correlation"] += 10_000_000 * rank
            events.append(event)
        if named:
            for pid, what in ((0, "GPU"), (77, "CPU")):
                events.append(
                    {"ph": "M", "name": "process_name", "pid": 1000 * rank + pid}
                    | {"args": {"name": f"RANK {rank} - {what}"}}
                )
    return {"traceEvents": events}


@pytest.mark.parametrize(("named", "own_numbers"), [(True, False), (True, True), (False, True)])
def test_ranks_in_one_file_are_compared_as_those_of_several_files(tmp_path, named, own_numbers):
    enters = ((300, 750), (600, 850))
    apart = run_of_ranks(tmp_path, *(ddp(each, rank=rank) for rank, each in enumerate(enters)))
    document = merged(*map(ddp, enters), named=named, own_numbers=own_numbers)
    together = load_run(import_traces([write(tmp_path / "m.json", document)], tmp_path / "together"))
    assert together.head.world_size == 2
    assert rank_waiting(together).equals(rank_waiting(apart))
    assert first_sentence(together) == first_sentence(apart)
    assert sorted(together.windows["wall_us"]) == sorted(apart.windows["wall_us"])


@pytest.mark.parametrize("processes", [1, 2])
def test_devices_of_one_process_are_no_ranks(tmp_path, processes):
    """Nor are processes that cannot be told apart, since their work names calls of both."""
    trace = Made()
    for n in range(2):
        trace.op("aten::mm", 10 * n, 8)
        trace.kernel(GEMM, 100 + n, 500, 10 * n + 1)
        call, _, kernel = trace.events[-3:]
        kernel["pid"] = kernel["args"]["device"] = n
        if processes == 2:
            trace.events[-4]["pid"] = call["pid"] = 77 + n
            call["args"]["correlation"] = kernel["args"]["correlation"] = 5
    run = load_run(import_traces([write(tmp_path / "t.json", trace.document())], tmp_path / "run"))
    assert run.head.world_size == 1 and sorted(run.windows["device"]) == ["cuda:0", "cuda:1"]


def held(rank, queued):
    """A step in which rank 0's only kernel begins 800 µs after its launch, or is launched that late."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 998 if rank == 0 else 20)
    trace.kernel(GEMM, 5, 20, 2)
    trace.kernel(GEMM, 825 if rank == 0 else 25, 20, 10 if queued or rank else 820)
    trace.op("record_param_comms", 890 if not queued and not rank else 30, 20, 2)
    late = rank == 0
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 850 if late else 50, 100 if late else 900,
                 40 if queued or rank else 845, 2)  # fmt: skip
    return trace.document(distributedInfo={"rank": rank, "world_size": 2})


@pytest.mark.parametrize("queued", [True, False])
def test_a_late_rank_with_work_queued_is_held_by_its_gpu_and_not_by_its_host(tmp_path, queued):
    run = run_of_ranks(tmp_path, held(0, queued), held(1, queued))
    findings = {f.code: f for f in diagnose(run)}
    assert ("Rank 0's GPU is idle for" in first_sentence(run) and "is queued)" in first_sentence(run)) == queued
    late = findings["exposed-communication"]
    assert late.where == "rank 0"
    assert ("Look for other processes" in late.advice) == queued == ("with_stack" not in late.snippet)
    assert ("of it although work is queued) of the step" in late.advice) == queued
    assert "Rank 0's GPU is idle for" in findings["kernel-wait"].title if queued else "kernel-wait" not in findings
