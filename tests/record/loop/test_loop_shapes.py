"""Loops of unusual shapes: the same losses with and without `watch`, complete rows, no warnings."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amp_core import Run, diagnose, load_run
from amp_core.record import watch
from amp_core.record.torch_internals.module_calls import listeners
from tests.record.loops import small_model
from tests.record.shapes import EVERY, LOOPS, STEPS, Lap, adam, batches, classify, go

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def assert_complete_rows(run: Run, optimizers: int, per_step: int, losses: list[float]) -> None:
    assert run.status == "finished" and len(run.steps) == STEPS * optimizers
    assert run.steps.step.nunique() == STEPS
    for column in ("loss", "grad_norm", "samples", "forward_ms", "backward_ms", "data_ms"):
        assert run.table("steps").column(column).null_count == 0, column
    if per_step:
        assert np.allclose(run.steps.loss, np.reshape(losses, (-1, per_step)).sum(1), rtol=1e-5)
    assert sorted(run.tensors(kind="weight_grad").step.unique()) == list(range(0, STEPS, EVERY))
    assert len(run.tensors(kind="output_grad"))


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_is_unchanged_and_its_run_complete_and_without_warnings(tmp_path, name, precision):
    dtype = DTYPES[precision]
    if name == "lbfgs" and precision == "fp16":
        pytest.skip("a GradScaler takes no closure")
    plain = go(LOOPS[name], None, dtype)
    watched = go(LOOPS[name], tmp_path / "run", dtype)
    assert plain.losses == watched.losses
    for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(a, b)
    run = load_run(tmp_path / "run")
    assert_complete_rows(run, 2 if name == "gan" else 1, {"accumulation": 3, "ema": 0}.get(name, 1), watched.losses)
    assert [(f.code, f.title) for f in diagnose(run) if f.severity != "info"] == []
    assert not run.events[run.events.kind == "warning"].detail.str.contains("stopped at").any()
    assert not any(listeners(m) or m._forward_hooks for m in watched.model.modules())
    names = set(run.tensors(kind="weight_grad").name)
    trained = {n for n, p in watched.model.named_parameters() if p.requires_grad}
    assert names == trained if name != "parameters-later" else names >= {"0.weight", "0.bias"}


def test_the_loss_of_another_model_is_not_recorded(tmp_path):
    """An unwatched discriminator learns from the detached output of the watched generator."""
    generator, other = small_model(), nn.Linear(10, 1)
    optimizer, of_other = adam(generator), adam(other)
    losses = []
    with watch(generator, optimizer, into=tmp_path / "run"):
        for x, _ in batches(4):
            generated = generator(x)
            other(generated.detach()).mean().backward()
            of_other.step()
            loss = other(generated).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            of_other.zero_grad()
            losses.append(loss.item())
    assert load_run(tmp_path / "run").steps.loss.tolist() == pytest.approx(losses)


@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_])
def test_gradients_are_measured_before_they_are_clipped(tmp_path, clip):
    model = small_model()
    optimizer = adam(model)
    largest = []
    with watch(model, optimizer, into=tmp_path / "run", every=1):
        for x, y in batches(3):
            F.cross_entropy(model(x), y).backward()
            largest.append(max(p.grad.abs().max().item() for p in model.parameters()))
            clip(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    assert load_run(tmp_path / "run").tensors(kind="weight_grad").groupby("step").absmax.max().tolist() == largest


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_unchanged_and_its_run_complete(tmp_path, backend):
    def compiled(lap: Lap) -> None:
        classify(lap, torch.compile(small_model(), backend=backend))

    plain, watched = go(compiled, None, torch.bfloat16), go(compiled, tmp_path / "run", torch.bfloat16)
    assert plain.losses == watched.losses
    run = load_run(tmp_path / "run")
    assert len(run.steps) == STEPS and run.steps[["loss", "forward_ms", "backward_ms"]].notna().all(axis=None)
    assert set(run.tensors(kind="weight_grad").name) == {n for n, _ in small_model().named_parameters()}
    assert [(f.code, f.title) for f in diagnose(run) if f.severity != "info"] == []
