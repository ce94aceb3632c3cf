"""A watched scaler or optimizer is copied and pickled like an unwatched one, and its copies are not watched."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.torch_internals.patched_functions import _methods, method_of
from tests.record.twins import assert_same_weights, trained

NAMES = ("scale", "unscale_", "step", "update", "get_scale")


def net():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


class Louder(torch.amp.GradScaler):
    """Overrides some methods and calls its base class, like `ShardedGradScaler`."""

    def scale(self, outputs):
        return super().scale(outputs)

    def step(self, optimizer, *args, **kwargs):
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale=None):
        super().update(new_scale)


class Delegating:
    """A scaler only by its methods, most of which it delegates to another."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if name == "inner":  # not yet set in a copy
            raise AttributeError(name)
        return getattr(self.inner, name)

    def step(self, optimizer):
        return self.inner.step(optimizer)


def louder(_):
    return Louder("cpu", init_scale=2.0**10, growth_interval=3)


KINDS = {"GradScaler": lambda scaler: scaler, "subclass": louder}


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_acts_on_itself_and_is_not_watched(kind, tmp_path):
    def copies(model, optimizer, scaler):
        results = []
        for other in (copy.deepcopy(scaler), copy.copy(scaler), pickle.loads(pickle.dumps(scaler))):
            assert vars(other).keys() == vars(scaler).keys()
            other.scale(torch.ones(1))
            other.update(new_scale=4.0)
            results.append((other.get_scale(), scaler.get_scale()))
        return results, pickle.dumps(scaler)

    bare, watched = (trained(net, into, each=copies, wrap=KINDS[kind]) for into in (None, tmp_path / "run"))
    assert bare[0] == watched[0] and bare[2] == watched[2]
    assert_same_weights(bare[1], watched[1])
    steps = load_run(tmp_path / "run").steps
    assert len(steps) == 8 and steps["loss"].tolist() == pytest.approx(bare[0])
    assert steps["loss_scale"].tolist() == [2.0**10] * 3 + [2.0**11] * 3 + [2.0**12] * 2


def test_a_delegating_scaler_is_watched_and_copied(tmp_path):
    def copies(model, optimizer, scaler):
        other = copy.deepcopy(scaler)
        other.scale(torch.ones(1))
        other.update(new_scale=4.0)
        return other.get_scale(), scaler.get_scale(), pickle.loads(pickle.dumps(scaler)).get_scale()

    bare, watched = (trained(net, into, each=copies, wrap=Delegating) for into in (None, tmp_path / "run"))
    assert bare[0] == watched[0] and bare[2] == watched[2]
    assert load_run(tmp_path / "run").steps["loss"].tolist() == pytest.approx(bare[0])


def test_a_pickled_scaler_loads_where_there_is_no_ampscope(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run"):
        (tmp_path / "both.pkl").write_bytes(pickle.dumps((scaler, optimizer)))
    program = "import pickle, sys; scaler, optimizer = pickle.load(open('both.pkl', 'rb')); optimizer.zero_grad()"
    program += "; assert scaler.get_scale() == 8 and not any(name.startswith('amp_core') for name in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Whole(torch.optim.SGD):
    """Copies its whole `__dict__`; torch's own method would omit the hooks."""

    def __getstate__(self):
        return dict(self.__dict__)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, Whole])
def test_a_copy_of_an_optimizer_is_not_watched(optimizer_class, tmp_path):
    def copies(model, optimizer, scaler):
        other = copy.deepcopy(optimizer)
        other.step()
        other.zero_grad()
        return list(vars(other)), list(vars(copy.copy(optimizer))), len(other._optimizer_step_pre_hooks)

    bare, watched = (
        trained(net, into, each=copies, optimizer_class=optimizer_class, scaled=False)
        for into in (None, tmp_path / "run")
    )
    assert bare[0] == watched[0] and bare[2] == watched[2]
    run = load_run(tmp_path / "run")
    assert len(run.steps) == 8
    order = run.events.loc[run.events["kind"] == "calls", "name"].tolist()
    assert order[-1] == "zero_grad" or "zero_grad backward optimizer.step" in order


@pytest.mark.parametrize("first_to_close", [0, 1])
def test_two_runs_share_a_patched_class_and_restore_it(first_to_close, tmp_path):
    kinds = (torch.amp.GradScaler, Louder)
    before = [vars(kind).get(name) for kind in kinds for name in NAMES]
    loops = []
    for i, kind in enumerate((torch.amp.GradScaler, Louder, torch.amp.GradScaler)):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = kind("cpu", init_scale=8.0)
        arguments = {} if i == 2 else {"scaler": scaler}  # the last scaler is detected when it scales a loss
        loops.append((watch(model, optimizer, into=tmp_path / str(i), **arguments), model, optimizer, scaler))
        del scaler
    for _ in range(3):
        for _, model, optimizer, scaler in loops:
            scaler.scale(model(torch.ones(2, 8)).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    for recorder, *_ in loops if first_to_close == 0 else reversed(loops):
        recorder.close()
    assert [vars(kind).get(name) for kind in kinds for name in NAMES] == before and not _methods
    for i in range(3):
        run = load_run(tmp_path / str(i))
        assert len(run.steps) == 3 and run.steps["loss"].notna().all()
        order = run.events.loc[run.events["kind"] == "calls", "name"].iloc[0]
        assert order.count("scaler.step") == 1 and order.count("update") == 1


def test_a_step_that_raises_leaves_the_scaler_usable(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run"):
        with pytest.raises(AssertionError):
            scaler.step(optimizer)  # before any loss was scaled
        for _ in range(3):
            scaler.scale(model(torch.ones(2, 8)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    assert run.status == "finished" and run.steps["loss"].notna().sum() == 3


def test_a_listener_added_within_a_call_is_not_notified_of_its_end():
    class Target:
        def act(self, value):
            return value + 1

    one, other, calls = Target(), Target(), []
    act = method_of(one, "act")

    def begin(args, kwargs):
        calls.append(("before", args, kwargs))
        if len(calls) == 1:
            act.listen_after(end, of=one)

    def end(args, kwargs, result):
        calls.append(("after", result))

    act.listen(begin, of=one)
    assert (one.act(1), other.act(5), one.act(value=2)) == (2, 6, 3)
    assert calls == [("before", (one, 1), {}), ("before", (one,), {"value": 2}), ("after", 3)]
    act.unlisten(begin, end)
    assert one.act(3) == 4 and len(calls) == 3 and not hasattr(Target.act, "__wrapped__") and not _methods
