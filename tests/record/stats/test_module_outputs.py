"""Output gradients and activations are measured for every form of module output."""

import dataclasses
import gc
from collections import Counter, namedtuple

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from amp_core import load_run
from amp_core.record import watch, watching
from amp_core.record.stats import module_outputs
from amp_core.record.torch_internals.module_calls import listeners
from tests.record.loops import small_model, train

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    aux: dict


class Wrapping(nn.Module):
    """A linear layer that returns its result inside a container."""

    def __init__(self, wrap):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.wrap = wrap

    def forward(self, x):
        return self.wrap(x @ self.weight)


WRAPPINGS = {
    "tensor": (lambda t: t, lambda o: o),
    "tuple": (lambda t: (t, 3), lambda o: o[0]),
    "nested": (lambda t: [{"a": (t,)}], lambda o: o[0]["a"][0]),
    "namedtuple": (lambda t: Pair(t, None), lambda o: o.left),
    "dict": (lambda t: {"logits": t}, lambda o: o["logits"]),
    "dataclass": (lambda t: Output(t, {}), lambda o: o.hidden),
}


def one_step(
    model, x, tmp_path, loss_of=lambda out: out.square().sum(), kinds=("output_grad", "activation"), **options
):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run", every=1, kinds=kinds, **options):
        loss_of(model(x)).backward()
        optimizer.step()
    run = load_run(tmp_path / "run")
    return {k: run.tensors(kind=k).set_index("name") for k in kinds}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_outputs_in_any_container_are_measured(tmp_path, wrapping):
    torch.manual_seed(0)
    wrap, unwrap = WRAPPINGS[wrapping]
    layer = Wrapping(wrap)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return unwrap(self.layer(x))

    x = torch.randn(3, 4)
    out = x @ layer.weight.detach()
    rows = one_step(Net(), x, tmp_path)
    grad, activation = rows["output_grad"].loc["layer"], rows["activation"].loc["layer"]
    assert grad["absmax"] == pytest.approx((2 * out).abs().max().item())
    assert grad["numel"] == activation["numel"] == 12
    assert activation["absmax"] == pytest.approx(out.abs().max().item())


def test_output_gradients_are_the_16_bit_values_times_the_loss_scale(tmp_path):
    train(tmp_path / "run", torch.float16, every=1, init_scale=256.0)
    rows = load_run(tmp_path / "run").tensors(kind="output_grad", name="2", steps=(0, 0))
    assert rows["dtype"].tolist() == ["float16"] and rows.loss_scale.tolist() == [256.0]
    assert rows.numel.tolist() == [16 * 48]


def test_both_uses_of_a_module_are_counted_in_one_row(tmp_path):
    layer = nn.Linear(4, 4)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(self.layer(x))

    rows = one_step(Twice(), torch.randn(3, 4), tmp_path)
    assert rows["output_grad"].loc["layer"]["numel"] == 24
    assert rows["activation"].loc["layer"]["numel"] == 24


def test_all_micro_batches_are_counted_in_one_row(tmp_path):
    train(tmp_path / "run", torch.bfloat16, every=1, accumulate=3)
    rows = load_run(tmp_path / "run").tensors(kind="output_grad", name="5")
    assert (rows.numel == 3 * 16 * 10).all() and len(rows) == 12


def test_the_output_gradient_before_an_in_place_module_is_correct(tmp_path):
    """ReLU(inplace=True) overwrites the linear layer's output; its gradient must still be the linear layer's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True))
    x = torch.randn(5, 4)
    before = model[0](x).detach()
    rows = one_step(model, x, tmp_path, kinds=("output_grad",))
    expected = 2 * before.clamp(min=0)
    assert rows["output_grad"].loc["0"]["absmax"] == pytest.approx(expected.abs().max().item())
    assert rows["output_grad"].loc["0"]["zero"] == (expected == 0).sum().item()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_module_is_measured_once(tmp_path, reentrant):
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.last(checkpoint(self.inner, self.first(x), use_reentrant=reentrant))

    rows = one_step(Net(), torch.randn(3, 4), tmp_path, kinds=("output_grad",))
    assert {"first", "inner", "last"} <= set(rows["output_grad"].index)


def test_the_output_and_states_of_an_lstm_are_measured(tmp_path):
    model = nn.LSTM(4, 8, batch_first=True)
    wrapper = nn.ModuleDict({"lstm": model, "head": nn.Linear(8, 1)})
    wrapper.forward = lambda x: wrapper["head"](wrapper["lstm"](x)[0])
    rows = one_step(wrapper, torch.randn(2, 5, 4), tmp_path, kinds=("output_grad",))
    assert rows["output_grad"].loc["lstm"]["numel"] == 2 * 5 * 8


class Unused(torch.autograd.Function):
    """Has no gradient for its second input, as cuDNN's LSTM has none for a state that no loss depends on."""

    @staticmethod
    def forward(ctx, x, state):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("blocks", [False, True])
def test_an_output_that_gets_no_gradient_is_left_out(tmp_path, blocks):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return Unused.apply(self.first(x), self.unused(x))

    rows = one_step(Net(), torch.randn(3, 4), tmp_path, kinds=("output_grad", "activation"), blocks=blocks)
    assert list(rows["output_grad"].index) == ["first"]


def test_hooks_are_on_the_modules_only_during_sampled_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(watching, "_observers", lambda *_: [])  # some modules have hooks of their own
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked = []
    with watch(model, optimizer, into=tmp_path / "run", every=3):
        for _ in range(6):
            loss = model(torch.randn(2, 24)).sum()
            hooked.append(len(listeners(model[0])))
            loss.backward()
            optimizer.step()
    # On a sampled step for outputs and for casts to 8 and 4 bits; first also for where the loop enters the model.
    assert hooked == [4, 0, 0, 2, 0, 0]


def test_weights_are_measured_with_kind_weight(tmp_path):
    train(tmp_path / "run", every=4, kinds=("weight",))
    rows = load_run(tmp_path / "run").tensors()
    assert set(rows.kind) == {"weight"} and set(rows.name) == {n for n, _ in small_model().named_parameters()}
    assert (rows.loss_scale == 1).all()


def test_a_compiled_model_reports_once_which_kinds_are_missing(tmp_path):
    train(tmp_path / "run", torch.bfloat16, wrap=lambda m: torch.compile(m, backend="eager"))
    run = load_run(tmp_path / "run")
    warnings = run.events[(run.events.kind == "warning") & run.events.detail.str.contains("into a compiled graph")]
    assert len(warnings) == 1 and warnings.detail.iloc[0].startswith("output_grad")
    assert set(run.tensors().kind) == {"weight_grad"}


def capped_of(tmp_path, model, x, **options):
    """The recorded weight gradients of one step: each row with its two histograms by exponent."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(model, optimizer, into=tmp_path / "run", every=1, **options):
        (model(x).square().sum() / 7).backward()
        optimizer.step()
    rows = load_run(tmp_path / "run").tensors(kind="weight_grad").set_index("name")

    def histogram(name, which):
        first, counts = rows.loc[name, f"{which}_min"], rows.loc[name, f"{which}_counts"]
        return None if counts is None else {int(first) + i: int(n) for i, n in enumerate(counts) if n}

    return histogram


def counted(values):
    exponents = torch.frexp(values[values != 0]).exponent - 1
    return dict(sorted(Counter(exponents.tolist()).items()))


class Conv1D(nn.Module):
    """The linear layer of GPT-2 in transformers, whose weight is transposed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        return x @ self.weight


@pytest.mark.parametrize(
    ("layer", "shape", "channel", "row"),
    [
        (nn.Linear(6, 4), (9, 6), -1, 0),
        (nn.Linear(6, 4), (3, 5, 6), -1, 0),
        (nn.Conv2d(3, 5, 3), (2, 3, 6, 6), 1, 0),
        (nn.Conv1d(4, 6, 2, groups=2), (2, 4, 9), 1, 0),
        (nn.Conv2d(3, 5, 3), (3, 6, 6), 0, 0),
        (Conv1D(), (9, 6), -1, 1),
    ],
)
def test_a_weight_gradient_is_capped_by_its_channels_output_gradients(tmp_path, layer, shape, channel, row):
    torch.manual_seed(0)
    model = nn.Sequential(layer)
    x = torch.randn(shape)
    x[0] *= 20  # weight gradients larger than output gradients
    out = model(x).detach()
    dims = [d for d in range(out.dim()) if d != channel % out.dim()]
    cap = (2 * out / 7).abs().amax(dims)
    histogram = capped_of(tmp_path, model, x)
    grad = layer.weight.grad
    view = [1] * grad.dim()
    view[row] = len(cap)
    assert histogram("0.weight", "exp") == counted(grad)
    assert histogram("0.weight", "capped") == counted(torch.minimum(grad.abs(), cap.view(view)))
    assert histogram("0.weight", "exp") != histogram("0.weight", "capped")


def test_a_cap_covers_all_uses_of_a_layer_and_other_layers_have_none(tmp_path):
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.LayerNorm(4), layer)
    histogram = capped_of(tmp_path, model, torch.randn(5, 4))
    assert sum(histogram("0.weight", "capped").values()) == 16
    assert histogram("0.bias", "capped") is None and histogram("1.weight", "capped") is None


@pytest.mark.parametrize("shape", [(0, 4), (4,)])
def test_empty_and_one_dimensional_outputs_give_no_cap(tmp_path, shape):
    histogram = capped_of(tmp_path, nn.Sequential(nn.Linear(4, 4)), torch.ones(shape))
    assert histogram("0.weight", "capped") is None


def test_a_layer_that_is_frozen_or_has_no_gradient_is_omitted(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    histogram = capped_of(tmp_path, model, torch.randn(5, 4))
    assert sum(histogram("1.weight", "capped").values()) == 16


def test_without_output_gradients_there_are_no_caps(tmp_path):
    histogram = capped_of(tmp_path, nn.Sequential(nn.Linear(4, 4)), torch.randn(5, 4), kinds=("weight_grad",))
    assert histogram("0.weight", "capped") is None


def test_gradients_and_caps_are_multiplied_by_the_loss_scale(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run", every=1):
        for _ in range(2):
            scaler.scale(model(torch.randn(5, 4)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    rows = load_run(tmp_path / "run").tensors(kind="weight_grad", name="0.weight")
    assert (rows.loss_scale == 1024.0).all() and rows.capped_counts.notna().all()


def test_the_head_has_the_class_and_shape_of_every_layer(tmp_path):
    class OwnLSTM(nn.LSTM):
        pass

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(7, 4)
            self.mix = OwnLSTM(4, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x):
            return self.head(self.mix(self.words(x))[0])

    model = Model()
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1), into=tmp_path / "run"):
        pass
    about = load_run(tmp_path / "run").head.model
    assert about["layers"] == {"words": "Embedding", "mix": "LSTM", "head": "Linear"}
    assert about["shapes"]["words.weight"] == [7, 4] and about["shapes"]["mix.bias_ih_l0"] == [16]
    assert about["tied"] == {"head.weight": "words.weight"}


def test_a_sampled_step_allocates_few_objects_per_output(tmp_path):
    """Python's garbage collector runs after every 700 objects that are allocated and not freed."""
    depth = 200
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collections = []
    with watch(model, optimizer, into=tmp_path / "run", every=10):
        gc.disable()
        gc.freeze()  # else each collection traverses objects of other tests
        try:
            for step in range(31):
                gc.collect()
                before = gc.get_count()[0]
                loss = model(torch.ones(2, 4)).square().mean()
                if step % 10 in (0, 5):
                    collections.append(gc.get_count()[0] - before)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            gc.unfreeze()
            gc.enable()
    sampled, plain = collections[-1], collections[-2]
    assert (sampled - plain) / depth < 3


def test_a_sampled_step_leaves_no_tensor_for_each_layer(tmp_path):
    """Small objects made in between the tensors of a backward, and kept, slow down all later steps."""

    def alive():
        gc.collect()
        return sum(isinstance(held, torch.Tensor) for held in gc.get_objects())

    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(100)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = alive()
    with watch(model, optimizer, into=tmp_path / "run", every=1):
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert alive() - before < len(model) / 4
    frame = load_run(tmp_path / "run").tensors(kind="weight_grad")
    assert frame["capped_counts"].notna().sum() == 3 * len(model)


def test_an_output_gradient_is_measured_alike_whether_its_sort_is_known_or_not(tmp_path, monkeypatch):
    """Shapes, dtypes and weights change between steps, and one weight has two layers."""

    def recorded(into):
        torch.manual_seed(0)
        shared = nn.Linear(6, 6)
        model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), shared, nn.Tanh(), shared, nn.Conv1d(1, 3, 2), nn.Flatten())
        model.insert(5, nn.Unflatten(1, (1, 6)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with watch(model, optimizer, into=into, every=1):
            for step, (rows, dtype) in enumerate([(4, None), (4, None), (7, None), (4, torch.bfloat16), (4, None)] * 2):
                if step == 6:
                    shared.weight = nn.Parameter(shared.weight.detach() * 2)
                    optimizer.param_groups[0]["params"][2] = shared.weight
                with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                    loss = model(torch.randn(rows, 5)).float().square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return load_run(into).tensors().drop(columns=["rank"])

    known = recorded(tmp_path / "known")
    reused = []
    monkeypatch.setattr(
        module_outputs._OutputGrad,
        "__call__",
        lambda self, grad: reused.append(self._outputs._on_grad(self._name, self._module, grad, self._channels)),
    )
    anew = recorded(tmp_path / "anew")
    assert len(reused) > 50 and any(reused)
    assert known["capped_counts"].notna().sum() >= 20
    pd.testing.assert_frame_equal(known, anew)
