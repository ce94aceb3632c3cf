"""The precision in a kernel's name, for each way in which families of kernels write it.

    >>> of_xmma("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128")     # A, C; compute, accumulate
    'fp8'
    >>> of_nvjet("nvjet_sm100_tst_128x256_64x6_2x1_2cta_v_bz_NNT")                  # A (and B where it differs), ...
    'bf16'

Each function maps a whole name to a precision of `amp_core.formats` or None. None is not a failure: the name does not
give it, and the types of the operator that launched the kernel may.
"""

import re
from collections.abc import Iterable

from amp_core.formats import FORMATS, kernel_precision_of

_OTHERS = {
    "f8": "fp8",
    "fp8": "fp8",
    "e2m1": "fp4",
    "float_e2m1_t": "fp4",
    "f4": "fp4",
    "fp4": "fp4",
    "nvfp4": "fp4",
    "e3m2": "fp6",
    "e2m3": "fp6",
    "f6": "fp6",
    "s8": "int8",
    "u8": "int8",
    "i8": "int8",
    "s4": "int4",
    "u4": "int4",
    "i4": "int4",
    "int4": "int4",
    "b1": "int1",
}
"""Precision of types in kernel names that no format or dtype of `amp_core.formats` has."""


def _any_of(names: Iterable[str]) -> str:
    """A pattern for one of `names`, the longest first."""
    return "|".join(re.escape(name) for name in sorted(set(names), key=lambda name: (-len(name), name)))


_TOKENS = [token for form in FORMATS.values() for token in form.kernel_tokens]
_SPELLINGS = [name for form in FORMATS.values() for name in (form.dtype, *form.spellings) if name is not None]
_EIGHT_BITS_OR_FEWER = ("fp8", "f8", "fp4", "f4", "e2m1", "f6", "e3m2", "e2m3")
_TYPE = f"(?:{_any_of([*_TOKENS, *_EIGHT_BITS_OR_FEWER])}|[sui]8|[sui]4|int8|int4|i32|b1)"


def _word(token: str | None) -> str | None:
    if not token:
        return None
    name = token.lower()
    tokens = (form.kernel_precision for form in FORMATS.values() if name in form.kernel_tokens)
    return next(tokens, None) or _OTHERS.get(name) or kernel_precision_of(token)


_ALONE = ("bfloat16", "half", "float32", "fp8", "fp4", "nvfp4", "e2m1", "int8", "s8")
_TOKEN = re.compile(rf"(?<![A-Za-z0-9])({_any_of([*_TOKENS, *_ALONE])})(?![A-Za-z0-9])")


def of_token(name: str) -> str | None:
    """The first type that is a separate token: `fmha_cutlassF_f16_aligned`, `sm90_fp8_gemm_1d2d_impl`."""
    match = _TOKEN.search(name)
    return _word(match.group(1)) if match else of_template(name)


def of_instruction(name: str) -> str | None:
    """The same where an instruction is named: FP32 beside it is the accumulator."""
    match = of_token(name)
    return None if match == "fp32" else match


_PAIRS = re.compile(rf"_({_TYPE})({_TYPE})_({_TYPE})({_TYPE})(?:_|$)")
_FIRST_PAIR = re.compile(rf"_({_TYPE})({_TYPE})(?=_|$)")


def of_xmma(name: str) -> str | None:
    """`f16f16_f16f32_f32`: A with C, then the compute type, with the accumulator. FP32 may be computed in TF32."""
    match = _PAIRS.search(name)
    if match:
        stored, computed = match.group(1), match.group(3)
        return _word(computed if stored == "f32" else stored)
    first = _FIRST_PAIR.search(name)
    if first is None or first.group(1) == "f32":  # cut off before the pair with the compute type
        return None
    return _word(first.group(1))


def of_xmma_tensor(name: str) -> str | None:
    """The same where a tensor-core instruction is named: FP32 can only be TF32 there."""
    match = of_xmma(name)
    return "tf32" if match == "fp32" else match


_LETTERS = {"s": "fp32", "d": "fp64", "h": "fp16", "c": "fp32", "z": "fp64", "i": "int8", "gc": "fp32", "gz": "fp64"}
_SIMT = re.compile(rf"simt_(?:({_TYPE})_)?([a-z])(?:gemm|fprop|dgrad|wgrad|\w*?gemm)\w*?(?:_({_TYPE}))?(?:_|$|\W)")
_BLAS = re.compile(
    r"_(?:(fp16|bf16|int8)\w*_)?(gc|gz|[sdhczi])(?:gemm|cudnn|trsm|symm|syrk)(?:_(fp16|bf16|int8))?", flags=re.ASCII
)


def of_simt(name: str) -> str | None:
    """`simt_sgemm`: on CUDA cores the letter is the type, unless another type follows."""
    match = _SIMT.search(name)
    if not match:
        return of_token(name)
    return _word(match.group(3)) or _word(match.group(1)) or _LETTERS.get(match.group(2))


def of_blas(name: str) -> str | None:
    """`ampere_sgemm`, `volta_fp16_sgemm_fp16`, `volta_scudnn`: likewise."""
    match = _BLAS.search(name)
    if not match:
        return None
    return _word(match.group(1)) or _word(match.group(3)) or _LETTERS.get(match.group(2))


_SHAPED = re.compile(
    rf"(?:(?<![A-Za-z0-9])({_TYPE})\w*?_)?(?<![A-Za-z0-9])([hsidczg])(\d{{3,6}})(tf32|bf16|f16|f32|fast_\w+?)?_?"
    rf"(?:sp|gr|xor)?(?:gemm|cudnn|fprop|dgrad|wgrad|deconv|conv|symm|syrk|syr2k|trmm|trsm|hemm|herk|her2k)"
    rf"(?:_(?:optimized|analytic|fixed_channels|few_channels|universal|grouped|precomputed|planar_complex))*"
    rf"(?:_({_TYPE})(?=_|\W|$))?(_?)"
)


def of_shape(name: str) -> str | None:
    """`f16_s16816gemm_bf16`: CUTLASS writes the type of A after `gemm` where it differs from the accumulator, and
    the type that FP32 is rounded to before it (`s1688tf32gemm`). cuBLAS and cuDNN write the same type on both sides.

    Without any of these A has the accumulator's type: half, double, or FP32, which a tensor core takes as TF32.
    """
    if "cutlass3x" in name:
        return of_cutlass(name)
    match = _SHAPED.search(name)
    if not match:
        return of_token(name)
    before, letter, shape, between, after, more = match.groups()
    if between:
        return "tf32" if between in ("tf32", "f32") else _word(between.removeprefix("fast_"))
    explicit = _word(after) or _word(before)
    if explicit:
        return "tf32" if explicit == "fp32" else explicit
    if letter == "h" or (letter == "s" and shape == "884"):  # 8×8×4 multiplies FP16 alone
        return "fp16"
    if letter in "dz":
        return "fp64"
    whole = bool(more) and not match.group(0).endswith("...")
    if letter in "scg" and shape in ("1688", "1684") and whole and "tensorop" in name:
        return "tf32"
    return None


_CUTLASS3 = re.compile(rf"(?:x\d+(?:x\d+)?(tf32|bf16|f16)?)?\w*?(?:gemm|fprop|dgrad|wgrad)\w*?_(?:ue\dm\dx)?({_TYPE})_")


def of_cutlass(name: str) -> str | None:
    """`cutlass3x_sm90_tensorop_gemm_f16_f16_f32_…`: A, B, accumulator, C, D. FP32 on tensor cores is TF32."""
    start = name.find("tensorop_")
    tail = name[start + len("tensorop_") :][:200]  # the types come before the tile
    if "tf32gemm" in tail:
        return "tf32"
    match = _CUTLASS3.search(tail)
    precision = _word(match.group(2)) if match else None
    return "tf32" if precision == "fp32" else precision


_NVJET = re.compile(r"nvjet_(?:sm\d+_)?([a-z]+)_")
_NVJET_LETTERS = {
    "h": "fp16",
    "t": "bf16",
    "q": "fp8",
    "r": "fp8",
    "o": "fp4",
    "s": None,
    "d": "fp64",
    "b": "int8",
    "i": "int8",
}


def of_nvjet(name: str) -> str | None:
    """`hsh` is FP16 in, FP32 accumulated, FP16 out; `tst` BF16; `qqtst` FP8 for A and B; `ootst` FP4."""
    match = _NVJET.search(name)
    return _NVJET_LETTERS.get(match.group(1)[0]) if match else None


def of_cudnn_sdpa(name: str) -> str | None:
    """FP8 and BF16 are named. `f16` means any 16-bit format here: BF16 attention may have the same names."""
    if re.search(r"fp8|e4m3|e5m2", name):
        return "fp8"
    return "bf16" if "bf16" in name else None


_TRTLLM = re.compile(r"^(?:bmm|gemm)_[A-Za-z0-9]+_((?:Mx)?(?:E\dm\d|Bfloat16|Fp16))((?:Mx)?(?:E\dm\d|Bfloat16|Fp16))_")
_QKV = re.compile(r"mhaSm\d+[a-z]?Kernel_Q(?:kv)?(E4m3|E5m2|E2m1|Bfloat16|Fp16)")


def of_trtllm(name: str) -> str | None:
    """`bmm_Bfloat16_E2m1E2m1_Fp32_…`: result, A with B, accumulator. Where A and B differ, the wider type: an
    instruction for both takes the narrower one at the rate of the wider."""
    attention = _QKV.search(name)
    if attention:
        return _word(attention.group(1))
    match = _TRTLLM.search(name)
    if not match:
        return None
    words = [_word(group.removeprefix("Mx")) for group in match.groups()]
    return max(words, key=lambda word: _WIDTHS.get(word or "", 0))


_WIDTHS = {"fp4": 4, "fp8": 8, "bf16": 16, "fp16": 16}


_OGS = re.compile(r"matmul_ogs_[A-Z]+_\w+?x(?:mx)?(bf16|fp16|f16|fp8|fp4|fp32|f32|e4m3|e5m2|u8)\w*?x(?:mx)?[befu]")


def of_matmul_ogs(name: str) -> str | None:
    """`_matmul_ogs_NNT_bf16xbf16xmxfp4_…`: result, A, B. Weights of B are converted to the type of A."""
    match = _OGS.search(name)
    return _word(match.group(1)) if match else None


_AITER = re.compile(r"(?i)(?:blockscale|pertoken|per1x32|per1x128|mx)_?(fp8|fp4|i8|int8)")
_AITER_GEMM = {"bf16": "bf16", "fp8": "fp8", "f8": "fp8", "f4": "fp4", "i8": "int8"}


def of_aiter(name: str) -> str | None:
    """`fp8gemm_bf16_…`: the inputs, then the result. `fmoe_bf16_blockscaleFp8_…`: the result, then the inputs.
    `pa_bf16_pertokenFp8_…` holds its cache in FP8 and multiplies in BF16; `mla_a16w8` is A in 16 bits, W in 8."""
    product = re.search(r"(?<![A-Za-z])(bf16|fp8|f8|f4|i8)gemm_", name)
    if product:
        return _AITER_GEMM[product.group(1)]
    scaled = _AITER.search(name)
    if scaled and "fmoe_" in name:
        return _word(scaled.group(1))
    if re.search(r"mla_a8w8", name):
        return "fp8"
    return of_token(name) or of_rocm(name)


_AITER_TRITON = re.compile(r"gemm_a(fp)?(\d+)_?w(?:fp)?(\d+)")


def of_aiter_triton(name: str) -> str | None:
    """`_gemm_afp4_wfp4_kernel`: bits of A and of W, the first of which it multiplies in. 8 bits may be integers."""
    match = _AITER_TRITON.search(name)
    if match is None or match[2] not in ("4", "8"):
        return None
    return "fp4" if match[2] == "4" else "fp8" if match[1] or match[3] == "4" else None


_ATOM = re.compile(
    r"SM\d+_(?:MMA_)?(?:\d+x\d+x\d+_)?(?:F32|F16|S32|F64)?(TF32|BF16|F16|E4M3|E5M2|E2M1|S8|U8|F64)", flags=re.ASCII
)
_CUTLASS = [name for name in [*_SPELLINGS, *_OTHERS] if name.endswith("_t")]
_CUDA = [name for name in _SPELLINGS if name.startswith(("__", "nv_"))]
_ELEMENT = re.compile(
    rf"(?<![A-Za-z_])({_any_of(_CUTLASS)})|({_any_of(_CUDA)}|c10::(?i:{_any_of(_SPELLINGS)})(?![A-Za-z]))"
)
_PLAIN = re.compile(r"[<,] ?(float|double)(?=[,> ])")


_POINTER = re.compile(r"tensorptr(bf16|f16|f8|f4)")


def of_template(name: str) -> str | None:
    """The first type among template arguments: of a matrix instruction where one is named, else of an element. The
    Python DSL of CuTe writes `tensorptrbf16`."""
    pointer = _POINTER.search(name)
    if pointer:
        return _word(pointer.group(1))
    atom = _ATOM.search(name)
    if atom:
        return _word(atom.group(1))
    element = _ELEMENT.search(name)
    if element:
        return _word(element.group())
    plain = _PLAIN.search(name)
    return _word(plain.group(1)) if plain else _of_mangled(name)


def of_matrix_template(name: str) -> str | None:
    """The same of a kernel with matrix instructions: FP32 is the accumulator, or the type of scales."""
    match = of_template(name)
    return None if match == "fp32" else match


_MARLIN = re.compile(r"Marlin<\(?(?:\w+\))?(\d{4,})")
_SCALAR_TYPES = {(8, 7): "bf16", (5, 10): "fp16", (4, 3): "fp8", (5, 2): "fp8", (0, 7): "int8"}
"""By bits of exponent and mantissa."""


def of_marlin(name: str) -> str | None:
    """`Marlin<1125899906909960l, …>`: the type of A, which vLLM numbers by its bits of exponent (the lowest byte) and
    mantissa (the next one); weights are converted to it. Older versions name it: `Marlin<__half, …>`."""
    match = _MARLIN.search(name)
    if match is None:
        return of_matrix_template(name.split("(")[0])
    number = int(match.group(1))
    return _SCALAR_TYPES.get((number & 0xFF, number >> 8 & 0xFF))


_LENGTH = re.compile(r"\d{1,3}")


def _of_mangled(name: str) -> str | None:
    """`_Z23implicit_convolve_sgemmIffLi1024E…`: the letter of the first template argument."""
    place = 3 if name.startswith("_ZN") else 2
    while match := _LENGTH.match(name, place):
        place = match.end() + int(match.group())
    letter = name[place : place + 2] if name.startswith("_Z") else ""
    return {"If": "fp32", "Id": "fp64"}.get(letter)


_TENSILE = re.compile(r"Cijk_[A-Z][a-z]+_[A-Z][a-z]+_((?:F8|B8|I8|4xi8|[HBSDCZX])+)_")
_TENSILE_WORDS = {
    "F8": "fp8",
    "B8": "fp8",
    "I8": "int8",
    "4xi8": "int8",
    "H": "fp16",
    "B": "bf16",
    "S": "fp32",
    "D": "fp64",
}


def of_tensile(name: str) -> str | None:
    """`Cijk_Alik_Bljk_HHS_BH_…`: types of A, of the result, and of the sum."""
    match = _TENSILE.search(name)
    if not match:
        return None
    if "X" in match.group(1):
        return "tf32"
    first = re.match(r"F8|B8|I8|4xi8|[HBSD]", match.group(1))
    return _TENSILE_WORDS[first.group()] if first else None


def of_rocm(name: str) -> str | None:
    """Types as tokens or as HIP writes them; mangled, `DF16b` is BF16 and `DF16_` FP16."""
    if "DF16b" in name:
        return "bf16"
    if re.search(r"_Float16|(?<![a-z])half|DF16_", name):
        return "fp16"
    return of_token(name)


_TYPES_OF_CK = {"unsigned short": "bf16", "_Float16": "fp16", "unsigned _BitInt(8)": "fp8", "signed char": "int8"}
"""How names for types of Composable Kernel are printed: bhalf_t, half_t, f8_t and int8_t (its data_type.hpp)."""
_OF_CK = re.compile(rf"(?<=[<,] )({_any_of(_TYPES_OF_CK)})(?=,)")


def of_composable_kernel(name: str) -> str | None:
    """The type of A, the first element type behind the layouts, of a GEMM of Composable Kernel."""
    found = _OF_CK.search(name)
    return _TYPES_OF_CK[found.group(1)] if found else of_rocm(name)


_MTIA = re.compile(r"-dtype_(\w+?)(?:-|$)")


def of_mtia(name: str) -> str | None:
    """The type in a name of Meta's MTIA: `fc-dtype_Half`."""
    match = _MTIA.search(name)
    return kernel_precision_of(match.group(1)) if match else None


_TELLS = re.compile(r"(?i)e4m3|e5m2|e2m1|fp8|fp4|mxfp|(?<![a-z0-9])[iu]nt?8|bf16|bfloat16|DF16|tf32|_Float16|_half")


def tells_type(name: str) -> bool:
    """Whether a name has a type in it, which the types of an operator must not override."""
    return _TELLS.search(name) is not None
