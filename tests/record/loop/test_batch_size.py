"""`samples` is the batch size, whichever dimension of the input that is, or null."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from amp_core import load_run, watch
from amp_core.record.torch_internals.module_calls import listeners
from tests.record.loops import small_model

STEPS = 5
T, N, C = 7, 4, 6


class First(nn.Module):
    """Calls a layer with several outputs, and returns the first."""

    def __init__(self, layer, turned=False, last=False):
        super().__init__()
        self.layer, self.turned, self.last = layer, turned, last
        self.out = nn.Linear(C, 3)

    def forward(self, x):
        if self.turned:
            x = x.transpose(0, 1)
        x = self.layer(x) if not isinstance(self.layer, nn.MultiheadAttention) else self.layer(x, x, x)
        x = x if isinstance(x, torch.Tensor) else x[0]
        return self.out(x[-1] if self.last else x.transpose(0, 1) if self.turned else x)


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(C, C)

    def forward(self, x):
        state = None
        for at_once in x:
            state = self.cell(at_once, state)
        return state


class Words(nn.Module):
    """A language model of torch's own examples: time first, flat logits."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(20, C), nn.LSTM(C, C), nn.Linear(C, 20)

    def forward(self, tokens):
        return self.out(self.rnn(self.embed(tokens))[0]).view(-1, 20)


def samples(into, model, inputs, *, wrap=lambda m: m):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, into=into):
        for step in range(STEPS):
            batch = inputs(step)
            out = model(*batch) if type(batch) is tuple else model(batch)
            while not isinstance(out, torch.Tensor):
                out = out[0]
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = load_run(into)
    assert not run.events.detail.str.contains("watching failed|stopped at").any()
    assert not any(listeners(m) for m in model.modules())
    return run.steps.samples


def attention(batch_first):
    return nn.MultiheadAttention(C, 2, batch_first=batch_first)


def encoder(batch_first):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(C, 2, 8, batch_first=batch_first), 2)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(
    "layer",
    [
        lambda first: nn.RNN(C, C, batch_first=first),
        lambda first: nn.LSTM(C, C, batch_first=first),
        attention,
        encoder,
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_layers_determine_the_batch_dimension(tmp_path, layer, batch_first, turned):
    model = First(layer(batch_first), turned=turned)
    time_first = batch_first == turned
    counts = samples(tmp_path / "run", model, lambda _: torch.randn(T, N, C) if time_first else torch.randn(N, T, C))
    assert (counts == N).all()


@pytest.mark.parametrize("model", [lambda: nn.LSTM(C, C), lambda: nn.GRU(C, C, 2), lambda: encoder(False)])
def test_the_layer_itself_is_the_model(tmp_path, model):
    assert (samples(tmp_path / "run", model(), lambda _: torch.randn(T, N, C)) == N).all()


def test_a_sequence_length_that_equals_the_batch_size_at_first_is_not_mistaken_for_it(tmp_path):
    counts = samples(tmp_path / "run", First(nn.LSTM(C, C)), lambda step: torch.randn(N + step, N, C))
    assert (counts == N).all()


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (lambda: First(nn.LSTM(C, C), last=True), lambda _: torch.randn(T, N, C)),
        (Cells, lambda _: torch.randn(T, N, C)),
        (Words, lambda _: torch.randint(0, 20, (T, N))),
        (lambda: nn.Transformer(C, 2, 1, 1, 8), lambda _: (torch.randn(T, N, C), torch.randn(T + 2, N, C))),
        (lambda: nn.GRU(C, C), lambda _: pack_sequence([torch.randn(n, C) for n in (T, 5, 3, 2)])),
    ],
)
def test_the_batch_is_the_second_dimension_of_models_that_take_time_first(tmp_path, model, inputs):
    assert (samples(tmp_path / "run", model(), inputs) == N).all()


def test_one_sequence_without_a_batch_is_one_sample(tmp_path):
    assert (samples(tmp_path / "run", First(nn.LSTM(C, C)), lambda _: torch.randn(T, C)) == 1).all()


class Rows(nn.Module):
    """Flattens the tokens of all samples into rows."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(C, 5)

    def forward(self, x):
        return self.out(x).reshape(-1, 5)


class Losses(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = small_model()

    def forward(self, *batch):
        return self.body(torch.cat([x.reshape(-1, 24) for x in batch])).square().mean()


class Pooled(nn.Module):
    """Sums the nodes of two graphs."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(C, 5)

    def forward(self, x):
        return torch.stack([self.out(x[:3]).sum(0), self.out(x[3:]).sum(0)])


def test_the_first_dimension_is_the_batch_by_default(tmp_path):
    assert (samples(tmp_path / "plain", small_model(), lambda _: torch.randn(9, 24)) == 9).all()
    assert (samples(tmp_path / "rows", Rows(), lambda _: torch.randn(N, T, C)) == N).all()
    assert (samples(tmp_path / "loss", Losses(), lambda _: (torch.randn(9, 24), torch.randn(9, 24))) == 9).all()


def test_samples_are_unknown_if_inputs_and_outputs_contradict_each_other(tmp_path):
    assert samples(tmp_path / "graphs", Pooled(), lambda _: torch.randn(T, C)).isna().all()
    images = samples(tmp_path / "images", Losses(), lambda _: (torch.randn(3, 4, 24), torch.randn(2, 4, 24)))
    assert images.isna().all()
