"""Classify a kernel of Huawei's NPUs by its name, which is that of an operator of CANN.

    >>> classify_npu_kernel("aclnnMm_MatMulCommon_MatMulV2")
    KernelClass(tensor_core='yes', precision=None, category='gemm', why="CANN: the cube unit multiplies matrices", ...)
    >>> classify_npu_kernel("trans_TransData_117").category
    'layout'

The type of the operator decides: the last part of `aclnn` names, else the name without `trans_` and the number of its
node and version. The cube unit multiplies matrices, and takes the place of tensor cores; the vector unit does all
else. Of operators that may use both, or that are several fused, the unit is unknown. The names of types are those of
CANN's operator library; words of GPU kernels mean other things in them. Precision is not in the names.
"""

import functools
import re

from amp_core.hardware.kernel_names.classify import KernelClass, classify_kernel

_OPERATOR = re.compile(r"(?:aclnn\w*_|trans_)?([A-Z][A-Za-z0-9]*?)(?:_?\d+)?$")
_COPIES = ("Memcopy", "Memcpy", "Memset", "MEMCPY", "MEMSET")
"""Beginnings of names of tasks that copy and fill."""
_CUBE = (
    ("attention", r"(?:FlashAttention|PromptFlashAttention|IncreFlashAttention|FusedInferAttention)\w*"),
    ("conv", r"(?:Quant|Depthwise|Extend)?Conv(?:olution)?[123]?D?(?:Backprop\w*|Transpose\w*|V|D)*|Deconvolution"),
    (
        "gemm",
        r"(?:Weight|Quant|Batch|Grouped|Transpose|AllGather|AlltoAll|Sparse|\w+\d(?:Left|Right)Batch)*Mat[Mm]ul(?:V|D|AllReduce|ReduceScatter|Alltoall"
        r"|Swiglu\w*|Finalize\w*)*|G[Ee][Mm][Mm]V?|FullyConnection|Dynamic(?:RNN|GRU)(?:V|Grad)*",
    ),
)
"""Types of operators that multiply matrices."""
_MAY_MULTIPLY = re.compile(
    r"Mat[Mm]ul|Conv(?!ert)|Attention|RNN|LSTM|GRU|G[Ee][Mm][Mm]|Moe(?!\w*(?:Routing|Gating))|Mlp|Ffn|FFN|Mla|MLA|"
    r"Lightning|Einsum|BiLinear"
)
_VECTOR = (
    ("cast", r"Cast"),
    (
        "layout",
        r"Trans(?:Data|pose)|Concat|Split|Slice|Pack|Pad|Tile|BroadcastTo|AsStrided|ViewCopy|TensorMove|Flip|Roll",
    ),
    ("optimizer", r"Apply\w*(?:Adam|Momentum|Lamb|Adagrad|RMSProp)|SGD"),
    ("norm", r"Norm|^BN"),
    ("embedding", r"Embedding|Gather|Scatter|^Index"),
    ("reduction", r"Reduce|Softmax|SoftMax|Arg(?:Max|Min)|TopK|Sort|Cumsum|Cumprod|Loss|L2Loss"),
    (
        "elementwise",
        r"^(?:Add|Sub|Mul|Div|RealDiv|Axpy|Neg|Abs|Exp|Log|Pow|Sqrt|Rsqrt|Square|Sign|Tanh|Sigmoid|Sin|Cos|Erf|Fill|"
        r"Zeros|Ones|Select|Where|Masked|Maximum|Minimum|Clip|Equal|NotEqual|Greater|Less|Logical|Bitwise|Foreach|"
        r"Muls|Adds|Lerp|Threshold|Swi|Fast|Inplace)|Relu|Gelu|Silu|Swish|Pool|Drop[Oo]ut|Random|Uniform",
    ),
)
"""Categories of the others, the first match decides."""
_CUBE_PATTERNS = tuple((category, re.compile(pattern)) for category, pattern in _CUBE)
_VECTOR_PATTERNS = tuple((category, re.compile(pattern)) for category, pattern in _VECTOR)


@functools.lru_cache(maxsize=4096)
def classify_npu_kernel(name: str) -> KernelClass:
    """Whether the kernel called `name` runs on an NPU's cube unit, and its category. Names that are no operator's, as
    those of copies, collectives and Triton's kernels, are classified as elsewhere."""
    if name.startswith("atomic_memset") or name.endswith("_MemSet"):
        return KernelClass("no", None, "memset", "CANN: fills what an operator adds to")
    match = _OPERATOR.fullmatch(name)
    if match is None or name.startswith(_COPIES):
        return classify_kernel(name)
    operator = match[1]
    for category, pattern in _CUBE_PATTERNS:
        if pattern.fullmatch(operator):
            return KernelClass("yes", None, category, "CANN: the cube unit multiplies matrices")
    if _MAY_MULTIPLY.search(operator):
        return KernelClass("unknown", None, "other", "CANN: an operator that may multiply matrices beside other work")
    category = next((category for category, pattern in _VECTOR_PATTERNS if pattern.search(operator)), "other")
    return KernelClass("no", None, category, "CANN: the vector unit, for it multiplies no matrices")
