"""`watch` on objects that Accelerate prepared: it needs only the model and the optimizer."""

import numpy as np
import pytest
import torch

from amp_core import diagnose, load_run
from amp_core.record import watch
from tests.record.frameworks.healthy import assert_complete, warning_codes
from tests.record.loops import small_model

accelerate = pytest.importorskip("accelerate")

STEPS = 20


@pytest.fixture(autouse=True)
def fresh():
    """Accelerate keeps its settings for the life of a process."""
    yield
    accelerate.state.AcceleratorState._reset_state(True)


def on_cpu(precision, init_scale=2.0**12):
    """An Accelerator; for `fp16` with autocast and a scaler, as on a GPU: a CPU has both too."""
    accelerator = accelerate.Accelerator(
        mixed_precision=precision.removesuffix("-as-shipped"), cpu=True, gradient_accumulation_steps=3
    )
    if precision == "fp16":
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=5)
    return accelerator


def train(precision, into=None, model=None, clip=True, **options):
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = on_cpu(precision, **options)
    torch.manual_seed(0)
    model = model or small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(1)
    rows = torch.utils.data.TensorDataset(torch.randn(960, 24, generator=g), torch.randint(0, 10, (960,), generator=g))
    loader = torch.utils.data.DataLoader(rows, batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    rec = watch(model, optimizer, into=into, every=4) if into is not None else None
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if clip and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if rec is not None:
        rec.close()
    return losses, model


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_training_is_unchanged_and_its_run_complete_and_healthy(tmp_path, precision, clip):
    plain, a = train(precision, clip=clip)
    watched, b = train(precision, tmp_path / "run", clip=clip)
    assert plain == watched
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    run = load_run(tmp_path / "run")
    assert_complete(run, STEPS, 4, {n for n, _ in b.named_parameters()})
    assert np.allclose(run.steps.loss, np.reshape(watched, (STEPS, 3)).mean(1), rtol=1e-6), "the mean over the step"
    assert (run.steps.samples == 48).all() and (run.steps.grad_norm > 0.05).all()
    assert run.head.config["precision"] == precision.replace("no", "fp32")
    assert warning_codes(run) == []
    if precision == "fp16":
        assert run.head.config["scaler"]["enabled"] and run.steps.loss_scale.iloc[-1] > 2.0**12


def test_autocast_is_detected_for_a_model_without_submodules(tmp_path):
    train("bf16", tmp_path / "run", model=torch.nn.Linear(24, 10))
    assert load_run(tmp_path / "run").head.config["precision"] == "bf16"


def test_overflow_is_recorded_through_the_wrappers(tmp_path):
    train("fp16", tmp_path / "run", init_scale=2.0**26)
    steps = load_run(tmp_path / "run").steps
    assert steps.skipped.iloc[0] and not steps.skipped.iloc[-1]


def test_requested_fp16_without_scaler_and_autocast_is_reported(tmp_path):
    train("fp16-as-shipped", tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.head.config["requested_precision"] == "fp16" and run.head.config["precision"] == "fp32"
    (finding,) = [f for f in diagnose(run) if f.severity != "info"]
    assert finding.code == "autocast-inactive" and finding.title.startswith("fp16 was requested")


def test_a_loop_that_calls_the_model_inside_of_the_prepared_one_is_told_so(tmp_path):
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    model, optimizer = accelerator.prepare(*(m := small_model(), torch.optim.SGD(m.parameters(), lr=0.1)))
    inside = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    with watch(model, optimizer, into=tmp_path / "run"):
        for _ in range(STEPS):
            accelerator.backward(inside(torch.randn(16, 24)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = [f for f in diagnose(load_run(tmp_path / "run")) if f.severity != "info"]
    assert finding.title.startswith("bf16 was requested") and "unwrap_model" in finding.snippet


def test_a_planted_fault_is_detected(tmp_path):
    model = small_model()
    with torch.no_grad():
        model[2].weight *= 1e7  # more than FP16 holds
    train("fp16", tmp_path / "run", model=model)
    assert "activation-overflow" in warning_codes(load_run(tmp_path / "run"))
