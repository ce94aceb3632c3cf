"""Loading and launching kernels through a driver that holds to CUDA's rules: contexts, modules, streams, errors."""

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from amp_core.record.stats import dispatch
from amp_core.record.stats.cuda import nvrtc, program
from amp_core.record.stats.cuda.measure import measure_cuda
from amp_core.record.stats.cuda.table import on_device, stretches
from amp_core.record.stats.layout import packed_size
from tests.compilers import needs_cxx
from tests.record.stats.cuda.on_host import STREAM, with_driver

pytestmark = needs_cxx

VALUES = torch.tensor([1.0, -2.0, 0.0, torch.inf])


@pytest.fixture
def driver() -> Iterator[Any]:
    with with_driver() as found:
        yield found
        found.stub_fail(0)


def zeros_of(index: int) -> float:
    """Launch `measure` on a device; the number of zeros in `VALUES` that it counts."""
    made = stretches([4], [VALUES.data_ptr()], 4, out=[0], ticket=[packed_size(torch.float32)])
    (table,), _ = on_device([made], 0, torch.device("cpu"))
    results = torch.zeros(packed_size(torch.float32) + 1, dtype=torch.float64)
    program.launch(torch.device("cuda", index), "fp32", "measure", table, results)
    return float(results[0])


@pytest.mark.parametrize("index", [0, 1])
def test_a_launch_uses_context_and_stream_of_its_device(index: int, driver: Any) -> None:
    assert zeros_of(index) == 1
    assert (driver.stub_device(), driver.stub_stream(), driver.stub_depth()) == (index, STREAM, 0)


def test_the_context_that_another_library_made_current_stays_so(driver: Any) -> None:
    driver.cuCtxPushCurrent_v2(program._primary_context(torch.device("cuda:0")))
    assert zeros_of(1) == 1 and driver.stub_device() == 1 and driver.stub_depth() == 1
    driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def test_a_thread_without_a_context_launches(driver: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(zeros_of, 1).result() == 1 and pool.submit(driver.stub_depth).result() == 0


def test_kernels_are_loaded_once_for_each_device_and_format(driver: Any) -> None:
    before = driver.stub_modules()
    together = threading.Barrier(4)

    def work(index: int) -> float:
        together.wait()
        return zeros_of(index % 2)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [1] * 4
    assert driver.stub_modules() - before == 2


def test_an_error_of_the_driver_is_raised_and_leaves_no_context(driver: Any) -> None:
    zeros_of(0)
    driver.stub_fail(201)
    with pytest.raises(RuntimeError, match=r"invalid device context \(201\)"):
        zeros_of(0)
    assert driver.stub_depth() == 0


def test_an_image_that_the_driver_refuses_is_an_error(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_compiled", lambda form, architecture: b"/no/such/image")
    with pytest.raises(RuntimeError, match="image is invalid"):
        zeros_of(0)


@pytest.mark.parametrize("missing", ["compiler", "driver"])
def test_without_compiler_or_driver_plain_torch_measures(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(program, "_backend", lambda device: SimpleNamespace(architecture=lambda: "sm_90"))
    if missing == "compiler":
        monkeypatch.setattr(torch.version, "cuda", "99.1")
        monkeypatch.setattr(program, "_compiled", program._compiled.__wrapped__)
    else:
        monkeypatch.setattr(program, "_compiled", lambda form, architecture: b"")
    monkeypatch.setattr(program, "_driver", no_driver)
    monkeypatch.setattr(dispatch, "_kernels", {"cuda": {"measure": measure_cuda}})
    monkeypatch.setattr(dispatch, "fallbacks", {})
    assert dispatch.by_kernel("measure", "cuda", [VALUES]) is None
    assert ("libnvrtc.so.99" if missing == "compiler" else "libcuda.so.1") in dispatch.fallbacks["cuda"]
    assert "measure" not in dispatch._kernels["cuda"]


class Compiler:
    """An NVRTC that knows some generations."""

    def __init__(self, *known: int) -> None:
        self._known = known

    def nvrtcGetNumSupportedArchs(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._known)
        return 0

    def nvrtcGetSupportedArchs(self, known: Any) -> int:  # noqa: N802
        known[:] = self._known
        return 0


@pytest.mark.parametrize(
    ("gpu", "compiled"),
    [("sm_90", "sm_90"), ("sm_103", "sm_100"), ("sm_121", "sm_120"), ("sm_89", "sm_89"), ("sm_70", "sm_70")],
)
def test_a_gpu_newer_than_the_compiler_gets_the_code_of_its_generation(gpu: str, compiled: str) -> None:
    known: Any = Compiler(75, 80, 86, 89, 90, 100, 120)
    assert nvrtc.known_architecture(known, gpu) == compiled


@pytest.mark.parametrize(
    "place", ["site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "site/torch/lib/libnvrtc-672ee683.so.12.1", "toolkit"]
)
def test_the_compiler_is_found_where_torch_builds_have_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / ("cuda/lib64/libnvrtc.so.12" if place == "toolkit" else place)
    path.parent.mkdir(parents=True)
    builtins = path.parent / "libnvrtc-builtins-07fb.so.12.1"
    for file in (path, builtins):
        file.touch()
    opened = []

    def load(name: str) -> str:
        opened.append(name)
        if name not in (str(path), str(builtins)):
            raise OSError(name)
        return "library"

    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", load)
    assert nvrtc.load_nvrtc("12.8") == "library"
    assert opened == ["libnvrtc.so.12", str(builtins), str(path)]
