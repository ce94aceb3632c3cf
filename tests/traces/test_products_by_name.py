"""Products of which names of kernels and arguments of operators tell type, vendor, count and peak."""

import pytest

from amp_core.analysis.performance.eligible_ops import matrix_ops
from amp_core.analysis.performance.gemm_shapes import product
from amp_core.analysis.performance.kernels import kernel_rows
from amp_core.analysis.performance.saving import ProductSaving
from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings import first_sentence
from tests.traces.made import Made, finding_of, run_of
from tests.traces.test_told_products import BF16, TENSILE, products_of

FLASH = "aten::_scaled_dot_product_flash_attention"
XMMA = "sm{}_xmma_gemm_bf16f16_bf16f16_bf16f32_tn_n_tilesize256x128x64_stage4_warpsize2x2x1"
IGEMM = "igemm_fwd_gtcx_nhwc_fp32_bx0_bt64x64x16"
EXPERTS = [[16, 4096], [64, 22016, 4096], [64, 4096, 11008], [16, 2]]


def launches_of(op, kernel, dims, types, us=1000.0, calls=4, **arguments):
    """An operator that is called with work of the same size each time, ahead of the device."""
    trace = Made()
    for n in range(calls):
        trace.op(op, 10 + 10 * n, 8, **{"Input Dims": dims, "Input type": types, **arguments})
        trace.kernel(kernel, 100 + us * n, us, 12 + 10 * n)
    return trace


@pytest.mark.parametrize(
    ("dims", "rows", "flops"),
    [
        (EXPERTS, 32, 2 * 32 * 4096 * (22016 + 11008)),  # gate and up in one weight
        ([[16, 4096], [64, 11008, 4096], [64, 4096, 11008], [16, 2]], 32, 2 * 32 * 4096 * 2 * 11008),
        ([[16, 4096], [64, 22016, 2048], [64, 4096, 11008], [16, 2]], None, None),  # other sizes than experts have
        ([[16, 4096], [64, 22016, 4096]], None, None),
        ([[16, 4096], [], [64, 4096, 11008], [16, 2]], None, None),
    ],
)
def test_rows_of_a_mixture_of_experts_go_through_two_products_each(dims, rows, flops):
    made = product("vllm::fused_experts", str(dims))
    assert (made and (made.rows, made.flops)) == (flops and (rows, flops))


def test_the_rate_of_experts_is_told_and_their_vendor_is_known_by_the_library(tmp_path):
    trace = launches_of("vllm::rocm_aiter_fused_moe", "aiter_fused_moe_kernel_bf16", EXPERTS, [*BF16, BF16[0], "float"])
    run = run_of(tmp_path, trace, gpu="")
    (rate,) = matrix_ops(run)["flops_per_s"]
    assert rate == pytest.approx(8657043456 / 1e-3)
    told = first_sentence(run)
    assert "on matrix cores at 8.66 TFLOP/s" in told and "as with rocprofv3" in told and "Nsight" not in told


def test_memory_bounds_experts_by_those_that_rows_can_reach(tmp_path):
    """32 rows read the weights of 32 experts of 64 at most: 8.66 of 17.3 GB, at 3,352 GB/s."""
    types = [*BF16, BF16[0], "float"]
    trace = launches_of("vllm::fused_experts", "fused_moe_kernel", EXPERTS, types, us=4000.0)
    savings = possible_savings(run_of(tmp_path, trace, "NVIDIA H100 80GB HBM3", (9, 0)))
    (slow,) = [one for one in savings.ranked if isinstance(one, ProductSaving)]
    assert "vllm::fused_experts (64 × (H 4096 · I 11008)) runs at" in slow.what
    assert slow.ideal_us == pytest.approx(8.658e9 / 3352e3, rel=1e-3)


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (
            100,
            "6.11 % of the peak of a B200; the device is not named in the trace, and the kernels are compiled for sm",
        ),
        (90, "13.9 % of the peak of an H100"),
        (80, "the device is not named in the trace, so its efficiency is unknown"),  # it runs on later GPUs too
    ],
)
def test_kernels_for_one_architecture_tell_the_peak_of_a_gpu_that_is_not_named(tmp_path, number, says):
    trace = products_of([[8192, 8192]] * 2, XMMA.format(number), us=8000.0)
    told = first_sentence(run_of(tmp_path, trace, gpu=""))
    assert says in told
    assert ("So far below the peak, it is what could be faster." in told) == (number > 80) == ("Nothing" not in told)


def test_matrix_cores_of_amd_multiply_fp32_at_their_own_rate(tmp_path):
    dims, inputs = [[32, 256, 56, 56], [256, 256, 3, 3]], ["", "", "", "[1, 1]", "[1, 1]", "[1, 1]"]
    trace = launches_of("aten::convolution", IGEMM, dims, ["float"] * 2, us=2000.0, **{"Concrete Inputs": inputs})
    run = run_of(tmp_path / "named", trace, "AMD Instinct MI300X", (9, 4))
    (row,) = matrix_ops(run).to_dict("records")
    assert (row["precision"], row["of_peak_frac"]) == ("fp32", pytest.approx(row["flops_per_s"] / 163.4e12, rel=1e-3))
    unnamed = finding_of(run_of(tmp_path / "unnamed", trace, gpu=""), "fp32-products")
    assert "TF32" not in unnamed.advice + unnamed.snippet


@pytest.mark.parametrize(
    ("kernel", "says"),
    [
        (IGEMM, "by the data sheet of an MI100, for which its kernel is compiled, 16 bits are 4.0 ×"),
        (IGEMM.replace("gtcx", "gtcx2"), "of an MI250X, for which its kernel is compiled, 16 bits are 4.0 ×"),
        (IGEMM.replace("gtcx", "gtcx3"), "of an MI300X, for which its kernel is compiled, 16 bits are 8.0 ×"),
        ("Cijk_Ailk_Bljk_SB_MT128x64x16_MI32x32x1x2_SN_K1", "16 bits are assumed to be 2.0 ×"),
    ],
)
def test_fp32_on_an_unnamed_gpu_is_held_against_what_its_kernel_is_compiled_for(tmp_path, kernel, says):
    """AMD, CDNA white papers: the dense rates of FP16 and FP32 on matrix cores."""
    trace = launches_of("aten::mm", kernel, [[1024, 1024]] * 2, ["float"] * 2)
    assert says in finding_of(run_of(tmp_path, trace, gpu=""), "fp32-products").title


@pytest.mark.parametrize("known", [True, False])
def test_a_kernel_under_flash_attention_runs_on_tensor_cores(tmp_path, known):
    kernel = "flash_fwd_kernel_bf16_hdim256" if known else "some_attention_forward_tile"
    trace = launches_of(FLASH, kernel, [[4, 8, 2048, 256]] * 3, [BF16[0]] * 3)
    run = run_of(tmp_path, trace, "NVIDIA H100 80GB HBM3", (9, 0))
    assert kernel_rows(run)[["tensor_core", "precision", "category"]].values.tolist() == [["yes", "bf16", "attention"]]


def test_a_cache_that_attention_writes_is_no_product(tmp_path):
    trace = launches_of(FLASH, "reshape_and_cache_flash_kernel", [[4, 8, 2048, 128]] * 3, [BF16[0]] * 3)
    for n in range(4):
        trace.op(FLASH, 60 + 10 * n, 8, **{"Input Dims": [[4, 8, 2048, 128]] * 3, "Input type": [BF16[0]] * 3})
        trace.kernel("kernel_paged_attention_2d_bf16_v2", 4200 + 500 * n, 500, 62 + 10 * n)
    run = run_of(tmp_path, trace, "NVIDIA H100 80GB HBM3", (9, 0))
    assert dict(kernel_rows(run)[["category", "tensor_core"]].values) == {"other": "no", "attention": "yes"}


def test_products_of_little_work_per_byte_are_held_against_the_memory_of_a_gpu_that_is_not_named(tmp_path):
    """131,072 rows by 32 columns move 142.6 MB for 4.29 GFLOP, and an MI300X reads 5.3 TB/s."""
    kernel = TENSILE.format(parts=1, stream=0)
    trace = products_of([[131072, 512], [512, 32]], kernel, us=200.0)
    told = first_sentence(run_of(tmp_path, trace, gpu=""))
    assert "at 21.5 TFLOP/s, 1.64 % of the peak of a whole MI300X, and 13.5 % of the rate of its memory;" in told
