"""A run whose recording stopped, or that holds nothing, says so in an event."""

import pytest
import torch
from torch import nn

from amp_core import load_run, watch
from amp_core.record.loop.steps import MIN_UNSTEPPED_BACKWARDS
from tests.record.loops import small_model


def told(into):
    events = load_run(into).events
    return events[(events.kind == "warning") & (events.name == "not recorded")].detail.tolist()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def test_a_run_of_another_model_and_optimizer(tmp_path):
    model, other = small_model(), small_model()
    optimizer = sgd(other)
    with watch(model, sgd(model), into=tmp_path / "run"):
        for _ in range(3):
            other(torch.randn(4, 24)).mean().backward()
            optimizer.step()
    (said,) = told(tmp_path / "run")
    assert said.startswith("steps: neither a forward")


@pytest.mark.parametrize("backwards", [1, 3])
def test_backward_without_a_step(tmp_path, backwards):
    model = small_model()
    with watch(model, sgd(model), into=tmp_path / "run"):
        for _ in range(backwards):
            model(torch.randn(4, 24)).mean().backward()
    (said,) = told(tmp_path / "run")
    assert said.startswith("steps: no optimizer that was given")


def test_steps_that_end_in_mid_run(tmp_path):
    """The loop goes over to updating the weights by hand."""
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
    (said,) = told(tmp_path / "run")
    assert said.startswith("steps: ") and "since the last step" in said


def test_accumulation_over_many_micro_batches_is_no_stop(tmp_path):
    model = small_model()
    optimizer = sgd(model)
    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(2):
            for _ in range(2 * MIN_UNSTEPPED_BACKWARDS):
                model(torch.randn(1, 24)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert told(tmp_path / "run") == []


def test_forwards_that_are_not_seen_any_more(tmp_path):
    """The loop goes over to calling a function of its own on the weights."""
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
    (said,) = told(tmp_path / "run")
    assert said.startswith("forward of the model: the loop no longer calls")
