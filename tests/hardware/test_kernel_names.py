"""Facts from kernel names: a table of names from profiles of Volta to Blackwell and of AMD GPUs."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amp_core.analysis import KernelClass, classify_kernel
from amp_core.hardware.kernel_names import CATEGORIES, RULES, masks_causally, tells_type, with_dtype
from amp_core.hardware.kernel_names.rules import matching_rule

NAMES = [
    (name, tensor_core, None if precision == "-" else precision)
    for line in (Path(__file__).parent / "kernel_names.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for tensor_core, precision, name in [line.split(maxsplit=2)]
]
CUDA_CORES = [name for name, tensor_core, _ in NAMES if tensor_core == "no"]


@pytest.mark.parametrize(("name", "tensor_core", "precision"), NAMES)
def test_known_kernels_are_classified_correctly(name: str, tensor_core: str, precision: str | None) -> None:
    result = classify_kernel(name)
    assert (result.tensor_core, result.precision) == (tensor_core, precision)
    assert result.category in CATEGORIES and result.why


def test_the_compared_fields_are_those_shown_to_users() -> None:
    result = classify_kernel("ampere_sgemm_128x64_tn")
    assert result == KernelClass("no", "fp32") != KernelClass("yes", "fp32")
    assert (result.category, result.why) == ("gemm", "cuBLAS without an instruction shape: CUDA cores")


def test_a_name_cut_off_anywhere_never_turns_a_cuda_core_kernel_into_a_tensor_core_one() -> None:
    wrong = [
        name[:end]
        for name in CUDA_CORES
        for end in range(len(name))
        if classify_kernel(name[:end]).tensor_core == "yes"
    ]
    # Helpers of attention whose names begin like that of the main kernel.
    assert [w for w in wrong if "flash" not in w and "Flash" not in w] == []


def test_every_rule_classifies_a_name_of_the_table() -> None:
    idle = set(range(len(RULES)))
    for name, _, _ in NAMES:
        name = name.removeprefix("void ")
        if (rule := matching_rule(name)) is not None:
            idle.discard(RULES.index(rule))
    assert [RULES[i].why for i in sorted(idle)] == []


def test_the_words_that_are_tested_first_exclude_no_match() -> None:
    for pattern in (rule.pattern for rule in RULES if rule.pattern.words and rule.pattern.regex.pattern):
        names = [name.removeprefix("void ") for name, _, _ in NAMES]
        names = [name.lower() for name in names] if pattern.fold else names
        lost = [n for n in names if pattern.regex.search(n) and not any(word in n for word in pattern.words)]
        assert lost == [], pattern.regex.pattern


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("volta_sgemm_128x64_nn", "gemm"),
        ("fused_moe_kernel", "gemm"),
        ("fused_moe_kernel_gptq_awq", "gemm"),
        ("void vllm::segmented_max_reduction_strided<c10::BFloat16, c10::Float8_e4m3fn>(float*)", "reduction"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "gemm"),
        ("sm80_xmma_wgrad_implicit_gemm_indexed_f16f16_f16f32_f32_nhwckrsc_nhwc", "conv"),
        ("volta_scudnn_128x64_relu_interior_nn_v1", "conv"),
        ("linear_relu_square_kernel", "gemm"),
        ("bilinear_relu_kernel", "elementwise"),
        ("void cudnn::winograd_nonfused::winogradForwardOutput4x4<float, float>", "conv"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
        ("fmha_cutlassB_f16_aligned_64x64_k64_sm80", "attention"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<__half, float, 512, true, 1>", "norm"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::Half, float>", "norm"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true>", "reduction"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reduction"),
        ("void splitKreduce_kernel<float, float, float, float>(cublasSplitKParams<float>)", "reduction"),
        ("void at::native::vectorized_elementwise_kernel<4, neg_kernel_cuda()::{lambda()#1}>", "elementwise"),
        ("void at::native::unrolled_elementwise_kernel<MulFunctor, LoadWithoutCast, StoreWithoutCast>", "elementwise"),
        (
            "void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda()::{lambda()}, LoadWithCast<1>>",
            "cast",
        ),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda()>", "cast"),
        ("void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true>", "layout"),
        ("void cudnn::engines_precompiled::convertTensor_kernel<float, float, float>", "elementwise"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 2, 128, 1>", "layout"),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>", "optimizer"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>", "embedding"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("Memcpy DtoH (Device -> Pinned)", "memcpy"),
        ("Memset (Device)", "memset"),
        ("my_kernel", "other"),
    ],
)
def test_kernels_have_their_category(name: str, category: str) -> None:
    assert classify_kernel(name).category == category


@given(st.lists(st.sampled_from(["gemm_f16", "sm80_xmma_", "tensorop_", "s16816", "flash", "_", "f16f16_", "<", "a"])))
def test_any_name_is_classified(parts: list[str]) -> None:
    result = classify_kernel("".join(parts))
    assert result.tensor_core in ("yes", "no", "unknown") and result.category in CATEGORIES


@pytest.mark.parametrize("part", ["gemm_f16", "flash", "cutlass_tensorop_", "simt_s", "f16f16_", "h884", "(", "xmma_"])
@pytest.mark.parametrize("start", ["", "cutlass_80_tensorop_", "sm80_xmma_", "x_simt_"])
def test_a_hostile_name_is_classified_quickly(start: str, part: str) -> None:
    began = time.process_time()
    classify_kernel(start + part * 20_000)
    assert time.process_time() - began < 30  # backtracking would take hours; no exact time is measured


@pytest.mark.parametrize(
    "name", ["attn_fwd", "bwd_kernel_fuse", "sage_fwd", "kernel_unified_attention_2d", "triton_tem_fused_mm_0"]
)
def test_a_triton_product_is_resolved_by_the_types_of_its_operator(name: str) -> None:
    kernel = classify_kernel(name)
    assert kernel.tensor_core == "unknown"
    assert with_dtype(kernel, "bf16") == KernelClass("yes", "bf16")
    assert with_dtype(kernel, "fp32") == with_dtype(kernel, None) == kernel
    other = classify_kernel("my_kernel")
    assert with_dtype(other, "bf16") == other


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("triton_poi_fused_addmm_gelu_view_15", "elementwise"),
        ("triton_for_fused_0", "elementwise"),
        ("sage_fwd", "attention"),
        ("sage_quant_kernel", "other"),
        ("triton_red_fused_add_addmm_mul_native_layer_norm_split_16", "reduction"),
        ("triton_per_fused_convolution_flash_attention_3", "reduction"),
        ("void moe::dev::finalize::finalizeKernel<moe::dev::finalize::KernelParams<cutlass::bfloat16_t> >", "other"),
        ("void cutlass::Kernel<cutlass::reduction::kernel::ReduceSplitK<cutlass::MatrixShape<4, 128> > >", "reduction"),
        ("void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64> >", "reduction"),
        ("void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128> >", "reduction"),
        ("void ck_tile::kentry<64, 2, ck_tile::FmhaBwdOGradDotOKernel<int> >", "reduction"),
        ("Im2d2Col_v2", "layout"),
        ("Cijk_BBS_BH_Bias_PostGSU8_VW2", "reduction"),
        ("void dpsk::ep::internode::combine<false, 8, __nv_bfloat16>", "communication"),
        ("userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<16>", "communication"),
        ("_fbgemm_silu_mul", "elementwise"),
        ("void transformer_engine::HadamardTransformKernel<__nv_bfloat16, 16>", "other"),
    ],
)
def test_helpers_and_fused_kernels_are_no_products(name: str, category: str) -> None:
    assert classify_kernel(name).category == category


@pytest.mark.parametrize(("letter", "precision"), [("f", "fp32"), ("d", "fp64"), ("i", None)])
def test_a_mangled_template_tells_its_type(letter: str, precision: str | None) -> None:
    assert classify_kernel(f"_Z23implicit_convolve_sgemmI{letter}fLi1024ELi5EEviiiPKT_").precision == precision
    assert classify_kernel(f"_ZN5cudnn8winograd8generateI{letter}fEEvPKT_").precision == precision


@pytest.mark.parametrize("name", ["_matmul_ogs_NNT_bf16xmxfp4_1", "bmm_MxE4m3_MxE2m1", "_ZN2ckDF16b", "gemm_int8_x"])
def test_a_name_with_a_type_tells_it(name: str) -> None:
    assert tells_type(name) and not tells_type("ampere_sgemm_128x64_nn")


@pytest.mark.parametrize(
    ("name", "causal"),
    [
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, T<64> >, false, true, false, true>(P)", True),
        ("void f::flash_fwd_kernel<f::Flash_fwd_kernel_traits<64, f::T<64> >, true, false, true>(P)", False),
        ("void f::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, T<2> >, true, false, false>(f::P)", True),
        ("void flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, T<2> >, false, true, false>(P)", False),
        ("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<32>, false, true, false>(P)", True),
        ("void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, T<2> >, 4, 1, true>(P)", None),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, T<64> >, fal", None),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, T<6", None),
        ("fmha_cutlassF_f16_aligned_64x64_rf_sm80(P)", None),
    ],
)
def test_flash_attention_tells_its_mask_in_its_name(name: str, causal: bool | None) -> None:
    assert masks_causally(name) is causal
