"""Which forwards and backwards count for a step's loss and samples."""

import pytest
import torch
from torch import nn

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.observers.storages import hooks_are_on
from tests.record.loops import optimizer_step, small_model

STEPS = 6


def loss_of(model, rows):
    return model(torch.randn(rows, 24)).square().mean()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("micro", [1, 2])
def test_forwards_without_a_backward_do_not_count_as_samples(tmp_path, micro, scaled):
    """An evaluation with gradients enabled, before the step's own forward and after its backward."""
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if scaled else None
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run"):
        for step in range(STEPS):
            if step % 2:
                model(torch.randn(100, 24))
            for _ in range(micro):
                loss = loss_of(model, 8)
                (scaler.scale(loss) if scaler else loss).backward()
            if step % 3 == 2:
                model(torch.randn(100, 24))
            optimizer_step(optimizer, scaler)
    assert load_run(tmp_path / "run").steps.samples.tolist() == [8 * micro] * STEPS


def test_a_forward_that_is_used_by_two_backwards_is_counted_once(tmp_path):
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(STEPS):
            out = model(torch.randn(8, 24))
            out.square().mean().backward(retain_graph=True)
            out.abs().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert load_run(tmp_path / "run").steps.samples.tolist() == [8] * STEPS


def test_backward_without_a_hooked_output_counts_as_a_whole(tmp_path):
    """The model does not return its output."""

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small_model()

        def forward(self, x):
            self.loss = self.inner(x).square().mean()

    torch.manual_seed(0)
    model = Hidden()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(STEPS):
            model(torch.randn(8, 24))
            model.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    steps = load_run(tmp_path / "run").steps
    assert steps.samples.tolist() == [8] * STEPS and steps.loss.notna().all()


def test_optimizers_that_step_within_backward_get_its_loss(tmp_path):
    """One per parameter, which steps and clears the gradient as soon as it has arrived."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 4))
    optimizers = [torch.optim.SGD([p], lr=1e-3) for p in model.parameters()]

    def stepping(optimizer):
        def step(parameter):
            optimizer.step()
            optimizer.zero_grad()

        return step

    for parameter, optimizer in zip(model.parameters(), optimizers, strict=True):
        parameter.register_post_accumulate_grad_hook(stepping(optimizer))
    losses = []
    with watch(model, optimizers, into=tmp_path / "run", every=2):
        for _ in range(STEPS):
            loss = loss_of(model, 8)
            loss.backward()
            losses.append(loss.item())
    steps = load_run(tmp_path / "run").steps
    assert sorted(set(steps.step)) == list(range(STEPS)) and len(steps) == STEPS * 4
    assert steps.groupby("step").loss.unique().explode().tolist() == pytest.approx(losses)
    assert (steps.samples == 8).all() and (steps.grad_norm > 0).all()
    assert set(load_run(tmp_path / "run").tensors(kind="weight_grad").name) == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }


def test_no_hooks_stay_on_autograd_after_steps_within_backward(tmp_path):
    torch.manual_seed(0)
    layer = nn.Linear(24, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)

    def step(parameter):
        optimizer.step()
        optimizer.zero_grad()

    layer.bias.register_post_accumulate_grad_hook(step)
    with watch(layer, optimizer, into=tmp_path / "run"):
        for _ in range(STEPS):
            loss_of(layer, 8).backward()
    assert not hooks_are_on()
    assert sorted(load_run(tmp_path / "run").memory.step.unique()) == [1, 4]
