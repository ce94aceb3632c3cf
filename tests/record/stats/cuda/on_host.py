"""Launches of the CUDA kernels on the host: `host.cpp` compiles the same source and lends it threads and blocks, and
`driver.cpp` stands in for the driver, so that `program` runs as it does on a GPU.

with on_host() as launches:
    packed = measure_cuda([torch.ones(3)])
assert launches == [("fp32", "measure")]
"""

import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from amp_core.record.stats.cuda import program
from amp_core.record.stats.cuda.nvrtc import SOURCES, definitions
from amp_core.record.stats.cuda.table import Table
from tests.compilers import CXX

THREADS = 64
"""Of a block: fewer than on a device, because each is a fiber."""
STREAM = 0xABC
"""The handle of the current stream of every device."""


@contextmanager
def on_host() -> Iterator[list[tuple[str, str]]]:
    """Within this context the CUDA kernels take tensors on the CPU. The list has format and kernel of each launch."""
    launches: list[tuple[str, str]] = []
    launch = program.launch

    def noted(device: torch.device, form: str, name: str, table: Table, results: torch.Tensor) -> None:
        launches.append((form, name))
        launch(device, form, name, table, results)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(program, "launch", noted))
        stack.enter_context(with_driver())
        yield launches


@contextmanager
def with_driver() -> Iterator[ctypes.CDLL]:
    """Within this context launches go to the driver of `driver.cpp`, which has two devices."""
    found = driver()
    stream = SimpleNamespace(cuda_stream=STREAM)
    backend = SimpleNamespace(current_stream=lambda: stream, architecture=lambda: "sm_90")
    changed = {
        "_driver": lambda: found,
        "_compiled": lambda form, architecture: bytes(compiled(form)),
        "_primary_context": program._primary_context.__wrapped__,
        "_backend": lambda device: backend,
        "_loaded": {},
        "_functions": {},
    }
    with mock.patch.multiple(program, **changed):
        yield found


@cache
def driver() -> ctypes.CDLL:
    """The stub of the driver."""
    return ctypes.CDLL(str(_built("driver", "driver.cpp", ["-ldl"])))


@cache
def compiled(form: str) -> Path:
    """The library with the kernels for a format."""
    definitions_of = [f"-DTHREADS={THREADS}", *definitions(form), f"-I{SOURCES[0].parent}"]
    return _built(f"kernels-{form}", "host.cpp", ["-ffp-contract=off", *definitions_of])


def _built(name: str, source: str, options: list[str]) -> Path:
    library = _folder() / f"{name}.so"
    assert CXX is not None, "the kernels are compiled from C++, and there is neither g++ nor clang++"
    source = str(Path(__file__).with_name(source))
    command = [CXX, "-std=c++17", "-O1", "-fPIC", "-shared", source, *options, "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="ampscope-kernels-")
    _folders.append(folder)  # removed when the process ends
    return Path(folder.name)


_folders: list[tempfile.TemporaryDirectory[str]] = []
