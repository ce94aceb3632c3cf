"""Where a host is while a device waits for it: between which operators, in `torch.tensor`, or in slow launches."""

import pytest

from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of
from tests.traces.test_collectives import ddp
from tests.traces.test_collectives import run_of as run_of_ranks


def _between(first: str, second: str, after: str, gaps: tuple[int, int]) -> Made:
    """Three steps of 20 ms, in each of which the host is in no operator before and after `first`."""
    trace = Made()
    for step in range(3):
        at = 20_000 * step
        trace.event("mark", f"ProfilerStep#{step + 3}", at, 20_000, 1)
        trace.op("aten::mm", at, 20)
        trace.kernel(made.GEMM, at + 20, 100, at + 5)
        trace.op("aten::reshape", at + 30, 5)
        trace.op(first, at + 35 + gaps[0], 10)
        trace.op(second, at + 45 + sum(gaps), 10)
        trace.op(after, at + 60 + sum(gaps), 5)
        trace.op("aten::relu", at + 70 + sum(gaps), 20)
        trace.kernel(made.RELU, at + 95 + sum(gaps), 100, at + 75 + sum(gaps))
    return trace


@pytest.mark.parametrize(
    ("operators", "told"),
    [
        (("aten::empty", "aten::to", "aten::lift_fresh"), "in torch.tensor, which reads Python's values one by one"),
        (("aten::empty", "aten::to", "aten::detach_"), "in torch.tensor, which reads Python's values one by one"),
        (("aten::empty", "aten::fill_", "aten::add"), "between aten::reshape and aten::empty"),
    ],
)
def test_the_operators_between_which_the_host_is_are_told(tmp_path, operators, told):
    run = run_of(tmp_path, _between(*operators, (12_000, 6_000)))
    finding = finding_of(run, "host-bound")
    assert told in finding.title and told in first_sentence(run)
    assert ("one value after the other" in finding.advice) == ("torch.tensor" in told)


def test_what_is_long_in_no_place_is_not_told(tmp_path):
    """Neither of the two places has half of the time."""
    trace = _between("aten::empty", "aten::fill_", "aten::add", (9_000, 9_000))
    for event in trace.events:
        if event["name"] == "aten::add":
            event["ts"] += 9_000  # a third one
    finding = finding_of(run_of(tmp_path, trace), "host-bound")
    assert "of it in no operator" in finding.title and "between aten" not in finding.title


def test_launches_of_one_slow_operator_are_no_other_work(tmp_path):
    """The host is in convolutions, which launch; of operators that launch nothing, it is something else."""
    trace = Made()
    for step in range(3):
        at = 20_000 * step
        trace.event("mark", f"ProfilerStep#{step + 3}", at, 20_000, 1)
        for n in range(10):
            trace.op("aten::conv2d", at + 2000 * n, 1900)
            trace.kernel("cudnn::convolve_sgemm", at + 2000 * n + 1000, 200, at + 2000 * n + 990)
    finding = finding_of(run_of(tmp_path, trace), "host-bound")
    assert finding.where == "aten::conv2d"
    assert "preprocessing" not in finding.advice and finding.advice.startswith("The host is in many operators")


@pytest.mark.parametrize(("slow_us", "told"), [(600, False), (6_000, True)])
def test_a_gpu_is_slow_only_where_that_makes_the_rank_late(tmp_path, slow_us, told):
    """Rank 0 enters a collective 3,000 µs after the other. Its product takes 3 times as long, which is little or all of
    that."""
    ranks = [ddp((7_000,), leaves=(7_500,), rank=0), ddp((4_000,), leaves=(7_500,), rank=1)]
    for document, kernel_us in zip(ranks, (slow_us, slow_us // 3), strict=True):
        for event in document["traceEvents"]:
            if event["name"] == "ProfilerStep#3":
                event["dur"] = 8_000
            if event["name"] == made.GEMM:
                event["dur"] = kernel_us
    finding = finding_of(run_of_ranks(tmp_path, *ranks), "exposed-communication")
    assert finding.where == "rank 0"
    assert ("3.0 × as long for as many kernels" in finding.title) == told


@pytest.mark.parametrize("scripted", [True, False])
def test_a_scripted_model_is_not_told_to_be_compiled_as_it_is(tmp_path, scripted):
    trace = Made()
    trace.event("python_function", f"nn.Module: {'RecursiveScriptModule' if scripted else 'Net'}_0", 0, 1000, 1)
    for n in range(20):
        trace.op("aten::mul", 1 + 40 * n, 10)
        trace.kernel(made.RELU, 12 + 40 * n, 2, 3 + 40 * n)
    finding = finding_of(run_of(tmp_path, trace), "launch-bound")
    assert ("compile the module that was scripted" in finding.advice) == scripted
    assert ("torch.compile(module" in finding.snippet) == scripted
