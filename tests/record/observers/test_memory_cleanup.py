"""Measuring a step's memory changes nothing and leaves nothing behind."""

import pytest
import torch

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.backends.base import Allocated
from amp_core.record.backends.cpu import Cpu
from amp_core.record.observers.memory import MemoryWatch, sampled
from amp_core.record.observers.storages import hooks_are_on
from amp_core.record.torch_internals.module_calls import listeners
from amp_core.store.writer import RunWriter
from tests.record.memory_loop import BATCH, CPU, FP32, PARAMETERS, WIDTH, model, recorded, train


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_losses_and_weights_are_the_same_bit_for_bit(tmp_path, dtype):
    plain = model()
    losses = train(None, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), steps=6, dtype=dtype)
    _, watched, net = recorded(tmp_path, steps=6, dtype=dtype, due=lambda step: True)
    assert losses == watched
    for a, b in zip(plain.parameters(), net.parameters(), strict=True):
        assert torch.equal(a, b)


def test_only_few_steps_are_measured_and_no_hooks_stay_on_the_model(tmp_path):
    run, _, net = recorded(tmp_path, steps=20)
    assert sorted(run.memory.step.unique()) == [1, 4, 16]
    assert [s for s in range(300) if sampled(s)] == [1, 4, 16, 64, 256]
    assert not any(listeners(m) for m in net.modules())
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    assert not hooks_are_on()


def test_a_loop_that_raises_leaves_no_hooks(tmp_path):
    net = model()
    with RunWriter(tmp_path / "run") as writer:
        observer = MemoryWatch(writer, net, [], CPU, lambda step: True)
        observer.step_began(0)
        net(torch.randn(BATCH, WIDTH))
        observer.close()
    assert not hooks_are_on()
    assert not any(listeners(m) for m in net.modules())
    assert len(load_run(tmp_path / "run").memory) == 0


def test_hooks_of_the_program_stay_and_the_reason_is_reported(tmp_path):
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run, _, _ = recorded(tmp_path, steps=5)
    assert packed
    assert run.memory.activations_bytes.isna().all() and run.memory.gradients_bytes.notna().all()
    reports = run.events[run.events.name == "not recorded"]
    assert len(reports) == 1 and "saved-tensor hooks of its own" in reports.detail.iloc[0]


def test_a_model_that_is_compiled_is_left_alone(tmp_path):
    net = model()
    net._compiled_call_impl = lambda *args: None  # the state after `net.compile()`
    optimizer = torch.optim.AdamW(net.parameters())
    with RunWriter(tmp_path / "run") as writer:
        observer = MemoryWatch(writer, net, [optimizer], CPU, lambda step: True)
        observer.step_began(0)
        assert not any(listeners(m) for m in net.modules())
        assert not hooks_are_on()
        observer.called("optimizer.step", 0)
        observer.step_ended(0)
    run = load_run(tmp_path / "run")
    assert run.memory.parameters_bytes.tolist() == [PARAMETERS * FP32] * 3
    assert run.memory.activations_bytes.isna().all()


def test_torch_func_works_in_a_step_whose_memory_is_measured(tmp_path):
    """torch.func refuses all saved-tensor hooks, so ours are removed."""
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
    (reports,) = run.events[run.events.name == "not recorded"].detail
    assert "turned saved-tensor hooks off, as torch.func does" in reports
    assert torch.autograd.graph.disable_saved_tensors_hooks.__module__ == "torch.autograd.graph"


def test_errors_while_measuring_do_not_reach_the_training(tmp_path, monkeypatch):
    calls = []

    def fails(backend):
        calls.append(1)
        if len(calls) > 3:  # within the forward
            raise RuntimeError("no such file")
        return Allocated(1000)

    monkeypatch.setattr(Cpu, "read_allocator", fails)
    run, watched, net = recorded(tmp_path, steps=6, due=lambda step: True)
    plain = model()
    assert train(None, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), steps=6) == watched
    (reports,) = run.events[run.events.name == "not recorded"].detail
    assert reports == "what memory is made of, from now on: RuntimeError: no such file"
    assert len(run.memory) == 0 and not hooks_are_on()
    assert not any(listeners(m) for m in net.modules())


def test_a_measured_step_leaves_no_hook_on_a_parameter(tmp_path):
    """Even an empty table of hooks is looked at in every later backward."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert set(load_run(tmp_path / "run").table("memory").column("moment").to_pylist()) >= {"gradient", "step ends"}
    assert all(p._post_accumulate_grad_hooks is None and p._backward_hooks is None for p in model.parameters())
