"""What a step's memory is made of, measured by the storages; and nothing changes by asking."""

import gc
import signal
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_core import load_run
from amp_core.record import attempt
from amp_core.record import memory as watching
from amp_core.record.memory import MemoryWatch, sampled
from amp_core.record.observers import Observer
from amp_core.record.storages import Saved, hooks_are_on, is_cast_of_weight, storage_of, storages
from amp_core.runlog import RunWriter

CPU = torch.device("cpu")
WIDTH, HIDDEN, BATCH, CLASSES = 32, 64, 16, 10
FP32, BF16 = 4, 2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, CLASSES))


PARAMETERS = WIDTH * HIDDEN + HIDDEN + 2 * HIDDEN + HIDDEN * CLASSES + CLASSES
BUFFERS = 2 * HIDDEN * FP32 + 8  # running mean and variance, and a counter of 64 bits


def train(observer: Observer | None, net: nn.Module, optimizer, *, steps=2, dtype=None, micro=1, forward=None):
    """A loop that tells an observer its moments as the recorder does; the losses."""
    losses = []
    data = torch.Generator().manual_seed(1)
    tell = observer or Observer()
    for step in range(steps):
        for i in range(micro):
            x = torch.randn(BATCH, WIDTH, generator=data)
            y = torch.randint(0, CLASSES, (BATCH,), generator=data)
            if i == 0:
                tell.step_began(step)
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                out = (forward or net)(x)
                tell.forward_ended(out)
                loss = nn.functional.cross_entropy(out, y)
            out.register_hook(lambda grad: tell.backward_began())
            loss.backward()
            tell.backward_ended()
            losses.append(loss.item())
        tell.called("optimizer.step", 0)
        optimizer.step()
        tell.step_ended(step)
        optimizer.zero_grad()
    return losses


def recorded(tmp_path, *, dtype=None, net=None, due=sampled, **options):
    net = net or model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    with RunWriter(tmp_path / "run") as writer:
        observer = MemoryWatch(writer, net, [optimizer], CPU, due)
        losses = train(observer, net, optimizer, dtype=dtype, **options)
        observer.close()
    run = load_run(tmp_path / "run")
    run.validate(full=True)
    return run, losses, net


def at(run, moment, step=1, last=True):
    rows = run.memory[(run.memory.step == step) & (run.memory.moment == moment)]
    return rows.iloc[-1 if last else 0]


def test_what_is_held_is_what_the_tensors_say(tmp_path):
    run, _, _ = recorded(tmp_path)
    begin, loss, end = at(run, "step begins"), at(run, "loss computed"), at(run, "step ends")
    assert begin.parameters_bytes == PARAMETERS * FP32 and begin.buffers_bytes == BUFFERS
    assert begin.gradients_bytes == 0 and end.gradients_bytes == PARAMETERS * FP32
    assert begin.optimizer_bytes == 2 * PARAMETERS * FP32 + 4 * 6  # two moments each, and a count of steps
    # kept: input and ReLU's output, BatchNorm's mean and deviation and output, log-softmax, targets and their weight
    activations = (
        FP32 * (BATCH * WIDTH + BATCH * HIDDEN + 2 * HIDDEN + BATCH * HIDDEN + BATCH * CLASSES + 1) + 8 * BATCH
    )
    assert begin.activations_bytes == 0 and loss.activations_bytes == activations
    of_the_loss = FP32 * (BATCH * CLASSES + 1) + 8 * BATCH  # gone when the first gradient of the output is seen
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


def test_moments_follow_one_another_and_memory_grows_and_falls(tmp_path):
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


def test_micro_batches_add_up_gradients_under_activations(tmp_path):
    run, _, _ = recorded(tmp_path, micro=3)
    first, last = at(run, "backward begins", last=False), at(run, "backward begins")
    assert first.gradients_bytes == 0 and last.gradients_bytes == PARAMETERS * FP32
    assert first.activations_bytes == last.activations_bytes > 0
    assert (run.memory.moment == "backward begins").sum() == 3
    assert (run.memory[run.memory.moment == "module"].phase == "forward").all()


def test_checkpointed_activations_are_not_kept(tmp_path):
    net = model()
    run, _, _ = recorded(tmp_path, net=net, forward=lambda x: checkpoint(net, x, use_reentrant=False))
    whole, _, _ = recorded(tmp_path / "whole")
    kept = at(run, "backward begins").activations_bytes
    assert 0 < kept < 0.6 * at(whole, "backward begins").activations_bytes


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_losses_and_weights_are_the_same_bit_for_bit(tmp_path, dtype):
    plain = model()
    losses = train(None, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), steps=6, dtype=dtype)
    _, watched, net = recorded(tmp_path, steps=6, dtype=dtype, due=lambda step: True)
    assert losses == watched
    for a, b in zip(plain.parameters(), net.parameters(), strict=True):
        assert torch.equal(a, b)


def test_only_few_steps_are_looked_at_and_nothing_stays_on_the_model(tmp_path):
    run, _, net = recorded(tmp_path, steps=20)
    assert sorted(run.memory.step.unique()) == [1, 4, 16]
    assert [s for s in range(300) if sampled(s)] == [1, 4, 16, 64, 256]
    assert not any(m._forward_hooks for m in net.modules())
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    assert not hooks_are_on()


def test_a_loop_that_breaks_off_leaves_no_hooks(tmp_path):
    net = model()
    with RunWriter(tmp_path / "run") as writer:
        observer = MemoryWatch(writer, net, [], CPU, lambda step: True)
        observer.step_began(0)
        net(torch.randn(BATCH, WIDTH))
        observer.close()
    assert not hooks_are_on()
    assert not any(m._forward_hooks for m in net.modules())
    assert len(load_run(tmp_path / "run").memory) == 0


def test_hooks_of_the_program_keep_their_place_and_the_reason_is_said(tmp_path):
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run, _, _ = recorded(tmp_path, steps=5)
    assert packed
    assert run.memory.activations_bytes.isna().all() and run.memory.gradients_bytes.notna().all()
    said = run.events[run.events.name == "not recorded"]
    assert len(said) == 1 and "saved-tensor hooks of its own" in said.detail.iloc[0]


def test_a_model_that_is_compiled_is_left_alone(tmp_path):
    net = model()
    net._compiled_call_impl = lambda *args: None  # as `net.compile()` leaves it
    optimizer = torch.optim.AdamW(net.parameters())
    with RunWriter(tmp_path / "run") as writer:
        observer = MemoryWatch(writer, net, [optimizer], CPU, lambda step: True)
        observer.step_began(0)
        assert not any(m._forward_hooks for m in net.modules())
        assert not hooks_are_on()
        observer.called("optimizer.step", 0)
        observer.step_ended(0)
    run = load_run(tmp_path / "run")
    assert run.memory.parameters_bytes.tolist() == [PARAMETERS * FP32] * 3
    assert run.memory.activations_bytes.isna().all()


def test_a_step_without_a_forward_of_ours_says_null_not_zero(tmp_path):
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
    monkeypatch.setattr(watching, "MOST_MODULES", 3)
    monkeypatch.setattr(watching, "MOST_GRADIENTS", 2)
    net = nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)], nn.Linear(WIDTH, CLASSES)
    )
    run, _, _ = recorded(tmp_path, net=net)
    assert (run.memory.moment == "module").sum() <= 3
    assert (run.memory.moment == "gradient").sum() <= 4
    everything = sum(p.numel() for p in net.parameters()) * FP32
    assert at(run, "backward ends").gradients_bytes == everything
    last = run.memory[run.memory.moment == "gradient"].iloc[-1]
    assert last.gradients_bytes >= 0.9 * everything  # all arrive, noted or not


class Allocator:
    """torch's CUDA allocator as far as it is read: a list of (now, peak since it was begun anew)."""

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


def test_on_cuda_peaks_are_those_between_moments_and_the_run_keeps_the_highest(tmp_path, monkeypatch):
    device = torch.device("cuda:0")
    allocator = Allocator([(100, 900), (100, 120), (300, 450), (310, 310), (150, 500), (150, 150), (150, 200)])
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", allocator.stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", allocator.reset)
    net = model()
    with RunWriter(tmp_path / "run") as writer:
        observer = MemoryWatch(writer, net, [], device, lambda step: True)
        monkeypatch.setattr(observer, "_put_on", lambda: None)  # the model itself is on the CPU
        observer.step_began(0)
        observer.forward_ended(None)
        observer.backward_began()
        observer.backward_ended()
        observer.called("optimizer.step", 0)
        from amp_core.record.attempt import earlier_peaks

        assert earlier_peaks[device] == 900  # before the step: what the run's own peak must not forget
        observer.step_ended(0)
        observer.close()
        assert device not in earlier_peaks
    rows = load_run(tmp_path / "run").memory
    assert rows.allocated_bytes.tolist() == [100, 300, 310, 150, 150, 150]
    assert rows.peak_bytes.tolist() == [120, 450, 310, 500, 150, 200]
    assert rows.reserved_bytes.tolist() == [240, 900, 620, 1000, 300, 400]
    assert allocator.resets == len(rows) + 1


def test_a_storage_is_counted_once_however_it_is_seen():
    base = torch.zeros(6, 4)
    assert storages([base, base.t(), base[2:], torch.zeros(0)], CPU) == {base.data_ptr(): 96}
    assert storage_of(base.to("meta"), CPU) is None


def test_saved_tensors_are_counted_off_when_autograd_lets_go(tmp_path):
    saved = Saved(CPU)
    x = torch.randn(8, 8, requires_grad=True)
    assert saved.start(ignored=()) is None
    y = (x.exp() * 2).sin()  # exp keeps its result, sin its input
    assert saved.activations == 2 * 8 * 8 * 4
    del y
    gc.collect()
    assert saved.activations == 0  # no circle keeps what nobody needs
    y = x.exp()
    saved.stop()
    y.sum().backward()
    assert saved.activations == 0 and torch.equal(x.grad, x.detach().exp())


def test_torch_func_works_in_a_step_that_is_looked_at(tmp_path):
    """It refuses saved-tensor hooks of anybody, so ours have to make way."""
    net = model()

    def forward(x):
        slope = torch.func.grad(lambda z: z.sin().sum())(x)
        return net(x) + 0 * slope.mean()

    run, watched, _ = recorded(tmp_path, net=net, steps=5, forward=forward)
    plain = model()
    net = plain
    assert train(None, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), steps=5, forward=forward) == watched
    later = run.memory[run.memory.moment.isin(["forward ends", "backward begins", "step ends"])]
    assert later.activations_bytes.isna().all() and later.gradients_bytes.notna().all()
    (said,) = run.events[run.events.name == "not recorded"].detail
    assert "turned saved-tensor hooks off, as torch.func does" in said
    assert torch.autograd.graph.disable_saved_tensors_hooks.__module__ == "torch.autograd.graph"


def test_what_goes_wrong_while_looking_stays_out_of_the_training(tmp_path, monkeypatch):
    calls = []

    def fails():
        calls.append(1)
        if len(calls) > 3:  # within the forward
            raise RuntimeError("no such file")
        return 1000

    monkeypatch.setattr(watching, "resident_bytes", fails)
    run, watched, net = recorded(tmp_path, steps=6, due=lambda step: True)
    plain = model()
    assert train(None, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), steps=6) == watched
    (said,) = run.events[run.events.name == "not recorded"].detail
    assert said == "what memory is made of, from now on: RuntimeError: no such file"
    assert len(run.memory) == 0 and not hooks_are_on()
    assert not any(m._forward_hooks for m in net.modules())


def test_a_tensor_that_cannot_be_counted_is_kept_all_the_same(monkeypatch):
    from amp_core.record import storages as module

    monkeypatch.setattr(module, "is_cast_of_weight", lambda tensor: 1 / 0)
    saved = Saved(CPU)
    assert saved.start(ignored=()) is None
    x = torch.randn(3, requires_grad=True)
    x.exp().sum().backward()
    saved.stop()
    assert torch.equal(x.grad, x.detach().exp()) and saved.interrupted == "ZeroDivisionError: division by zero"


def test_hooks_are_taken_off_by_the_thread_that_put_them_on():
    saved = Saved(CPU)
    assert saved.start(ignored=()) is None
    other = threading.Thread(target=saved.stop)
    other.start()
    other.join()
    assert hooks_are_on()
    saved.stop()
    assert not hooks_are_on()


def test_where_hooks_are_turned_off_the_reason_is_told():
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        said = Saved(CPU).start(ignored=())
    assert said is not None and "not here" in said


@pytest.mark.parametrize("older", [False, True])
def test_hooks_of_others_are_noticed_by_any_torch(monkeypatch, older):
    if older:
        monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)
    assert not hooks_are_on()
    with torch.autograd.graph.save_on_cpu():
        assert hooks_are_on()
    assert not hooks_are_on()


def test_casts_of_weights_are_told_from_other_casts():
    weight = nn.Parameter(torch.randn(4, 4))
    assert is_cast_of_weight(weight.to(torch.bfloat16)) and is_cast_of_weight(weight.to(torch.bfloat16).t())
    assert not is_cast_of_weight((weight * 2).to(torch.bfloat16))
    assert not is_cast_of_weight(weight.t()) and not is_cast_of_weight(torch.ones(2))


def test_cuda_memory_is_the_allocators_and_keeps_a_peak_that_was_begun_anew(monkeypatch):
    device = torch.device("cuda:0")
    held = {"allocated_bytes": {"all": {"current": 5, "peak": 7}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda of: held if of == device else {})
    assert attempt.memory_bytes(device) == (5, 7)
    monkeypatch.setitem(attempt.earlier_peaks, device, 9)
    assert attempt.memory_bytes(device) == (5, 9)


def test_ctrl_c_is_not_lost_while_autograd_lets_go_of_tensors():
    """Python drops what is raised in the callback of a weak reference, which is where the count goes down."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted():
        raise KeyboardInterrupt

    saved = Saved(torch.device("cpu"))
    assert saved.start(ignored=[]) is None
    try:
        loss = torch.ones(3, requires_grad=True).exp().sum()
        saved.before_release = interrupted
        with pytest.raises(KeyboardInterrupt):
            del loss
            time.sleep(10)
    finally:
        saved.stop()
        signal.signal(signal.SIGINT, before)
