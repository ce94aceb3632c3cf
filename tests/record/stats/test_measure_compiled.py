"""The compiled kernels of `measure` in separate processes: cached code, and the GPU kernel without a GPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import amp_core


def fresh_process(code: str, package: Path, **environment: str) -> str:
    """Run Python code that imports `amp_core` from beside `package`; returns its output."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA", "XDG"))} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=package.parent, env=settings, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_compiled_code_is_reused(tmp_path):
    """Numba never finds the cached code of a kernel whose closure holds other kernels, and then adds a file each
    time."""
    code = (
        "import torch; from amp_core.record.stats.numba import measure as m; torch.set_num_threads(2); m.SHARE = 2048;"
        "assert m.measure_cpu([torch.ones(9000)])[7 + 149] == 9000;"
        "print(sum(m.measure_singles.stats.cache_hits.values()))"
    )
    package = Path(amp_core.__file__).parent
    assert fresh_process(code, package, NUMBA_CACHE_DIR=str(tmp_path)) == "0"
    files = sorted(tmp_path.rglob("*.nbc"))
    assert files and fresh_process(code, package, NUMBA_CACHE_DIR=str(tmp_path)) == "1"
    assert sorted(tmp_path.rglob("*.nbc")) == files


def test_kernels_work_if_no_cache_folder_can_be_written(tmp_path):
    """If neither the installation nor the home folder is writable, kernels are compiled in every process."""
    package = tmp_path / "amp_core"
    shutil.copytree(Path(amp_core.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "record" / "stats" / "numba" / "__pycache__").write_text("a file here: root can write any folder")
    (tmp_path / "home").write_text("")
    code = (
        "import torch; from amp_core.record.stats.numba import measure as m;"
        "from amp_core.record.stats import measure as p;"
        "assert m.measure_cpu([torch.ones(3)])[7 + 149] == 3; print(p.__file__)"
    )
    home = str(tmp_path / "home" / "none")
    printed = fresh_process(code, package, HOME=home, XDG_CACHE_HOME=home, PYTHONDONTWRITEBYTECODE="1")
    assert Path(printed) == package / "record" / "stats" / "measure.py"
    assert not list(tmp_path.rglob("*.nbc"))


TRITON = """
import math, torch
from amp_core.record.stats import plain as plainly
from amp_core.record.stats import measure as measuring
from amp_core.record.stats.triton.channels import channels_cuda
from amp_core.record.stats.channels import Cap
from amp_core.record.stats.triton.measure import measure_cuda

torch.manual_seed(0)
everything = []
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
    bits = torch.randint(0, 256, (3001 * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    if dtype == torch.float64:  # whose squares are finite, so that sums can be compared
        bits = torch.where(bits.isfinite() & (bits.abs() > 1e150), bits.sign(), bits)
    normal = torch.randn(5000).to(dtype)
    tensors = [bits, normal, normal[3:], normal[:2000].reshape(40, 50).t(), torch.zeros(2100).to(dtype), normal[:0]]
    tensors += [torch.cat([torch.zeros(1500), torch.randn(700)]).to(dtype), normal[:1]]
    everything += tensors[::2]
    groups = (tensors, everything) if dtype == torch.float8_e5m2 else (tensors,)  # all dtypes together at the end
    for group in groups:
        packed = measure_cuda(group).split([measuring.packed_size(t.dtype) for t in group])
        for i, (tensor, got) in enumerate(zip(group, packed)):
            plain = plainly.measure_plain(tensor)
            assert torch.equal(got[:5], plain[:5]) and torch.equal(got[7:], plain[7:]), (dtype, i)
            assert torch.allclose(got[5:7], plain[5:7], rtol=1e-12), (dtype, i)

for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
    bits = torch.randint(0, 256, (60 * 50 * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(60, 50)
    if dtype == torch.float64:
        bits = torch.where(bits.isfinite() & (bits.abs() > 1e150), bits.sign(), bits)
    many = torch.randn(40, 70, 9).to(dtype)
    caps = [Cap(torch.randn(60).abs().to(dtype), 50), Cap(torch.randn(70).abs().to(dtype) / 8, 9)]
    caps.append(Cap(caps[1].largest[:9].contiguous(), 1))
    for tensors in ([bits], [bits, many, many]):
        count = len(tensors)
        packed = measure_cuda(tensors, caps[:count]).split([measuring.packed_size(dtype)] * 2 * count)
        for tensor, cap, got, limited in zip(tensors, caps, packed, packed[count:]):
            plain = plainly.measure_plain(tensor)
            assert torch.equal(got[:5], plain[:5]) and torch.equal(got[7:], plain[7:]), dtype
            assert torch.equal(limited[7:], plainly.measure_plain(tensor, cap)[7:]), dtype
    if dtype != torch.float64:
        # Each program is interpreted: the last three are large in one dimension alone, so that a program reads its
        # part several times, in either layout, and a channel is longer than a block.
        shapes = [(7, 300), (300, 7), (3, 5, 11), (2, 3, 5, 7), (1, 1), (130, 3, 20), (2, 3000), (2100, 130)]
        for shape in shapes:
            values = torch.randn(shape).to(dtype)
            for channel in (range(len(shape)) if max(shape) < 1000 else [int(shape[0] > 1000)]):
                inner = math.prod(shape[channel + 1 :])
                wanted = values.abs().amax([d for d in range(len(shape)) if d != channel])
                assert torch.equal(channels_cuda(values, shape[channel], inner), wanted), (dtype, shape, channel)
print("all the same")
"""


def test_the_triton_kernel_measures_correctly_in_tritons_interpreter():
    """The same source on NumPy instead of a GPU, with the same numbers."""
    pytest.importorskip("triton", reason="the CUDA kernel needs triton")
    package = Path(amp_core.__file__).parent
    assert fresh_process(TRITON, package, TRITON_INTERPRET="1") == "all the same"


COMPILE = """
import sys
import time
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from amp_core.record.stats.triton import channels
from amp_core.record.stats.triton import measure as kernel

FORMATS = ("fp32", "fp16", "bf16", "fp64", "fp8-e4m3", "fp8-e5m2")
for form, capped in [(form, False) for form in FORMATS] + [("fp32", True), ("fp16", True)]:
    constants = kernel.constants(form) | {"ALIGNED": True, "CAPPED": capped}
    types = {"table": "*i64", "packed": "*fp64", "packed_bits": "*i64", "stretches": "i32"}
    source = ASTSource(
        fn=kernel._measure_stretches,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs={(kernel._measure_stretches.arg_names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 4})
    assert "ld.global.v" in compiled.asm["ptx"], form  # 16 bytes at a time
for function, types, constants in (
    (channels._beside, {"values": "*i16", "found": "*i32"}, {"ROWS": 16, "COLUMNS": 128}),
    (channels._apart, {"values": "*i16", "found": "*i32", "inner": "i32"}, {"SIZE": 1024}),
):
    types = types | {"channels": "i32", "outer": "i32", "times": "i32"}
    constants = constants | {"FORM": "bf16"}
    source = ASTSource(
        fn=function,
        signature={n: types.get(n, "constexpr") for n in function.arg_names},
        constexprs={(function.arg_names.index(name),): value for name, value in constants.items()},
    )
    triton.compile(source, target=GPUTarget("cuda", 80, 32))
print("compiled")
"""


def test_the_triton_kernel_compiles_without_a_gpu(tmp_path):
    """For an A100: the interpreter accepts code that the compiler refuses."""
    pytest.importorskip("triton", "3.3", reason="before triton 3.3 its compiler is called in another way")
    package = Path(amp_core.__file__).parent
    assert fresh_process(COMPILE, package, TRITON_CACHE_DIR=str(tmp_path)) == "compiled"
