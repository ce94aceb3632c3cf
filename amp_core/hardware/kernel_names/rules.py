"""The rules by which `classify_kernel` derives tensor-core use and precision from a kernel's name.

    RULES[0].pattern.search(name)      # the first rule that matches decides

So exceptions come before the wider pattern that would match them too: an `_ffma_` kernel before `xmma`, helpers of
FlashAttention before FlashAttention. The answer is `yes` only where the family, or an instruction in the name, allows
no other reading; `unknown` where a family has variants of both kinds and the name was cut off before the difference;
`no` for families that do not multiply matrices and for those that do so on CUDA cores.

Sources: CUTLASS `python/cutlass_library` (grammar of its names, opcode classes) and `media/docs/cpp/profiler.md`;
PyTorch's own kernels; for cuBLAS, cuDNN and nvjet, which document no names, the profiles that people publish (the table
in `tests/hardware/kernel_names.txt` has them); ROCm Tensile's kernel parameters (`MI`: matrix instruction).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from amp_core.hardware.kernel_names import dtypes as types


@dataclass(frozen=True)
class _Pattern:
    """What a name must match. `words`: one of them must be in it; that is much faster to test than the regular
    expression. `unless`: what must not be in it."""

    regex: re.Pattern[str]
    words: tuple[str, ...] = ()
    unless: re.Pattern[str] | None = None
    fold: bool = False
    """Whether all of it is matched in lower case."""


@dataclass(frozen=True)
class Rule:
    pattern: _Pattern
    tensor_core: str
    precision: str | Callable[[str], str | None] | None
    why: str
    by_dtype: bool = False
    category: str = ""


def _rule(
    pattern: str,
    tensor_core: str,
    precision: str | Callable[[str], str | None] | None,
    why: str,
    *,
    words: str = "",
    unless: str = "",
    by_dtype: bool = False,
    category: str = "",
    fold: bool = False,
) -> Rule:
    excluded = re.compile(unless) if unless else None
    return Rule(
        _Pattern(re.compile(pattern), tuple(words.split()), excluded, fold),
        tensor_core,
        precision,
        why,
        by_dtype,
        category,
    )


OF_WARP = "_cuda_kernel_(?:forward|backward)$"
"""In the names of kernels that a program writes in NVIDIA's Warp."""

# An instruction's name as a separate token: "summary", "trimmable" and "gamma" contain such letters too.
_INSTRUCTION = (
    r"(?<![A-Za-z])(?:[hidqgHIDQG]mma|HMMA|IMMA|DMMA|GMMA|UMMA|wgmma|WGMMA|utc[a-z]*mma|umma|tcgen05|wmma|WMMA|"
    r"mma_sync|mma_m\d+n\d+k\d+|m\d+n\d+k\d+_mma)"
)
_SHAPE = r"[hsidczg](?:884|1684|1688|8816|8832|88128|16816|16832|16864|161616|32816|83216|168128|168256)"
_KIND = r"(?:sp|gr|xor)?(?:gemm|cudnn|fprop|dgrad|wgrad|deconv|conv|symm|syrk|syr2k|trmm|trsm|hemm|herk|her2k)"

_PRODUCTS = (
    r"(?<!fb)gemm(?!a)|matmul|(?<![a-z])[bg]?mm(?![a-z])|addmm|attn|attention|fmha|conv(?!ert)|linear|"
    r"(?<![a-z])dot|moe|mlp|chunk_(?!\w*cumsum)|rwkv6_fwd_cumsum|prefill|decode|_proj_|stage1|_kda_|_kkt_|_swiglu_kernel|rotate_quantize|_nsa_|expand_combine_bwd"
)
"""Words, in lower case, of kernels that may multiply matrices whatever else is in their names."""

_MTIA_PRODUCTS = r"(?<![a-z])(?:fc|linear|[a-z]*mm|\w*matmul|conv(?!ert)\w*|\w*attention)(?![a-z])"
_MTIA_MAY_MULTIPLY = (
    r"(?i)(?:attn|attention|linear|einsum|bilinear|interaction|cross|gram|dot|rnn|lstm|gru|mlp|moe|expert|fused|gemm|"
    r"matmul|mm(?![a-z])|conv(?!ert)|(?<![a-z])fc(?![a-z]))(?!.*::split_embedding)"
)

RULES = (
    # --- Meta's MTIA: operators with a type
    _rule(
        rf"^(?:\w+::)?\w*?{_MTIA_PRODUCTS}\w*(?:\.\w+)?-dtype_(?:Half|BFloat16|Char|Byte)(?:-|$)",
        "yes",
        types.of_mtia,
        "MTIA: its matrix engine multiplies 16 and 8 bits",
        words="-dtype_",
    ),
    _rule(
        rf"^(?:\w+::)?\w*?{_MTIA_PRODUCTS}\w*(?:\.\w+)?-dtype_",
        "unknown",
        types.of_mtia,
        "MTIA: no rate of its matrix engine for FP32 is published, and inputs may be rounded to 16 bits for it",
        words="-dtype_",
    ),
    _rule(
        r"^[\w:.]+-dtype_\w+(?:-\w+)*$",
        "no",
        None,
        "MTIA: an operator that multiplies no matrices",
        words="-dtype_",
        unless=_MTIA_MAY_MULTIPLY,
    ),
    _rule(r"^dma_request$", "no", None, "MTIA: a copy", words="dma_request", category="memcpy"),
    _rule(r"^(?:MEMCPY|MemcopyAsync)", "no", None, "CANN: a copy", words="MEMCPY MemcopyAsync", category="memcpy"),
    _rule(
        r"^MLUOpTensor(?!\w*(?i:matmul|gemm|conv))",
        "no",
        None,
        "Cambricon's CNNL: an operator applied to each element",
        words="MLUOpTensor",
        category="elementwise",
    ),
    # First of the others, because Inductor puts names of operators into kernel names: triton_poi_fused_all_reduce_mm_0.
    _rule(
        r"^_?triton_(?:poi|for|red|per)_",
        "no",
        None,
        "Inductor: elementwise, over lists, or sums; products in it are sums, too",
        words="triton_",
    ),
    _rule(
        r"^_?triton_(?:tem_|mm|bmm|addmm|flex_|scaled_mm|conv(?!ert))",
        "unknown",
        None,
        "Inductor's template of a product: depends on the types of its inputs",
        by_dtype=True,
        words="triton_",
    ),
    _rule(
        r"^triton__\d",
        "no",
        None,
        "Inductor of PyTorch 2.0, which numbers its kernels: elementwise or sums; products have templates with names",
        words="triton_",
    ),
    _rule(
        r"^_?triton_(?:rope|qwen2vl_mrope|\w*_quant)",
        "no",
        None,
        "rotary embeddings of Liger, casts of torchao",
        words="triton_",
        unless=_PRODUCTS,
    ),
    _rule(
        r"^fused_\w+_\d{10,}$",
        "no",
        None,
        "TorchScript's fuser: elementwise",
        words="fused_",
        unless=_PRODUCTS,
        category="elementwise",
    ),
    _rule(r"^triton_fp8_gemm_\d", "yes", "fp8", "torchao's FP8 products of blocks", words="triton_fp8_gemm_"),
    _rule(
        r"^_?triton_|_0d1d",
        "unknown",
        None,
        "Triton: its name does not reveal whether it is a GEMM",
        words="triton_ _0d1d",
    ),
    _rule(
        r"^(?:at::native|_zn2at6native)",
        "no",
        None,
        "PyTorch's own kernels, which multiply no matrices",
        words="at::native at6native",
        unless="gemm|mma|att(?:n|ention)|flash|cutlass|nccl",
        fold=True,
    ),
    # --- families with a mark of their own, and many names in a trace
    _rule(r"Cijk_\w*_PostGSU", "no", None, "sums after a split product of Tensile", words="_PostGSU"),
    _rule(
        r"Cijk_\w*_MI(?!0x|1x1x)\d+x\d+",
        "yes",
        types.of_tensile,
        "Tensile with a matrix instruction (MI)",
        words="Cijk_",
    ),
    _rule(
        r"Cijk_\w*_(?:TT\d+_\d+|ISA90[0-6])_",
        "no",
        types.of_tensile,
        "Tensile without a matrix instruction",
        words="Cijk_",
    ),
    _rule(r"Cijk_", "unknown", types.of_tensile, "Tensile, cut off before the matrix instruction", words="Cijk_"),
    # --- moves and communication
    _rule(r"^\[?(?:CUDA )?[Mm]em(?:cpy|set)\b|^mem(?:cpy|set)\d*(?:_|$)", "no", None, "a copy or a fill", words="em"),
    _rule(
        r"^__amd_rocclr_|^Copy(?:Host|Device)To(?:Host|Device)|^FillBuffer",
        "no",
        None,
        "a copy or a fill (ROCm)",
        words="__amd_rocclr_ Copy FillBuffer",
    ),
    _rule(
        r"nccl|rccl|nvshmem|mscclpp|cross_device_reduce|multimem_|userbuffers_|\bep::(?:inter|intra)node|"
        r"(?i:all_?reduce|reduce_?scatter|all_?gather|all_?to_?all|deep_?ep::)",
        "no",
        None,
        "communication between devices",
        words="nccl rccl nvshmem mscclpp cross_device multimem_ userbuffers_ ep:: EP:: educe ather all_ All",
        unless="gemm|GEMM|matmul|memcpy",
    ),
    # --- GEMM/conv named as running on CUDA cores
    _rule(
        r"sm[3-6]\d_xmma|xmma_\w*pooling",
        "no",
        types.of_xmma,
        "xmma pooling, or xmma for GPUs without tensor cores",
        words="xmma_",
    ),
    _rule(
        r"xmma_\w*_(?:[fdh]fma2?|idp4a|simt)(?:_|$)",
        "no",
        types.of_xmma,
        "xmma with a CUDA-core instruction",
        words="xmma_",
    ),
    _rule(r"(?<![A-Za-z])simt_", "no", types.of_simt, "CUTLASS, opcode class simt: CUDA cores", words="simt_"),
    _rule(
        r"^(?!.*TensorOp).*(?:OpClassSimt|MmaSimt)",
        "no",
        types.of_template,
        "CUTLASS SIMT template: CUDA cores",
        words="Simt",
    ),
    _rule(
        r"^(?!.*SM\d+_\d+x).*cute::UniversalFMA",
        "no",
        types.of_template,
        "CuTe FMA atom: CUDA cores",
        words="UniversalFMA",
    ),
    _rule(
        r"fmha_cutlass[FB]\w*_sm50",
        "no",
        types.of_token,
        "memory-efficient attention for sm50: CUDA cores",
        words="fmha_cutlass",
    ),
    _rule(
        r"fmha_cutlass[FB]_f32_\w*_sm7\d",
        "no",
        "fp32",
        "memory-efficient attention in FP32 before TF32 existed",
        words="fmha_cutlass",
    ),
    _rule(
        r"Attention(?:Backward)?Kernel.*arch::Sm50",
        "no",
        types.of_template,
        "memory-efficient attention for sm50",
        words="Sm50",
    ),
    _rule(
        r"cutlass::reduction|ReduceSplitK",
        "no",
        None,
        "sums after a split product of CUTLASS",
        category="reduction",
        words="cutlass::reduction ReduceSplitK",
    ),
    # --- attention
    _rule(
        r"(?:flash|cudnn|sdpa|fmha).*(?:dot_do_o|convert_?dq|convert_?dkv|combine|clear_dkv|preprocess|"
        r"postprocess|prepare_varlen|fmhareduction)",
        "no",
        None,
        "helper of an attention kernel: sums and conversions",
        words="dot_do_o convert combine clear_dkv process prepare_varlen fmhareduction",
        category="reduction",
        fold=True,
    ),
    _rule(
        r"FmhaBwd(?:OGradDotO|ConvertQ)|FmhaFwdSplitKVCombine|fmha_bwd_\w*(?:odo|dq_convert|dq_shuffle)|"
        r"paged_attention_\w*reduce|(?:mla|attention)_(?:reduce|combine)|mla_reduce|spli(?:t|ct)_?kv_combine",
        "no",
        None,
        "helper of an attention kernel: sums and conversions",
        words="Fmha fmha paged_att mla attention_ kv_combine",
        category="reduction",
    ),
    _rule(r"qk_int(?:8|4)?_sv_", "yes", "int8", "SageAttention: INT8 products of queries and keys", words="qk_int"),
    _rule(
        r"paged_attention_\w*_mfma|(?<![A-Za-z])pa_(?:bf16|fp16)_|(?<![A-Za-z])mla_(?:a\d+w\d+|dec_stage1_(?:bf16|fp16|fp8)|"
        r"pfl_(?:bf16|fp16|fp8))|fmha_(?:fwd|bwd)_hd\d+_(?:bf16|fp16|fp8)",
        "yes",
        types.of_aiter,
        "attention of AITER and ROCm: matrix instructions only",
        words="paged_att pa_ mla_ fmha_",
    ),
    _rule(
        r"fmha_cutlass[FB]_f32_\w*_sm(?:[89]\d|1\d\d)",
        "yes",
        "tf32",
        "memory-efficient attention in FP32: three products in TF32 for each (CUTLASS, OpMultiplyAddFastF32)",
        words="fmha_cutlass",
    ),
    _rule(
        r"fmha_cutlass[FB]_bf16",
        "yes",
        "bf16",
        "memory-efficient attention; in BF16 it exists for sm80 alone",
        words="fmha_cutlass",
    ),
    _rule(
        r"fmha_cutlass[FB]_f16_\w*_sm(?:[789]\d|1\d\d)",
        "yes",
        "fp16",
        "memory-efficient attention from sm70 on",
        words="fmha_cutlass",
    ),
    _rule(
        r"fmha_cutlass[FB]",
        "unknown",
        types.of_token,
        "memory-efficient attention: FP32 depends on TF32, and a name cut off before smNN may be of sm50",
        words="fmha_cutlass",
    ),
    _rule(
        r"Attention(?:Backward)?Kernel.*(?:half_t|bfloat16_t).*arch::Sm[789]\d|"
        r"Attention(?:Backward)?Kernel.*arch::Sm[789]\d.*(?:half_t|bfloat16_t)",
        "yes",
        types.of_matrix_template,
        "memory-efficient attention from sm70 on",
        words="ttention",
    ),
    _rule(
        r"(?<![a-z])flash_(?:fwd|bwd)_(?:splitkv_)?kernel_\w*(?:bf16|fp16)",
        "yes",
        types.of_token,
        "flash attention in 16 bits",
        words="flash_",
    ),
    _rule(
        r"Flash_(?:fwd|bwd)_kernel_traits|pytorch_flash\d*(?:::)?\d*flash_|flash::flash_(?:fwd|bwd)|"
        r"flash_bwd_dq_dk_dv_loop|flash_fwd_splitkv_(?:mla_)?kernel",
        "yes",
        types.of_matrix_template,
        "FlashAttention 2: 16-bit only",
        words="lash",
    ),
    _rule(
        r"flash_fwd_splitkv_mla_fp8_sparse_kernel<|sparse_attn_fwd_(?:for_small_topk_)?kernel<",
        "yes",
        "bf16",
        "FlashMLA's sparse attention: WGMMA or UMMA in BF16, also of a cache in FP8",
        words="mla_fp8_sparse sparse_attn_fwd",
        category="attention",
    ),
    _rule(
        r"hstu_(?:fwd_kernel|bwd_(?:kernel|compute_dq_dk_dv_kernel))<",
        "yes",
        types.of_matrix_template,
        "HSTU attention of FBGEMM: matrix instructions only",
        words="hstu_",
        category="attention",
    ),
    _rule(
        r"FlashAttn(?:Fwd|Bwd)Sm[89]\d|flash(?:::|\d+)FlashAttn(?:Fwd|Bwd)(?=I|<|$)|"
        r"FlashAttention(?:Forward|Backward)Sm\d+",
        "yes",
        types.of_matrix_template,
        "FlashAttention 3 and 4",
        words="FlashAtt",
    ),
    _rule(
        r"cudnn_generated\w*sdpa",
        "yes",
        types.of_cudnn_sdpa,
        "cuDNN's generated attention: 16 bits or FP8",
        words="cudnn_generated",
    ),
    _rule(r"fmhaSm\d+|FmhaSm\d+", "yes", types.of_trtllm, "attention of TensorRT-LLM for sm100", words="mhaSm"),
    _rule(
        r"fmha_v2_flash|fmha_(?:fprop|dgrad|fwd|bwd)\w*(?:fp16|bf16)",
        "yes",
        types.of_token,
        "attention of apex, FA1",
        words="fmha_",
    ),
    _rule(
        r"Batch\w*Prefill\w*KVCacheKernel",
        "yes",
        types.of_matrix_template,
        "FlashInfer prefill: matrix instructions only",
        words="KVCacheKernel",
    ),
    _rule(
        r"ck_tile.*Fmha(?:FwdKernel|Fwd(?:SplitKV|PagedKV)Kernel|BatchPrefill\w*Kernel|BwdDQDKDV)",
        "yes",
        types.of_rocm,
        "attention of CK",
        words="ck_tile",
    ),
    # --- instructions and opcode classes
    _rule(
        rf"(?<![A-Za-z0-9]){_SHAPE}(?:tf32|bf16|f16|f32|fast_\w+?)?_?{_KIND}",
        "yes",
        types.of_shape,
        "instruction shape of a tensor core in the name",
        words="884 684 688 8816 8832 8812 6816 6832 6864 6161 2816 8321 6812 6825",
    ),
    _rule(
        r"(?<![A-Za-z])(?:wmma_|sp|bs|bssp|bl)?tensorop_",
        "yes",
        types.of_cutlass,
        "CUTLASS, an opcode class of tensor cores",
        words="tensorop_",
    ),
    _rule(r"xmma_\w*(?:depthwise|dwconv)", "unknown", types.of_xmma, "xmma by channel: exists for both", words="xmma_"),
    _rule(
        r"sm(?:[789]\d|1\d\d)_xmma_(?!\w*_[iu][48])\w*(?:tf32|bf16|f16|e4m3|e5m2|e2m1)",
        "yes",
        types.of_xmma,
        "xmma in a type that its CUDA-core variants do not have",
        words="xmma_",
    ),
    _rule(
        r"sm(?:[789]\d|1\d\d)_xmma_\w*_(?:sp)?tensor\d+x\d+x\d+",
        "yes",
        types.of_xmma_tensor,
        "xmma with a tensor-core instruction shape",
        words="xmma_",
    ),
    _rule(r"xmma_\w*_f32f32_f32f32_f32(?:_|$)", "no", "fp32", "xmma that multiplies in FP32", words="xmma_"),
    _rule(
        r"(?<![A-Za-z])xmma_(?:gemm|fprop|dgrad|wgrad)|\d_xmma_",
        "unknown",
        types.of_xmma,
        "xmma, cut off or FP32",
        words="xmma_",
    ),
    # --- cuBLASLt since CUDA 12
    _rule(r"nvjet_(?:sm\d+_)?(?:ss[a-z]?_tf32|\w*tf32)", "yes", "tf32", "nvjet in TF32", words="nvjet_"),
    _rule(
        r"nvjet_(?:sm\d+_)?[htqreobi]{1,2}[a-z]{2,3}(?![a-z])",
        "yes",
        types.of_nvjet,
        "nvjet: cuBLASLt for tensor cores",
        words="nvjet_",
    ),
    _rule(
        r"nvjet_",
        "unknown",
        types.of_nvjet,
        "nvjet without types in its name, or FP32 without the word TF32",
        words="nvjet_",
    ),
    # --- other libraries of matrix kernels
    _rule(
        r"deep_gemm\w*::.*(?:gemm|mqa_logits)", "yes", types.of_token, "DeepGEMM: WGMMA or UMMA only", words="deep_gemm"
    ),
    _rule(
        r"^sm(?:90|100)_(?:fp8|bf16|fp4)\w*_gemm\w*impl",
        "yes",
        types.of_token,
        "DeepGEMM: WGMMA or UMMA only",
        words="sm90 sm100",
    ),
    _rule(
        r"^(?:bmm|gemm)_(?:Mx)?(?:E2m1|E4m3|E5m2|Bfloat16|Fp16)_",
        "yes",
        types.of_trtllm,
        "TensorRT-LLM's own GEMM",
        words="bmm_ gemm_",
    ),
    _rule(
        r"_(?:p_)?matmul_ogs_\w*?(?:bf16|fp16|f16|fp8|e4m3|e5m2|mxfp\d|u8)x",
        "yes",
        types.of_matmul_ogs,
        "triton_kernels: products with 16 bits or fewer",
        words="matmul_ogs_",
    ),
    _rule(
        r"(?<![A-Za-z])(?:bf16gemm|fp8gemm|f8gemm|f4gemm|i8gemm|fmoe)_",
        "yes",
        types.of_aiter,
        "AITER's assembly: matrix instructions only",
        words="gemm_ fmoe_",
    ),
    _rule(
        r"gemm_a(?:fp)?\d+_?w(?:fp)?\d+\w*?_reduce",
        "no",
        None,
        "AITER in Triton: adds parts of a product",
        words="gemm_a",
        category="reduction",
    ),
    _rule(
        r"(?<![A-Za-z])gemm_a(?:fp)?\d+_?w(?:fp)?\d+\w*_kernel",
        "yes",
        types.of_aiter_triton,
        "AITER in Triton: products of 16 bits or fewer, which the name counts",
        words="gemm_a",
    ),
    _rule(
        r"enable_(?:2x|3x)_kernel_for_sm(?:89|9x|10|12)|enable_sm(?:89|9\d|1\d\d)\w*<",
        "yes",
        types.of_matrix_template,
        "CUTLASS 2 and 3 as PyTorch and vLLM use it",
        words="enable_",
    ),
    _rule(
        r"device_kernel<[^<(]*(?:fp8|fp4|e4m3|mxfp)[^<(]*(?:Gemm|gemm|GEMM)",
        "yes",
        types.of_token,
        "CUTLASS: FP8 and FP4 exist on tensor cores alone",
        words="device_kernel<",
    ),
    _rule(
        r"Fused_Moe_Kernel_sm[89]\d<",
        "yes",
        types.of_matrix_template,
        "TensorRT-LLM's fused experts: MMA of 16 bits",
        category="gemm",
        words="Fused_Moe_Kernel",
    ),
    _rule(r"DeviceGemmFp4\w*Sm1\d\d", "yes", "fp4", "FP4 exists on tensor cores alone", words="DeviceGemmFp4"),
    _rule(
        r"(?<![a-z])marlin\w*::\w*Marlin|(?<![A-Za-z])Marlin<",
        "yes",
        types.of_marlin,
        "Marlin: 16-bit MMA",
        words="arlin",
    ),
    _rule(
        r"Hadamard(?:Transform|AmaxTma)Kernel|rht_gemm_device",
        "yes",
        "bf16",
        "Transformer Engine's random Hadamard transforms: BF16 MMA",
        words="Hadamard rht_gemm",
        category="other",
    ),
    _rule(
        r"gemm_4bit_sm\d+_m16n8k",
        "yes",
        types.of_matrix_template,
        "bitsandbytes' 4-bit weights: MMA",
        words="gemm_4bit_sm",
    ),
    _rule(
        r"tcnn::kernel_mlp_fused",
        "yes",
        "fp16",
        "tiny-cuda-nn's fused layers: WMMA",
        words="kernel_mlp",
        category="gemm",
    ),
    _rule(r"tinygemm_m16n8k16", "yes", "bf16", "PyTorch's int4 weights: BF16 MMA", words="tinygemm_"),
    # --- CUTLASS as templates
    _rule(
        r"(?<!Wmma)(?:MmaTensorOp|OpClass(?:Wmma|Sparse|BlockScaled)?TensorOp)|MmaWmma|"
        r"MainloopSm(?:9\d|1\d\d)\w*|SM(?:70|75|80|89|90|1\d\d)_(?:MMA_\w+|\d+x\d+x\d+)_|"
        r"(?:GemmSm|Sm)(?:90|1\d\d)\w*Gemm\w*|Gemm\w*Sm(?:90|1\d\d)",
        "yes",
        types.of_matrix_template,
        "CUTLASS 3 or CuTe: a matrix instruction in the template",
        words="TensorOp MmaWmma MainloopSm SM7 SM8 SM9 SM1 Sm9 Sm1",
    ),
    # --- AMD: matrix cores
    _rule(
        r"(?i)xdlops?|igemm_\w*gtcx|(?<![a-z])[s]?mfma|smfmac|_xdl_",
        "yes",
        types.of_rocm,
        "AMD matrix instruction",
        words="dlop DLOP gtcx mfma MFMA smfmac _xdl_ _XDL_",
    ),
    _rule(
        r"(?<![a-z])ck::(?:kernel_(?:moe_)?(?:mx)?gemm\w*<ck::)?Gridwise(?:Moe|Gemm\w*)\w*<\w*",
        "yes",
        types.of_composable_kernel,
        "GEMM of Composable Kernel for CDNA: matrix instructions only",
        words="Gridwise",
        unless=r"(?i)_dl_|_dpp_|naive|elementwise_|wmma|reduce_",
    ),
    _rule(r"(?i)wmma_cshuffle|_wmma_", "yes", types.of_rocm, "a matrix instruction in the name", words="wmma_ WMMA_"),
    _rule(
        r"miopenSp3AsmConv(?!Fury)|miopenGcnAsm|MIOpen\w*(?:Norm|Pool|Softmax)|naive_conv_\w*(?:fwd|bwd|wrw)_",
        "no",
        None,
        "MIOpen on vector units",
        words="iopen IOpen naive_conv",
    ),
    _rule(_INSTRUCTION, "yes", types.of_instruction, "a matrix instruction in the name", words="mma MMA tcgen05"),
    # --- GEMM/conv on CUDA cores
    _rule(
        r"(?:kepler|maxwell|pascal|volta|turing|ampere|ada|hopper|blackwell)_(?:(?:fp16|bf16)_)?"
        r"(?:gc|gz|[sdhcz])(?:gemm|trsm|symm|syrk)(?!\w*tf32)",
        "no",
        types.of_blas,
        "cuBLAS without an instruction shape: CUDA cores",
        words="gemm trsm symm syrk",
    ),
    _rule(
        r"(?:maxwell|pascal|volta|turing|ampere)_(?:(?:fp16|int8x4|int8x32|int8)_)?[shidc]cudnn",
        "no",
        types.of_blas,
        "cuDNN without an instruction shape: CUDA cores",
        words="cudnn",
    ),
    _rule(r"(?<![A-Za-z])magma_[sdcz]gemm|magmablas", "no", types.of_blas, "MAGMA: CUDA cores", words="magma"),
    _rule(
        r"gemv|(?<![a-z])(?<!_w_)(?<!_gluon_)(?<!_block_)(?:dot|asum|nrm2|axpy|scal|ger)_kernel|reduce_1Block",
        "no",
        types.of_template,
        "cuBLAS 1 and 2",
        words="gemv _kernel reduce_1Block",
    ),
    _rule(
        r"trsm_batch_|trsm_(?:left|right|lower|upper)|trsv_",
        "no",
        types.of_template,
        "triangular solves of cuBLAS",
        words="trsm_ trsv_",
    ),
    _rule(
        r"gemmSN_|gemmk1_kernel|gemm_kernel\dx\d",
        "no",
        types.of_template,
        "small products of cuBLAS",
        words="gemmSN_ gemmk1_ gemm_kernel",
    ),
    _rule(
        r"^(?:void )?sgemm_(?:largek|\d+x\d+)(?!\w*(?:tf32|mma))",
        "no",
        "fp32",
        "cuBLAS before it named GPUs",
        words="sgemm_",
    ),
    _rule(
        r"splitKreduce|splitK_reduce|cublasLt::epilogue|epilogue::impl",
        "no",
        None,
        "sums after a split GEMM",
        words="splitK epilogue",
    ),
    _rule(
        r"(?:im|ex)plicit_convolve(?:Nd)?_sgemm|precomputed_convolve(?:Nd)?_sgemm|convolve_common_engine|convolveNd_\w*engine|"
        r"(?:dgrad|wgrad)_(?:alg\d_)?(?:nd_float_)?(?:float_)?engine|(?:conv2d|dgrad2d|wgrad2d)_grouped_direct|reduce_wgrad|"
        r"conv_depthwise|[Dd]epthwise_?[Cc]onv(?!\w*mma)|cudnn::detail::(?:dgrad|wgrad)",
        "no",
        types.of_template,
        "cuDNN's legacy engines, and convolutions by channel: CUDA cores",
        words="convol engine direct wgrad epthwise cudnn::detail",
    ),
    _rule(
        r"winograd",
        "no",
        types.of_template,
        "Winograd transforms, or Winograd without an instruction shape",
        unless="batched_gemm_kernel",
    ),
    _rule(
        r"(?<![a-z])(?:fft\dd|(?:regular|vector|composite|multi_bluestein)_fft|DIT_fft|DIF_fft)",
        "no",
        None,
        "FFT",
        words="fft",
    ),
    # --- MIOpen beside its products, and cuDNN's transforms around an FFT
    _rule(
        r"SubTensorOpWith|(?i:im2d?2?col|col2im|im2col\dd)|flip_filter|kern_precompute_indices|region_transform|"
        r"pointwise_mult_and_sum_complex|Op[1-5]dTensor|Batched_?Transpose",
        "no",
        None,
        "transforms and sums beside a convolution",
        words="SubTensor 2Col 2col Col2 col2 flip_ kern_pre region_ pointwise_mult dTensor ranspose",
        category="layout",
    ),
    _rule(r"RNN_addBias", "no", None, "biases of a recurrent layer", words="addBias", category="elementwise"),
    _rule(
        r"convertTensor_kernel",
        "no",
        None,
        "cuDNN: rounds or converts the tensors of a convolution",
        words="convertTensor_kernel",
        category="elementwise",
    ),
    # --- families that multiply no matrices
    _rule(
        r"at::native|_ZN2at6native|at_cuda_detail|at::cuda",
        "no",
        None,
        "PyTorch's own kernels, which multiply no matrices",
        words="at::native at6native at_cuda_detail at::cuda",
    ),
    _rule(
        r"(?<![A-Za-z])(?:cub|thrust|hipcub|rocprim)(?:::|\d)",
        "no",
        None,
        "scans, sorts and reductions",
        words="cub thrust rocprim",
    ),
    _rule(
        r"transformer_engine(?:::|\d)(?!.*(?i:gemm|matmul))|deep_gemm::transpose",
        "no",
        None,
        "casts, norms, layouts",
        words="transformer_engine deep_gemm::",
    ),
    _rule(
        r"gsplat::|tcnn::|(?:^|::)(?:render|preprocess|computeCov2D)CUDA|duplicateWithKeys|identifyTileRanges|"
        r"(?:Rasterize|alphaComposite|weightedSum)\w*Cuda\w*Kernel|PointFaceArray|PointEdgeArray|KNearestNeighbor",
        "no",
        None,
        "rendering of Gaussians, meshes and fields: gsplat, PyTorch3D, tiny-cuda-nn",
        words="gsplat:: tcnn:: CUDA Cuda duplicateWithKeys identifyTileRanges PointFace PointEdge KNearest",
        unless=r"(?i:mlp|cutlass|gemm|shampoo)",
        category="other",
    ),
    _rule(
        r"segment_(?:\w+_)?(?:coo|csr)_\w*kernel|(?:fps|knn|radius|nearest|grid_cluster)_(?:cuda_)?kernel|random_walk_\w*kernel|"
        r"spline_(?:basis|weighting)_\w*kernel|"
        r"(?:roi_align|roi_pool|border_align|bezier_align|ball_query|group_points|three_nn|three_interpolate|"
        r"furthest_point_sampling|points_in_boxes|voxelize|bbox_overlaps|chamfer_distance|carafe|psamask|sync_bn|"
        r"correlation|box_iou)_\w*cuda|nms_(?:cuda|rotated|quadri)|bias_act_kernel|filtered_lrelu_|upfirdn2d_",
        "no",
        None,
        "graphs, boxes and points: PyG, MMCV, StyleGAN",
        words="segment_ _kernel _cuda nms_ bias_act filtered_lrelu upfirdn2d",
        unless=r"(?i:gemm|mma)",
        category="other",
    ),
    _rule(
        r"cusparse::\w*(?:csrmv|partition|load_balancing)|(?:Coo|Csr|Csc)To(?:Coo|Csr|Csc)|csr2csc",
        "no",
        None,
        "cuSPARSE: products of a sparse matrix with a vector, and conversions of formats",
        words="cusparse:: CooTo CsrTo CscTo csr2csc",
        category="other",
    ),
    _rule(
        r"fastertransformer::",
        "no",
        None,
        "FasterTransformer beside its products: biases, norms, caches, sampling",
        words="fastertransformer::",
        unless=r"(?i:gemm|matmul|multihead|attention_kernel|mma|cutlass)",
    ),
    _rule(r"fbgemm_gpu|split_embedding|permute_pooled|linearize_index", "no", None, "FBGEMM's embeddings"),
    _rule(
        r"multi_tensor_apply|(?i:fused_?(?:adam|sgd|lamb|adagrad|novograd))",
        "no",
        None,
        "an optimizer over lists",
        words="multi_tensor used",
    ),
    _rule(
        r"cudnn::(?:ops|bn_|detail::bn)|compute\w*Offsets|cudnn::cnn::\w*pool",
        "no",
        None,
        "cuDNN, other than convolutions",
    ),
    _rule(
        r"cudnn_generated\w*(?:bn|batch_?norm|layer_?norm|rms_?norm|softmax)",
        "no",
        None,
        "cuDNN's norms",
        words="cudnn_generated",
    ),
    # --- serving engines and mixtures of experts, beside their products
    _rule(
        r"moe::dev::(?:routing|finalize|activation|permute)|moe_(?:align|sum|permute|unpermute)|MoeSorting|reshape_and_cache|"
        r"store_kv_?cache|concat_and_cache|scaled_fp8_quant|scaled_int8_quant|(?<!_dot_kernel_)per_token(?:_group)?_quant|"
        r"causal_conv1d_|recat_copy_async|bounds_check_indices|kv_indices|page_indices|combined_routing|"
        r"_finalize_matmul_scatter|sum_bitmatrix|reduce_segments|count_expert|expand_to_fused|get_fused_mapping|"
        r"reduce_fused_impl|get_dispatch_layout|future_token_ids|clamp_position|sage_quant|_copy_tensor_kernel|"
        r"topk_gating|topkGating|expandInputRows|fusedBuildExpertMaps|finalizeMoeRouting|doActivation|grouped_gemm::\w+::utils::transpose|"
        r"destindex_copy_|_copy_kv_|^_?alloc_(?:decode|extend|\w*slots?|\w*tokens?)_kernel|"
        r"(?:align|swizzle|interleave|repack)_(?:\w+_)?(?:scales?|sf)(?:_kernel)?(?:$|[<(])",
        "no",
        None,
        "routing, caches, casts and sums beside the products of a language model",
        category="other",
        words="moe_ moe:: MoeSorting cache quant causal_conv1d_ recat_ bounds_check _indices combined_routing "
        "_finalize_ sum_bitmatrix reduce_segments count_expert expand_to_fused get_fused get_dispatch reduce_fused "
        "future_token clamp_position _copy_tensor topk_gating topkGating expandInput fusedBuild "
        "finalizeMoe doActivation grouped_gemm:: alloc_ scale sf destindex_copy_ _copy_kv_",
    ),
    _rule(
        r"^(?:chunk_dplr_bwd_kernel_intra|prepare_wy_repr_fwd_kernel_chunk32)$",
        "no",
        None,
        "flash-linear-attention: products of chunks by sums",
        words="chunk",
    ),
    _rule(r"^_chunk_scan_bwd_(?:dz|ddAcs_unstable)", "no", None, "Mamba 2 beside its products", words="_chunk_scan_"),
    _rule(
        r"^_(?:bmm_chunk_(?:fwd|bwd)|chunk_scan_fwd|chunk_state_(?:fwd|varlen)|chunk_scan_chunk_state_bwd|"
        r"chunk_(?:scan|state)_bwd_(?:d[bcx]|dcb|dstates|ddAcs_(?:prev|stable)))(?:_|$)",
        "yes",
        None,
        "Mamba 2: products of chunks by tl.dot",
        words="_chunk_ _bmm_chunk",
    ),
    _rule(
        r"(?<![a-z])(?:fill_|cast_|sort|scan|rope|relu|adamw?(?:_|functor|$)|lamb_|sgd_|rms_)|pool(?:ing)?\dd",
        "no",
        None,
        "elementwise, or sums",
        words="fill_ cast_ sort scan rope relu adam lamb_ sgd_ rms_ pool",
        unless=_PRODUCTS,
        fold=True,
    ),
    _rule(
        "",
        "no",
        None,
        "elementwise, or sums",
        words="elementwise reduce_kernel _reduction softmax layernorm layer_norm rmsnorm rms_norm batchnorm batch_norm "
        "groupnorm group_norm instancenorm instance_norm bn_fw bn_bw ln_fwd ln_bwd nchwtonhwc nhwctonchw foldednhwc "
        "transpose tensortransform op_generic_tensor opgenerictensor scalepackedtensor upsample addpadding max_pool "
        "maxpool avg_pool avgpool dropout embedding indexselect index_select gather scatter catarray cunn_ classnll "
        "crossentropy cross_entropy copy_kernel quantize rotary topk top_k bitonic radix cumsum arange rowwisemoments "
        "nms_kernel to_mxfp mx_blocked_layout copy_into_buffer "
        "gammabeta cucompute cuapply elemwise settensor koptimizer unscale activation silu gelu swiglu act_and_mul",
        unless=_PRODUCTS,
        fold=True,
    ),
    _rule(
        r"(?:Single|Batch)PrefillWith\w*KVCacheKernel|BatchMLAPage\w*AttentionKernel|BatchMLAPageAttentionHopperKernel",
        "yes",
        types.of_matrix_template,
        "FlashInfer: prefill by MMA only",
        words="PrefillWith BatchMLAPage",
        category="attention",
    ),
    _rule(
        r"(?:Single|Batch)DecodeWith\w*KVCacheKernel(?!Ml)",
        "no",
        None,
        "FlashInfer: decoding on CUDA cores; on tensor cores it uses the kernels of prefill",
        words="DecodeWith",
        category="attention",
    ),
    _rule(
        r"kgemm_4bit_inference_naive|gemm_4bit_simt|(?<!cake_blackwell_)router_gemm_kernel|HGEMV_WFPerRow",
        "no",
        types.of_template,
        "products by FMA: bitsandbytes' and routers' for single rows",
        words="gemm HGEMV",
    ),
    _rule(
        r"(?:Sampling|Renorm\w*)(?:From\w+)?Kernel|ChainSpeculativeSampling|AppendPagedKV\w*Kernel|MergeStates?\w*Kernel|"
        r"VariableLength\w*SumKernel|(?<![A-Za-z])AttentionSumKernel|PackBitsKernel|interleave_\w+_gemm_kernel|"
        r"setup_grouped_gemm|routingIndices\w*Kernel|routingMainKernel|(?:global|block|merge)ExpertPrefixSum|"
        r"moe(?:Permute|Unpermute|Activation|A2A\w+)Kernel|finalizeKernel|computeStridesTma|"
        r"Amax\w*Kernel|kInt8VectorQuant|kPreconditionOptimizer|kOptimizer|kDequantize|kQuantize|"
        r"selective_state_update|welford_kernel|transducer_\w+|focal_loss_\w+_kernel|index_mul_2d_|"
        r"operator_(?:bcast|contiguous|element|tn)\w*|ipc_\w*(?:rsag|push)\w*|dtype_convert_\w+|"
        r"fused_moe_aux_loss|score_for_moe_aux_loss|thd_(?:copy|grad|lse|out|partition|read|reorder)_\w+|cuda_random_\w+|"
        r"multi_tensor_(?:un)?swizzle|multi_(?:un)?padding_kernel|copy_to_kv_cache|convert_(?:bshd|thd)_to|"
        r"moe_fused_gate|moe_bgmv_(?:expand|shrink)|update_scale_hysteresis|copy_blocks_kernel",
        "no",
        None,
        "sampling, routing, caches, norms and optimizers of FlashInfer, TensorRT-LLM, Apex, bitsandbytes and AITER",
        unless=r"(?i:mma)",
    ),
    _rule(
        r"^_?\w*(?:(?<!fb)gemm|matmul|(?<![a-z])[bg]?mm(?:_|$)|moe_kernel|attn_(?:fwd|bwd)|unified_attention|sage_fwd|mqa_logits)|"
        r"^_?bwd_kernel(?:_|$)|^_?fwd_kernel(?:_|$)|^_?(?:fwd|bwd)_grouped_kernel|^_?(?:attn|attention)_(?:fwd|bwd)|"
        r"^_?linear_(?:re|ge|si)lu\w*_kernel|"
        r"^_?bwd_(?:dq|dkdv|dkv)_kernel|^_?chunk_\w*(?:fwd|bwd)_kernel_(?:o|h|dh|dv|dqk\w*|dqkwg|inter|intra)$",
        "unknown",
        None,
        "a Triton kernel that multiplies by tl.dot: depends on the types of its inputs",
        unless=r"[<(:]|reduce|quant|preprocess|cumsum|rope|(?<!grouped_kernel_)stage\d|combine|scatter|gemma|_tiles?$|schedule|launch_|hgrn|gemm_args|token_parallel",
        by_dtype=True,
    ),
    _rule(
        r"^(?:chunk_(?:scaled_dot_kkt|transform_qk|cumprod_householder|ttt_linear|mesa_net|precond_k|gated_delta|scaled)|"
        r"chunk_\w+_(?:fwd|bwd)_(?:\w*kernel_(?:[KV]|d[AhqkvwT]\w*|wy_\w+|[ho]|h_\w+|intra\w*|inter\w*)|[AoKh]_kernel\w*|"
        r"k_kernel_\w+|inter|intra)|chunk_(?:fwd|bwd)_kernel_(?:[ho]|dh|dv|dqk)\w*|chunkwise_(?:fwd|bwd)_kernel|"
        r"(?:fused_chunk|parallel)_(?:\w+_)?(?:fwd|bwd)_(?:kernel|d[qkv]+_kernel|intra_chunk_kernel)|"
        r"fused_chunk_\w*kkt_fwd_kernel|(?:intra_chunk_preprocess|transform_q|wu|merge_fwd)_(?:fwd|bwd)_kernel|"
        r"pre_process_(?:fwd|bwd)_kernel_merged|recompute_w_u_|(?:fused_)?(?:solve_tril_recompute|prepare_\w*wy_repr)|"
        r"merge_16x16_to_\d+x\d+_inverse|mamba3_siso_(?:fwd|step|bwd)_kernel(?:_dqkv)?$|kernel_(?:fwd|bwd)$|"
        r"_?mla_(?:decode|prefill)_fwd_kernel|_mla_(?:attn_kernel|gluon)|_pa_(?:decode|prefill)_sparse$|"
        r"_?(?:(?:kernel_)?paged_attention|attention_core|sparse_attn_prefill|dense_neighborhood|fused_neighborhood_attention)\w*|"
        r"_conv2d_\w+_kernel|_fused_moe_(?:persistent|silu)\w*|e2e_moe_\w*kernel|_moe_(?:bwd_d[WX]|gemm|bwd_down_proj)\w*|"
        r"_?tgmm_\w+|_gluon_moe_gemm\w*|XXT_kernel$|ba_plus_cAA_kernel$|_ff_a16w16_\w+|_fused_(?:up|down)_proj_\w+|_flash_kda_\w+|_triton_gather_kv_b_proj\w*)",
        "unknown",
        None,
        "a Triton kernel that multiplies by tl.dot: depends on the types of its inputs",
        words="chunk parallel_ merge_ _process_ recompute_ prepare_ mamba3 kernel_ mla_ _pa_ attention attn "
        "neighborhood conv2d moe gmm XXT_ ba_plus_ _ff_ _kda_ _proj solve_tril wu_ transform_q",
        unless=r"[<(:]|token_parallel|sub_intra(?!_)|sub_intra_(?:merge|split|npu)|_reduc|cumsum|rcum|hgrn|_gate_|_dgk_|"
        r"summary|reference|metadata|_preprocess$|diag_solve|finalize_dg",
        by_dtype=True,
    ),
    _rule(
        r"^_?(?:\w*_)?(?:preprocess|logsigmoid|sigmoid|softplus|swish|l2norm|poly_norm|sinkhorn|row_id_map|logsumexp|"
        r"mean_pooling|token_shift|m?rope|histogram|state_passing|merge_states?|variable_length_merge|sparsemax|kldiv|"
        r"kl_div|jsd|geglu|grpo|dyt|optimizer_(?:update|precondition)|element_mul|zero_pad|amax|tv_distance|philox|"
        r"segsum|addcmul|downcast|upcast|dequant|unpermute|permute|argsort|quant|reduce|combine|hgrn|token_parallel|"
        r"chunk_sort_map|softcapped_\w*entropy|copy_last_chunk|splitk_reduce|zero_pad|page_table|slot_mapping|penalt(?:y|ies))(?:_\w*|$)|"
        r"^fused_recurrent_\w+(?<!_dw)$|^_(?:DWf_DW_dfg|fg|exact_(?:forward|backward)|approx_(?:forward|backward))_kernel$|"
        r"^_(?:fbgemm_silu_mul|fbgemm_gather_scale_dense_tokens|to_fp8_(?:col|row)_major)\w*$",
        "no",
        None,
        "a Triton kernel without products",
        unless=rf"[<(:]|{_PRODUCTS}|routing_sigmoid|hadamard",
    ),
    _rule(
        r"^_?(?:\w+_)?lora_(?:shrink|expand|[ab])(?:_\w+)?_kernel\w*$|^_?fused_moe_lora_(?:\w+_)?kernel$",
        "unknown",
        None,
        "adapters (LoRA) of vLLM and SGLang, which multiply by tl.dot: depends on the types of their inputs",
        words="lora_",
        category="gemm",
        by_dtype=True,
    ),
    _rule(
        r"count_and_sort_expert_tokens|sanitize_expert_ids|eagle_prepare_\w+_kernel|write_req_to_token_pool|fused_qknorm_",
        "no",
        None,
        "routing, token pools, speculative decoding and norms of vLLM and SGLang",
        words="expert_ eagle_ token_pool qknorm_",
    ),
    _rule(
        r"indexing_backward_kernel|group_gemm_args|compute_cuda_kernel<|to_dense_representation_kernel|compute_position_kernel|"
        r"fill_tensormaps_kernel|aux_fi_impl|unique_group_indices",
        "no",
        None,
        "indices and descriptors",
        category="other",
    ),
    _rule(
        rf"_[0-9a-f]{{8}}{OF_WARP}",
        "no",
        None,
        "NVIDIA Warp: arithmetic of single threads; only its tiles multiply on tensor cores",
        words="_cuda_kernel_",
        unless=r"(?i:tile|matmul|gemm|mma|attention|conv|mlp|linear)",
        category="other",
    ),
    _rule(
        r"batched_svd_parallel_jacobi|svd_music_kernel|getrf_2x2",
        "no",
        None,
        "cuSOLVER: decompositions of small matrices",
        words="svd_ getrf_",
        category="other",
    ),
    _rule(
        r"^fused_(?:(?:add|sub|mul|div|neg|abs|pow|clamp|exp|expm1|log|log1p|sqrt|rsqrt|reciprocal|sin|cos|tan|tanh|sigmoid|relu|"
        r"gelu|silu|erf|erfc|floor|ceil|round|trunc|frac|fmod|remainder|lerp|where|gt|ge|lt|le|eq|ne|and|or|not|min|max|to|"
        r"cat|cast|type|as|sum|threshold|hardtanh)(?:_|$))+$",
        "no",
        None,
        "TorchScript's fuser: elementwise operators",
        words="fused_",
        category="elementwise",
    ),
)
"""In the order in which they are tried: pattern, tensor cores or not, how to read the precision, and the reason."""
_TRIED = [
    (rule, rule.pattern.words, rule.pattern.regex.search, rule.pattern.unless, rule.pattern.fold) for rule in RULES
]


def matching_rule(name: str) -> Rule | None:
    """The first rule that a name matches; None for a name that no rule knows."""
    low = name.lower()
    for rule, words, search, unless, fold in _TRIED:
        text = low if fold else name
        for word in words:  # loops without calls: a trace of a server has a thousand names, and there are 113 rules
            if word in text:
                break
        else:
            if words:
                continue
        if search(text) is not None and (unless is None or unless.search(text) is None):
            return rule
    return None
