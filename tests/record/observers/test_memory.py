"""The parts of a step's memory, measured by its storages."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_core import load_run
from amp_core.record.backends import backend_of
from amp_core.record.backends.cuda import Cuda
from amp_core.record.observers import memory as watching
from amp_core.record.observers.memory import MemoryWatch
from amp_core.store.writer import RunWriter
from tests.record.memory_loop import (
    BATCH,
    BF16,
    BUFFERS,
    CLASSES,
    CPU,
    FP32,
    HIDDEN,
    PARAMETERS,
    WIDTH,
    model,
    recorded,
)


def at(run, moment, step=1, last=True):
    rows = run.memory[(run.memory.step == step) & (run.memory.moment == moment)]
    return rows.iloc[-1 if last else 0]


def test_the_bytes_of_each_category_are_those_of_its_tensors(tmp_path):
    run, _, _ = recorded(tmp_path)
    begin, loss, end = at(run, "step begins"), at(run, "loss computed"), at(run, "step ends")
    assert begin.parameters_bytes == PARAMETERS * FP32 and begin.buffers_bytes == BUFFERS
    assert begin.gradients_bytes == 0 and end.gradients_bytes == PARAMETERS * FP32
    assert begin.optimizer_bytes == 2 * PARAMETERS * FP32 + 4 * 6  # two moments each, and a count of steps
    # saved: the input, ReLU's output, BatchNorm's mean, deviation and output, log-softmax, targets and their weight
    activations = (
        FP32 * (BATCH * WIDTH + BATCH * HIDDEN + 2 * HIDDEN + BATCH * HIDDEN + BATCH * CLASSES + 1) + 8 * BATCH
    )
    assert begin.activations_bytes == 0 and loss.activations_bytes == activations
    of_the_loss = FP32 * (BATCH * CLASSES + 1) + 8 * BATCH  # freed when the first gradient of the output arrives
    assert at(run, "backward begins").activations_bytes == activations - of_the_loss
    assert at(run, "backward ends").activations_bytes == 0 == end.autocast_bytes
    assert (run.memory.allocated_bytes > 50 * 2**20).all() and run.memory.peak_bytes.isna().all()
    assert run.memory.device.unique().tolist() == ["cpu"]


def test_autocast_halves_activations_and_adds_copies_of_weights(tmp_path):
    run, _, _ = recorded(tmp_path, dtype=torch.bfloat16)
    plain, _, _ = recorded(tmp_path / "fp32")
    backward = at(run, "backward begins")
    assert backward.autocast_bytes == HIDDEN * CLASSES * BF16  # the first layer's input needs no gradient
    assert backward.activations_bytes < 0.75 * at(plain, "backward begins").activations_bytes
    assert backward.parameters_bytes == PARAMETERS * FP32
    assert at(plain, "backward begins").autocast_bytes == 0


def test_moments_are_in_order_and_memory_grows_and_shrinks(tmp_path):
    run, _, _ = recorded(tmp_path)
    rows = run.memory
    assert rows.number.tolist() == list(range(len(rows)))
    assert rows.moment.tolist() == [
        "step begins",
        *["module"] * 4,
        "forward ends",
        "loss computed",
        "backward begins",
        *["gradient"] * 6,
        "backward ends",
        "optimizer begins",
        "step ends",
    ]
    assert rows[rows.moment == "module"].name.tolist() == ["0", "1", "2", "3"]
    assert rows[rows.moment == "gradient"].name.tolist()[0] in ("3.weight", "3.bias")
    assert rows.phase.tolist() == ["forward"] * 8 + ["backward"] * 7 + ["optimizer"] * 2
    forward, backward = rows[rows.phase == "forward"], rows[rows.phase == "backward"]
    assert forward.activations_bytes[:-1].is_monotonic_increasing
    assert backward.activations_bytes.is_monotonic_decreasing and backward.gradients_bytes.is_monotonic_increasing


def test_gradients_stay_allocated_during_later_micro_batches(tmp_path):
    run, _, _ = recorded(tmp_path, micro=3)
    first, last = at(run, "backward begins", last=False), at(run, "backward begins")
    assert first.gradients_bytes == 0 and last.gradients_bytes == PARAMETERS * FP32
    assert first.activations_bytes == last.activations_bytes > 0
    assert (run.memory.moment == "backward begins").sum() == 3
    assert (run.memory[run.memory.moment == "module"].phase == "forward").all()


def test_checkpointed_activations_do_not_count_as_saved(tmp_path):
    net = model()
    run, _, _ = recorded(tmp_path, net=net, forward=lambda x: checkpoint(net, x, use_reentrant=False))
    whole, _, _ = recorded(tmp_path / "whole")
    kept = at(run, "backward begins").activations_bytes
    assert 0 < kept < 0.6 * at(whole, "backward begins").activations_bytes


def test_a_step_without_a_forward_of_the_model_has_null_and_not_zero(tmp_path):
    net, optimizer = model(), None
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with RunWriter(tmp_path / "run") as writer:
        observer = MemoryWatch(writer, net, [optimizer], CPU, lambda step: True)
        loss = net(torch.randn(BATCH, WIDTH)).sum()
        observer.step_began(0)
        observer.backward_began()
        loss.backward()
        observer.called("optimizer.step", 0)
        observer.step_ended(0)
    rows = load_run(tmp_path / "run").memory
    assert rows[rows.moment == "backward begins"].activations_bytes.isna().all()


def test_very_deep_and_wide_models_have_few_moments(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "MAX_MODULES", 3)
    monkeypatch.setattr(watching, "MAX_GRADIENTS", 2)
    net = nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)], nn.Linear(WIDTH, CLASSES)
    )
    run, _, _ = recorded(tmp_path, net=net)
    assert (run.memory.moment == "module").sum() <= 3
    assert (run.memory.moment == "gradient").sum() <= 4
    everything = sum(p.numel() for p in net.parameters()) * FP32
    assert at(run, "backward ends").gradients_bytes == everything
    last = run.memory[run.memory.moment == "gradient"].iloc[-1]
    assert last.gradients_bytes >= 0.9 * everything  # all gradients arrive, recorded or not


class Allocator:
    """A fake of torch's CUDA allocator: its readings are pairs (current, peak since the last reset)."""

    def __init__(self, readings):
        self.readings, self.resets = list(readings), 0

    def stats(self, device):
        now, peak = self.readings[0] if len(self.readings) == 1 else self.readings.pop(0)
        return {
            "allocated_bytes": {"all": {"current": now, "peak": peak}},
            "reserved_bytes": {"all": {"current": 2 * peak}},
        }

    def reset(self, device):
        self.resets += 1


def test_on_cuda_each_moment_has_its_own_peak_and_the_run_keeps_the_highest(tmp_path, monkeypatch):
    device = torch.device("cuda:0")
    later = [(150, 500), (150, 150), (150, 150), (150, 200)]
    allocator = Allocator([(100, 900), (100, 120), (300, 450), (310, 310), *later])
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", allocator.stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", allocator.reset)
    net = model()
    with RunWriter(tmp_path / "run") as writer:
        observer = MemoryWatch(writer, net, [], device, lambda step: True)
        monkeypatch.setattr(observer, "_attach", lambda: None)  # the model is on the CPU
        observer.step_began(0)
        observer.forward_ended(None)
        observer.backward_began()
        observer.backward_ended()
        observer.called("optimizer.step", 0)
        backend = backend_of(device)
        assert backend.memory_bytes() == (150, 900)  # a peak before the step, which the peak of the run must include
        observer.step_ended(0)
        observer.close()
        assert backend.memory_bytes() == (150, 200)
    rows = load_run(tmp_path / "run").memory
    assert rows.allocated_bytes.tolist() == [100, 300, 310, 150, 150, 150]
    assert rows.peak_bytes.tolist() == [120, 450, 310, 500, 150, 200]
    assert rows.reserved_bytes.tolist() == [240, 900, 620, 1000, 300, 400]
    assert allocator.resets == len(rows) + 1


def test_cuda_memory_is_that_of_the_allocator_and_includes_peaks_before_a_reset(monkeypatch):
    device = torch.device("cuda:0")
    held = {"allocated_bytes": {"all": {"current": 5, "peak": 7}}}
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict", lambda asked_device: held if asked_device == device else {}
    )
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda asked_device: held["allocated_bytes"]["all"].update(peak=5)
    )
    held["reserved_bytes"] = {"all": {"current": 20}}
    gpu = Cuda(device)
    assert gpu.memory_bytes() == (5, 7)
    assert gpu.read_allocator() == (5, 7, 20) and gpu.read_allocator() == (5, 5, 20)
    assert gpu.memory_bytes() == (5, 7)
    gpu.forget_readings()
    assert gpu.memory_bytes() == (5, 5)
