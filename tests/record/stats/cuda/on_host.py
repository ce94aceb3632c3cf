"""Launches of the CUDA kernels, run on the host: `host.cpp` compiles the same source, and lends it threads and blocks.

with on_host() as launches:
    packed = measure_cuda([torch.ones(3)])
assert launches == [("fp32", "measure")]
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import torch

from amp_core.record.stats.cuda import program
from amp_core.record.stats.cuda.nvrtc import SOURCE, definitions
from amp_core.record.stats.cuda.table import Table
from tests.compilers import CXX

THREADS = 64
"""Of a block: fewer than on a device, because each is a fiber."""


@contextmanager
def on_host() -> Iterator[list[tuple[str, str]]]:
    """Within this context the CUDA kernels take tensors on the CPU. The list has format and kernel of each launch."""
    launches: list[tuple[str, str]] = []

    def launch(device: torch.device, form: str, name: str, table: Table, results: torch.Tensor) -> None:
        launches.append((form, name))
        library = compiled(form)
        function = ctypes.cast(getattr(library, name), ctypes.c_void_p)
        rows, into = ctypes.c_void_p(table.address), ctypes.c_void_p(results.data_ptr())
        library.launch(function, ctypes.c_uint(table.rows), rows, into)

    with mock.patch.object(program, "launch", launch):
        yield launches


@cache
def compiled(form: str) -> ctypes.CDLL:
    """The kernels for a format."""
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", f"-DTHREADS={THREADS}"]
    source = str(Path(__file__).with_name("host.cpp"))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        assert CXX is not None, "the kernels are compiled from C++, and there is neither g++ nor clang++"
        command = [CXX, *options, *definitions(form), f"-I{SOURCE.parent}", source, "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(library))
