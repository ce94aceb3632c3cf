"""Signals whose numbers are late: the host waits for the oldest alone, and for no more than is needed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from amp_core.record.observers.signals import nonfinite_outputs, output_sizes, state
from amp_core.store.writer import RunWriter

CPU = torch.device("cpu")


class Late:
    """A transfer that arrives when somebody waits for it."""

    def ready(self, wait: bool = False) -> bool:
        return wait

    def values(self, key: str) -> Any:
        return np.ones(2)

    def joined(self, keys: list[str]) -> Any:
        return np.ones(2)


@pytest.fixture
def writer(tmp_path: Path) -> RunWriter:
    return RunWriter(tmp_path / "run")


@pytest.mark.parametrize("too_many", [1, 3])
def test_the_host_waits_for_as_many_as_are_too_many(writer: RunWriter, too_many: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    late: Any = Late()
    statistics = state.RunningStatistics(writer, model)
    forward = nonfinite_outputs.ForwardCheck(writer, model, CPU, each_step=False)
    outputs = forward._sizes
    statistics._sent = [(0, ["a", "b"], ["sizes"], late) for _ in range(state.EVERY + too_many)]
    most = nonfinite_outputs.ARMED_STEPS
    measured = [(0, torch.float32), (1, torch.float32)]
    outputs._sent = [output_sizes._Sent(0, measured, ["sizes"], late) for _ in range(most + too_many)]
    statistics._buffers = [(n, b.to("meta")) for n, b in statistics._buffers]  # as on a device: not read at every step
    for observer in (statistics, forward):
        observer.step_ended(1)
    assert (len(statistics._sent), len(outputs._sent)) == (state.EVERY, most)
    for observer in (statistics, forward):
        observer.close()
    assert not (statistics._sent or outputs._sent)
    writer.close()
