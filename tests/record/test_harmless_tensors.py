"""A tensor that outlives its step has no more of our hooks in the last step than in the first, and none at the end."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.torch_internals.tensor_hooks import MIN_TO_PRUNE, TensorHooks
from tests.record.twins import assert_same_weights, trained


class Policy(nn.Module):
    """Returns a parameter, a buffer that requires a gradient, and its input, beside its result."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 4)
        self.log_std = nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("scale", torch.ones(4).requires_grad_())
        self.std = Std(self.log_std)

    def forward(self, x):
        return self.body(x), self.std(), self.log_std, self.scale


class Std(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self):
        return self.value


def hooks_on(model):
    tensors = [*model.parameters(), *model.buffers()]
    return [len(t._backward_hooks or ()) + len(t._post_accumulate_grad_hooks or ()) for t in tensors]


@pytest.mark.parametrize("scaled", [True, False])
def test_hooks_on_a_returned_parameter_do_not_accumulate(scaled, tmp_path):
    bare = trained(Policy, None, scaled=scaled)
    losses, model, counts = trained(
        Policy, tmp_path / "run", scaled=scaled, each=lambda model, *_: hooks_on(model), steps=8
    )
    assert losses == bare[0]
    assert_same_weights(model, bare[1])
    assert max(map(max, counts)) <= 1 and counts[-1] == counts[2]
    assert hooks_on(model) == [0] * 4
    rows = load_run(tmp_path / "run").tensors(kind="output_grad")
    assert rows.groupby(["step", "name"]).size().max() == 1 and "std" in set(rows["name"])


def test_hooks_on_tensors_that_the_program_keeps_do_not_accumulate(tmp_path):
    """A cached result that is not a leaf, and a constant input that the model returns."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
            self.table = None

        def forward(self, x):
            if self.table is None:
                self.table = self.embed(torch.eye(3))
            return self.head(self.table), self.table, x

    model, x = Cached(), torch.ones(2, 2, requires_grad=True)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    counts = []
    with watch(model, optimizer, into=tmp_path / "run", every=1):
        for _ in range(6):
            y, table, same = model(x)
            (y.sum() + table.sum() + same.sum()).backward(retain_graph=True)
            optimizer.step()
            counts.append((len(model.table._backward_hooks), len(x._backward_hooks)))
    assert counts[-1] == counts[1] and max(map(max, counts)) <= 2
    assert not model.table._backward_hooks and not x._backward_hooks


def test_a_new_hook_replaces_the_one_for_the_same_purpose():
    hooks, calls = TensorHooks(), []
    leaf = torch.ones(2, requires_grad=True)
    for i in range(3):
        hooks.attach(leaf, "a", lambda grad, i=i: calls.append(i))
    hooks.attach(leaf, "b", lambda grad: calls.append("b"))
    leaf.sum().backward()
    assert calls == [2, "b"] and leaf.grad.tolist() == [1, 1]
    hooks.detach_leaves()
    assert not leaf._backward_hooks


def test_handles_of_freed_tensors_are_not_kept():
    hooks = TensorHooks()
    leaf = torch.ones(2, requires_grad=True)
    kept = leaf * 2
    hooks.attach(kept, "a", lambda grad: None)
    for _ in range(10 * MIN_TO_PRUNE):
        hooks.attach(leaf * 3, "a", lambda grad: None)
    assert len(hooks._others) <= MIN_TO_PRUNE
    hooks.remove()
    assert not kept._backward_hooks


def test_a_hook_of_the_program_stays_on_its_tensor():
    hooks, calls, own = TensorHooks(), [], []
    leaf = torch.ones(2, requires_grad=True)
    first = leaf * 2
    hooks.attach(first, "a", calls.append)
    handle = first.register_hook(own.append)
    first.sum().backward()
    del first
    second, third = leaf * 3, leaf * 5
    for tensor in (second, third):
        hooks.attach(tensor, "a", calls.append)
    third.register_hook(own.append)
    assert len(second._backward_hooks) == 1
    (second + third).sum().backward()
    assert (len(calls), len(own)) == (3, 2)
    handle.remove()
    hooks.remove()
    assert not second._backward_hooks and len(third._backward_hooks) == 1


def test_the_table_of_hooks_does_not_grow_with_the_steps():
    hooks, calls = TensorHooks(), []
    leaf = torch.ones(2, requires_grad=True)
    tables = set()
    for step in range(5):
        output = leaf * 2
        hooks.attach(output, "a", lambda grad, step=step: calls.append(step))
        tables.add(id(output._backward_hooks))
        output.sum().backward()
        del output
    assert calls == [0, 1, 2, 3, 4] and len(tables) == 1


class Nosy(torch.Tensor):
    """Records the functions that torch calls on it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Nosy.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_watching_runs_no_code_of_a_tensor_subclass(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.b(torch.relu(self.a(x.as_subclass(Nosy))))

    seen = {}
    for into in (None, tmp_path / "run"):
        Nosy.seen.clear()
        losses, _, _ = trained(Net, into, every=1)
        seen[into] = losses, list(Nosy.seen)
    assert seen[None] == seen[tmp_path / "run"] and seen[None][1]
