"""Statements on kernels, layouts and copies that an audit of public traces refuted: each case, and its neighbour."""

import pytest

from amp_core.analysis.performance.fp64_savings import fp64_rows
from amp_core.analysis.performance.kernels import kernel_rows
from amp_core.findings import first_sentence
from amp_core.traces import read_trace
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of, write

AMD = ("AMD Instinct MI300X", (9, 4))
TURNED = "batched_transpose_16x64_pack_1x4_ediv_1x2_half"


def recomputing(queued_us=0):
    """A step whose backward recomputes 2 of 10 ms, behind `queued_us` of work from before the trace."""
    trace = Made()
    if queued_us:
        trace.event("kernel", made.GEMM, 0, queued_us, "stream 7", correlation=5, device=0, stream=7)
    trace.event("mark", "ProfilerStep#3", 10, 12_000, 1)
    trace.op("autograd::engine::evaluate_function: CheckpointFunctionBackward", 100, 200, 2, **{"Sequence number": 1})
    trace.op("aten::linear", 110, 20, 2)
    trace.kernel(made.GEMM, queued_us + 400, 1_200, 112, 2)
    trace.op("aten::layer_norm", 150, 20, 2)
    trace.kernel(made.RELU, queued_us + 1_600, 800, 152, 2)
    trace.op("aten::mm", 400, 20, 2)
    trace.kernel(made.GEMM, queued_us + 2_400, 8_000, 402, 2)
    trace.op("aten::copy_", 450, 20, 2)
    trace.kernel("Memcpy DtoD (Device -> Device)", queued_us + 10_400, 900, 452, 2, sort="copy")
    return trace


@pytest.mark.parametrize("queued_us", [0, 9_000])
def test_recomputation_is_a_share_of_what_the_trace_launched(tmp_path, queued_us):
    found = read_trace(write(tmp_path / "t.json", recomputing(queued_us).document())).recomputation
    assert found is not None and found.us == 2_000 and found.frac == pytest.approx(0.2)


def turning(norm="void at::native::batch_norm_transform_input_kernel<c10::BFloat16>"):
    """A convolution between transposes of two sizes of tile, and a kernel after it."""
    trace = Made()
    for n in range(4):
        trace.op("aten::miopen_convolution", 20 * n, 18)
        trace.kernel(TURNED, 100 + 400 * n, 40, 20 * n + 2)
        trace.kernel("igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt256x64x8", 140 + 400 * n, 300, 20 * n + 6)
        trace.kernel("batched_transpose_256x4_half", 440 + 400 * n, 10, 20 * n + 10)
        trace.op("aten::batch_norm", 20 * n + 18, 2)
        trace.kernel(norm, 450 + 400 * n, 50, 20 * n + 19)
    return trace


@pytest.mark.parametrize(
    ("gpu", "hip", "asks"),
    [(AMD, 60443483, True), (AMD, None, True), (AMD, 70253211, False), (("Tesla V100-SXM2-32GB", (7, 0)), None, False)],
)
def test_channels_last_on_amd_needs_the_environment_before_rocm_7(tmp_path, gpu, hip, asks):
    head = {} if hip is None else {"hip_runtime_version": hip}
    finding = finding_of(run_of(tmp_path, turning(), *gpu, **head), "layout-transposes")
    assert ('"PYTORCH_MIOPEN_SUGGEST_NHWC"] = "1"' in finding.snippet) == asks
    assert ("SUGGEST_NHWC_BATCHNORM" in finding.snippet) == asks
    assert ("Matrix-core" in finding.advice) == (gpu is AMD) != ("Tensor-core" in finding.advice)


def test_the_environment_names_batch_norm_only_where_there_is_one(tmp_path):
    trace = turning(norm=made.RELU)
    trace.events = [event for event in trace.events if event["name"] != "aten::batch_norm"]
    finding = finding_of(run_of(tmp_path, trace, *AMD), "layout-transposes")
    assert "SUGGEST_NHWC" in finding.snippet and "BATCHNORM" not in finding.snippet


def test_transposes_of_every_tile_change_the_layout(tmp_path):
    trace = turning()
    trace.events = [event for event in trace.events if not event["name"].startswith("aten::")]
    finding = finding_of(run_of(tmp_path, trace, *AMD), "layout-transposes")
    assert finding.value == pytest.approx(50 / 400)


def adding(us, elements=2**25):
    """Sums of two tensors on a V100 of 900 GB/s, launched ahead; the last one is longer."""
    trace, at = Made(), 100
    for n in range(8):
        each_us = us + 20 * n
        sizes = [[elements // 1024, 1024]] * 2
        trace.op("aten::add", 10 * n, 8, **{"Input Dims": [*sizes, []], "Input type": ["float", "float", "Scalar"]})
        trace.kernel(made.RELU, at, each_us, 10 * n + 2)
        at += each_us
    return trace


@pytest.mark.parametrize(("us", "elements", "told"), [(1240, 2**25, True), (540, 2**25, False), (200, 2**22, False)])
def test_a_large_sum_far_below_its_memorys_rate_is_told_with_its_saving(tmp_path, us, elements, told):
    sentence = first_sentence(run_of(tmp_path, adding(us, elements)))
    assert ("(up to 6.01 of 10.5 ms per profiled window). Check the clocks" in sentence) == told
    assert sentence.startswith("No single change") != told


NORM = "void at::native::batch_norm_backward_kernel<c10::BFloat16, c10::BFloat16, float, int>(...)"


def normalizing(grid, call="hipLaunchKernel"):
    """Batch norms of 200 to 260 us, launched ahead, beside elementwise kernels; no operator is recorded."""
    trace, at = Made(), 100
    for n in range(6):
        for name, us, size in ((NORM, 200 + 10 * n, grid), (made.RELU, 60 + 5 * n, [4096, 1, 1])):
            trace.kernel(name, at, us, 5 * n + (name is made.RELU))
            trace.events[-3]["name"] = call
            trace.events[-1]["args"] |= {"grid": size, "block": [256, 1, 1]}
            at += us
    return trace


def run_on_amd(tmp_path, trace):
    gpu = {"name": AMD[0], "computeMajor": 9, "computeMinor": 4, "warpSize": 64, "numSms": 304}
    return run_of(tmp_path, trace, deviceProperties=[gpu])


@pytest.mark.parametrize(
    ("grid", "call", "per_unit"),
    [
        ([64, 1, 1], "hipLaunchKernel", 64 / 304),
        ([64 * 256, 1, 1], "hipExtModuleLaunchKernel", 64 / 304),
        ([64, 19, 1], "hipLaunchKernel", 4),
    ],
)
def test_kernels_of_few_blocks_are_not_memory_bound(tmp_path, grid, call, per_unit):
    run = run_on_amd(tmp_path, normalizing(grid, call))
    of_norms = run.timeline[run.timeline["name"] == NORM]
    assert of_norms["blocks_per_sm"].tolist() == pytest.approx([per_unit] * 6, abs=1e-5)
    finding = finding_of(run, "memory-bound-kernels")
    told = "in kernels with fewer blocks than the GPU has compute units, most in"
    assert (told in finding.advice) == ("(64 on average for 304)" in finding.advice) == (per_unit < 1)
    assert finding.advice.startswith("These kernels are memory-bound") == (per_unit >= 1)
    assert "batch norm alone 76 %" in finding.title
    assert ("fusing them halves their memory traffic" in finding.title) == (per_unit >= 1)


@pytest.mark.parametrize(("columns", "is_small"), [(1024, True), (32768, False)])
def test_small_calls_of_an_unnamed_gpu_are_not_memory_bound(tmp_path, columns, is_small):
    trace, at = Made(), 100
    for n in range(8):
        sizes = {"Input Dims": [[256, columns], []], "Input type": ["float", "double"]}
        trace.op(("aten::mul_", "aten::relu")[n % 2], 10 * n, 8, **sizes)
        trace.kernel(made.RELU, at, 30 + n, 10 * n + 2)
        at += 30 + n
    advice = finding_of(run_of(tmp_path, trace, gpu=""), "memory-bound-kernels").advice
    assert ("mostly small: they move so little" in advice) == is_small != ("memory-bound" in advice)


def of_doubles(graph=True):
    """Kernels on tensors of doubles between two of others, copies of these doubles, and copies to the host."""
    trace, at = Made(), 100
    doubles = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["double", "double"]}
    masks = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["bool", "float"]}
    if graph:
        trace.op("Torch-Compiled Region: 0/0", 0, 60)
        trace.event("call", "cudaGraphLaunch", 58, 1, 1, correlation=3)
    work = [("aten::add", doubles, made.RELU, 300), ("aten::copy_", doubles, "Memcpy DtoD (Device -> Device)", 250)]
    work += [("aten::mul", masks, made.RELU, 500), ("aten::copy_", masks, "Memcpy DtoH (Device -> Pageable)", 600)]
    for n in range(8):
        name, inputs, kernel, us = work[n % 4]
        trace.op(name, 7 * n, 6, **inputs)
        trace.kernel(kernel, at, us + 10 * n, 7 * n + 2, sort="copy" if "Memcpy" in kernel else "kernel")
        at += us + 10 * n
    return trace


def test_copies_of_doubles_are_no_kernels_in_fp64(tmp_path):
    run = run_of(tmp_path, of_doubles())
    assert fp64_rows(kernel_rows(run, everything=True))["total_us"].sum() == 640
    assert "Kernels in FP64 take 18 % of the profiled window, in aten::add" in finding_of(run, "fp64-operators").title


@pytest.mark.parametrize("graph", [True, False])
def test_copies_within_the_device_beside_longer_ones_have_advice_of_their_own(tmp_path, graph):
    finding = finding_of(run_of(tmp_path, of_doubles(graph)), "copies")
    assert "to the host" in finding.advice
    assert "Beside them, copies within the device take 0.560 ms: " in finding.advice
    assert ("mark_static_address" in finding.snippet) == ("CUDA graphs" in finding.advice) == graph


def test_few_copies_within_the_device_have_none(tmp_path):
    trace = of_doubles()
    for one in trace.events:
        one |= {"dur": 90} if "DtoD" in one["name"] else {}
    assert "within the device" not in finding_of(run_of(tmp_path, trace), "copies").advice


@pytest.mark.parametrize(
    ("between", "expand", "share"),
    [
        ("moe_align_block_size_kernel", "fused_moe_kernel", "26 %"),
        ("moe_align_block_size_kernel", "_moe_lora_expand_kernel", "18 %"),
        ("void at::native::vectorized_layer_norm_kernel<float>", "fused_moe_kernel", "7 %"),
    ],
)
def test_a_product_right_behind_one_of_adapters_expands_its_result(tmp_path, between, expand, share):
    """One layer of experts per 1,000 us: its adapters take 70 us to shrink, 80 to prepare and 110 to expand."""
    trace = Made()
    for n in range(6):
        at = 1000 * n + 100
        for kernel, start, us in (
            ("_moe_lora_shrink_splitk_kernel", 0, 70),
            (between, 70, 80),
            (expand, 150, 110),
            ("fused_moe_kernel", 260, 640 + n),
        ):
            trace.kernel(kernel, at + start, us, 4 * n + start / 100)
    trace.kernel(made.RELU, 6100, 100, 40)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert f"(LoRA) take at least {share} of the profiled window in kernels of their own" in sentence
    assert ("in products of other names" in sentence) == (share == "26 %")
