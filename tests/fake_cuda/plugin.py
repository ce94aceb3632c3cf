"""A pytest plugin: `pytest --whole -p tests.fake_cuda.plugin FILE` runs a file's tests on a fake CUDA machine.

Tests that were written for the CPU run unchanged: tensors that they create without a device are on `cuda:0`, and their
autocast regions and scalers are those of CUDA. A race between streams fails a test.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from tests.fake_cuda import kernels, runtime, tensors

runtime.install(devices=2)


class OnCuda(TorchFunctionMode):
    """Tensors are created on the current CUDA device by default, as under `torch.set_default_device`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor):  # they fill memory without the dispatcher
            device = kwargs.pop("device", None) or "cuda"
            with torch._C.DisableTorchFunctionSubclass():
                made = function(*args, **kwargs)
            return made if torch.device(device).type == "cpu" else made.to(device).requires_grad_(made.requires_grad)
        if function not in _device_constructors() or kwargs.get("device") is not None or function is torch.Generator:
            return function(*args, **kwargs)
        if kwargs.get("generator") is not None:  # the tests' generators are the host's
            return function(*args, **kwargs).to("cuda")
        return function(*args, **(kwargs | {"device": "cuda"}))


def _on_cuda(init: Any) -> Any:
    parameter = next(name for name in inspect.signature(init).parameters if name != "self")

    def redirected(self: Any, *args: Any, **kwargs: Any) -> None:
        device = args[0] if args else kwargs.pop(parameter, "cuda")
        init(self, "cuda" if device == "cpu" else device, *args[1:], **kwargs)

    return redirected


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that were written for the CPU run here with `--whole` only."""
    for item in items:
        if not item.path.name.startswith("cases_"):
            item.add_marker("whole")


@pytest.fixture(autouse=True)
def _fake_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset the machine."""
    from amp_core.record.backends.cuda import Cuda
    from amp_core.record.stats import dispatch

    monkeypatch.setattr(Cuda, "kernels", staticmethod(kernels.kernels))
    monkeypatch.setattr(dispatch, "_kernels", {})
    monkeypatch.setattr(dispatch, "fallbacks", {})
    monkeypatch.setattr(torch.autocast, "__init__", _on_cuda(torch.autocast.__init__))
    monkeypatch.setattr(torch.amp.GradScaler, "__init__", _on_cuda(torch.amp.GradScaler.__init__))
    kernels.failing.clear()
    for record in (tensors.races, tensors.waits, tensors.launches):
        record.clear()
    runtime.manual_seed_all(0)
    with OnCuda():
        yield
    torch.cuda.set_device(0)
    assert not tensors.races, tensors.races[:5]
