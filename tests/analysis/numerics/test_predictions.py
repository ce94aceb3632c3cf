"""Predictions from real runs compared with audits of the same batches, for the workloads and for unlike models."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_core import Run, load_run
from amp_core.analysis import predicted_and_audited, safe_window, what_if
from amp_core.analysis.numerics.safe_window import MIN_COSINE
from amp_core.analysis.numerics.what_if import MAX_SOURCE_UNDERFLOW_FRAC
from amp_core.record import watch
from amp_core.settings.training import TrainConfig
from amp_core.train.workloads import build
from amp_core.train.workloads.text_lstm import PortableLSTM

SCALES = tuple(2.0**k for k in range(-4, 17, 2))
STEPS = 12


def workload(name):
    built = build(TrainConfig(workload=name).resolved())
    return built.model, built.loss_fn, iter(built.batches)


def residual_network():
    """Convolutions with batch norm around a residual, smooth, on images of noise with a pattern in it."""

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
            self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

        def forward(self, x):
            return F.gelu(x + self.norm2(self.conv2(F.gelu(self.norm1(self.conv1(x))))))

    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), Block(8), nn.AvgPool2d(2), Block(8), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)
    )
    pattern = torch.randn(5, 1, 10, 10)

    def batches():
        while True:
            labels = torch.randint(0, 5, (16,))
            yield pattern[labels] + torch.randn(16, 1, 10, 10), labels

    return model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches()


def word_classifier():
    """A bidirectional LSTM of two layers over words of very unequal frequency."""

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(200, 24)
            self.lstm = PortableLSTM(24, 32, 2, batch_first=True, bidirectional=True)
            self.drop, self.head = nn.Dropout(0.2), nn.Linear(64, 4)

        def forward(self, words):
            return self.head(self.drop(self.lstm(self.words(words))[0].mean(1)))

    frequency = 1 / torch.arange(1.0, 201.0)

    def batches():
        while True:
            yield torch.multinomial(frequency, 8 * 12, replacement=True).view(8, 12)

    return Classifier(), lambda m, words: F.cross_entropy(m(words), words[:, 0] % 4), batches()


def encoder():
    """torch's own transformer encoder, whose attention calls its projections as functions, without hooks."""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.place = nn.Embedding(60, 32), nn.Parameter(torch.randn(1, 16, 32) * 0.02)
            layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, activation="gelu")
            self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(32, 60)

        def forward(self, words):
            return self.head(self.layers(self.words(words) + self.place))

    def batches():
        while True:
            yield torch.randint(0, 60, (8, 16))

    return Tagger(), lambda m, words: F.cross_entropy(m(words).flatten(0, 1), words.flatten()), batches()


MODELS = {
    "text-gpt": lambda: workload("text-gpt"),
    "text-lstm": lambda: workload("text-lstm"),
    "digits-cnn": lambda: workload("digits-cnn"),
    "residual": residual_network,
    "words": word_classifier,
    "encoder": encoder,
}


def recorded(folder, name, precision):
    """A short training in `precision` with an audit of FP16 at its last step, and the state and batch of that step."""
    torch.manual_seed(3)
    model, loss_of, batches = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}[precision]
    model.train()
    with watch(model, optimizer, scaler=scaler if scaler.is_enabled() else None, into=folder, every=1) as rec:
        for step in range(STEPS):
            batch = next(batches)
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = loss_of(model, batch)
            scaler.scale(loss).backward()
            if step == STEPS - 1:
                rec.audit(lambda batch=batch: loss_of(model, batch), SCALES, precision="fp16")
                last = model, {k: v.clone() for k, v in model.state_dict().items()}, batch, loss_of
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return load_run(folder), last


def audited_at(folder, last, scales):
    """Audit FP16 at `scales` in the state and on the batch of the last step."""
    model, state, batch, loss_of = last
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(model, optimizer, into=folder) as rec:
        loss_of(model, batch).backward()
        rec.audit(lambda: loss_of(model, batch), scales, precision="fp16")
        optimizer.step()
    audits = load_run(folder).audits
    return dict(iter(audits.groupby("loss_scale")))


def matrices(run: Run, names: pd.Series) -> pd.Series:
    return names.map(lambda n: len(run.head.model["shapes"][n]) > 1)


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", MODELS)
def test_predictions_agree_with_audits(tmp_path, name, precision):
    run, last = recorded(tmp_path / "run", name, precision)
    step = STEPS - 1

    pairs = predicted_and_audited(run)
    assert set(pairs["step"]) == {step} and pairs["predicted_frac"].notna().all()
    source = what_if(run, ("fp16",), range(-4, 17), kinds=("weight_grad",), step=step)
    source = source.set_index(["name", "log2_scale"])["source_underflow_frac"]
    keys = pd.MultiIndex.from_arrays([pairs["name"], np.log2(pairs["loss_scale"]).astype(int)])
    healthy = source.reindex(keys).to_numpy() <= MAX_SOURCE_UNDERFLOW_FRAC
    judged = matrices(run, pairs["name"]) & pairs["audited_frac"].notna()
    error = (pairs["predicted_frac"] - pairs["audited_frac"]).abs()
    assert error[judged & healthy].max() < 0.01
    assert (judged & healthy).sum() > 0.7 * judged.sum()

    window = safe_window(run)
    assert window.first_step == window.last_step == step
    lowest, highest = np.log2([window.lowest, window.highest])
    inside = [2.0**k for k in np.arange(lowest, highest + 1, 3)] + [window.highest]
    audits = audited_at(tmp_path / "audits", last, [*inside, window.lowest / 16, window.highest * 4])
    for scale in inside:
        rows = audits[scale]
        assert (rows["nonfinite"] == 0).all()
        assert rows["cosine"][matrices(run, rows["name"]) & (rows["nonzero"] > 0)].min() >= MIN_COSINE
    below = audits[window.lowest / 16]
    below = below[matrices(run, below["name"])]
    assert below["cosine"].min() < MIN_COSINE or (below["lost"] / below["nonzero"]).max() > 0.01
    assert (audits[window.highest * 4]["nonfinite"] > 0).any()
