"""Kernels, copies and devices of traces whose statements or advice were wrong: what attention in steps, graphs, copies
and a slow device save, and what is advised for them."""

import pytest

from amp_core import diagnose
from amp_core.analysis.performance.saving import MemorySaving, ProductSaving, Saving
from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of

A100 = ("NVIDIA A100-SXM4-80GB", (8, 0))


def operators(*of_each, every=100):
    """A trace of operators, one kernel each, which run one after the other: (operator, kernel, µs)."""
    trace, at = Made(), 1000.0
    for n, (op, kernel, us) in enumerate(of_each):
        trace.op(op, every * n, 20, **{"Input type": ["c10::Half"]})
        trace.kernel(kernel, at, us, every * n + 5)
        at += us
    return trace


SOFTMAX = "void (anonymous namespace)::softmax_warp_forward<float>"


@pytest.mark.parametrize(
    ("middle", "saved_us"),
    [
        # Scale, mask and cast between the products vanish with the softmax.
        ([("aten::mul", made.RELU, 100), ("aten::_softmax", SOFTMAX, 200), ("aten::copy_", made.CAST, 100)], 400 + 50),
        # What another product is made of is none of the scores.
        ([("aten::_softmax", SOFTMAX, 200), ("aten::mm", made.GEMM, 50), ("aten::mul", made.RELU, 200)], 200 + 150),
    ],
)
def test_kernels_on_the_scores_of_attention_vanish_with_the_softmax(tmp_path, middle, saved_us):
    bmm = ("aten::bmm", made.GEMM, 200)
    run = run_of(tmp_path, operators(bmm, *middle, bmm, ("aten::mul", made.RELU, 100), every=30), *A100)
    saving = possible_savings(run).of("memory-bound-kernels", MemorySaving)
    assert saving.saved_us == saved_us
    assert ("nor the other kernels on its scores" in saving.what) == (saved_us == 450)
    finding = finding_of(run, "memory-bound-kernels")
    assert (finding.where == "aten::_softmax") == (saved_us == 450)
    assert ("scaled_dot_product_attention" in finding.snippet) == (saved_us == 450)


@pytest.mark.parametrize("graphs", [True, False])
def test_copies_around_a_graph_of_compiled_code_are_its_inputs_and_outputs(tmp_path, graphs):
    trace = Made()
    trace.op("CompiledFunction", 0, 900)
    for n in range(12):
        op = "aten::copy_" if n < 6 else "aten::clone"
        trace.op(op, 20 * n + (400 if n >= 6 else 0), 10)
        trace.kernel("Memcpy DtoD (Device -> Device)", 100 * n + 100 + (3000 if n >= 6 else 0), 100,
                     20 * n + 2 + (400 if n >= 6 else 0), sort="copy")  # fmt: skip
    for n in range(12):
        if graphs and n == 0:
            trace.event("call", "cudaGraphLaunch", 300, 5, 1, correlation=99)
        if graphs:
            trace.event("kernel", made.RELU, 700 + 250 * n, 250, "stream 7", correlation=99, device=0, stream=7)
        else:
            trace.op("aten::relu", 250 + 10 * n, 8)
            trace.kernel(made.RELU, 700 + 250 * n, 250, 252 + 10 * n)
    run = run_of(tmp_path, trace, *A100)
    copies, unfused = (finding_of(run, code) for code in ("copies", "memory-bound-kernels"))
    assert copies.advice.startswith("Each call of compiled code replays a graph" if graphs else "Compiled code itself")
    assert ("launches one kernel per operator" in unfused.advice) != graphs
    assert all(('"reduce-overhead"' in f.snippet) == graphs for f in (copies, unfused))


@pytest.mark.parametrize(("types", "converts"), [(["c10::Half", "c10::Half"], False), (["c10::Half", "float"], True)])
def test_only_what_is_converted_is_told_to_be_converted_on_the_device(tmp_path, types, converts):
    trace = Made()
    trace.kernel(made.RELU, 10, 100, 2)
    trace.op("aten::to", 120, 4000, **{"Input type": [types[1]]})
    trace.op("aten::copy_", 130, 3900, **{"Input type": [*types, "Scalar"], "Input Dims": [[8, 16], [8, 16], []]})
    trace.kernel(made.RELU, 4200, 100, 4150)
    finding = finding_of(run_of(tmp_path, trace), "host-bound")
    assert finding.where == "aten::to" and ("convert on the device" in finding.advice) == converts
    assert ("torch.float16" in finding.snippet) == converts and "bfloat16" not in finding.snippet


def test_pinned_copies_on_streams_of_their_own_save_what_narrower_ones_and_the_other_way_leave(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel(made.COPY, 10, 980, 2, sort="copy", stream=20)
    trace.kernel("Memcpy DtoH (Device -> Pinned)", 10, 580, 5, sort="copy", stream=24)
    saving = possible_savings(run_of(tmp_path, trace, *A100)).of("copies", Saving)
    assert saving.saved_us == 400
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel(made.COPY, 10, 800, 2, sort="copy", stream=20)
    trace.kernel(made.RELU, 810, 180, 12)
    saving = possible_savings(run_of(tmp_path / "alone", trace, *A100)).of("copies", Saving)
    assert saving.saved_us == 600


PAGEABLE = "Memcpy HtoD (Pageable -> Device)"


@pytest.mark.parametrize(("kernels", "is_of_copies"), [(1, True), (20, False)])
def test_idle_time_beside_a_copy_that_blocks_is_the_copys(tmp_path, kernels, is_of_copies):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 925 + 100 * kernels, 1)
    trace.kernel(PAGEABLE, 140, 800, 80, sort="copy", call_us=850)
    for n in range(kernels):
        trace.kernel(made.RELU, 1000 + 100 * n, 10, 995 + 100 * n)
        trace.kernel(made.RELU, 1010 + 100 * n, 10, 998 + 100 * n)
    run = run_of(tmp_path, trace, *A100)
    codes = [f.code for f in diagnose(run)]
    assert ("launch-bound" in codes) != is_of_copies
    assert ("right before and after, it is idle" in finding_of(run, "copies").title) == is_of_copies


def test_figures_of_one_device_are_not_those_of_the_mean_and_it_waits_for_the_other(tmp_path):
    """A copy to device 1, and kernels of device 0 before the next copy."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 4440, 1)
    trace.kernel(PAGEABLE, 10, 4000, 2, sort="copy", device=1)
    trace.events[-1]["args"]["bytes"] = 20 << 20
    trace.kernel(made.RELU, 4020, 395, 4016, device=0)
    trace.kernel(PAGEABLE, 4420, 10, 4417, sort="copy", device=1)
    trace.events[-1]["args"]["bytes"] = 0
    run = run_of(tmp_path, trace, *A100)
    assert "moves 20.0 MiB" in finding_of(run, "copies").title
    windows = run.windows.set_index("device")
    assert windows["idle_elsewhere_us"].tolist() == [4010, 395]
    assert not {"launch-bound", "host-bound"} & {f.code for f in diagnose(run)}


@pytest.mark.parametrize(("first", "joins"), [([512, 4, 32], False), ([512, 256, 32], True)])
def test_few_rows_of_each_product_of_a_batch_are_not_told_to_be_joined(tmp_path, first, joins):
    trace = Made()
    trace.op("aten::bmm", 0, 9, **{"Input type": ["c10::Half"] * 2, "Input Dims": [first, [512, 32, 65536]]})
    trace.kernel("void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true, cublasGemvTensorBatched<__half>>", 10, 900, 2)
    finding = finding_of(run_of(tmp_path, trace, *A100), "kernels-off-tensor-cores")
    assert ("scaled_dot_product_attention" in finding.snippet) == joins and "torch.cat(rows)" not in finding.snippet
    assert ("a multiplication and a sum" in finding.advice) != joins


@pytest.mark.parametrize("spread", [True, False])
def test_layout_conversions_of_many_modules_are_not_told_as_those_of_one(tmp_path, spread):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for n in range(10):
        name = f"Conv2d_{n if spread else 0}"
        trace.event("python_function", f"nn.Module: {name}", 50 * n, 40, 1)
        trace.op("aten::cudnn_convolution", 50 * n + 1, 30, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(
            "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>", 100 * n + 50, 20, 50 * n + 2
        )
        trace.kernel(made.GEMM, 100 * n + 70, 60, 50 * n + 5)
    assert ("Conv2d_0" in finding_of(run_of(tmp_path, trace), "layout-transposes").where) != spread


@pytest.mark.parametrize(("us", "is_slow"), [(9000, True), (120, False)])
def test_a_device_that_moves_far_less_than_its_memory_could_is_told_first(tmp_path, us, is_slow):
    """A ReLU on 64 MiB: at most 96 MiB, with a second input."""
    trace = Made()
    for n in range(3):
        trace.op("aten::relu", 20 * n, 10)
        trace.kernel(made.RELU, 100 + n * us, us, 20 * n + 2)
        trace.events[-1]["args"] |= {"grid": [16384, 1, 1], "block": [128, 1, 1]}
    sentence = first_sentence(run_of(tmp_path, trace, *A100))
    assert (
        sentence.startswith("The device is not at its speed: elementwise kernels of 27.0 ms move 22.4 GB/s") == is_slow
    )


@pytest.mark.parametrize(("us", "saved_us"), [(2, 200 - 4), (20, 1000)])
def test_fusing_an_optimizer_of_the_shortest_kernels_saves_by_their_number(tmp_path, us, saved_us):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 4000, 1)
    trace.event("mark", "Optimizer.step#Adam.step", 0, 3900, 1)
    for n in range(100):
        trace.op("aten::mul_", 30 * n, 20)
        trace.kernel(made.RELU, 30 * n + 6, us, 30 * n + 2)
    assert possible_savings(run_of(tmp_path, trace)).of("unfused-optimizer", Saving).saved_us == saved_us


@pytest.mark.parametrize(("rows", "times"), [(9, "2.0 × as fast, since memory bounds"), (4096, "16 × as fast;")])
def test_products_that_memory_bounds_gain_their_bytes_in_16_bits(tmp_path, rows, times):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    shapes = [[rows, 4096], [4096, 65_536 if rows == 9 else 4096]]
    trace.op("aten::mm", 1, 8, **{"Input type": ["float"] * 2, "Input Dims": shapes})
    trace.kernel(made.SIMT, 10, 990, 2)
    finding = finding_of(run_of(tmp_path, trace, *A100), "fp32-products")
    assert f"16 bits are {times}" in finding.title
    assert ("By the data sheet, TF32 is 8.0 × as fast as FP32." in finding.advice) == (rows > 9)
    assert ("TF32" in finding.advice) == (rows > 9)


@pytest.mark.parametrize(("gpu", "allowed"), [("NVIDIA GeForce RTX 3090 Ti Laptop", False), ("", True)])
def test_tf32_is_not_advised_where_it_may_be_as_slow_as_fp32(tmp_path, gpu, allowed):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 8, **{"Input type": ["float"] * 2})
    trace.kernel(made.SIMT, 10, 990, 2)
    finding = finding_of(run_of(tmp_path, trace, gpu, (8, 6)), "fp32-products")
    assert ("allow TF32" in finding.advice) == allowed


def test_faster_kernels_save_no_more_than_the_host_waits_for_them(tmp_path):
    """In each pass the host launches a product, waits for it, and works for 100 µs while the device is idle."""
    trace = Made()
    for n in range(20):
        at = 500 * n
        trace.op("aten::mm", at, 30, **{"Input type": ["float"] * 2, "Input Dims": [[4096, 4096]] * 2})
        trace.kernel(made.SIMT, at + 20, 380, at + 5)
        trace.event("call", "cudaDeviceSynchronize", at + 200, 205, 1, correlation=5)
        trace.op("aten::add", at + 410, 80)
    saving = possible_savings(run_of(tmp_path, trace, *A100)).of("fp32-products", ProductSaving)
    assert saving.saved_us == pytest.approx(20 * 205, rel=0.1) and "until the device waits for the host" in saving.what


@pytest.mark.parametrize(("first_us", "hint"), [(5000, False), (20_000, True)])
def test_equal_passes_whose_first_is_no_longer_need_no_warm_up(tmp_path, first_us, hint):
    """A benchmark of two launches per pass."""
    trace, at = Made(), 0
    for us in (5000, first_us, *[5000] * 6):
        trace.op("aten::randn", at, us - 200)
        trace.kernel(PAGEABLE, at + us - 150, 50, at + us - 190, sort="copy")
        trace.kernel(made.RELU, at + us - 90, 50, at + us - 120)
        at += us
    assert ("after a warm-up" in first_sentence(run_of(tmp_path, trace, *A100))) == hint


@pytest.mark.parametrize("kernel", [made.RELU, made.GEMM])
def test_a_trace_without_a_product_is_not_told_to_compile_its_model(tmp_path, kernel):
    trace = Made()
    for n in range(8):
        trace.op(f"aten::op{n}", 100 * n, 20)
        trace.kernel(f"{kernel}_{n}", 100 * n + 20, 5, 100 * n + 10)
    finding = finding_of(run_of(tmp_path, trace, *A100), "launch-bound")
    assert ("torch.compile" in finding.snippet) == (kernel == made.GEMM)
    assert ("the model may not be in the trace" in finding.advice) == (kernel == made.RELU)
