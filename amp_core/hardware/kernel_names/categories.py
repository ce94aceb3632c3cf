"""The category of work of a GPU kernel, by its name.

>>> kernel_category("void splitKreduce_kernel<float, float, float, float>(cublasSplitKParams<float>)")
'reduction'

The operator that launched it may say more: `amp_core.traces` uses both.
"""

import re

CATEGORIES = (
    "gemm",
    "conv",
    "attention",
    "norm",
    "elementwise",
    "reduction",
    "cast",
    "layout",
    "optimizer",
    "embedding",
    "memcpy",
    "memset",
    "communication",
    "other",
)
"""Values of the column `kernels.category`."""
GEMM_CATEGORIES = ("gemm", "conv", "attention")
"""Categories of kernels that multiply matrices."""
COPIES = ("memcpy", "memset")
"""Categories of copies and fills, which are not kernels."""

_PATTERNS = (
    ("elementwise", r"^_?triton_(?:poi|for)_"),  # whatever operators are fused in it
    ("reduction", r"^_?triton_(?:red|per)_"),
    ("gemm", r"^(?:Custom_)?Cijk_(?!\w*_PostGSU)|^nvjet_"),
    (
        "memcpy",
        r"^\[?(?:CUDA )?[Mm]emcpy|^__amd_rocclr_copy|^Copy(?:Host|Device)To|^memcpy|^MEMCPY_ASYNC|^MemcopyAsync|"
        r"^dma_request$",
    ),
    ("memset", r"^\[?(?:CUDA )?[Mm]emset|^__amd_rocclr_fill|^FillBuffer|^memset"),
    (
        "communication",
        r"nccl|rccl|^hcom_|nvshmem|mscclpp|cross_device_reduce|multimem_|userbuffers_|\bep::(?:inter|intra)node|"
        r"(?i:all_?reduce|reduce_?scatter|all_?gather|all_?to_?all|deep_?ep::)",
    ),
    (
        "attention",
        r"(?i)flash_?(?:fwd|bwd|attn|attention)|fmha|sdpa|attention|attn|\bsage_fwd|^_?(?:fwd|bwd)_kernel(?:_|$)|(?:prefill|decode)\w*kvcachekernel",
    ),
    (
        "embedding",
        r"(?i)embedding|fbgemm_gpu::|indexselect|vectorized_gather|permute_pooled|linearize_index|bounds_check_ind",
    ),
    (
        "optimizer",
        r"multi_tensor_apply|(?i:(?<![a-z])(?:fused_?)?(?:adamw?|sgd|lamb|adagrad|novograd)(?![a-z]))|[a-z]Adam",
    ),
    (
        "norm",
        r"(?i)(?:layer|rms|batch|group|instance)_?norm|bn_(?:fw|bw)|rowwisemoments|gammabeta|cucompute\w*grad|"
        r"norm::|ln_(?:fwd|bwd)",
    ),
    (
        "layout",
        r"(?i)nhwcto|tonhwc|tofoldednhwc|nchw2nhwc|(?<![a-z])transpose_|_transpose|tensortransform|catarray|permute_",
    ),
    (
        "conv",
        r"fprop|dgrad|wgrad|[Dd]epthwise_?[Cc]onv|(?i:(?<![a-z])conv(?:olve|olution|\d?d|fwd|bwd|_|<))|[shidc](?:\d{3,6})?cudnn|winograd|"
        r"fft2d|igemm_|miopen\w*Conv|cask_\w+::compute",
    ),
    ("reduction", r"splitK_?reduce|ReduceSplitK|cutlass::reduction|_PostGSU"),
    ("elementwise", r"cublasLt::epilogue|epilogue::impl"),
    (
        "gemm",
        r"(?i)^fc-dtype_|(?<!fb)gemm(?!a)|gemv|nvjet|matmul|cijk_|cutlass(?!(?:::|\d+)(?:bfloat16_t|half_t|float_|tfloat32_t|array|u?int))|(?<![a-z])[b]?mm_|marlin|addmm|fused_\w*mm(?:_|$)|"
        r"fused_moe_(?:\w+_)?kernel|(?<![a-z])(?:trsm|syrk|symm|trmm)|(?<![a-z])xdlops|(?<![a-z])linear_(?:re|ge|si)lu",
    ),
    (
        "cast",
        r"(?i)(?:bfloat16|float16|half|float8)\w*copy_kernel|copy_kernel_cuda.*loadwithcast|_to_copy|(?<![a-z])cast(?:_|kernel)",
    ),
    (
        "reduction",
        r"(?i)reduc(?:e|tion)|softmax|argm(?:ax|in)|(?<![a-z])cub(?:::|\d)|scan|sort|topk|cumsum|triton_(?:red|per)_|norm_",
    ),
    (
        "elementwise",
        r"(?i)elem(?:ent)?wise|triton_poi_|pool|scalepackedtensor|op_generic_tensor|copy_kernel|fill|dropout|pointwise|gelu|silu|relu|activation(?!_type)|where|mask",
    ),
)
"""Categories and their patterns; the first match decides. One that begins with `(?i)` is in lower case, and is matched
against the name in lower case, which is faster than the flag."""
_WORDS = {
    "communication": "nccl rccl hcom_ nvshmem mscclpp cross_device multimem_ userbuffers_ internode intranode "
    "allreduce all_reduce reducescatter reduce_scatter allgather all_gather alltoall all_to_all deep_ep:: deepep::",
    "attention": "flash fmha sdpa attention attn sage kvcache fwd_kernel bwd_kernel",
    "embedding": "embedding fbgemm indexselect vectorized_gather permute_pooled linearize_index bounds_check",
    "optimizer": "multi_tensor adam sgd lamb adagrad novograd",
    "norm": "layernorm layer_norm rmsnorm rms_norm batchnorm batch_norm groupnorm group_norm instancenorm "
    "instance_norm bn_fw bn_bw rowwisemoments gammabeta cucompute norm:: ln_fwd ln_bwd",
    "layout": "nhwc transpose transform catarray permute_",
    "conv": "prop grad conv Conv cudnn winograd fft2d igemm_ cask_",
    "gemm": "gemm gemv nvjet matmul cijk_ cutlass mm_ marlin addmm mm trsm syrk symm trmm xdlops linear_ fc-dtype_ "
    "fused_moe",
    "cast": "copy_kernel _to_copy cast_ castkernel",
    "reduction": "reduc softmax argm cub scan sort topk cumsum triton_ norm_ postgsu",
    "elementwise": "elementwise elemwise triton_ pool scalepackedtensor op_generic copy_kernel fill dropout pointwise "
    "gelu silu relu activation where mask epilogue",
}
"""One of these is in the name in lower case, where the pattern of a category matches: faster than the pattern."""
_NO_COMMUNICATION = re.compile(r"gemm|GEMM|[Mm]at[Mm]ul")
_CATEGORY_PATTERNS = tuple(  # an anchored pattern is faster than its words
    (
        name,
        () if pattern.startswith("^") else tuple(_WORDS.get(name, "").split()),
        pattern.startswith("(?i)"),
        re.compile(pattern.removeprefix("(?i)")),
    )
    for name, pattern in _PATTERNS
)


def kernel_category(name: str) -> str:
    """The category of a kernel, one of `CATEGORIES`."""
    low = name.lower()
    text = low.replace("lambda", "")  # it holds the name of an optimizer
    for category, words, fold, pattern in _CATEGORY_PATTERNS:
        for word in words:
            if word in text:
                break
        else:
            if words:
                continue
        if pattern.search(low if fold else name) and not (
            category == "communication" and _NO_COMMUNICATION.search(name)
        ):
            return category
    return "other"
