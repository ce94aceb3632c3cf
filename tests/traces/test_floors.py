"""What bounds kernels is told as far as a trace shows it: starting them, memory, or neither."""

import pytest

from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of

KINDS = ("add", "mul", "gelu", "silu", "rsqrt", "mean", "cat", "cos", "sum", "pow", "neg", "exp")


@pytest.mark.parametrize(("shortest_us", "starts"), [(4.6, True), (9.0, False)])
def test_kernels_as_short_as_any_are_not_told_to_be_bound_by_memory(tmp_path, shortest_us, starts):
    """A graph of products with twelve kinds of other kernels in between, all about equally long."""
    trace = Made()
    trace.event("call", "cudaGraphLaunch", 1, 5, 1, correlation=99)
    at = 10.0
    for n in range(600):
        us, product = shortest_us + 0.1 * (n % 5), made.GEMM.replace("128x128", f"128x{64 + 16 * (n % 8)}")
        for name, lasts in ((f"triton_poi_fused_{KINDS[n % 12]}_{n % 12}", us), (product, 13.0)):
            trace.event("kernel", name, at, lasts, "stream 7", correlation=99, device=0, stream=7)
            at += lasts
    told = first_sentence(run_of(tmp_path, trace, "NVIDIA A100-SXM4-80GB", (8, 0)))
    assert ("in 600 kernels that are as short as any here, 4.80 µs on average: starting them takes" in told) == starts
    assert ("Memory-bound kernels take" in told) != starts
    assert ("no single change that is looked for" in told) == starts


@pytest.mark.parametrize(("waits", "named"), [(True, False), (False, True)])
def test_a_fused_optimizer_is_not_advised_where_the_host_waits_after_the_optimizer(tmp_path, waits, named):
    """The host launches a third of the kernels in the optimizer's step, behind a long one, and is late in forward."""
    trace = Made()
    for number in range(3):
        at = 1600.0 * number
        trace.event("mark", f"ProfilerStep#{number}", at, 1590, 1)
        for n in range(40):
            trace.op("aten::relu", at + 10 * n, 8)
            trace.kernel(made.RELU, at + 10 * n + 7, 2, at + 10 * n + 4)
        trace.op("aten::mm", at + 401, 12)
        trace.kernel(made.GEMM, at + 410, 1000, at + 403)
        trace.event("mark", "Optimizer.step#SGD.step", at + 420, 300, 1)
        for n in range(20):
            trace.op("aten::add_", at + 425 + 12 * n, 10)
            trace.kernel(made.RELU, at + 1410 + 5 * n, 5, at + 430 + 12 * n)
        if waits:
            trace.event("call", "cudaStreamSynchronize", at + 725, 790, 1, correlation=5 + number)
    run = run_of(tmp_path, trace, "NVIDIA A100-SXM4-80GB", (8, 0))
    finding = finding_of(run, "launch-bound")
    assert ("fused" in f"{finding.advice} {finding.snippet}") == named
    assert (float(run.windows["optimizer_sooner_us"].iloc[0]) > 300) == named


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        (24_576, "for so few rows, so memory bounds them, and weights of fewer bits, more requests per pass or"),
        (
            4096,
            "for so few rows, at 12.5 % of the memory's rate: more requests per pass or speculative decoding help, and",
        ),
        (0, "for so few rows: more requests per pass or speculative decoding help, as do weights of fewer bits where"),
    ],
)
def test_few_rows_alone_do_not_tell_that_memory_bounds_a_product(tmp_path, columns, says):
    """Ten passes of one product each, whose sizes are recorded or not."""
    trace = Made()
    for number in range(10):
        at = 100.0 * number
        trace.event("mark", "step[DECODE bs=4]", at, 90, 1)
        shapes = {"Input Dims": [[4, 4096], [4096, columns]], "Input type": ["c10::BFloat16"] * 2} if columns else {}
        trace.op("aten::mm", at + 1, 8, **shapes)
        trace.kernel(made.GEMM, at + 10, 80, at + 3)
    assert says in first_sentence(run_of(tmp_path, trace, "NVIDIA H100 80GB HBM3", (9, 0)))


def test_idle_time_of_several_causes_is_told_in_all_beside_small_savings(tmp_path):
    """A step of 10,000 µs with 410 µs before a late launch, and 350 µs of the host's after it has waited."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    half = {"Input type": ["c10::Half"] * 2}
    for at, start, us in ((1, 4, 90), (500, 504, 9_146)):
        trace.op("aten::mm", at, 8, **half)
        trace.kernel(made.GEMM, start, us, at + 1)
    trace.event("call", "cudaStreamSynchronize", 520, 9_133, 1, correlation=5)
    told = first_sentence(run_of(tmp_path, trace))
    assert "the GPU is idle for 4 % of the step because the host launches too late (up to 0.414 of" in told
    assert "per step). In all, the GPU is idle for 8 % of the step." in told


@pytest.mark.parametrize(("blocks", "told"), [(0.7, True), (4.0, False), (None, False)])
def test_an_unclassified_kernel_is_told_not_to_fill_the_gpu(tmp_path, blocks, told):
    trace = Made()
    trace.event("call", "cudaGraphLaunch", 1, 5, 1, correlation=99)
    for n in range(10):
        grid = {"blocks per SM": blocks} if blocks else {}
        trace.event("kernel", "mystery", 10 + 80 * n, 80, "stream 7", correlation=99, device=0, stream=7, **grid)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "cannot be classified by kernel name" in sentence
    assert ("That kernel has fewer blocks than the GPU has multiprocessors, so alone" in sentence) == told
