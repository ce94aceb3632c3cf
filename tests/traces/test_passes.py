"""Loops that are profiled without step markers, and ranks of which one does nearly all."""

import pytest

from amp_core import diagnose, load_run
from amp_core.analysis import step_cost
from amp_core.findings import first_sentence
from amp_core.traces import import_traces
from tests.traces import made
from tests.traces.made import Made, run_of, write

NAMES = (made.GEMM, made.RELU, made.NORM, made.GEMM, made.CAST, made.RELU)


def loop(first_us, others_us, passes=3, extra=0):
    """Passes of six launches each, with that long between the launches of the first pass and of the others."""
    trace, at = Made(), 0
    for _ in range(extra):
        trace.kernel("void at::native::distribution_elementwise_kernel<float>", at + 3, 2, at)
        at += 10
    for number in range(passes):
        each = (first_us if number == 0 else others_us) / len(NAMES)
        for name in NAMES:
            trace.op("aten::something", at, each - 1)
            trace.kernel(name, at + each - 1, 3, at + each - 4)
            at += each
    return trace


@pytest.mark.parametrize("extra", [0, 1])
def test_a_first_pass_that_sets_up_is_told_with_what_the_others_take(tmp_path, extra):
    run = run_of(tmp_path, loop(60_000, 1_200, extra=extra))
    (finding,) = [f for f in diagnose(run) if f.code == "host-bound"]
    assert "The same 6 launches run 3 times, as passes or layers: the first time takes" in first_sentence(run)
    assert "and a later one 1.10 ms on average." in first_sentence(run) and "call prof.step()" not in first_sentence(
        run
    )
    assert "after a warm-up" in finding.advice and "model(batch)" in finding.snippet


@pytest.mark.parametrize(("first_us", "passes"), [(3_000, 3), (60_000, 1)])
def test_passes_of_one_length_and_a_single_one_are_not_told(tmp_path, first_us, passes):
    run = run_of(tmp_path, loop(first_us, 1_200, passes))
    assert "The same" not in first_sentence(run)
    assert "equal series of launches" not in " ".join(f.advice for f in diagnose(run))


def test_a_first_pass_that_computes_more_is_not_told_as_one_that_sets_up(tmp_path):
    trace = loop(60_000, 1_200)
    for event in trace.events:
        if event["cat"] == "kernel" and event["ts"] < made.BASE + 60_000:
            event["dur"] = 9_000
    assert "The same" not in first_sentence(run_of(tmp_path, trace))


@pytest.mark.parametrize(("other_us", "alone"), [(10, True), (5_000, False)])
def test_a_rank_that_does_nearly_all_is_told_alone(tmp_path, other_us, alone):
    paths = []
    for rank, us in enumerate((9_000, other_us)):
        trace = Made()
        trace.op("aten::cat", 0, us)
        trace.kernel(made.RELU, 2, 3, 1)
        trace.kernel(made.RELU, us + 5, 3, us - 1)
        about = {"distributedInfo": {"rank": rank, "world_size": 2, "backend": "nccl"}}
        paths.append(write(tmp_path / f"rank{rank}.json", trace.document(**about)))
    import_traces(paths, tmp_path / "run")
    run = load_run(tmp_path / "run")
    told = first_sentence(run)
    assert ("Figures are those of rank 0" in told, "figures are means over 2 ranks" in told) == (alone, not alone)
    assert step_cost(run).step_us == pytest.approx(9_006 if alone else 7_006)


def test_the_profilers_work_before_the_first_kernel_is_part_of_no_saving(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    trace.event("gpu_user_annotation", "ProfilerStep#3", 3_000, 6_995, "stream 7")
    trace.events[-1]["pid"] = 0
    trace.event("overhead", "Activity Buffer Request", 100, 2_000, 0)
    trace.op("aten::mm", 2_500, 8)
    for at in (3_000, 6_000, 9_990):
        trace.kernel(made.GEMM, at, 5, at - 3)
    window = run_of(tmp_path, trace).windows.iloc[0]
    assert window["lead_us"] == pytest.approx(1_000)


@pytest.mark.parametrize(("few", "told"), [(4, True), (40, False)])
def test_graphs_are_not_advised_across_waits_where_the_time_is_even_if_most_launches_are_elsewhere(tmp_path, few, told):
    trace, at = Made(), 0
    trace.event("mark", "ProfilerStep#3", 0, 28_200, 1)
    for _ in range(400):  # launched without a gap and without a wait
        trace.kernel(made.GEMM, at + 5, 10, at)
        at += 10
    trace.event("call", "cudaStreamSynchronize", at, 5, 1)
    for _ in range(120 // few):
        for _ in range(few):
            trace.kernel(made.RELU, at + 200, 2, at + 190)
            at += 200
        trace.event("call", "cudaStreamSynchronize", at + 3, 1, 1)
    trace.event("call", "cudaStreamSynchronize", at + 9, 1, 1)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "launch-bound"]
    assert (f"after some {few} launches" in finding.advice) == told


def test_what_is_launched_once_after_the_last_pass_is_none_of_it(tmp_path):
    trace = loop(60_000, 1_200, passes=5)
    last = max(event["ts"] for event in trace.events) - made.BASE
    trace.op("aten::something", last + 20, 9_000)
    trace.kernel("lm_head", last + 9_030, 3_000, last + 9_010)
    assert "and a later one 1.20 ms on average." in first_sentence(run_of(tmp_path, trace))
