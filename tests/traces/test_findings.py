"""What diagnose says first of a trace, and what it must not say."""

import pytest

from amp_core import diagnose, load_run
from amp_core.analysis import step_cost
from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings import first_sentence
from amp_core.traces import import_traces
from tests.traces import made
from tests.traces.made import Made, products, run_of, write
from tests.traces.test_step_windows import host_bound


def test_findings_come_by_what_there_is_to_win_and_the_first_is_the_first_sentence(tmp_path):
    run = run_of(tmp_path, products(backward=True))
    wins = [f.win_ms for f in diagnose(run) if f.severity == "warning"]
    assert wins == sorted(wins, reverse=True) and len(wins) == 2
    assert diagnose(run)[0].code == "fp32-products"
    assert "80 % of the step in FP32" in first_sentence(run)
    # 800 µs at 125 / 15.7 of the rate
    assert wins[0] == pytest.approx(0.8 * (1 - 15.7 / 125))


def test_a_trace_that_trains_nothing_gets_no_advice_on_training(tmp_path):
    findings = diagnose(run_of(tmp_path, products()))
    assert findings[0].code == "fp32-products"
    assert not [f for f in findings if "loss" in f.snippet or "optimizer" in f.snippet or "GradScaler" in f.advice]


def test_a_trace_with_nothing_to_win_says_so(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, 990, 2)
    run = run_of(tmp_path, trace)
    assert first_sentence(run).startswith(
        "Nothing beside GEMM/conv would save 5.00 % or more of the step: it takes 99.0 %"
    )
    assert [f for f in diagnose(run) if f.severity == "warning"] == []


def test_the_step_of_a_finding_is_that_of_the_step_cost(tmp_path):
    """Three steps of 1,000 µs whose first kernels come 400 µs late, 300 of which are data loading: the wait before the
    first one counts like those before the others, which lie between steps that the device marks."""
    run = load_run(import_traces([write(tmp_path / "t.json", host_bound(steps=3))], tmp_path / "run"))
    savings, cost = possible_savings(run), step_cost(run)
    assert {c.step_us for c in savings.ranked} == {cost.step_us} == {2900 / 3}
    assert cost.parts["us"].sum() == pytest.approx(cost.step_us)
    by_code = {c.code: (c.saved_us, c.lead_us) for c in savings.ranked}
    assert by_code["waiting-for-data"] == (pytest.approx(300), 0)
    assert "waits for data 31 % of the step" in diagnose(run)[0].title


def test_a_window_that_is_hardly_used_is_told_to_be_start_up(tmp_path):
    trace = Made()
    for at in (0, 90_000):
        trace.op("aten::mm", at, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, at + 10, 100, at + 2)
    text = first_sentence(run_of(tmp_path, trace))
    assert "idle for 99.8 % of the profiled window" in text and text.endswith("profile after a warm-up.")


def test_the_start_of_a_program_is_one_cause(tmp_path):
    """A first launch, the driver's memory and the streams take the host's time between two kernels."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    trace.kernel(made.GEMM, 10, 10, 2)
    for call, at, us in (("cudaFree", 100, 3000), ("cudaMalloc", 3200, 1000), ("cudaStreamCreate", 4300, 1500)):
        trace.event("call", call, at, us, 1, correlation=at)
    trace.kernel(made.GEMM, 9_500, 10, 6000, call_us=3400)
    finding = diagnose(run_of(tmp_path, trace))[0]
    assert finding.code == "host-bound" and "setting up the device (" in finding.title
    assert "warm-up" in finding.advice


@pytest.mark.parametrize(("kernel", "us", "told"), [("gemvx", 900, True), ("gemvx", 90, False), ("gemmx", 900, False)])
def test_products_with_a_vector_that_take_nearly_all_time_are_told(tmp_path, kernel, us, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel(f"void {kernel}::kernel<int, int, __half, __half>", 10, us, 2)
    text = first_sentence(run_of(tmp_path, trace))
    assert text.startswith("Products of a matrix and a vector take 100 % of the kernel time") == told


def with_small_parts(*, relu_us):
    """A step of 10,000 µs, of which late launches, and a ReLU after them, could each save less than 5 %."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 10_000, 1)
    trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, 90, 2)
    trace.op("aten::mm", 400, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 410, 9_590 - relu_us, 401)
    trace.op("aten::relu", 420, 8)
    trace.kernel(made.RELU, 10_000 - relu_us, relu_us, 422)
    return trace


@pytest.mark.parametrize(("relu_us", "told"), [(600, True), (200, False)])
def test_savings_that_are_small_each_are_told_if_they_are_not_together(tmp_path, relu_us, told):
    sentence = first_sentence(run_of(tmp_path, with_small_parts(relu_us=relu_us)))
    assert "5.00 % or more of the step" in sentence
    assert ("Smaller savings add up to 6.20 %; the largest: the GPU is idle for 3 %" in sentence) == told


@pytest.mark.parametrize(("us", "named"), [(700, True), (300, False)])
def test_the_operator_that_takes_most_of_the_memory_bound_time_is_named(tmp_path, us, named):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::masked_fill_", 1, 8)
    trace.kernel("void at::native::index_elementwise_kernel<128, 4>(long)", 10, us, 2)
    for n, name in enumerate(("relu", "gelu")):
        trace.op(f"aten::{name}", 20 + 10 * n, 8)
        trace.kernel(made.RELU, 10 + us + 500 * n * (1 - us / 1000), 500 * (1 - us / 1000), 22 + 10 * n)
    assert ("aten::masked_fill_ alone 69 %" in first_sentence(run_of(tmp_path, trace))) == named


EXPERTS = (
    "void moe::run<moe::Kernel_sm80<cutlass::bfloat16_t, cutlass::bfloat16_t, cutlass::bfloat16_t, 32, 128, 64, 2> >"
)


@pytest.mark.parametrize(
    ("kernel", "product", "unknown"),
    [
        ("my_kernel", "my_products", True),
        ("my_kernel", made.GEMM, False),  # what runs beside it is in 16 bits
        (f"{EXPERTS}(moe::Params)", made.GEMM, False),
    ],
)
def test_what_16_bits_would_save_is_not_asked_of_kernels_in_16_bits(tmp_path, kernel, product, unknown):
    """Their names are without what they are instantiated with."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel(kernel, 10, 300, 2)
    if not unknown:
        trace.op("aten::mm", 20, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(product, 310, 690, 22)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("the savings from 16 bits are unknown" in sentence) == unknown
    named = product if unknown else "moe::run<…>" if "moe" in kernel else kernel
    assert f"{named}, so the share of GEMM/conv{' and the savings from 16 bits are' if unknown else ' is'}" in sentence


@pytest.mark.parametrize(("idle_us", "beside"), [(100, True), (400, False)])
def test_products_are_told_before_a_small_saving_beside_them(tmp_path, idle_us, beside):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, 490, 2)
    trace.op("aten::mm", 490 + idle_us, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 500 + idle_us, 500 - idle_us, 495 + idle_us)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert sentence.startswith("GEMM/conv takes 89.0 % of the step, on tensor cores;") == beside
    assert ("Beside it, the largest possible saving: the GPU is idle for 11 %" in sentence) == beside
    assert sentence.startswith("Largest possible saving: the GPU is idle for 41 %") != beside


@pytest.mark.parametrize(("idle_us", "told"), [(250, True), (60, False)])
def test_the_second_largest_saving_is_told_if_it_is_about_as_large(tmp_path, idle_us, told):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel(made.RELU, 10, 480 - idle_us, 2)
    trace.op("aten::mm", 479, 8, **{"Input type": ["float"] * 2})
    trace.kernel(made.SIMT, 490, 500, 480)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert (" The next: the GPU is idle for" in sentence) == told
