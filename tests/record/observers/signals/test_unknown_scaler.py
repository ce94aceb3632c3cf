"""A GradScaler that is created after `watch` is adopted when it first scales a loss."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from amp_core import diagnose, load_run
from amp_core.record import watch, watching
from amp_core.record.observer import Observer
from amp_core.record.observers.signals.unknown_scaler import MAX_LOSSES
from tests.record.loops import small_model

STEPS = 12
TIMES = [f"{phase}_ms" for phase in ("step", "data", "forward", "backward", "optimizer", "watch")]


class StandsIn:
    """The object that fastai passes to its scaler: not an optimizer, but one with `param_groups` and `step`."""

    def __init__(self, optimizer):
        self.param_groups = optimizer.param_groups
        self.stepped = False

    def step(self, *args, **kwargs):
        self.stepped = True


def train(into, *, later, init_scale=2.0**21, clip=False, stands_in=False, second_network=False):
    """Two scaled networks if `second_network`; only the first is watched."""
    torch.manual_seed(0)
    model, other = small_model(), nn.Linear(24, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    others = torch.optim.SGD(other.parameters(), lr=1e-3)

    def new_scaler():
        return GradScaler("cpu", init_scale=init_scale, growth_interval=4)

    scaler = None if later else new_scaler()
    losses = []
    with watch(model, optimizer, scaler=scaler, into=into, every=3):
        scaler, second = scaler or new_scaler(), GradScaler("cpu", init_scale=8.0) if second_network else None
        for _ in range(STEPS):
            x = torch.randn(16, 24)
            if second is not None:
                second.scale(other(x).square().mean()).backward()
                second.step(others)
                second.update()
                others.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), torch.randint(0, 10, (16,)))
            scaler.scale(loss).backward()
            taker = StandsIn(optimizer) if stands_in else optimizer
            if clip:
                scaler.unscale_(taker)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(taker)
            if stands_in and taker.stepped:
                optimizer.step()
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert all(hasattr(getattr(type(scaler), m), "__wrapped__") for m in ("scale", "step", "update")), (
            "the scaler is watched"
        )
    assert not any(hasattr(getattr(type(scaler), m), "__wrapped__") for m in ("scale", "step", "update")), (
        "the scaler is no longer watched"
    )
    return losses


def rows(folder):
    left_out = [*TIMES, "time_s", "memory_allocated_bytes", "memory_peak_bytes"]
    return load_run(folder).steps.drop(columns=left_out)


@pytest.mark.parametrize("clip", [False, True])
def test_its_run_equals_that_of_a_scaler_passed_to_watch(tmp_path, clip):
    scale = vars(GradScaler)["scale"]
    known_scaler = train(tmp_path / "given", later=False, clip=clip)
    assert train(tmp_path / "later", later=True, clip=clip) == known_scaler
    assert vars(GradScaler)["scale"] is scale
    steps = rows(tmp_path / "later")
    assert steps.equals(rows(tmp_path / "given")) and steps.skipped.any() and not steps.skipped.all()
    runs = [load_run(tmp_path / name) for name in ("given", "later")]
    frames = [run.tensors().drop(columns="time_s", errors="ignore") for run in runs]
    assert frames[0].equals(frames[1]) and len(frames[0])
    configs = [dict(run.head.config) for run in runs]
    assert configs[0] == configs[1] and configs[1]["precision"] == "fp16"
    calls = [run.events[run.events.kind == "calls"][["step", "name"]].to_numpy().tolist() for run in runs]
    assert calls[0] == calls[1]
    given, later = ([f.code for f in diagnose(run) if f.code != "watch-overhead"] for run in runs)
    assert given == later


@pytest.mark.parametrize("clip", [False, True])
def test_another_object_may_be_passed_for_the_optimizer_in_step(tmp_path, clip):
    known_scaler = train(tmp_path / "given", later=False, clip=clip)
    assert train(tmp_path / "later", later=True, clip=clip, stands_in=True) == known_scaler
    steps = rows(tmp_path / "later")
    assert steps.equals(rows(tmp_path / "given")) and steps.skipped.any()
    recorded = load_run(tmp_path / "later").steps
    assert np.isfinite(recorded.optimizer_ms).all()


def test_the_scaler_of_each_fit_is_adopted_in_turn(tmp_path):
    """fastai creates a scaler for every `fit`."""
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses, norms, fits = [], [], (4.0, 1024.0)
    with watch(model, optimizer, into=tmp_path / "run"):
        for init_scale in fits:
            scaler = GradScaler("cpu", init_scale=init_scale)
            for _ in range(3):
                loss = model(torch.randn(16, 24)).square().mean()
                scaler.scale(loss).backward()
                losses.append(loss.item())
                norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters()]).item() / init_scale)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    assert run.steps.loss_scale.tolist() == [scale for scale in fits for _ in range(3)]
    assert np.allclose(run.steps.loss, losses) and np.allclose(run.steps.grad_norm, norms)
    assert run.head.config["scaler"]["init_scale"] == fits[0]


def test_the_scaler_of_another_network_is_left_alone(tmp_path):
    train(tmp_path / "run", later=True, second_network=True)
    run = load_run(tmp_path / "run")
    assert set(run.steps.loss_scale) != {8.0} and run.steps.loss_scale.iloc[0] == 2.0**21
    assert len(run.steps) == STEPS and "scaler_unseen" not in run.head.config


def test_an_observer_that_fails_in_scaler_found_is_dropped(tmp_path, monkeypatch):
    def fail(self, scaler):
        raise MemoryError

    kind = type("Failing", (Observer,), {"scaler_found": fail})
    known_scaler = train(tmp_path / "given", later=False)
    monkeypatch.setattr(watching, "default_signals", lambda *_: [kind()])
    assert train(tmp_path / "later", later=True) == known_scaler
    run = load_run(tmp_path / "later")
    assert run.steps.loss_scale.iloc[0] == 2.0**21 and len(run.steps) == STEPS
    assert run.events.detail.str.contains("Failing stopped at scaler_found: MemoryError", regex=False).sum() == 1


def test_a_scaler_whose_factor_is_applied_by_hand_is_reported(tmp_path):
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = GradScaler.scale
    with watch(model, optimizer, into=tmp_path / "run"):
        scaler = GradScaler("cpu")
        looked_on = GradScaler.scale
        for _ in range(MAX_LOSSES):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(16, 24)).square().mean()
            (loss * scaler.scale(torch.ones(()))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert GradScaler.scale is before is not looked_on  # the observer has seen enough
    run = load_run(tmp_path / "run")
    reports = run.events[run.events["detail"].str.contains("GradScaler", na=False)]
    assert reports["kind"].tolist() == ["warning"] and reports["step"].tolist() == [0]
    assert {finding.code: finding.severity for finding in diagnose(run)}["fp16-without-scaler"] == "warning"


def test_a_scaler_that_never_scales_a_watched_loss_is_reported(tmp_path):
    model, other = small_model(), nn.Linear(24, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, into=tmp_path / "run"):
        scaler = GradScaler("cpu")
        for _ in range(30):
            scaler.scale(other(torch.randn(4, 24)).mean()).backward()
            model(torch.randn(4, 24)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    assert run.head.config["scaler_unseen"] and (run.steps.loss_scale == 1).all()
    assert run.events.detail.str.contains("that watch was not given").sum() == 1
