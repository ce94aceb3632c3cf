"""A watched model may be copied or saved, for an EMA or with `torch.save`: our hooks are not included."""

import contextlib
import io
import subprocess
import sys

import torch
from torch import nn

from amp_core import load_run
from amp_core.record import watch
from tests.record.loops import small_model


def hooks_in(model):
    return [h for m in model.modules() for h in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]


def train(into, ema=False, each=lambda model: None):
    """A loop with an averaged copy of the watched model, which is also trained a little itself."""
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"level": "full", "trace_ops": 1, "profile": (2, 3)}
    losses, averaged = [], None
    with watch(model, optimizer, into=into, every=2, **options) if into is not None else contextlib.nullcontext():
        for _ in range(4):
            x = torch.randn(16, 24)
            loss = model(x).square().mean()
            each(model)
            if ema:
                averaged = averaged or torch.optim.swa_utils.AveragedModel(model)
                averaged.train()(x * 3).sum().backward()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if ema:
                averaged.update_parameters(model)
            losses.append(loss.item())
    return losses, averaged


def test_a_copy_of_a_watched_model_is_not_watched(tmp_path):
    plain, _ = train(tmp_path / "plain")
    losses, averaged = train(tmp_path / "ema", ema=True)
    assert losses == plain
    assert hooks_in(averaged) == []
    runs = [load_run(tmp_path / name) for name in ("plain", "ema")]
    assert runs[0].steps.loss.tolist() == runs[1].steps.loss.tolist()
    for kind in ("weight_grad", "output_grad", "activation"):
        frames = [run.tensors(kind=kind)[["step", "name", "numel", "absmax"]] for run in runs]
        assert len(frames[0]) > 0 and frames[0].equals(frames[1]), kind


def test_a_watched_model_can_be_saved_and_loads_without_ampscope(tmp_path):
    saved = []

    def save(model):
        file = io.BytesIO()
        torch.save(model, file)
        saved.append(file.getvalue())

    train(tmp_path / "run", each=save)
    assert len(saved) == 4
    (tmp_path / "model.pt").write_bytes(saved[2])  # while a profiler's hooks were attached too
    program = "import sys, torch; m = torch.load('model.pt', weights_only=False); m(torch.ones(2, 24)).sum().backward()"
    program += "; assert not any(name.startswith('amp_core') for name in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_both_entry_points_of_a_model_are_recorded(tmp_path):
    """As in a GAN whose generator is the model's forward, and whose discriminator is called separately."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator, self.discriminator = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            return self.generator(x)

    torch.manual_seed(0)
    model = Pair()
    parts = (model.generator, model.discriminator)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    losses = []
    with watch(model, optimizers, into=tmp_path / "run"):
        for _ in range(3):
            for optimizer in optimizers:
                fake = model(torch.randn(8, 4))
                loss = model.discriminator(fake.detach() if optimizer is optimizers[1] else fake).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    steps = load_run(tmp_path / "run").steps
    assert steps.loss.tolist() == losses
    assert steps.backward_ms.notna().all() and steps.optimizer.tolist() == [0, 1] * 3
