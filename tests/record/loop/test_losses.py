"""The loss of a step for every way to call backward: on submodules, vectors, several roots, by `autograd.grad`."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_core import load_run, watch
from tests.record.loops import optimizer_step, small_model

STEPS = 8


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=1e-2)


def warnings_about(run, what="loss"):
    events = run.events[(run.events.kind == "warning") & (run.events.name == "not recorded")]
    return events[events.detail.str.startswith(what)]


def go(into, backward, *, scaler=None, model=None):
    """`backward(model, scale)` calls backward and returns the true loss of the step; `scale` is the scaler's."""
    torch.manual_seed(0)
    model = model or small_model()
    optimizer = sgd(model)
    scale = (lambda loss: scaler.scale(loss)) if scaler else (lambda loss: loss)
    losses = []
    with watch(model, optimizer, scaler=scaler, into=into, every=3):
        for _ in range(STEPS):
            losses.append(float(backward(model, scale)))
            optimizer_step(optimizer, scaler)
    return load_run(into), losses


def per_sample(model):
    return F.cross_entropy(model(torch.randn(6, 24)), torch.randint(0, 10, (6,)), reduction="none")


def several_roots(model, scale):
    first, second = per_sample(model).mean(), per_sample(model).square().mean()
    torch.autograd.backward([scale(first), scale(second)])
    return (first + second).detach()


def vector(model, scale):
    loss = per_sample(model)
    scale(loss).backward(torch.ones(6))
    return loss.detach().sum()


def weighted(model, scale):
    loss, weights = per_sample(model), torch.rand(6)
    torch.autograd.backward([scale(loss)], grad_tensors=[weights])
    return (loss.detach() * weights).sum()


def mixed_roots(model, scale):
    vector, one = per_sample(model), per_sample(model).mean()
    torch.autograd.backward((scale(vector), scale(one)), (torch.full((6,), 0.5), None))
    return vector.detach().sum() / 2 + one.detach()


def divided_after_scaling(model, scale):
    total = 0.0
    for _ in range(2):
        loss = per_sample(model).mean()
        (scale(loss) / 2).backward()
        total += loss.item() / 2
    return total


def by_grad(model, scale):
    loss = per_sample(model).mean()
    parameters = list(model.parameters())
    for parameter, grad in zip(parameters, torch.autograd.grad(scale(loss), parameters), strict=True):
        parameter.grad = grad
    return loss.detach()


def by_grad_of_a_vector(model, scale):
    loss = per_sample(model)
    parameters = list(model.parameters())
    grads = torch.autograd.grad([scale(loss)], parameters, grad_outputs=[torch.full((6,), 1 / 6)])
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    return loss.detach().mean()


def penalty_as_in_the_amp_examples(model, scale):
    loss = per_sample(model).mean()
    factor = float(scale(torch.ones(())))
    grads = torch.autograd.grad(scale(loss), list(model.parameters()), create_graph=True)
    loss = loss + sum((g / factor).square().sum() for g in grads)
    scale(loss).backward()
    return loss.detach()


def of_inputs_too(model, scale):
    """Gradients of the input, as for saliency maps, do not count for the loss of the step."""
    x = torch.randn(6, 24, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    loss = F.cross_entropy(model(x), torch.randint(0, 10, (6,)))
    loss.backward(retain_graph=True, inputs=[x])
    scale(loss).backward()
    return loss.detach()


def of_gradients_alone(model, scale):
    """The loss is made of gradients with respect to the input: backward does not pass through the output."""
    x = torch.randn(6, 24, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    loss = (grad.norm(dim=1) - 1).square().mean()
    scale(loss).backward()
    return loss.detach()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "backward",
    [
        several_roots,
        vector,
        weighted,
        mixed_roots,
        divided_after_scaling,
        by_grad,
        by_grad_of_a_vector,
        penalty_as_in_the_amp_examples,
        of_inputs_too,
        of_gradients_alone,
    ],
)
def test_the_recorded_loss_is_the_one_that_backward_differentiates(tmp_path, backward, scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    run, losses = go(tmp_path / "run", backward, scaler=scaler)
    assert run.steps.loss.tolist() == pytest.approx(losses, rel=1e-5) and warnings_about(run).empty
    assert run.steps.grad_norm.notna().all()


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float16, 1.0), (torch.float16, 100.0), (torch.bfloat16, 1024.0)])
def test_a_loss_scale_of_the_loop_is_no_part_of_the_loss_in_fp16(tmp_path, dtype, factor):
    """Another constant is a weight, and so is a power of two where nothing underflows."""
    losses = []
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with watch(model, optimizer, into=tmp_path / "run"):
        for number in range(4):
            with torch.autocast("cpu", dtype=dtype):
                loss = F.cross_entropy(model(torch.randn(6, 8)).float(), torch.randint(0, 4, (6,)))
            scale = 2.0 ** (10 + number) if factor == 1.0 else factor
            (loss * scale).backward()
            losses.append(loss.item() * factor)
            optimizer.step()
            optimizer.zero_grad()
    assert load_run(tmp_path / "run").steps.loss.tolist() == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_loop_that_changes_to_calling_a_submodule_keeps_its_losses(tmp_path, scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
    scale = (lambda loss: scaler.scale(loss)) if scaler else (lambda loss: loss)
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(24, 16), small_model_of(16)), "unused": nn.Linear(2, 2)})

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return self.parts["body"](x)

    whole = Whole()
    optimizer, losses = sgd(whole), []
    with watch(whole, optimizer, scaler=scaler, into=tmp_path / "run", every=2):
        for step in range(2 * STEPS):
            called = whole if step < STEPS else whole.parts["body"][0]
            loss = called(torch.randn(4, 24)).square().mean()
            scale(loss).backward()
            losses.append(loss.item())
            optimizer_step(optimizer, scaler)
    run = load_run(tmp_path / "run")
    assert run.steps.loss.tolist() == pytest.approx(losses) and warnings_about(run).empty
    assert run.steps.forward_ms.isna().sum() <= 2 and run.steps.samples.iloc[-1] == 4


def small_model_of(width):
    return nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 4))


def test_another_models_backward_is_not_recorded_if_the_loop_calls_a_submodule(tmp_path):
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(24, 4)))), nn.Linear(24, 1)
    optimizer, losses = sgd(model), []
    with watch(model, optimizer, into=tmp_path / "run"):
        for step in range(STEPS):
            other(torch.randn(4, 24)).mean().backward()
            loss = (model if step < 3 else model[0][0][0])(torch.randn(4, 24)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert load_run(tmp_path / "run").steps.loss.tolist() == pytest.approx(losses)


def test_a_pipeline_stage_has_no_loss_and_the_run_says_how_to_log_one(tmp_path):
    """Its backward starts from its output, with the gradient that the next stage sent."""
    torch.manual_seed(0)
    stage, optimizer = small_model(), None
    optimizer = sgd(stage)
    with watch(stage, optimizer, into=tmp_path / "run"):
        for step in range(2 * STEPS):
            out = stage(torch.randn(4, 24))
            out.backward(torch.randn_like(out))
            optimizer.step()
            optimizer.zero_grad()
            if step >= STEPS:
                pass
    run = load_run(tmp_path / "run")
    assert run.steps.loss.isna().all() and run.steps.grad_norm.notna().all()
    assert len(warnings_about(run)) == 1 and "rec.log(loss=loss)" in warnings_about(run).detail.iloc[0]


def test_a_logged_loss_is_not_reported_as_missing(tmp_path):
    stage = small_model()
    optimizer = sgd(stage)
    with watch(stage, optimizer, into=tmp_path / "run") as rec:
        for step in range(STEPS):
            out = stage(torch.randn(4, 24))
            out.backward(torch.randn_like(out))
            optimizer.step()
            rec.log(loss=float(step))
    run = load_run(tmp_path / "run")
    assert run.steps.loss.tolist() == list(range(STEPS)) and warnings_about(run).empty


@pytest.mark.parametrize("steps", [1, 2])
def test_a_short_run_without_a_loss_reports_that_too(tmp_path, steps):
    stage = small_model()
    optimizer = sgd(stage)
    with watch(stage, optimizer, into=tmp_path / "run"):
        for _ in range(steps):
            stage(torch.randn(4, 24)).backward(torch.randn(4, 10))
            optimizer.step()
    assert len(warnings_about(load_run(tmp_path / "run"))) == 1


def gan(into, *, shared, cleared, order):
    """Two networks with a recorder each. Returns the losses of both."""
    torch.manual_seed(0)
    g, d = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 24)), nn.Linear(24, 1)
    of_g, of_d = sgd(g), sgd(d)
    scalers = {"none": (None, None), "one": (torch.amp.GradScaler("cpu", init_scale=8.0),) * 2}
    scalers["each"] = (torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=32.0))
    s_g, s_d = scalers[shared]

    def clear(*optimizers):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=cleared != "to-zero")

    def step(loss, scaler, optimizer):
        (scaler.scale(loss) if scaler else loss).backward()
        scaler.step(optimizer) if scaler else optimizer.step()
        if scaler and (shared == "each" or optimizer is of_g):
            scaler.update()

    losses = {"g": [], "d": []}
    with watch(g, of_g, scaler=s_g, into=into / "g"), watch(d, of_d, scaler=s_d, into=into / "d"):
        for _ in range(STEPS):
            real, fake = torch.randn(4, 24), g(torch.randn(4, 6))
            if cleared != "at-the-end":
                clear(of_d)
            loss_d = F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()
            step(loss_d, s_d, of_d)
            if cleared != "at-the-end":
                clear(of_g)
            loss_g = F.softplus(-d(fake)).mean()
            step(loss_g, s_g, of_g)
            if cleared == "at-the-end":
                clear(of_g, of_d)
            losses["g"].append(loss_g.item())
            losses["d"].append(loss_d.item())
    return losses


@pytest.mark.parametrize("cleared", ["to-none", "to-zero", "at-the-end"])
@pytest.mark.parametrize("shared", ["none", "one", "each"])
def test_two_networks_with_a_recorder_each_have_their_own_losses(tmp_path, shared, cleared):
    losses = gan(tmp_path, shared=shared, cleared=cleared, order=None)
    for name in ("g", "d"):
        run = load_run(tmp_path / name)
        assert run.steps.loss.tolist() == pytest.approx(losses[name], rel=1e-5), name
        assert run.steps.samples.tolist() == [8 if name == "d" else 4] * STEPS, name
        assert warnings_about(run).empty


def test_losses_are_summed_if_the_loop_sums_their_gradients(tmp_path):
    """Gradients of single samples, cleared after each and summed before the step."""
    torch.manual_seed(0)
    model = small_model()
    optimizer, losses = sgd(model), []
    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(STEPS):
            sums, total = [torch.zeros_like(p) for p in model.parameters()], 0.0
            for _ in range(4):
                loss = model(torch.randn(1, 24)).square().mean()
                loss.backward()
                total += loss.item()
                for kept, parameter in zip(sums, model.parameters(), strict=True):
                    kept += parameter.grad
                model.zero_grad()
            for kept, parameter in zip(sums, model.parameters(), strict=True):
                parameter.grad = kept
            optimizer.step()
            model.zero_grad()
            losses.append(total)
    run = load_run(tmp_path / "run")
    assert run.steps.loss.tolist() == pytest.approx(losses) and run.steps.samples.tolist() == [4] * STEPS
