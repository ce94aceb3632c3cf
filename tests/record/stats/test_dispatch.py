"""The choice of the kernel for a statistic, and the fallback if it fails."""

import logging
from typing import Any

import pytest
import torch

from amp_core import load_run
from amp_core.record import backends, watch
from amp_core.record.backends.base import Kernel
from amp_core.record.backends.cpu import Cpu
from amp_core.record.stats import dispatch
from amp_core.record.stats.channels import channel_largest
from amp_core.record.stats.measure import measure_together
from amp_core.record.stats.plain import measure_plain
from tests.record.loops import small_model


class Accelerator(Cpu):
    """The CPU, as a device whose kernels are compiled on first use."""

    may_lack_kernels = True
    error: Exception
    calls = 0

    @classmethod
    def kernels(cls) -> dict[str, Kernel]:  # type: ignore[override]
        def fails(*args: Any) -> torch.Tensor:
            cls.calls += 1
            raise cls.error

        return {"measure": fails, "channels": fails}


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> type[Accelerator]:
    monkeypatch.setitem(backends.BACKENDS, "cpu", Accelerator)
    monkeypatch.setattr(dispatch, "_kernels", {})
    monkeypatch.setattr(dispatch, "fallbacks", {})
    Accelerator.error, Accelerator.calls = RuntimeError("Failed to find C compiler.\nSet CC."), 0
    return Accelerator


def test_plain_torch_replaces_a_kernel_that_fails(
    accelerator: type[Accelerator], caplog: pytest.LogCaptureFixture
) -> None:
    gradient = torch.randn(7, 5)
    for _ in range(3):
        assert torch.equal(measure_together([gradient]), measure_plain(gradient))
        assert torch.equal(channel_largest(gradient, 1), gradient.abs().amax(0))
    assert accelerator.calls == 2  # each kernel was tried once
    assert caplog.text.count("plain torch, which is slower: Failed to find C compiler.") == 1


def test_plain_torch_replaces_kernels_whose_package_is_missing(
    accelerator: type[Accelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernels() -> dict[str, Kernel]:
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(accelerator, "kernels", kernels)
    assert torch.equal(channel_largest(torch.tensor([[1.0, -4.0]]), 1), torch.tensor([1.0, 4.0]))
    assert dispatch.fallbacks == {"cpu": "No module named 'triton'"}


def test_running_out_of_memory_does_not_disable_a_kernel(accelerator: type[Accelerator]) -> None:
    accelerator.error = torch.OutOfMemoryError("CUDA out of memory")
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            measure_together([torch.ones(3)])
    assert accelerator.calls == 2 and dispatch.fallbacks == {}


def test_an_error_of_a_numba_kernel_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> torch.Tensor:
        raise RuntimeError("wrong")

    monkeypatch.setattr(dispatch, "_kernels", {"cpu": {"measure": fails}})
    with pytest.raises(RuntimeError, match="wrong"):
        measure_together([torch.ones(3)])


def test_a_run_without_kernels_has_all_its_tensors_and_one_event(
    accelerator: type[Accelerator], tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    tables = []
    for name in ("a", "b"):  # the second run of the process reports it too
        torch.manual_seed(0)
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with watch(model, optimizer, into=tmp_path / name, every=1):
            for _ in range(3):
                model(torch.randn(4, 24)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        run = load_run(tmp_path / name)
        tables.append(run.tensors())
        reports = run.events[run.events["name"] == "statistics"]
        assert reports.kind.tolist() == ["phase change"] and reports.step.tolist() == [0]
        assert reports.detail.iloc[0].endswith("plain torch, which is slower: Failed to find C compiler.")
        assert not run.events.detail.str.contains("watching failed").any()
    assert {"weight_grad", "output_grad"} <= set(tables[0]["kind"]) and len(tables[0]) == len(tables[1])
    assert "watching failed" not in caplog.text
