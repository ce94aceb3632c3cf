"""The list of an optimizer's parameters is made once, and again whenever its groups change."""

import pytest
import torch
from torch import nn

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.loop.parameter_plan import ParameterPlan


def planned():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    names = {id(p): n for n, p in model.named_parameters()}
    return model, optimizer, ParameterPlan(optimizer, names, "optimizer0")


def addresses(plan):
    """Names of gradients, each with its address."""
    names, grads = plan.gradients()
    return dict(zip(names, [g.data_ptr() for g in grads], strict=True))


def test_gradients_have_the_names_of_their_parameters():
    model, _, plan = planned()
    assert addresses(plan) == {n: p.grad.data_ptr() for n, p in model.named_parameters()}


def test_a_parameter_is_omitted_while_it_has_no_gradient():
    model, _, plan = planned()
    kept, model[0].weight.grad = model[0].weight.grad, None
    assert list(addresses(plan)) == ["0.bias", "1.weight", "1.bias"]
    model[0].weight.grad = kept
    assert list(addresses(plan)) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_current_gradients_are_returned_after_they_are_replaced():
    model, optimizer, plan = planned()
    before = addresses(plan)
    optimizer.zero_grad()
    assert addresses(plan) == {}
    model(torch.ones(1, 2)).sum().backward()
    assert addresses(plan).keys() == before.keys()


def test_groups_added_during_a_run_are_included():
    _, optimizer, plan = planned()
    addresses(plan)
    extra = nn.Parameter(torch.ones(2))
    extra.grad = torch.ones(2)
    optimizer.add_param_group({"params": [extra]})
    assert addresses(plan)["optimizer0.group1.0"] == extra.grad.data_ptr()


def test_a_replaced_parameter_is_included():
    _, optimizer, plan = planned()
    addresses(plan)
    other = nn.Parameter(torch.ones(3, 2))
    other.grad = torch.ones(3, 2)
    optimizer.param_groups[0]["params"][0] = other
    assert list(addresses(plan)) == ["optimizer0.group0.0", "0.bias", "1.weight", "1.bias"]
    assert addresses(plan)["optimizer0.group0.0"] == other.grad.data_ptr()


def test_a_removed_parameter_is_omitted():
    _, optimizer, plan = planned()
    addresses(plan)
    del optimizer.param_groups[0]["params"][1]
    assert list(addresses(plan)) == ["0.weight", "1.weight", "1.bias"]


def test_a_run_has_the_gradients_of_added_groups_and_not_removed_ones(tmp_path):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.0)
    norms = []
    with watch(model, optimizer, into=tmp_path / "run", every=2, kinds=("weight_grad",)):
        for step in range(6):
            if step == 2:
                optimizer.add_param_group({"params": list(model[0].parameters())})
            model(torch.ones(1, 2)).sum().backward()
            if step >= 4:
                model[1].bias.grad = None
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            norms.append(float(torch.stack([g.norm() for g in grads]).norm()))
            optimizer.step()
            model.zero_grad()
    run = load_run(tmp_path / "run")
    assert run.steps.grad_norm.to_numpy() == pytest.approx(norms, rel=1e-6)
    names = run.tensors(kind="weight_grad").groupby("step")["name"].apply(set).to_dict()
    assert names == {
        0: {"1.weight", "1.bias"},
        2: {"0.weight", "0.bias", "1.weight", "1.bias"},
        4: {"0.weight", "0.bias", "1.weight"},
    }
