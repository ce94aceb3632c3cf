"""A stock Lightning training is unchanged by the callback, and its run is correct."""

import numpy as np
import pytest
import torch
from torch import nn

from amp_core import diagnose, load_run
from tests.record.frameworks.healthy import assert_complete, warning_codes

lightning = pytest.importorskip("lightning")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

from amp_core.record.lightning import WatchCallback  # noqa: E402

STEPS = 24


class Classifier(lightning.LightningModule):
    """Like Lightning's first example: the step calls submodules, never the module itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.GELU())
        self.head = nn.Linear(48, 10)
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.head(self.body(x)), y)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.head(self.body(x)), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Gan(lightning.LightningModule):
    """Manual optimization with two optimizers. Lightning runs the whole step under autocast, including backward, and
    updates the scaler after each optimizer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 24))
        self.discriminator = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        real = batch[0]
        g, d = self.optimizers()
        z = torch.randn(len(real), 8)

        def judge_loss(x, target):
            out = self.discriminator(x)
            return nn.functional.binary_cross_entropy_with_logits(out, torch.full_like(out, target))

        loss = judge_loss(real, 1.0) + judge_loss(self.generator(z).detach(), 0.0)
        d.zero_grad()
        self.manual_backward(loss)
        d.step()
        other = judge_loss(self.generator(z), 1.0)
        g.zero_grad()
        self.manual_backward(other)
        g.step()
        self.losses += [loss.item(), other.item()]

    def configure_optimizers(self):
        adam = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (self.generator, self.discriminator)]
        return adam, []


def scaled(init_scale=2.0**12):
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=10))


def fit(tmp_path, callbacks, module=Classifier, data=None, **options):
    model = module()
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(256, 24, generator=g), torch.randint(0, 10, (256,), generator=g)
    rows = torch.utils.data.TensorDataset(x, y)
    settings = {"max_steps": STEPS, "limit_val_batches": 1, "log_every_n_steps": 1} | options
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        default_root_dir=tmp_path,
        **settings,
    )
    torch.manual_seed(2)
    loaders = [torch.utils.data.DataLoader(rows, batch_size=16)]
    if module is Classifier:
        loaders.append(torch.utils.data.DataLoader(rows, batch_size=64))
    trainer.fit(model, *loaders)
    return model


WAYS = {
    "fp32": dict,
    "bf16": lambda: {"precision": "bf16-mixed"},
    "fp16": lambda: {"plugins": [scaled()]},
}


@pytest.mark.parametrize("clip", ["norm", "value"])
@pytest.mark.parametrize("way", WAYS)
def test_a_stock_training_is_unchanged_and_its_run_complete_and_healthy(tmp_path, way, clip):
    options = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": clip, "accumulate_grad_batches": 2}
    plain = fit(tmp_path, [], **WAYS[way](), **options)
    watched = fit(tmp_path, [WatchCallback(tmp_path / "run", every=4)], **WAYS[way](), **options)
    assert plain.losses == watched.losses and len(plain.losses) == 2 * STEPS
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    run = load_run(tmp_path / "run")
    assert_complete(run, STEPS, 4, {n for n, _ in watched.named_parameters()})
    assert np.allclose(run.steps.loss, np.reshape(watched.losses, (STEPS, 2)).mean(1), rtol=1e-6)
    assert (run.steps.samples == 32).all() and (run.steps.grad_norm > 0.05).all(), "before clipping"
    grads = run.tensors(kind="weight_grad")
    assert (grads.absmax / grads.loss_scale).max() > 0.06, "before clipping by value too"
    assert run.head.config["precision"] == way and run.head.config["accumulate_grad_batches"] == 2
    assert run.head.results.keys() == {"val_loss"} and (run.events.kind == "evaluated").sum() == 3
    assert warning_codes(run) == []
    if way == "fp16":
        assert run.steps.loss_scale.iloc[-1] >= 2.0**13 and run.steps.growth_tracker.notna().all()


@pytest.mark.parametrize("way", WAYS)
def test_manual_optimization_with_two_optimizers(tmp_path, way):
    plain = fit(tmp_path, [], Gan, **WAYS[way]())
    watched = fit(tmp_path, [WatchCallback(tmp_path / "run", every=4)], Gan, **WAYS[way]())
    assert plain.losses == watched.losses
    run = load_run(tmp_path / "run")
    steps = run.steps
    assert run.head.config["precision"] == way
    assert steps.optimizer.tolist() == [1, 0] * (len(steps) // 2)
    assert np.allclose(steps.loss, watched.losses[: len(steps)], rtol=1e-6)
    assert run.table("steps").column("grad_norm").null_count == 0
    names = run.tensors(kind="weight_grad").name
    assert set(names) == {n for n, _ in watched.named_parameters()}
    assert set(run.tensors(kind="output_grad").name) >= {"generator.0", "discriminator.2"}
    assert warning_codes(run) == []
    if way == "fp16":
        assert {"shared-backoff", "backward-under-autocast"} <= {f.code for f in diagnose(run)}


def test_steps_skipped_for_a_loss_scale_that_is_too_high_are_counted(tmp_path):
    fit(tmp_path, [WatchCallback(tmp_path / "run")], plugins=[scaled(2.0**40)])
    steps = load_run(tmp_path / "run").steps
    assert steps.skipped.any() and not steps.skipped.iloc[-1]
    assert steps.loss_scale.iloc[0] == 2.0**40
    assert (steps.loss_scale.diff().dropna()[steps.skipped.shift(1).iloc[1:]] < 0).all()


def test_a_planted_fault_is_detected(tmp_path):
    class Wrong(Classifier):
        def training_step(self, batch, batch_idx):
            with torch.autocast("cpu", enabled=False):
                return super().training_step(batch, batch_idx)

    fit(tmp_path, [WatchCallback(tmp_path / "run")], Wrong, precision="bf16-mixed")
    assert warning_codes(load_run(tmp_path / "run")) == ["autocast-inactive"]


def test_an_exception_ends_the_run_and_removes_the_hooks(tmp_path):
    class Failing(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise ValueError("no more")
            return super().training_step(batch, batch_idx)

    callback = WatchCallback(tmp_path / "run")
    with pytest.raises(ValueError, match="no more"):
        fit(tmp_path, [callback], Failing)
    run = load_run(tmp_path / "run")
    assert (run.status, run.end_reason, len(run.steps)) == ("failed", "ValueError: no more", 3)
    model = callback.recorder._model
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
