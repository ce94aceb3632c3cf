"""The compiled kernels of a device, loaded once for each format, and their launch.

    >>> launch(torch.device("cuda:0"), "fp16", "measure", stretches, results)

Launches go through the CUDA driver, into the context that torch has on the device and onto its current stream. They do
not depend on the current device of the thread.
"""

import ctypes
import sys
import threading
from functools import cache

import torch

from amp_core.record.backends import backend_of
from amp_core.record.backends.cuda import Cuda
from amp_core.record.stats.cuda.nvrtc import compile_kernels, known_architecture, load_nvrtc
from amp_core.record.stats.cuda.table import Table

THREADS = 512
"""Of a block, as the source has it."""

_lock = threading.Lock()
_loaded: dict[tuple[torch.device, str], ctypes.c_void_p] = {}
_functions: dict[tuple[torch.device, str, str], ctypes.c_void_p] = {}


def launch(device: torch.device, form: str, name: str, table: Table, results: torch.Tensor) -> None:
    """Start the kernel `name` for a format with one block for each row of `table`, whose results `results` takes.

    Compiles what is not compiled yet. Raises `RuntimeError` where the compiler or the driver does.
    """
    function = _functions.get((device, form, name))
    if function is None:
        function = _function(device, form, name)
    stream = ctypes.c_void_p(_backend(device).current_stream().cuda_stream)
    held = (ctypes.c_void_p(table.address), ctypes.c_void_p(results.data_ptr()))
    arguments = (ctypes.c_void_p * len(held))(*(ctypes.cast(ctypes.pointer(a), ctypes.c_void_p) for a in held))
    with _Context(device):
        _check(_driver().cuLaunchKernel(function, table.rows, 1, 1, THREADS, 1, 1, 0, stream, arguments, None))


def prepare(device: torch.device, form: str) -> None:
    """Compile and load the kernels for a format, which takes about a second."""
    with _lock:
        if (device, form) not in _loaded:
            code = _compiled(form, _backend(device).architecture())
            module = ctypes.c_void_p()
            with _Context(device):
                _check(_driver().cuModuleLoadData(ctypes.byref(module), code))
            _loaded[device, form] = module


def _function(device: torch.device, form: str, name: str) -> ctypes.c_void_p:
    prepare(device, form)
    function = ctypes.c_void_p()
    with _Context(device):
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), _loaded[device, form], name.encode()))
    _functions[device, form, name] = function
    return function


@cache
def _compiled(form: str, architecture: str) -> bytes:
    assert torch.version.cuda is not None
    nvrtc = load_nvrtc(torch.version.cuda)
    return compile_kernels(nvrtc, form, known_architecture(nvrtc, architecture))


def _backend(device: torch.device) -> Cuda:
    backend = backend_of(device)
    assert isinstance(backend, Cuda)
    return backend


class _Context:
    """The context that torch has on a device, the primary one, is current on this thread: autograd's may have none."""

    def __init__(self, device: torch.device) -> None:
        self._context = _primary_context(device)

    def __enter__(self) -> None:
        _check(_driver().cuCtxPushCurrent_v2(self._context))

    def __exit__(self, *error: object) -> None:
        _check(_driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))


@cache
def _primary_context(device: torch.device) -> ctypes.c_void_p:
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(number), device.index))
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), number))
    return context


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'error').decode()} ({result})")
