"""Scalers and optimizers that replace those of the loop are recorded from then on; others are left alone."""

import numpy as np
import pytest
import torch
from torch import nn

from amp_core import diagnose, load_run, watch
from amp_core.record import watching
from amp_core.record.observer import Observer
from tests.record.loops import optimizer_step, small_model

EPOCHS, PER_EPOCH = 3, 6
STEPS = EPOCHS * PER_EPOCH


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def changes(run, name):
    return run.events[(run.events.kind == "phase change") & (run.events.name == name)]


def codes(run):
    return {finding.code for finding in diagnose(run)}


def train(into, *, optimizers, each_epoch, scaled=True, clip=False, overflow_at=()):
    """A loop of three epochs. `each_epoch(epoch, model, optimizer, scaler)` returns the optimizer and scaler of the
    epoch."""
    torch.manual_seed(0)
    model = small_model()
    optimizer = optimizers(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    losses, scales, skipped = [], [], []
    with watch(model, optimizer, scaler=scaler, into=into, every=4):
        for step in range(STEPS):
            if step % PER_EPOCH == 0 and step:
                optimizer, scaler = each_epoch(step // PER_EPOCH, model, optimizer, scaler)
            x, y = torch.randn(16, 24), torch.randint(0, 10, (16,))
            with torch.autocast("cpu", dtype=torch.float16, enabled=scaled):
                loss = nn.functional.cross_entropy(model(x).float(), y)
            (scaler.scale(loss) if scaler else loss).backward()
            if step in overflow_at:
                model[0].weight.grad[0, 0] = torch.inf
            if scaler and clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            losses.append(loss.item())
            scales.append(scaler.get_scale() if scaler else 1.0)
            skipped.append(step in overflow_at)
            optimizer_step(optimizer, scaler)
    return load_run(into), losses, scales, skipped


def of_the_same_settings(epoch, model, optimizer, scaler):
    return optimizer, torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + epoch))


def restored(epoch, model, optimizer, scaler):
    fresh = torch.amp.GradScaler("cpu")
    fresh.load_state_dict(scaler.state_dict())
    return optimizer, fresh


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("each_epoch", [of_the_same_settings, restored])
def test_a_scaler_that_is_replaced_each_epoch_is_recorded_like_the_first(tmp_path, each_epoch, clip):
    run, losses, scales, skipped = train(
        tmp_path / "run",
        optimizers=lambda m: adamw(m.parameters()),
        each_epoch=each_epoch,
        clip=clip,
        overflow_at=(2, 8, 14),
    )
    assert run.steps.loss.tolist() == pytest.approx(losses) and run.steps.step.tolist() == list(range(STEPS))
    assert run.steps.loss_scale.tolist() == scales and run.steps.skipped.tolist() == skipped
    assert run.steps.grad_norm[~run.steps.skipped].between(1e-3, 1e2).all()
    assert not {"fp16-without-scaler", "unscale-per-microbatch"} & codes(run)
    assert changes(run, "scaler").step.tolist() == [6, 12]
    assert "scaler_unseen" not in run.head.config


def same_parameters(epoch, model, optimizer, scaler):
    return sgd(model.parameters()), scaler


def test_a_scaler_of_another_network_is_not_taken_for_a_new_one(tmp_path):
    torch.manual_seed(0)
    model, other = small_model(), nn.Linear(24, 1)
    optimizer, of_other = sgd(model.parameters()), sgd(other.parameters())
    scaler, second = (torch.amp.GradScaler("cpu", init_scale=s) for s in (4.0, 1024.0))
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run"):
        for _ in range(30):
            for network, its_scaler, its_optimizer in ((other, second, of_other), (model, scaler, optimizer)):
                its_scaler.scale(network(torch.randn(4, 24)).square().mean()).backward()
                its_scaler.step(its_optimizer)
                its_scaler.update()
                its_optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    assert (run.steps.loss_scale == 4).all() and len(run.steps) == 30 and changes(run, "scaler").empty


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_an_optimizer_that_is_replaced_each_epoch_keeps_the_index_of_the_first(tmp_path, scaled, clip):
    overflows = (2, 6, 14) if scaled else ()
    run, losses, _, skipped = train(
        tmp_path / "run",
        optimizers=lambda m: adamw(m.parameters()),
        each_epoch=same_parameters,
        scaled=scaled,
        clip=clip,
        overflow_at=overflows,
    )
    assert run.steps.step.tolist() == list(range(STEPS)) and (run.steps.optimizer == 0).all()
    assert run.steps.loss.tolist() == pytest.approx(losses) and run.steps.skipped.tolist() == skipped
    assert run.steps.grad_norm.notna().all() and run.steps.lr.tolist() == pytest.approx([1e-3] * 6 + [1e-2] * 12)
    assert changes(run, "optimizer").step.tolist() == [6, 12]
    assert run.head.config["optimizers"] == ["SGD"]
    assert not {"unscale-per-microbatch", "recording-incomplete", "no-gradients"} & codes(run)
    assert sorted(run.tensors(kind="weight_grad").step.unique()) == [0, 4, 8, 12, 16]


def unfreezing(epoch, model, optimizer, scaler):
    for parameter in model[: 6 - 2 * epoch].parameters():
        parameter.requires_grad_(True)
    return adamw(p for p in model.parameters() if p.requires_grad), scaler


@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_rebuilt_after_layers_are_unfrozen_is_recorded(tmp_path, scaled):
    def optimizers(model):
        model[:5].requires_grad_(False)
        return adamw(model[5].parameters())

    run, losses, *_ = train(tmp_path / "run", optimizers=optimizers, each_epoch=unfreezing, scaled=scaled)
    assert run.steps.loss.tolist() == pytest.approx(losses) and run.steps.step.tolist() == list(range(STEPS))
    assert set(run.tensors(kind="weight_grad", steps=(12, 18)).name) > {"5.weight", "2.weight", "0.weight"}


def next_stage(epoch, model, optimizer, scaler):
    optimizer.zero_grad()
    model.requires_grad_(False)
    stage = model[0] if epoch == 1 else model[2]
    stage.requires_grad_(True)
    return adamw(stage.parameters()), scaler


@pytest.mark.parametrize("scaled", [False, True])
def test_optimizers_of_stages_with_different_parameters_are_all_recorded(tmp_path, scaled):
    def optimizers(model):
        model[:5].requires_grad_(False)
        return sgd(model[5].parameters())

    run, losses, *_ = train(tmp_path / "run", optimizers=optimizers, each_epoch=next_stage, scaled=scaled)
    assert run.steps.loss.tolist() == pytest.approx(losses) and run.steps.step.tolist() == list(range(STEPS))
    assert run.steps.optimizer.tolist() == [0] * 6 + [1] * 6 + [2] * 6
    assert changes(run, "optimizer").detail.str.contains("was not given").tolist() == [True, True]


def test_an_optimizer_that_is_used_again_is_recorded_again(tmp_path):
    kept = {}

    def in_turns(epoch, model, optimizer, scaler):
        kept.setdefault(0, optimizer)
        kept.setdefault(1, sgd(model.parameters()))
        return kept[epoch % 2], scaler

    run, losses, *_ = train(tmp_path / "run", optimizers=lambda m: adamw(m.parameters()), each_epoch=in_turns)
    assert run.steps.loss.tolist() == pytest.approx(losses) and len(run.steps) == STEPS


@pytest.mark.parametrize("first", [True, False])
def test_an_optimizer_of_another_model_is_never_adopted(tmp_path, first):
    """A discriminator, which is another model, trains five times as often."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(6, 24), nn.Linear(24, 1)
    of_g, of_d = sgd(generator.parameters()), sgd(discriminator.parameters())
    with watch(generator, of_g, into=tmp_path / "run"):
        for _ in range(10 if first else 0):
            discriminator(torch.randn(4, 24)).mean().backward()
            of_d.step()
        for _ in range(12):
            for _ in range(5):
                discriminator(generator(torch.randn(4, 6)).detach()).mean().backward()
                of_d.step()
                of_d.zero_grad()
            discriminator(generator(torch.randn(4, 6))).mean().backward()
            of_g.step()
            of_g.zero_grad()
        for _ in range(60):
            discriminator(torch.randn(4, 24)).mean().backward()
            of_d.step()
    run = load_run(tmp_path / "run")
    assert len(run.steps) == 12 and changes(run, "optimizer").empty


def test_a_second_optimizer_of_the_model_that_was_not_given_is_not_adopted(tmp_path):
    """A model has an optimizer for its body and one for its head; only the first is given to `watch`."""
    torch.manual_seed(0)
    model = small_model()
    of_body, of_head = sgd(model[:5].parameters()), sgd(model[5].parameters())
    with watch(model, of_body, into=tmp_path / "run"):
        for step in range(20):
            model(torch.randn(16, 24)).square().mean().backward()
            (of_head if step % 2 else of_body).step()
            (of_body if step % 2 else of_head).step()
            model.zero_grad()
    run = load_run(tmp_path / "run")
    assert len(run.steps) == 20 and (run.steps.optimizer == 0).all() and changes(run, "optimizer").empty


def test_a_critic_in_the_same_model_may_step_often_before_the_given_optimizer(tmp_path):
    torch.manual_seed(0)
    both = nn.ModuleDict({"g": nn.Linear(6, 24), "d": nn.Linear(24, 1)})
    of_g, of_d = sgd(both["g"].parameters()), sgd(both["d"].parameters())
    with watch(both, of_g, into=tmp_path / "run"):
        for _ in range(10):
            for _ in range(4):
                both["d"](both["g"](torch.randn(4, 6)).detach()).mean().backward()
                of_d.step()
                of_d.zero_grad()
            both["d"](both["g"](torch.randn(4, 6))).mean().backward()
            of_g.step()
            of_g.zero_grad()
    assert len(load_run(tmp_path / "run").steps) == 10


def test_an_optimizer_whose_closure_computes_the_gradients_follows_another_at_once(tmp_path):
    """Adam and then L-BFGS, as for physics-informed networks: no backward comes between their steps."""
    model = small_model()
    x, y = torch.randn(16, 24), torch.randint(0, 10, (16,))
    adam, lbfgs = adamw(model.parameters()), torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with watch(model, adam, into=tmp_path / "run"):
        for _ in range(4):
            closure()
            adam.step()
        for _ in range(3):
            lbfgs.step(closure)
    assert len(load_run(tmp_path / "run").steps) == 7


def test_an_optimizer_inside_another_is_not_recorded_separately(tmp_path):
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure=None):
            return self.inner.step()

    torch.manual_seed(0)
    model = small_model()
    optimizer = Lookahead(sgd(model.parameters()))
    with watch(model, optimizer, into=tmp_path / "run"):
        for step in range(12):
            if step == 6:
                optimizer = Lookahead(sgd(model.parameters()))
            model(torch.randn(16, 24)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
    run = load_run(tmp_path / "run")
    assert len(run.steps) == 12 and len(changes(run, "optimizer")) == 1


def test_an_optimizer_created_after_watch_replaces_the_given_one(tmp_path):
    """The loop creates a new optimizer before its first step."""
    torch.manual_seed(0)
    model = small_model()
    stale = sgd(model.parameters())
    losses = []
    with watch(model, stale, into=tmp_path / "run"):
        optimizer = adamw(model.parameters())
        for _ in range(8):
            loss = model(torch.randn(16, 24)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert load_run(tmp_path / "run").steps.loss.tolist() == pytest.approx(losses)


def test_replaced_optimizers_keep_no_hooks_and_weights_are_as_without_watching(tmp_path):
    from torch.optim import optimizer as torchs

    def go(into):
        torch.manual_seed(0)
        model = small_model()
        optimizers = [sgd(model.parameters())]
        rec = watch(model, optimizers[0], into=into) if into else None
        for step in range(12):
            if step % 4 == 3:
                optimizers.append(adamw(model.parameters()))
            model(torch.randn(16, 24)).square().mean().backward()
            optimizers[-1].step()
            optimizers[-1].zero_grad()
        if rec is not None:
            rec.close()
        return model, optimizers

    plain, _ = go(None)
    before = len(torchs._global_optimizer_pre_hooks), len(torchs._global_optimizer_post_hooks)
    watched, optimizers = go(tmp_path / "run")
    assert before == (len(torchs._global_optimizer_pre_hooks), len(torchs._global_optimizer_post_hooks))
    for optimizer in optimizers:
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
        assert "zero_grad" not in vars(optimizer)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert np.array_equal(one.detach().numpy(), other.detach().numpy())


def test_an_observer_that_fails_when_an_optimizer_is_adopted_is_dropped(tmp_path, monkeypatch):
    class Failing(Observer):
        def optimizer_found(self, index, optimizer):
            raise MemoryError

    monkeypatch.setattr(watching, "default_signals", lambda *_: [Failing()])
    model = small_model()
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1), into=tmp_path / "run"):
        for _ in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                model(torch.randn(4, 24)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    assert run.status == "finished" and len(run.steps) == 6
    assert run.events.detail.str.startswith("Failing stopped at optimizer_found: MemoryError").sum() == 1
