"""NVRTC, NVIDIA's compiler as a library: CUDA C++ to the machine code of one generation of GPUs.

    >>> code = compile_kernels(load_nvrtc("13.0"), "fp16", "sm_90")

It needs no GPU, no C compiler and no header.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from amp_core.formats import FORMATS
from amp_core.quantization import EIGHTHS, FINE_OCTAVES, OCTAVES

SOURCES = [Path(__file__).with_name(name) for name in ("kernels.cu", "blocks.cu")]
"""One after the other they are one program."""
NAMES = {"fp64": "Fp64", "fp32": "Fp32", "fp16": "Fp16", "bf16": "Bf16", "fp8-e4m3": "E4m3", "fp8-e5m2": "E5m2"}
"""Formats that the kernels know, and their names in the source."""


def load_nvrtc(cuda_version: str) -> ctypes.CDLL:
    """The library of torch's own CUDA, such as "12.8" (`torch.version.cuda`). Raises `OSError` where there is none."""
    major = cuda_version.partition(".")[0]
    if sys.platform == "win32":
        return ctypes.CDLL(f"nvrtc64_{major}0_0.dll")
    name = "libnvrtc.so.11.2" if major == "11" else f"libnvrtc.so.{major}"
    try:
        return ctypes.CDLL(name)
    except OSError:  # torch loads it from its own packages, and only when it first needs it
        for path in _installed(name, major):
            return open_package(path)
        raise


def _installed(name: str, major: str) -> Iterator[Path]:
    """The library in NVIDIA's packages, in torch's own folder (some builds carry it), or in the CUDA toolkit."""
    for folder in map(Path, sys.path):
        yield from (folder / "nvidia").glob(f"*/lib/{name}")
        carried = (folder / "torch" / "lib").glob(f"libnvrtc-*.so.{major}*")
        yield from (path for path in carried if "builtins" not in path.name)
    toolkit = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    yield from toolkit.glob(f"lib64/{name}")


def open_package(library: Path) -> ctypes.CDLL:
    """The NVRTC of an installed package, after its builtins, which that of CUDA 13.0 does not find beside itself."""
    for builtins in library.parent.glob("libnvrtc-builtins*.so*"):
        ctypes.CDLL(str(builtins))
    return ctypes.CDLL(str(library))


def known_architecture(nvrtc: ctypes.CDLL, architecture: str) -> str:
    """The newest generation that the compiler knows and whose machine code runs on `architecture`: of the same major
    version and not newer, such as `sm_100` for `sm_103` with CUDA 12.8. `architecture` itself where there is none.
    """
    count = ctypes.c_int()
    _check(nvrtc, nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    known = (ctypes.c_int * count.value)()
    _check(nvrtc, nvrtc.nvrtcGetSupportedArchs(known))
    wanted = int(architecture.removeprefix("sm_"))
    usable = [number for number in known if number // 10 == wanted // 10 and number <= wanted]
    return f"sm_{max(usable, default=wanted)}"


def compile_kernels(nvrtc: ctypes.CDLL, form: str, architecture: str) -> bytes:
    """The kernels for a format (`fp16`) as machine code (a cubin) for `architecture` (`sm_90`).

    Raises `RuntimeError` with what the compiler says.
    """
    options = [f"--gpu-architecture={architecture}", *definitions(form)]
    program = ctypes.c_void_p()
    source = b"\n".join(path.read_bytes() for path in SOURCES)
    _check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None))
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            raise RuntimeError(f"NVRTC: {_text(nvrtc, program, 'ProgramLog').decode().strip()}")
        return _text(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def definitions(form: str) -> list[str]:
    """What the source is compiled with for a format."""
    values = {"FORMAT": NAMES[form], "BITS": FORMATS[form].bits}
    values |= {"EIGHTHS": EIGHTHS, "FINE_OCTAVES": FINE_OCTAVES, "OCTAVES": OCTAVES}
    return [f"-D{name}={value}" for name, value in values.items()]


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    held = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, held))
    return held.raw


def _check(nvrtc: ctypes.CDLL, result: int) -> None:
    if result:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {nvrtc.nvrtcGetErrorString(result).decode()}")
