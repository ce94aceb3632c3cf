"""Non-finite gradients, the skipped steps they cause, and the falling loss scale."""

import numpy as np
import torch
from torch import nn

from amp_core import load_run
from amp_core.analysis import predicted_and_audited
from amp_core.record import watch
from tests.record.loops import small_model


def test_a_skip_names_the_gradients_that_caused_it(tmp_path):
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    rec = watch(model, optimizer, scaler=scaler, into=tmp_path / "run", every=100)
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(torch.randn(8, 24)).square().mean()).backward()
        if step == 2:
            model[2].weight.grad[3, 4] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved == (step != 2)
    rec.close()
    run = load_run(tmp_path / "run")
    assert run.steps.skipped.tolist() == [False, False, True, False]
    skips = run.events[run.events.kind == "skipped"]
    assert skips.step.tolist() == [2] and skips.name.tolist() == ["2.weight"]
    assert "1 of 8" in skips.detail.iloc[0]


def test_the_loss_scale_of_a_row_is_that_of_its_gradients_even_if_the_scaler_is_updated_before_the_step(tmp_path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run", every=1):
        for _ in range(3):
            scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
            scaler.unscale_(optimizer)
            scaler.update()
            optimizer.step()
            optimizer.zero_grad()
    assert load_run(tmp_path / "run").steps.loss_scale.tolist() == [8.0, 16.0, 32.0]


def test_gradients_of_several_dtypes_keep_their_names(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run"):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 3.0)
        model[1].bias.grad[0] = float("nan")
        model[2].weight.grad[0] = float("inf")
        optimizer.step()
    run = load_run(tmp_path / "run")
    event = run.events[run.events.kind == "non-finite"].iloc[0]
    assert event["name"] == "2.weight" and event.detail == "2 of 6 gradients non-finite: 2.weight, 1.bias"


def test_two_optimizers_under_one_scaler_have_their_own_skips(tmp_path):
    """An iteration of a GAN: two attempts with one step number, each with its own skip flag, although update() combines
    them."""
    torch.manual_seed(0)
    gen, dis = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.ModuleList([gen, dis])
    opt_d, opt_g = torch.optim.SGD(dis.parameters(), lr=0.1), torch.optim.SGD(gen.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    losses = []
    with watch(model, [opt_d, opt_g], scaler=scaler, into=tmp_path / "run", every=1):
        for step in range(5):
            opt_d.zero_grad()
            loss_d = dis(gen(torch.randn(3, 4)).detach()).square().mean()
            scaler.scale(loss_d).backward()
            scaler.step(opt_d)
            opt_g.zero_grad()
            loss_g = -dis(gen(torch.randn(3, 4))).mean()
            scaler.scale(loss_g).backward()
            if step == 3:
                gen.bias.grad[0] = float("inf")
            scaler.step(opt_g)
            scaler.update()
            losses += [loss_d.item(), loss_g.item()]
    steps = load_run(tmp_path / "run").steps
    assert steps.step.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert steps.optimizer.tolist() == [0, 1] * 5
    assert np.allclose(steps.loss, losses, rtol=1e-6)
    assert steps[steps.skipped][["step", "optimizer"]].values.tolist() == [[3, 1]]
    names = load_run(tmp_path / "run").tensors(steps=(0, 0))
    assert names[names.step == 0].name.tolist().count("1.weight") >= 1


def test_nonfinite_gradients_without_a_scaler_are_an_event(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(model, optimizer, into=tmp_path / "run"):
        for step in range(3):
            model(torch.randn(2, 24)).sum().backward()
            if step == 2:
                model[0].bias.grad.fill_(float("inf"))
            optimizer.step()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    events = run.events[run.events.kind == "non-finite"]
    assert events.step.tolist() == [2] and events.name.tolist() == ["0.bias"]
    assert not run.steps.skipped.any()


def test_a_loss_scale_that_was_halved_to_zero_is_recorded_as_zero(tmp_path):
    """One backoff from 2^-149 makes it 0 in FP32. The unscaled gradients are then unknown."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-148)
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run", every=1) as rec:
        for step in range(5):
            scaler.scale(model(torch.ones(2, 3)).sum()).backward()
            model.weight.grad.fill_(float("nan") if step < 4 else 0.0)
            if step == 4:
                rec.audit(lambda: model(torch.ones(2, 3)).sum())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    steps = run.table("steps")
    assert steps.column("loss_scale").to_pylist() == [2.0**-148, 2.0**-149, 0.0, 0.0, 0.0]
    assert steps.column("grad_norm").is_null().to_pylist() == [False, False, True, True, True]
    assert run.tensors(kind="weight_grad").groupby("step").loss_scale.first().tolist()[2:] == [0.0] * 3
    assert predicted_and_audited(run)["predicted_frac"].isna().all()
