"""What a GPU's tensor cores and a CPU's 16-bit instructions can do, and which precision recipe to try first there.

    >>> gpu = Gpu("NVIDIA GeForce GTX 1660 Ti", (7, 5))
    >>> gpu.architecture, gpu.has_tensor_cores
    ('Turing', False)
    >>> first_recipe(Gpu("NVIDIA A100-SXM4-80GB", (8, 0))).recipe
    'bf16'

Sources: CUDA C++ Programming Guide, "Compute Capabilities" (which inputs tensor cores take); the white papers of Volta
(FP16), Turing (INT8, INT4), Ampere (BF16, TF32, FP64), Ada and Hopper (FP8) and Blackwell (FP4); NVIDIA's Turing tuning
notes and product pages for TU116 and TU117, which have compute capability 7.5 and no tensor cores. Nothing here queries
a device or imports torch.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from amp_core.text.formatting import join_words

PRECISIONS = ("fp16", "bf16", "tf32", "fp8", "fp4", "int8", "fp64")
"""Inputs that tensor cores of some generation multiply."""

_SINCE = {"fp16": (7, 0), "int8": (7, 2), "bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9), "fp4": (10, 0)}
_FP64 = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})  # data-centre parts alone

_ARCHITECTURES = (  # from this capability on, newest first
    ((10, 0), "Blackwell"),
    ((9, 0), "Hopper"),
    ((8, 9), "Ada Lovelace"),
    ((8, 0), "Ampere"),
    ((7, 5), "Turing"),
    ((7, 0), "Volta"),
    ((6, 0), "Pascal"),
    ((5, 0), "Maxwell"),
    ((3, 0), "Kepler"),
)
_UNKNOWN_MAJOR = 13
"""From this major capability on, nothing is known here."""

_TURING_WITHOUT = re.compile(
    r"""GTX\s?16\d\d                       # GeForce GTX 1630 … 1660 Ti, also Max-Q
      | \bMX\s?(450|550)\b                 # GeForce MX450, MX550
      | \bT(400|500|550|600|1000|1200)\b   # NVIDIA T400 … T1200 and Quadro T1000; not T4
      | Quadro\s+T2000\b
      | \bCMP\s?30HX\b""",
    re.IGNORECASE | re.VERBOSE,
)
"""Names of the parts built from TU116 and TU117."""

_AMD = re.compile(r"\b(AMD|Radeon|Instinct)\b", re.IGNORECASE)
_OTHER_VENDOR = re.compile(
    r"\b(Intel|MetaX|Iluvatar|Moore Threads|MTT|Hygon|DCU|Enflame|GCU|Cambricon|MLU\d*|Biren|Kunlun\w*|Ascend\w*)\b",
    re.IGNORECASE,
)
"""Vendors, or names of their parts, whose devices torch lists like NVIDIA's, some with a compute capability."""
AMD_WARP = 64
"""Threads of a wavefront on AMD's GPUs for computing (CDNA); a warp of NVIDIA's has 32."""
_AMD_PARTS = {
    (9, 0, 120): "AMD Instinct MI100",
    (9, 4, 304): "AMD Instinct MI300X",
    (9, 4, 228): "AMD Instinct MI300A",
    (9, 5, 256): "AMD Instinct MI355X",
}
"""Parts by gfx version and number of compute units, where these identify it (AMD CDNA white papers)."""

_AMD_CORES = (
    (re.compile(r"\bMI100"), "CDNA", ("FP32", "FP16", "BF16")),
    (re.compile(r"\bMI2\d\d"), "CDNA 2", ("FP64", "FP32", "FP16", "BF16")),
    (re.compile(r"\bMI3[0-2]\d"), "CDNA 3", ("FP64", "FP32", "TF32", "FP16", "BF16", "FP8")),
    (re.compile(r"\bMI35\d"), "CDNA 4", ("FP64", "FP32", "FP16", "BF16", "FP8", "FP6", "FP4")),
)
"""Floating-point inputs of the matrix cores of AMD's Instinct parts (AMD CDNA white papers)."""

GPM_SINCE = (9, 0)
"""Hopper: from this capability on NVML has activity counters of the tensor cores (nvml.h, GPM)."""

CPU_BF16 = {
    "amx_bf16": "AMX tiles",
    "avx512_bf16": "AVX512-BF16",
    "avx10_2": "AVX10.2",
    "bf16": "Arm BF16",
    "sve_bf16": "SVE BF16",
    "svebf16": "SVE BF16",
}
"""Names of BF16 instruction sets by their flags in `/proc/cpuinfo`."""
CPU_FP16 = {"amx_fp16": "AMX-FP16 tiles", "avx512_fp16": "AVX512-FP16", "asimdhp": "Arm FP16"}
"""The same for FP16 arithmetic."""


@dataclass(frozen=True)
class Gpu:
    """One GPU by its name and its compute capability."""

    name: str
    capability: tuple[int, int] | None
    """Compute capability; None if it is not known, and for GPUs that are not NVIDIA's."""

    @property
    def known(self) -> bool:
        """Whether it is an NVIDIA GPU of a generation that is listed here."""
        not_nvidia = is_amd(self.name) or is_of_other_vendor(self.name)
        return self.capability is not None and not not_nvidia and self.capability[0] < _UNKNOWN_MAJOR

    @property
    def architecture(self) -> str | None:
        """The generation, e.g. `Ampere`; None if it is not known."""
        if not self.known or self.capability is None:
            return None
        return next((name for since, name in _ARCHITECTURES if self.capability >= since), None)

    @property
    def has_tensor_cores(self) -> bool | None:
        """Whether it has tensor cores: Volta and newer, except the small Turing parts; None for an unknown GPU."""
        if not self.known or self.capability is None:
            return None
        return self.capability >= (7, 0) and not (self.capability == (7, 5) and _TURING_WITHOUT.search(self.name))

    def takes(self, precision: str) -> bool | None:
        """Whether its tensor cores multiply inputs of `precision`; None for an unknown GPU."""
        if not self.has_tensor_cores or self.capability is None:
            return self.has_tensor_cores
        if precision == "fp64":
            return self.capability in _FP64
        since = _SINCE.get(precision)
        return since is not None and self.capability >= since

    @property
    def counts_tensor_use(self) -> bool | None:
        """Whether NVML may have counters of the tensor cores (GPM); None for an unknown GPU."""
        return self.capability >= GPM_SINCE if self.known and self.capability is not None else None

    def in_words(self) -> str:
        """What its tensor cores support, in one sentence."""
        at = f"compute capability {self.capability[0]}.{self.capability[1]}" if self.capability else "this GPU"
        if amd := _amd_cores(self.name):
            generation, inputs = amd
            return f"Matrix cores for {join_words(inputs)} ({generation})."
        if self.has_tensor_cores is None:
            return "Not an NVIDIA GPU of a known generation, so its matrix units are unknown."
        if not self.has_tensor_cores and self.capability == (7, 5):
            return f"No tensor cores, despite {at}: this Turing chip was built without them."
        if not self.has_tensor_cores:
            return f"No tensor cores: they start at compute capability 7.0, and this GPU has {at}."
        here = [p.upper() for p in ("fp16", "bf16", "tf32", "fp8", "fp4") if self.takes(p)]
        missing = [p.upper() for p in ("bf16", "tf32", "fp8") if not self.takes(p)]
        without = f"; not {join_words(missing, 'or')}" if missing else ""
        return f"Tensor cores for {join_words(here)}{without} ({self.architecture}, {at})."


def _amd_cores(name: str) -> tuple[str, tuple[str, ...]] | None:
    """Generation of an Instinct part, and what its matrix cores multiply; None for other GPUs."""
    if not is_amd(name):
        return None
    return next(((generation, inputs) for part, generation, inputs in _AMD_CORES if part.search(name)), None)


@dataclass(frozen=True)
class Advice:
    """The recipe to try first, by its name in `amp_core.train.RECIPES`, and why."""

    recipe: str
    why: str


def gpu_of(name: object, capability: object) -> Gpu:
    """A `Gpu` from a name and a capability such as `8.0` or `(8, 0)`, as run heads and drivers give them."""
    text = str(name or "")
    if isinstance(capability, tuple | list) and len(capability) == 2 and all(isinstance(n, int) for n in capability):
        return Gpu(text, (capability[0], capability[1]))
    match = re.fullmatch(r"(\d{1,2})\.(\d)", str(capability or ""))
    return Gpu(text, (int(match[1]), int(match[2])) if match else None)


def is_amd(name: str) -> bool:
    """Whether a GPU is AMD's, by its name."""
    return _AMD.search(name) is not None


def is_of_other_vendor(name: str) -> bool:
    """Whether a GPU is neither NVIDIA's nor AMD's, by its name."""
    return _OTHER_VENDOR.search(name) is not None


def core_names(name: str) -> tuple[str, str]:
    """What a GPU's vendor calls the units that multiply matrices, and the others: tensor cores and CUDA cores, or on
    AMD's GPUs matrix cores and vector units, as here on those of other vendors. NVIDIA's for an unknown name."""
    is_other = is_amd(name) or is_of_other_vendor(name)
    return ("matrix cores", "vector units") if is_other else ("tensor cores", "CUDA cores")


def amd_name(major: int | None, minor: int | None, units: int | None) -> str:
    """The name of an AMD GPU by its gfx version (9.4 for gfx942) and number of compute units."""
    return _AMD_PARTS.get((major or 0, minor or 0, units or 0), "AMD GPU")


def first_recipe(gpu: Gpu) -> Advice:
    """The recipe to try first on `gpu`."""
    if gpu.has_tensor_cores is None:
        return Advice(
            "bf16", ("It has FP32's range in 16 bits, so nothing needs scaling; compare its speed with FP32 here.")
        )
    if gpu.takes("bf16"):
        return Advice(
            "bf16",
            "Tensor cores run BF16 as fast as FP16, and BF16 has FP32's range: no loss scale, no skipped steps. "
            "Compare it with TF32, the fair FP32 baseline on this GPU.",
        )
    if gpu.has_tensor_cores:
        return Advice(
            "fp16",
            "FP16 is the only 16-bit format of these tensor cores; BF16 would be emulated. FP16 needs a scaler.",
        )
    return Advice(
        "fp32",
        ("Without tensor cores, 16 bits save memory but hardly any time; use fp16 only to fit a model into memory."),
    )


def first_recipe_on_cpu(flags: Collection[str] | None) -> Advice:
    """The recipe to try first on a CPU with these flags of `/proc/cpuinfo`; `flags` is None if they are unknown."""
    if flags is None:
        return Advice("fp32", "This CPU's 16-bit support is unknown; compare bf16 with fp32.")
    for precision in ("bf16", "fp16"):
        if names := cpu_abilities(flags)[precision]:
            scaler = "" if precision == "bf16" else " FP16 needs a scaler."
            return Advice(precision, f"This CPU has {precision.upper()} instructions ({join_words(names)}).{scaler}")
    return Advice("fp32", "This CPU has no 16-bit matrix instructions: 16 bits are emulated, and slower than FP32.")


def cpu_abilities(flags: Collection[str]) -> dict[str, list[str]]:
    """Names of a CPU's instruction sets for `bf16` and `fp16` products; empty lists where it has none."""
    return {
        precision: list(dict.fromkeys(name for flag, name in table.items() if flag in flags))
        for precision, table in (("bf16", CPU_BF16), ("fp16", CPU_FP16))
    }
