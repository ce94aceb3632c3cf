"""The compiled part of the fake machine: `machine.cpp`, called through `ctypes`."""

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from tests.compilers import CXX

_PLACES = {"device": ctypes.c_int, "stream": ctypes.c_int64, "event": ctypes.c_void_p, "place": ctypes.c_int64}
_FUNCTIONS: dict[str, tuple[object, tuple[str, ...]]] = {
    "fake_set_up": (None, ("device", "stream")),
    "fake_current_device": (ctypes.c_int, ()),
    "fake_set_device": (None, ("device",)),
    "fake_new_stream": (ctypes.c_int64, ()),
    "fake_current_stream": (ctypes.c_int64, ("device",)),
    "fake_set_stream": (None, ("device", "stream")),
    "fake_now": (ctypes.c_int64, ()),
    "fake_waits": (ctypes.c_int64, ()),
    "fake_ordered": (ctypes.c_int, ("device", "stream", "device", "stream", "place")),
    "fake_synchronize": (None, ("device", "stream")),
    "fake_synchronize_device": (None, ("device",)),
    "fake_stream_is_done": (ctypes.c_int, ("device", "stream")),
    "fake_new_event": (ctypes.c_void_p, ()),
    "fake_free_event": (None, ("event",)),
    "fake_record": (None, ("event", "device", "stream")),
    "fake_block": (None, ("event", "device", "stream")),
    "fake_query": (ctypes.c_int, ("event",)),
    "fake_wait": (None, ("event",)),
    "fake_passes_at": (ctypes.c_int64, ("event",)),
}


def build(into: Path) -> None:
    """Compile the library."""
    assert CXX is not None, "the fake CUDA machine is compiled from C++, and there is neither g++ nor clang++"
    at = Path(torch.__file__).parent
    source = Path(__file__).with_name("machine.cpp")
    command = [CXX, "-std=c++20", "-shared", "-fPIC", f"-I{at / 'include'}", str(source), "-o", str(into)]
    linked = [*command, f"-L{at / 'lib'}", "-ltorch_cpu", "-lc10"]
    done = subprocess.run(linked, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{source.name} does not compile against torch {torch.__version__}:\n{done.stderr}")


@cache
def library() -> ctypes.CDLL:
    """The library at the path in `AMPSCOPE_FAKE_CUDA`, else a new build.

    Once it is loaded, torch has devices of type `cuda` until the process ends.
    """
    if built := os.environ.get("AMPSCOPE_FAKE_CUDA"):
        loaded = ctypes.CDLL(built)
    else:
        with tempfile.TemporaryDirectory() as folder:
            build(Path(folder) / "machine.so")
            loaded = ctypes.CDLL(str(Path(folder) / "machine.so"))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, [_PLACES[kind] for kind in arguments]
    loaded.fake_launch.argtypes = [ctypes.c_int, ctypes.c_int64, *[ctypes.POINTER(ctypes.c_int64)] * 2]
    loaded.fake_launch.restype = None
    return loaded


def launch(device: int) -> tuple[int, int, int]:
    """Launch an operator on this thread's current stream of a device.

    Returns the stream, the position there, and the tick at which the operator is done.
    """
    lib = library()
    stream = lib.fake_current_stream(device)
    place, done = ctypes.c_int64(), ctypes.c_int64()
    lib.fake_launch(device, stream, ctypes.byref(place), ctypes.byref(done))
    return stream, place.value, done.value
