"""Limits: no compiler, little memory, a device that falls behind."""

from pathlib import Path

import pytest
import torch
from torch import nn

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.loop import row_writer
from amp_core.record.stats import plain
from amp_core.record.stats.plain import measure_plain
from tests.fake_cuda import kernels, tensors
from tests.fake_cuda.loops import recorded

NO_COMPILER = RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nMore lines")


@pytest.mark.parametrize(
    "missing", [("measure",), ("outputs",), ("outputs", "channels"), ("measure", "channels", "norms", "outputs")]
)
def test_without_a_compiler_everything_is_recorded_and_an_event_says_what_is_slower(
    missing: tuple[str, ...], tmp_path: Path
) -> None:
    with_kernels = recorded(tmp_path / "with", "cuda:0").tensors()
    kernels.failing.update(dict.fromkeys(missing, NO_COMPILER))
    run = recorded(tmp_path / "without", "cuda:0")
    details = run.events[run.events["name"] == "statistics"].detail.tolist()
    reason = "Failed to find C compiler. Please specify via CC environment variable."
    assert details == [f"those on cuda are computed in plain torch, which is slower: {reason}"]
    exact = ["step", "name", "kind", "zero", "inf", "nan", "absmax", "exp_min"]
    assert run.tensors()[exact].equals(with_kernels[exact])
    assert run.tensors()["capped_counts"].notna().any()


def test_plain_torch_measures_in_parts_of_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "CHUNK", 2**16)
    values = torch.randn(2**20)
    before = torch.cuda.memory_stats_as_nested_dict(0)["allocated_bytes"]["all"]["current"]
    torch.cuda.reset_peak_memory_stats(0)
    measure_plain(values)
    peak = torch.cuda.memory_stats_as_nested_dict(0)["allocated_bytes"]["all"]["peak"]
    assert peak - before < 100 * 2**16


def test_only_steps_beyond_the_bound_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_writer, "MAX_WAITING", 3)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 6)
    pending = []
    with watch(model, optimizer, into=tmp_path / "run", every=100) as rec:
        waiting = rec._steps.row_writer._waiting
        for _ in range(12):
            for _ in range(30):  # the device falls behind
                x = x * 1.0
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            pending.append(len(waiting))
    assert max(pending) == pending[-1] == 3
    assert tensors.waits.count("event.synchronize") <= 12 + 6
    assert len(load_run(tmp_path / "run").steps) == 12
