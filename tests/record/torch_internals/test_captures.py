"""Nothing is measured during the capture of a CUDA graph. No GPU is needed: a fake reports the capture."""

import pytest
import torch
from torch import nn

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.step_phases import HostClock
from amp_core.record.torch_internals import captures
from tests.record.loops import optimizer_step, small_model


@pytest.fixture
def capture(monkeypatch):
    """After `capture(True)` torch reports that a graph is being captured."""

    def switch(on: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: on)

    return switch


def step(model, optimizer, scaler=None):
    with torch.autocast("cpu", dtype=torch.float16, enabled=scaler is not None):
        loss = model(torch.randn(4, 24)).float().square().mean()
    (scaler.scale(loss) if scaler else loss).backward()
    if scaler:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer_step(optimizer, scaler)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_captured_step_is_left_alone_and_the_next_is_recorded(tmp_path, capture, monkeypatch, scaled):
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu") if scaled else None
    marks = []
    monkeypatch.setattr(HostClock, "mark", lambda self: marks.append(captures.capturing()) or float(len(marks)))
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run", every=1):
        for captured in (False, True, True, False):
            capture(captured)
            step(model, optimizer, scaler)
        capture(False)
    assert len(marks) > 20 and not any(marks), "a mark is an event on the stream, which a capture does not allow"
    run = load_run(tmp_path / "run")
    assert run.steps.step.tolist() == [0, 1] and run.steps.loss.notna().all()
    assert len(run.tensors(kind="weight_grad")) == 2 * 8
    reports = run.events[run.events.detail.str.contains("CUDA graph")]
    assert reports.kind.tolist() == ["warning"] and reports.step.tolist() == [1]


def test_steps_are_detected_if_only_forward_and_backward_are_captured(tmp_path, capture):
    """The loop replays a graph, which runs no Python code, and steps outside of it."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    gradients = [torch.randn_like(p) for p in model.parameters()]
    with watch(model, optimizer, into=tmp_path / "run", every=1) as rec:
        for _ in range(3):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            rec.log(loss=1.5)
    run = load_run(tmp_path / "run")
    assert run.steps.loss.tolist() == [1.5] * 3 and (run.steps.grad_norm > 0).all()
    assert len(run.tensors(kind="weight_grad")) == 3 * 8
