"""The end of a watched training: all rows are written, and no hooks or patches stay."""

import signal
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from amp_core import RunError, load_run
from amp_core.record import recorder, watch, watching
from amp_core.record.loop import unrecorded
from amp_core.record.loop.autocast_regions import PrecisionDetector
from amp_core.record.loop.hooks import Hooks
from amp_core.record.loop.row_writer import RowWriter
from amp_core.record.observers.signals import changed_gradients
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.module_calls import listeners
from amp_core.store.writer import RunWriter
from tests.conftest import patched_in_torch
from tests.record.loops import small_model, train


def test_close_leaves_no_trace(tmp_path):
    hook, handler, inner = sys.excepthook, signal.getsignal(signal.SIGTERM), clip_grad._clip_grads_with_norm_
    done = train(tmp_path / "run", torch.float16, clip=1.0)
    model = done.model
    for module in model.modules():
        assert not listeners(module) and not module._forward_hooks and not module._backward_hooks
    assert repr(done.recorder).endswith("hooks=0)")
    assert sys.excepthook is hook
    assert signal.getsignal(signal.SIGTERM) is handler
    assert clip_grad._clip_grads_with_norm_ is inner


def test_close_restores_scaler_and_optimizer(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    before = dict(vars(scaler)), dict(vars(optimizer))
    methods = [vars(torch.amp.GradScaler)[name] for name in ("scale", "unscale_", "step", "update", "get_scale")]
    zero_grad = torch.optim.Optimizer.zero_grad
    rec = watch(model, optimizer, scaler=scaler, into=tmp_path / "run")
    assert vars(torch.amp.GradScaler)["step"] is not methods[2] and torch.optim.Optimizer.zero_grad is not zero_grad
    assert (vars(scaler), vars(optimizer)) == before, "nothing is set on them"
    rec.close()
    rec.close()
    assert (vars(scaler), vars(optimizer)) == before
    assert [
        vars(torch.amp.GradScaler)[name] for name in ("scale", "unscale_", "step", "update", "get_scale")
    ] == methods
    assert torch.optim.Optimizer.zero_grad is zero_grad
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert not _global_optimizer_pre_hooks and not _global_optimizer_post_hooks


def test_a_users_wrapper_on_the_scaler_stays(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    original = scaler.update
    scaler.update = lambda *a, **k: original(*a, **k)
    user_wrapper = scaler.update
    watch(model, optimizer, scaler=scaler, into=tmp_path / "run").close()
    assert scaler.update is user_wrapper


def test_an_exception_ends_the_run_as_failed_with_what_was_recorded(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.raises(ZeroDivisionError),
        watch(model, optimizer, into=tmp_path / "run") as rec,
    ):
        for step in range(5):
            loss = model(torch.ones(2, 3)).sum()
            loss.backward()
            rec.log(loss=1 / (3 - step))
            optimizer.step()
    run = load_run(tmp_path / "run")
    assert run.status == "failed" and run.end_reason == "ZeroDivisionError: division by zero"
    assert len(run.steps) == 3
    assert not listeners(model)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (watching, "UnknownScaler"),  # called after the other observers
        (recorder, "Steps"),
        (Hooks, "_patch_scaler"),  # the optimizer already has hooks
        (patched_functions.clipped_by_norm, "listen"),  # and so has the scaler
        (RunWriter, "event"),
    ],
)
def test_a_watch_that_fails_restores_torch_and_ends_the_run(tmp_path, monkeypatch, owner, name):
    def fail(*_, **__):
        monkeypatch.undo()
        raise ZeroDivisionError("a fault of ours")

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(ZeroDivisionError):
        watch(model, optimizer, scaler=torch.amp.GradScaler("cpu"), into=tmp_path / "run", level="full", trace_ops=1)
    assert patched_in_torch() == []
    assert not any(listeners(module) for module in model.modules())
    run = load_run(tmp_path / "run")
    assert (run.status, run.end_reason) == ("failed", "ZeroDivisionError: a fault of ours")


@pytest.mark.parametrize(("owner", "name"), [(RowWriter, "empty"), (PrecisionDetector, "_update_head")])
def test_an_end_that_cannot_be_recorded_restores_torch(tmp_path, monkeypatch, owner, name):
    def fail(*_, **__):
        raise ZeroDivisionError("a fault of ours")

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run"):
        model(torch.randn(4, 24))  # while the 16-bit dtype is still being detected
        monkeypatch.setattr(owner, name, fail)
    assert patched_in_torch() == [] and load_run(tmp_path / "run").status == "finished"


def test_only_the_end_waits_for_numbers_that_are_still_on_the_device(tmp_path, monkeypatch):
    """As on CUDA: a pending copy does not delay the loop, and close() writes every row."""
    from amp_core.record.stats.host_transfer import HostTransfer

    waits = []
    monkeypatch.setattr(HostTransfer, "ready", lambda self, wait=False: waits.append(wait) or wait)
    done = train(tmp_path / "run", torch.float16)
    # The steps, the signals of the start, the operators of the first step and of the loop, the second moments before a
    # step, and the first steps' gradients before and after clipping.
    assert waits.count(True) == 12 + 4 + changed_gradients.STEPS and False in waits
    steps = load_run(tmp_path / "run").steps
    assert np.allclose(steps.loss, done.losses, rtol=1e-6)


def test_a_folder_that_holds_a_run_is_refused_and_unchanged(tmp_path):
    train(tmp_path / "run", steps=2)
    before = (tmp_path / "run" / "run.json").read_bytes()
    inner = clip_grad._clip_grads_with_norm_
    with pytest.raises(RunError, match="already holds a run"):
        train(tmp_path / "run", steps=2)
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    assert clip_grad._clip_grads_with_norm_ is inner


def test_an_optimizer_that_never_steps_is_reported(tmp_path):
    """The loop updates the weights by hand, since another torch optimizer would be adopted."""
    model = small_model()
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1), into=tmp_path / "run"):
        for _ in range(unrecorded.MIN_UNSTEPPED_BACKWARDS):
            model(torch.randn(4, 24)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()
    run = load_run(tmp_path / "run")
    assert len(run.steps) == 0 and unrecorded.NO_STEP in run.events["detail"].tolist()
