"""`watch` records every step correctly, and changes nothing."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from amp_core import load_run
from amp_core.record import watch
from tests.record.loops import small_model, train

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
WAYS = {
    "plain": {},
    "accumulate-clip": {"accumulate": 3, "clip": 0.5},
    "fused": {"fused": True},
    "overflowing": {"init_scale": 2.0**40},
}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_losses_and_weights_are_the_same_bit_for_bit(tmp_path, precision, way):
    plain = train(None, DTYPES[precision], **WAYS[way])
    watched = train(tmp_path / "run", DTYPES[precision], every=1, **WAYS[way])
    assert plain.losses == watched.losses
    for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_rows_have_the_losses_scales_and_norms_of_the_loop(tmp_path, precision, way):
    done = train(tmp_path / "run", DTYPES[precision], **WAYS[way])
    run = load_run(tmp_path / "run")
    steps = run.steps
    assert steps.step.tolist() == list(range(12))
    assert np.allclose(steps.loss, done.losses, rtol=1e-6)
    assert run.head.config["precision"] == precision
    assert run.status == "finished"
    micro = WAYS[way].get("accumulate", 1)
    assert (steps.samples == 16 * micro).all()
    assert (steps.lr == 1e-3).all()
    if precision == "fp16":
        assert steps.loss_scale.tolist() == done.scales
        halved = [b < a for a, b in itertools.pairwise(done.scales)]
        assert steps.skipped.tolist()[:-1] == halved
    else:
        assert (steps.loss_scale == 1).all() and not steps.skipped.any()
        assert run.table("steps").column("growth_tracker").null_count == 12
    if done.norms:
        assert np.allclose(steps.grad_norm, done.norms, rtol=1e-5), "the norm before clipping"


def test_phases_add_up_to_the_step(tmp_path):
    train(tmp_path / "run", torch.float16, accumulate=2, clip=1.0)
    steps = load_run(tmp_path / "run").steps
    phases = steps[["data_ms", "forward_ms", "backward_ms", "optimizer_ms", "watch_ms"]]
    assert (phases > 0).all(axis=None)
    assert np.allclose(phases.sum(axis=1), steps.step_ms, rtol=1e-9)
    assert (steps.time_s.diff().dropna() * 1e3 >= 0).all()


def test_memory_of_a_cpu_run_is_the_resident_set(tmp_path):
    train(tmp_path / "run")
    steps = load_run(tmp_path / "run").steps
    assert (steps.memory_allocated_bytes > 10 * 2**20).all()
    assert (steps.memory_peak_bytes >= steps.memory_allocated_bytes).all()


@pytest.mark.parametrize("unscale", [True, False])
def test_gradients_are_measured_as_backward_leaves_them(tmp_path, unscale):
    """They are still scaled, before `unscale_` and clipping, and recorded with their loss scale."""
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run", every=1):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(torch.randn(8, 24)).square().mean()
        scaler.scale(loss).backward()
        expected = {n: p.grad.clone() for n, p in model.named_parameters()}
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
    rows = load_run(tmp_path / "run").tensors(kind="weight_grad").set_index("name")
    assert set(rows.index) == set(expected)
    for name, grad in expected.items():
        row = rows.loc[name]
        assert row[["zero", "subnormal", "normal", "inf", "nan"]].sum() == row.numel == grad.numel()
        assert row.loss_scale == 1024.0 and row["dtype"] == "float32"
        assert row.absmax == grad.abs().max().item()
        assert row.rms == pytest.approx(grad.double().square().mean().sqrt().item(), rel=1e-9)
        exponents = torch.frexp(grad[grad != 0]).exponent - 1
        assert row.exp_min == exponents.min().item()
        assert row.exp_counts.tolist() == torch.bincount((exponents - exponents.min()).long()).tolist()


def test_logged_values_belong_to_the_step_just_made_or_to_the_next(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run") as rec:
        for step in range(6):
            loss = model(torch.ones(2, 3)).sum()
            loss.backward()
            if step % 2:
                rec.log(loss=float(step), samples=7, lr=0.5)
            optimizer.step()
            if not step % 2:
                rec.log(loss=torch.tensor(float(step)), samples=7, lr=0.5)
    steps = load_run(tmp_path / "run").steps
    assert steps.loss.tolist() == [0, 1, 2, 3, 4, 5]
    assert (steps.samples == 7).all() and (steps.lr == 0.5).all()


def test_an_unknown_loss_is_null_and_a_nan_loss_is_nan(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run") as rec:
        for value in (None, float("nan")):
            model(torch.ones(2, 3)).backward(torch.ones(2, 1))  # backward does not start from a single number
            optimizer.step()
            if value is not None:
                rec.log(loss=value)
    loss = load_run(tmp_path / "run").table("steps").column("loss")
    assert loss.null_count == 1 and loss[0].as_py() is None
    assert np.isnan(loss[1].as_py())


def test_without_a_scaler_the_loss_is_the_value_that_backward_starts_from(tmp_path):
    done = train(tmp_path / "run", torch.bfloat16, accumulate=3, log=False)
    assert np.allclose(load_run(tmp_path / "run").steps.loss, done.losses, rtol=1e-6)


def test_evaluation_between_steps_is_not_a_step(tmp_path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(3):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.ones(50, 3))
    steps = load_run(tmp_path / "run").steps
    assert len(steps) == 3 and (steps.samples == 2).all()
