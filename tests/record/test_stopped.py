"""A run whose recording stopped, or that has no steps, reports that in an event."""

import pytest
import torch
from torch import nn

from amp_core import load_run, watch
from amp_core.record.loop.unrecorded import MIN_UNSTEPPED_BACKWARDS
from tests.record.loops import small_model


def not_recorded(into):
    events = load_run(into).events
    return events[(events.kind == "warning") & (events.name == "not recorded")].detail.tolist()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def test_training_another_model_and_optimizer_is_reported(tmp_path):
    model, other = small_model(), small_model()
    optimizer = sgd(other)
    with watch(model, sgd(model), into=tmp_path / "run"):
        for _ in range(3):
            other(torch.randn(4, 24)).mean().backward()
            optimizer.step()
    (detail,) = not_recorded(tmp_path / "run")
    assert detail.startswith("steps: neither a forward")


@pytest.mark.parametrize("backwards", [1, 3])
def test_backward_without_a_step_is_reported(tmp_path, backwards):
    model = small_model()
    with watch(model, sgd(model), into=tmp_path / "run"):
        for _ in range(backwards):
            model(torch.randn(4, 24)).mean().backward()
    (detail,) = not_recorded(tmp_path / "run")
    assert detail.startswith("steps: no optimizer that was given")


def test_steps_that_stop_during_the_run_are_reported(tmp_path):
    """The loop changes to updating the weights by hand."""
    model = small_model()
    optimizer = sgd(model)
    with watch(model, optimizer, into=tmp_path / "run"):
        for step in range(5 + 2 * MIN_UNSTEPPED_BACKWARDS):
            model(torch.randn(4, 24)).square().mean().backward()
            if step < 5:
                optimizer.step()
            else:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter -= 1e-2 * parameter.grad
            model.zero_grad()
    assert len(load_run(tmp_path / "run").steps) == 5
    (detail,) = not_recorded(tmp_path / "run")
    assert detail.startswith("steps: ") and "since the last step" in detail


def test_accumulation_over_many_micro_batches_is_not_reported(tmp_path):
    model = small_model()
    optimizer = sgd(model)
    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(2):
            for _ in range(2 * MIN_UNSTEPPED_BACKWARDS):
                model(torch.randn(1, 24)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not_recorded(tmp_path / "run") == []


def test_forwards_that_bypass_the_model_during_the_run_are_reported(tmp_path):
    """The loop changes to calling a function on the weights."""
    model = nn.Linear(24, 10)
    optimizer = sgd(model)
    with watch(model, optimizer, into=tmp_path / "run"):
        for step in range(20):
            x = torch.randn(4, 24)
            out = model(x) if step < 5 else nn.functional.linear(x, model.weight, model.bias)
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    assert run.steps.loss.notna().all() and len(run.steps) == 20
    (detail,) = not_recorded(tmp_path / "run")
    assert detail.startswith("forward of the model: the loop no longer calls")
