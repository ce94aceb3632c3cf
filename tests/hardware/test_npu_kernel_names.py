"""Names of the operators of Huawei's NPUs."""

import pytest

from amp_core.hardware.kernel_names import CATEGORIES, classify_kernel, classify_npu_kernel


@pytest.mark.parametrize(
    ("category", "names"),
    [
        ("conv", "Conv2D Conv2D12 Conv2DBackpropFilter97 Conv2DBackpropInput Conv3DBackpropInputV2 Conv2DTransposeD"),
        ("conv", "aclnnConvolution_Conv2d_Conv2D DepthwiseConv2D3"),
        ("gemm", "MatMul69 MatMulV2 MatMulV228 BatchMatMulV2 aclnnMm_MatMulCommon_MatMulV2 GroupedMatmul"),
        ("gemm", "QuantBatchMatmulV3 WeightQuantBatchMatmulV2 MatmulAllReduce AllGatherMatmul DynamicRNN"),
        (
            "attention",
            "FlashAttentionScore aclnnFlashAttentionScoreGrad_FlashAttentionScoreGrad_FlashAttentionScoreGrad",
        ),
    ],
)
def test_operators_that_multiply_matrices_run_on_the_cube_unit(category, names):
    assert {(k.tensor_core, k.precision, k.category) for k in map(classify_npu_kernel, names.split())} == {
        ("yes", None, category)
    }


@pytest.mark.parametrize(
    ("category", "names"),
    [
        ("elementwise", "AxpyV2111 Mul70 Add131 aclnnInplaceAdd_AddAiCore_Add ReluGrad96 MaxPoolWithArgmaxV117 SwiGlu"),
        ("elementwise", "StatelessDropOutGenMask25 DropOutDoMask26 aclnnAddmm_MulAiCore_Mul AdaptiveAvgPool2d"),
        ("layout", "trans_TransData_117 TransData Transpose ConcatD SplitV StridedSliceD TensorMove"),
        ("cast", "trans_Cast_65 aclnnCast_CastAiCore_Cast"),
        ("norm", "LayerNormV3 RmsNorm InplaceAddRmsNorm BNTrainingUpdate"),
        ("reduction", "ReduceSum98 SoftmaxV2 LogSoftmaxV2 TopKV241 ArgMaxV2"),
        ("optimizer", "ApplyAdamW ApplyMomentum"),
        ("embedding", "GatherV2 EmbeddingDenseGrad"),
        ("other", "MoeInitRoutingV2"),
    ],
)
def test_other_operators_run_on_the_vector_unit(category, names):
    assert {(k.tensor_core, k.category) for k in map(classify_npu_kernel, names.split())} == {("no", category)}


def test_operators_that_may_do_both_are_unknown():
    names = (
        "MlaProlog FusedMoeFfn PagedAttentionMaskNdKernel AdaptiveAvgPool2d24RightBatchMatMulV2AdaptiveAvgPool2d24Mul"
    )
    assert {classify_npu_kernel(name).tensor_core for name in names.split()} == {"unknown"}


def test_other_names_are_those_of_copies_collectives_and_compilers():
    names = ("MEMCPY_ASYNC", "atomic_memset-1_647_0", "hcom_allReduce__538_0_1", "triton_poi_fused_add_0")
    kinds = [classify_npu_kernel(name).category for name in names]
    assert kinds == ["memcpy", "memset", "communication", "elementwise"] and set(kinds) <= set(CATEGORIES)


@pytest.mark.parametrize(("name", "category"), [("MEMCPY_ASYNC", "memcpy"), ("Conv2DBackpropFilter6_MemSet", "memset")])
def test_copies_and_fills_are_no_products(name, category):
    kernel = classify_npu_kernel(name)
    assert (kernel.tensor_core, kernel.category) == ("no", category)


def test_on_a_gpu_such_words_are_no_operators_of_an_npu():
    assert [classify_kernel(name).tensor_core for name in ("Conv2D12", "MatMulV2", "Add131")] == ["unknown"] * 3
