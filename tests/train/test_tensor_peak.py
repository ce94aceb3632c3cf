"""The peak of a step's tensors compared with torch's own tracker, on fake tensors."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from amp_core.forecast import forecast, memory_needed
from amp_core.settings.training import TrainConfig
from amp_core.train.step_on_fake_tensors import traced
from amp_core.train.workloads import Workload


class Stack(nn.Module):
    """Blocks between an entry and a head, each under a checkpoint if asked."""

    def __init__(self, entry, blocks, head, checkpointed):
        super().__init__()
        self.entry, self.blocks, self.head, self.checkpointed = entry, nn.ModuleList(blocks), head, checkpointed

    def forward(self, x):
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


class Conv(nn.Sequential):
    def __init__(self, channels):
        super().__init__(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(128, 128, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


def transformer(width, dropout):
    return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True, norm_first=True)


MODELS = {
    "mlp": lambda c: (
        Stack(nn.Linear(64, 512), [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)],
              nn.Linear(512, 10), c), torch.empty(256, 64)),
    "convolutions": lambda c: (
        Stack(nn.Conv2d(3, 32, 3), [Conv(32) for _ in range(4)],
              nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), c), torch.empty(16, 3, 34, 34)),
    "transformer": lambda c: (
        Stack(nn.Embedding(1000, 128), [transformer(128, 0.0) for _ in range(2)], nn.Linear(128, 10), c),
        torch.ones(8, 64, dtype=torch.long)),
    "dropout": lambda c: (
        Stack(nn.Linear(128, 128), [transformer(128, 0.1) for _ in range(2)], nn.Linear(128, 10), c),
        torch.empty(8, 96, 128)),
    "recurrent": lambda c: (
        Stack(nn.Linear(128, 128), [Recurrent() for _ in range(2)], nn.Linear(128, 10), c), torch.empty(64, 8, 128)),
}  # fmt: skip


def loss_fn(model, batch):
    logits = model(batch).flatten(0, -2)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


def tracked(name, amp_dtype, checkpointed):
    """Peak of a later step by torch's tracker, of fake tensors."""
    with FakeTensorMode():
        model, batch = MODELS[name](checkpointed)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

        def step():
            with torch.autocast("cpu", dtype=amp_dtype) if amp_dtype else nullcontext():
                loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()

        step()
        optimizer.zero_grad()
        tracker = MemTracker()
        tracker.track_external(model, optimizer, batch)
        with tracker:
            step()
        return sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())


def check(name, amp_dtype, checkpointed):
    model, batch = MODELS[name](checkpointed)
    workload = Workload(model, [batch], loss_fn)
    config = TrainConfig(workload="text-gpt", size="tiny", optimizer="adamw").resolved()
    step = traced(config, workload, batch, name, amp_dtype is not None)
    assert step.memory.peak == pytest.approx(tracked(name, amp_dtype, checkpointed), rel=0.05)
    low, high = memory_needed(step)
    assert low < step.memory.peak + 1.2e9 < high + 1e9 and high < 1.25 * step.memory.peak + 1.3e9
    return step.memory.peak


@pytest.mark.parametrize("amp_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_peak_is_that_of_torchs_tracker(amp_dtype):
    assert check("transformer", amp_dtype, True) < check("transformer", amp_dtype, False)


@pytest.mark.whole
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("amp_dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "transformer"])
def test_the_peak_of_every_other_model_is_that_of_torchs_tracker(name, amp_dtype, checkpointed):
    check(name, amp_dtype, checkpointed)


def test_the_peak_in_fp16_is_that_of_torchs_tracker():
    check("mlp", torch.float16, True)  # a value has as many bytes as in BF16, which the other tests compare


def test_the_peak_of_another_batch_follows_from_the_traced_one_and_is_what_the_largest_batch_fits():
    def step_of(samples):
        model, batch = MODELS["transformer"](False)
        batch = torch.cat([batch] * (samples // len(batch)))
        workload = Workload(model, [batch], loss_fn)
        config = TrainConfig(workload="text-gpt", size="tiny", optimizer="adamw").resolved()
        return traced(config, workload, batch, "transformer", True)

    few = len(MODELS["transformer"](False)[1])
    small, large = step_of(few), step_of(8 * few)
    assert small.memory.peak_per_sample > 0
    assert memory_needed(small, 8 * few) == pytest.approx(memory_needed(large), rel=0.02)
    assert memory_needed(small, 8 * few)[0] - 0.4e9 == pytest.approx(large.memory.peak, rel=0.02)


def test_a_model_that_takes_one_size_of_batch_alone_is_forecast_with_a_note():
    model, batch = MODELS["transformer"](False)

    def of_one_size(model, given):
        if len(given) != len(batch):
            raise ValueError("one size alone")
        return loss_fn(model, given)

    config = TrainConfig(workload="text-gpt", size="tiny", optimizer="adamw").resolved()
    steps = [traced(config, Workload(model, [batch], of_one_size), batch, "transformer", amp) for amp in (False, True)]
    assert steps[0].memory.peak_per_sample is None and steps[0].memory.refused == "ValueError: one size alone"
    result = forecast(tuple(steps), ["A100"])
    assert "one size alone" in result.notes[-1] and result.table["batch_high"].notna().all()
