"""Advice on hosts that launch too late: what graphs shorten, what happens at the start alone, and waits for results."""

import pytest

from amp_core.findings import first_sentence
from amp_core.findings.launch_remedies import AT_START, EARLY, FIRST_PASS
from amp_core.findings.trace_launches import launch_remedy
from tests.traces.made import GEMM, RELU, Made, finding_of, run_of, runs_of
from tests.traces.test_collectives import collective
from tests.traces.test_passes import NAMES


@pytest.mark.parametrize(
    ("steps", "waits", "says"), [(0, 1, ""), (0, 2, "2 times per profiled window"), (1, 2, "2 times per step")]
)
def test_a_last_wait_is_none_that_a_graph_would_go_across(tmp_path, steps, waits, says):
    """The host waits after some of the launches, and as the last kernel runs, which no graph has to go across."""
    trace = Made()
    for number in range(steps):
        trace.event("mark", f"ProfilerStep#{number}", 0, 4_100, 1)
    for number in range(40):
        at = 100 * number
        trace.op("aten::mul", at, 6)
        trace.kernel(RELU, at + 8, 4, at + 2)
        if number < waits:
            trace.event("call", "cudaStreamSynchronize", at + 20, 5, 1, correlation=77 + number)
    trace.event("call", "cudaDeviceSynchronize", 3_909, 40, 1, correlation=99)
    run = run_of(tmp_path, trace)
    assert run.windows[["syncs", "last_syncs"]].to_numpy().tolist() == [[waits + 1, 1]]
    finding = finding_of(run, "launch-bound")
    assert ("no graph goes across" in finding.advice) == bool(says) and says in finding.advice


def replays(*, python_us=0, function="", waits=""):
    """Ten replays of a graph of 120 kernels. Before each, the host is in Python for so long, and copies."""
    trace, at = Made(), 0
    for number in range(10):
        began, at = at, at + python_us
        for _ in range(3):
            trace.op("aten::copy_", at, 6)
            trace.kernel(RELU, at + 8, 4, at + 2)
            at += 100
        trace.event("call", "cudaGraphLaunch", at, 10, 1, correlation=number + 1)
        for node in range(120):
            start = at + 20 + 10 * node
            trace.event("kernel", RELU, start, 10, "stream 7", correlation=number + 1, device=0, stream=7)
        if waits:
            trace.event("call", waits, at + 12, 1_210, 1, correlation=900 + number)
        at += 1_225
        if function:
            trace.event("python_function", function, began, at - began - 1, 1)
    return trace


def test_a_graph_per_pass_is_not_told_which_waits_it_would_go_across(tmp_path):
    trace = replays()
    for number in range(3):
        trace.event("call", "cudaStreamSynchronize", 1_525 * number + 20, 5, 1, correlation=900 + number)
    finding = finding_of(run_of(tmp_path, trace), "launch-bound")
    assert "Each step replays one graph already" in finding.advice and "no graph goes across" not in finding.advice


@pytest.mark.parametrize("graph", [True, False])
def test_a_function_around_replays_is_not_told_to_be_compiled(tmp_path, graph):
    function = "runner.py(5): execute"
    trace = replays(python_us=1_500, function=function)
    if not graph:
        trace = Made()
        trace.event("python_function", function, 0, 10_000, 1)
        for at in (*range(0, 1_000, 100), *range(7_000, 8_000, 100)):
            trace.op("aten::mm", at, 20)
            trace.kernel(GEMM, at + 30, 60, at + 5)
    finding = finding_of(run_of(tmp_path, trace), "host-bound")
    assert finding.where == function
    assert ("Most passes replay one graph" in finding.advice) == graph == ("torch.compile" not in finding.snippet)


@pytest.mark.parametrize("call", ["cudaEventSynchronize", "cudaStreamSynchronize"])
def test_a_program_that_waits_for_events_is_told_to_launch_first(tmp_path, call):
    finding = finding_of(run_of(tmp_path, replays(waits=call)), "host-syncs")
    assert ("launch(next_batch)" in finding.snippet) == (call == "cudaEventSynchronize")
    assert ("wait only where a result is needed" in finding.advice) == (call != "cudaEventSynchronize")


@pytest.mark.parametrize("launches", [6, 1])
def test_a_function_that_launches_in_longer_gaps_is_what_a_graph_shortens(tmp_path, launches):
    """Three calls of a function of 600 µs, each after seven short kernels; it launches late, one kernel or several."""
    trace, at = Made(), 0
    for _ in range(3):
        for _ in range(7):
            trace.op("aten::mul", at, 6)
            trace.kernel(RELU, at + 8, 4, at + 2)
            at += 100
        trace.event("python_function", "experts.py(9): run", at, 600, 1)
        for number in range(launches):
            trace.op("aten::mul", at + 488 + 15 * number, 6)
            trace.kernel(RELU, at + 500 + 15 * number, 4, at + 490 + 15 * number)
        at += 600
    finding = finding_of(run_of(tmp_path, trace), "launch-bound")
    says = "which launches kernels itself: a graph" if launches > 1 else "which neither graphs nor larger batches"
    assert f"In the longer gaps the host is longest in experts.py(9): run, {says}" in finding.advice


def late_at_first(*, passes, ahead):
    """Kernels that are launched late at the start, with a longer gap; others follow from a host that is ahead. Or
    the same in the first of equal passes."""
    trace, at = Made(), 0
    for number in range(12):
        trace.op("aten::something", at, 6)
        trace.kernel(NAMES[number % 6] if number < 6 else NAMES[-1], at + 10, 20, at + 2)
        at += 1_500 if number == 4 else 200
    for number in range(ahead):
        trace.kernel(GEMM, at + 500 * number, 500, at - 60 + 3 * number)
    for _ in range(passes):
        for number in range(12):
            trace.op("aten::something", at, 6)
            trace.kernel(NAMES[number % 6] if number < 6 else NAMES[-1], at + 10, 20, at + 2)
            at += 35
    return trace


@pytest.mark.parametrize(("passes", "ahead", "remedy"), [(2, 0, FIRST_PASS), (0, 30, AT_START), (0, 5, EARLY)])
def test_longer_gaps_at_the_start_alone_are_no_work_of_a_loop(tmp_path, passes, ahead, remedy):
    run = run_of(tmp_path, late_at_first(passes=passes, ahead=ahead))
    finding = finding_of(run, "launch-bound")
    assert launch_remedy(run) is remedy and "in gaps of 0.3 ms and more" in finding.title
    assert finding.advice == remedy.advice


@pytest.mark.parametrize("slow", [True, False])
def test_launches_of_all_ranks_save_more_than_late_ranks_where_all_hosts_are_slow(tmp_path, slow):
    """Two ranks launch kernels every 100 µs before each of five collectives, and rank 1 begins 1.5 ms late; or rank 0's
    host launches fast."""
    traces = []
    for rank in range(2):
        trace, free = Made(), 0
        trace.event("mark", "ProfilerStep#3", 0, 11_700, 1)
        for number in range(5):
            for n in range(20):
                at = 2_000 * number + 100 * n + 1_500 * rank
                if not (slow or rank):
                    at = 10 * (20 * number + n)
                trace.op("aten::mul", at, 98 if slow or rank else 8)
                free = max(free, at + 5) + 5
                trace.kernel(RELU, free - 5, 5, at + 1)
            enter = max(free, at + 105 if slow or rank else at + 9)
            free = 2_000 * (number + 1) + 1_500 + 40
            collective(trace, enter, free - enter, at + 99 if slow or rank else at + 8)
        traces.append(trace)
    run = runs_of(tmp_path, traces)
    waiting, late = (finding_of(run, code) for code in ("exposed-communication", "launch-bound"))
    assert ("hosts are nearly as slow" in waiting.title) == slow and late.win_ms < waiting.win_ms
    sentence = first_sentence(run)
    assert ("of late ranks: the other ranks wait" in sentence) == slow
    assert ("What shortens the launches of all ranks saves more: rank 1's GPU" in sentence) == slow
    assert (late.value > waiting.value) == slow
