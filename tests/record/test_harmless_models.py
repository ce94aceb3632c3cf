"""Watching runs no code of the model, which is copied, saved, scripted and exported as if unwatched."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.torch_internals.module_calls import listeners
from tests.record.twins import assert_same_weights, saved, trained


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)

    def forward(self, x):
        return self.b(self.act(self.a(x)))


class Halved(nn.Module):
    """A parametrization that counts how often it is computed."""

    calls = 0

    def forward(self, weight):
        Halved.calls += 1
        return weight / 2

    def right_inverse(self, weight):
        return weight * 2


def parametrized(apply):
    def make():
        model = Net()
        for layer in (model.a, model.b):
            apply(layer)
        return model

    return make


def convolutional():
    conv = parametrizations.spectral_norm(nn.Conv1d(5, 6, 3, padding=1))
    return nn.Sequential(conv, nn.ReLU(), nn.Conv1d(6, 5, 1))


PARAMETRIZED = {
    "spectral_norm": parametrized(parametrizations.spectral_norm),
    "weight_norm": parametrized(parametrizations.weight_norm),
    "orthogonal": parametrized(parametrizations.orthogonal),
    "own": parametrized(lambda layer: parametrize.register_parametrization(layer, "weight", Halved())),
    "old spectral_norm": parametrized(nn.utils.spectral_norm),
    "convolution": convolutional,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_a_parametrized_weight_trains_the_same(name, tmp_path):
    losses, counts, models = {}, {}, {}
    for into in (None, tmp_path / "run"):
        Halved.calls = 0
        losses[into], models[into], _ = trained(PARAMETRIZED[name], into, every=1)
        counts[into] = Halved.calls
    assert losses[None] == losses[tmp_path / "run"] and counts[None] == counts[tmp_path / "run"]
    assert_same_weights(models[None], models[tmp_path / "run"])
    kinds = set(load_run(tmp_path / "run").tensors()["kind"])
    assert kinds >= {"weight_grad", "output_grad", "activation"}


def test_watching_runs_no_code_of_the_model(tmp_path):
    ran = []

    class Nosy(Net):
        @property
        def weight(self):
            ran.append("weight")
            return self.a.weight

        def __getattr__(self, name):
            if name not in self.__dict__["_modules"]:
                ran.append(name)
            return super().__getattr__(name)

        def parameters(self, recurse=True):
            ran.append("parameters")
            return super().parameters(recurse)

        def named_parameters(self, *args, **kwargs):
            ran.append("named_parameters")
            return super().named_parameters(*args, **kwargs)

        def named_modules(self, *args, **kwargs):
            ran.append("named_modules")
            return super().named_modules(*args, **kwargs)

        def modules(self):
            ran.append("modules")
            return super().modules()

        def children(self):
            ran.append("children")
            return super().children()

        def buffers(self, recurse=True):
            ran.append("buffers")
            return super().buffers(recurse)

    class NosyLinear(nn.Linear):
        """A linear layer whose weight is a property, like that of a lazy or parametrized layer."""

        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.raw = nn.Parameter(self._parameters.pop("weight").detach())

        @property
        def weight(self):
            ran.append("layer's weight")
            return self.raw

    def make():
        model = Nosy()
        model.b = NosyLinear(12, 4)
        return model

    calls = {}
    for into in (None, tmp_path / "run"):
        ran.clear()
        losses, _, _ = trained(make, into, every=1)
        calls[into] = losses, list(ran)
    assert calls[None] == calls[tmp_path / "run"]


def test_an_encoder_takes_the_same_path_in_evaluation(tmp_path):
    """An encoder takes its fused path only if no module has hooks."""

    def make():
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return nn.Sequential(layer, nn.Linear(8, 2))

    def evaluate(model, optimizer, scaler):
        with torch.no_grad():
            outputs = model.eval()(torch.linspace(-1, 1, 80).reshape(2, 5, 8))
        model.train()
        return outputs

    bare, watched = (trained(make, into, each=evaluate)[2] for into in (None, tmp_path / "run"))
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))


class OwnState(Net):
    """Has its own `__getstate__`, which returns its `__dict__`."""

    def __getstate__(self):
        return dict(self.__dict__)


class OwnCopy(Net):
    def __deepcopy__(self, memo):
        new = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


@pytest.mark.parametrize("make", [Net, OwnState, OwnCopy])
def test_copies_and_files_are_those_of_an_unwatched_model(make, tmp_path):
    def keep(model, optimizer, scaler):
        clone = type(model).__new__(type(model))
        clone.__dict__.update(model.__dict__)
        copies = (model, copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model)), clone)
        assert all(listeners(one) == [] for one in copies[1:])
        assert [vars(one).keys() for one in copies] == [vars(Net()).keys()] * len(copies)
        return [saved(one) for one in copies]

    bare, watched = (trained(make, into, each=keep) for into in (None, tmp_path / "run"))
    assert bare[0] == watched[0] and bare[2] == watched[2]


def test_a_file_saved_while_watched_loads_as_weights_only(tmp_path):
    needed = [Net, nn.Linear, nn.ReLU]

    def save(model, optimizer, scaler):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        with torch.serialization.safe_globals([*needed, set]):
            return torch.load(file, weights_only=True)(torch.ones(1, 1, 8))

    bare, watched = (trained(Net, into, each=save)[2] for into in (None, tmp_path / "run"))
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))


def graphs(model, optimizer=None, scaler=None):
    """The results of the exporters for the model and its copy."""
    outputs = []
    x = torch.linspace(-1, 1, 40).reshape(1, 5, 8)
    for one in (model, copy.deepcopy(model)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scripted = torch.jit.script(one)
            outputs += [scripted.code, scripted(x).tolist(), sorted(scripted.state_dict())]
            outputs.append(torch.jit.trace(one, x).code)
            outputs.append(torch.fx.symbolic_trace(one).code)
            outputs += [torch.export.export(one, (x,), strict=strict).graph_module.code for strict in (False, True)]
    return outputs


def test_a_watched_model_is_scripted_traced_and_exported_like_an_unwatched_one(tmp_path):
    (bare, plain, calls), (watched, model, seen_watched) = (
        trained(Net, into, each=graphs, steps=3) for into in (None, tmp_path / "run")
    )
    assert bare == watched and calls == seen_watched and graphs(plain) == graphs(model)
    run = load_run(tmp_path / "run")
    assert run.steps["loss"].tolist() == pytest.approx(watched) and run.steps["samples"].tolist() == [6, 6, 6]


def test_user_hooks_are_called_and_removed_as_without_watching(tmp_path):
    def trained_with_hooks(into):
        torch.manual_seed(0)
        model, order = Net(), []

        def note(name):
            return lambda *_: order.append(name)

        early = [model.a.register_forward_hook(note("early")), model.register_forward_pre_hook(note("pre"))]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rec = watch(model, optimizer, into=into, every=1) if into is not None else None
        late = model.a.register_forward_hook(note("late"))
        first = model.a.register_forward_hook(note("first"), prepend=True)
        model.b.register_full_backward_hook(note("backward"))
        for step in range(5):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            if step == 1:
                early[0].remove()
            if step == 2:
                first.remove()
        if rec is not None:
            rec.close()
        late.remove()
        model(torch.ones(2, 8)).sum().backward()
        return order, {n: len(getattr(model.a, n)) for n in ("_forward_hooks", "_forward_pre_hooks")}

    assert trained_with_hooks(None) == trained_with_hooks(tmp_path / "run")
