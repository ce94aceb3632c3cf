"""The training loop is correct in every recipe, and so is its record."""

import json
import math
import os
import signal
import subprocess
import sys
import threading

import pandas as pd
import pytest
import torch

from amp_core import RunError, load_run
from amp_core.train import RECIPES, WORKLOADS, TrainConfig, train
from amp_core.train.engine import training
from tests.waiting import wait_for


def run_of(folder, **settings):
    """Train with quick settings, and load the run."""
    train(TrainConfig(**{"device": "cpu", "steps": 3, "evaluate": False} | settings), folder)
    return load_run(folder)


def each_recipe_and_workload(workload, precision):
    """Every recipe with one workload, and every workload under autocast in FP16 and BF16; --whole has all pairs. Only
    two workloads have linear layers to quantize besides the head."""
    chosen = workload == "text-gpt" or precision in ("fp16", "bf16")
    return pytest.param(workload, precision, marks=[] if chosen else pytest.mark.whole)


@pytest.mark.parametrize(
    ("workload", "precision"),
    [
        each_recipe_and_workload(w, p)
        for w in WORKLOADS
        for p, recipe in RECIPES.items()
        if not recipe.quantization or w in ("text-gpt", "text-bert")
    ],
)
def test_every_recipe_trains_every_workload(tmp_path, workload, precision):
    run = run_of(tmp_path / "r", workload=workload, precision=precision, steps=2, batch_size=4, evaluate=True)
    assert run.status == "finished"
    assert run.steps["step"].tolist() == [0, 1]
    assert math.isfinite(run.steps["loss"].iloc[0])
    assert run.steps["samples"].tolist() == [4, 4]
    assert run.steps["loss_scale"].iloc[0] == (65536.0 if RECIPES[precision].scaler else 1.0)
    assert {"eval_loss", "eval_accuracy"} <= run.head.results.keys()
    assert "evaluated" in set(run.events["kind"])


def test_channels_last_is_used_for_convolutions_and_trains_the_same(tmp_path, monkeypatch):
    models = []
    make = training.make_optimizer
    monkeypatch.setattr(training, "make_optimizer", lambda config, model: models.append(model) or make(config, model))
    losses = [
        run_of(tmp_path / str(on), workload="digits-cnn", precision="fp32", channels_last=on).steps["loss"]
        for on in (True, False)
    ]
    layouts = [m.features[3].weight.is_contiguous(memory_format=torch.channels_last) for m in models]
    assert layouts == [True, False]
    assert losses[0].tolist() == pytest.approx(losses[1].tolist(), rel=1e-4)


def test_the_head_has_the_settings_and_the_data(tmp_path):
    config = run_of(tmp_path / "r", workload="digits-cnn", precision="fp16", clip_norm=1.0, every=2).head.config
    assert {
        "source": "train",
        "workload": "digits-cnn",
        "size": "tiny",
        "precision": "fp16",
        "device": "cpu",
    }.items() <= (config.items())
    assert (config["batch_size"], config["steps"], config["clip_norm"], config["every"]) == (32, 3, 1.0, 2)
    assert (config["lr"], config["loss_scale"], config["init_scale"]) == (2e-3, "dynamic", 65536.0)
    assert len(config["data"]["sha256"]) == 64


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_same_seed_gives_the_same_losses_bit_for_bit(tmp_path, precision):
    def losses(name, seed):
        return run_of(tmp_path / name, precision=precision, steps=4, seed=seed).steps["loss"].tolist()

    first = losses("a", 1)
    assert first == losses("b", 1)
    if precision == "fp32":  # the seed draws weights and batches before a recipe is applied
        assert first != losses("c", 2)


def test_first_losses_differ_between_precisions_only_by_rounding(tmp_path):
    first = [run_of(tmp_path / p, precision=p, steps=1).steps["loss"].iloc[0] for p in ("fp32", "fp16", "bf16")]
    assert first[1] == pytest.approx(first[0], rel=2e-3)
    assert first[2] == pytest.approx(first[0], rel=2e-2)
    assert len(set(first)) == 3


def test_accumulated_micro_batches_equal_one_large_batch(tmp_path):
    parts = run_of(tmp_path / "parts", precision="fp32", batch_size=4, accumulate=3, steps=5)
    whole = run_of(tmp_path / "whole", precision="fp32", batch_size=12, steps=5)
    assert parts.steps["samples"].tolist() == whole.steps["samples"].tolist() == [12] * 5
    assert parts.steps["loss"].tolist() == pytest.approx(whole.steps["loss"].tolist(), rel=1e-4)
    assert parts.steps["grad_norm"].tolist() == pytest.approx(whole.steps["grad_norm"].tolist(), rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clipping_bounds_the_update_and_records_the_norm_before_it(tmp_path, precision):
    # the first step of plain SGD moves the weights by lr × gradient, so the loss after it reveals the norm
    settings = {"workload": "digits-cnn", "precision": precision, "optimizer": "sgd", "lr": 0.5, "steps": 2}
    free = run_of(tmp_path / "free", **settings).steps
    clipped = run_of(tmp_path / "clipped", clip_norm=1e-6, **settings).steps
    still = run_of(tmp_path / "still", **settings | {"lr": 1e-7}).steps
    assert clipped["grad_norm"].iloc[0] == pytest.approx(free["grad_norm"].iloc[0], rel=1e-3)
    assert clipped["grad_norm"].iloc[0] > 0.1
    assert clipped["loss"].iloc[1] == pytest.approx(still["loss"].iloc[1], rel=1e-3)
    assert clipped["loss"].iloc[1] != pytest.approx(free["loss"].iloc[1], rel=1e-3)


def test_a_dynamic_loss_scale_backs_off_and_grows(tmp_path):
    high = run_of(tmp_path / "high", precision="fp16", init_scale=2.0**40, backoff_factor=2.0**-30, steps=3).steps
    assert high["skipped"].tolist()[:2] == [True, False]
    assert high["loss_scale"].tolist()[:2] == [2.0**40, 2.0**10]
    low = run_of(tmp_path / "low", precision="fp16", init_scale=8, growth_interval=2, growth_factor=4, steps=5).steps
    assert low["loss_scale"].tolist() == [8, 8, 32, 32, 128]


def test_a_static_loss_scale_stays_even_after_a_skipped_step(tmp_path):
    steps = run_of(tmp_path / "r", precision="fp16", loss_scale=2.0**40, growth_interval=1).steps
    assert steps["loss_scale"].tolist() == [2.0**40] * 3
    assert steps["skipped"].tolist() == [True] * 3
    assert steps["loss"].nunique() == 3  # each step reads new data, even if it is skipped
    fine = run_of(tmp_path / "fine", precision="fp16", loss_scale=128, growth_interval=1).steps
    assert fine["loss_scale"].tolist() == [128.0] * 3
    assert not fine["skipped"].any()


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_a_fused_optimizer_trains_like_the_plain_one_and_skips_too(tmp_path, optimizer):
    settings = {"workload": "digits-cnn", "precision": "fp16", "optimizer": optimizer, "init_scale": 2.0**40}
    settings |= {"backoff_factor": 2.0**-30}
    plain = run_of(tmp_path / "plain", **settings, fused=False).steps
    fused = run_of(tmp_path / "fused", **settings, fused=True).steps
    assert fused["skipped"].tolist() == plain["skipped"].tolist() == [True, False, False]
    assert fused["loss"].tolist() == pytest.approx(plain["loss"].tolist(), rel=1e-3)


def test_the_loss_falls(tmp_path):
    summary = train(TrainConfig(workload="text-lstm", precision="bf16", steps=60, device="cpu"), tmp_path / "r")
    # An untrained model predicts 256 bytes at random.
    assert summary.loss_first == pytest.approx(math.log(256), rel=0.05)
    assert summary.loss_last < 3.4
    assert summary.results["eval_loss"] < 3.6
    assert 0.15 < summary.results["eval_accuracy"] < 1
    assert (summary.status, summary.steps, summary.skipped, summary.loss_scale) == ("finished", 60, 0, 1.0)


def test_a_stop_ends_the_run_between_two_steps(tmp_path):
    requested = iter([None, None, "enough"])
    summary = train(TrainConfig(workload="digits-cnn", device="cpu"), tmp_path / "r", stop=lambda: next(requested))
    assert (summary.status, summary.steps, summary.results) == ("stopped", 2, {})
    assert load_run(tmp_path / "r").end_reason == "enough"


OWN = """
import torch
from torch import nn

def workload():
    data = [{"x": torch.randn(6, 4), "y": torch.randint(0, 2, (6,)), "name": "kept as it is"} for _ in range(2)]
    return nn.Linear(4, 2), data, lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"])

def breaks_in_the_third_step():
    calls = iter([1, 1])
    model, data, loss_fn = workload()
    return model, data, lambda model, batch: loss_fn(model, batch) * next(calls)

def empty():
    model, _, loss_fn = workload()
    return model, [], loss_fn
"""


@pytest.fixture
def own_file(tmp_path):
    file = tmp_path / "own_workload_in_engine.py"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16-pure"])
def test_a_user_workload_trains_and_its_batches_are_repeated(tmp_path, own_file, precision):
    run = run_of(tmp_path / "r", workload=f"{own_file}:workload", precision=precision, steps=5, lr=0.1, evaluate=True)
    assert run.steps["samples"].tolist() == [6] * 5
    assert run.steps["loss"].iloc[4] < run.steps["loss"].iloc[0]  # the first batch, for the third time
    assert run.head.results == {}  # the workload has no held-out batches


def test_an_exception_in_a_step_fails_the_run_and_keeps_the_steps_before(tmp_path, own_file):
    with pytest.raises(StopIteration):
        run_of(tmp_path / "r", workload=f"{own_file}:breaks_in_the_third_step", steps=9)
    run = load_run(tmp_path / "r")
    assert run.status == "failed"
    assert "StopIteration" in run.end_reason
    assert len(run.steps) == 2


def test_empty_batches_are_refused(tmp_path, own_file):
    with pytest.raises(RunError, match="at least one batch"):
        run_of(tmp_path / "r", workload=f"{own_file}:empty")


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a CUDA device that must not be there")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_missing_cuda_device_is_refused(tmp_path, device):
    with pytest.raises(RunError, match=rf"device='{device}' is not available: torch .*; choose cpu or auto"):
        run_of(tmp_path / "r", device=device)
    assert not (tmp_path / "r").exists()


def test_flags_and_signal_handlers_are_restored(tmp_path):
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)], torch.backends.cuda.matmul.allow_tf32
    run_of(tmp_path / "r", workload="digits-cnn", precision="tf32")
    after = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)], torch.backends.cuda.matmul.allow_tf32
    assert after == before


def test_training_in_a_thread_works(tmp_path):
    statuses = []
    thread = threading.Thread(
        target=lambda: statuses.append(run_of(tmp_path / "r", workload="digits-cnn", precision="fp32").status)
    )
    thread.start()
    thread.join()
    assert statuses == ["finished"]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.whole)])
def test_a_signal_ends_the_run_cleanly_with_all_its_steps(tmp_path, number):
    folder = tmp_path / "r"
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(TrainConfig(workload="digits-cnn", steps=10**6, device="cpu").to_dict()))
    command = [sys.executable, "-m", "amp_core", "train", "--config", os.fspath(settings), "--out", os.fspath(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            wait_for(lambda: child.poll() is not None or ((folder / "steps").exists() and _steps(folder) > 5))
        finally:
            child.send_signal(number)
        message, errors = child.communicate(timeout=300)
    assert child.returncode == 130, errors
    run = load_run(folder)
    assert (run.status, run.end_reason) == ("stopped", f"stopped by {number.name}")
    assert run.steps["step"].tolist() == list(range(len(run.steps)))
    assert len(run.steps) > 5
    assert f"stopped after {len(run.steps)} steps" in message


def _steps(folder):
    return len(load_run(folder).steps)


def test_the_compiled_model_is_the_one_that_is_trained(tmp_path, monkeypatch):
    compiled = []

    def compile_without_code_generation(model):  # Inductor takes minutes if nothing is cached
        compiled.append(model)
        return original(model, backend="eager")

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compile_without_code_generation)
    eager = run_of(tmp_path / "eager", precision="fp16")
    assert compiled == []
    run = run_of(tmp_path / "compiled", precision="fp16", compile=True)
    assert len(compiled) == 1
    assert run.steps["loss"].tolist() == pytest.approx(eager.steps["loss"].tolist(), rel=1e-4)
    assert set(run.tensors(kind="weight_grad")["name"]) == set(eager.tensors(kind="weight_grad")["name"])


def test_a_deterministic_run_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    run = run_of(tmp_path / "r", precision="fp16", deterministic=True)
    assert run.status == "finished"
    assert run.head.config["deterministic"] is True
    assert not torch.are_deterministic_algorithms_enabled()


def test_clipping_acts_on_unscaled_gradients(tmp_path):
    settings = {"workload": "digits-cnn", "optimizer": "sgd", "lr": 0.5, "steps": 2}
    reference = run_of(tmp_path / "fp32", precision="fp32", clip_norm=0.5, **settings).steps["loss"]
    scaled = run_of(tmp_path / "fp16", precision="fp16", clip_norm=0.5, **settings).steps["loss"]
    still = run_of(tmp_path / "still", precision="fp32", clip_norm=1e-6, **settings).steps["loss"]
    assert reference.iloc[1] != pytest.approx(still.iloc[1], rel=2e-2)
    assert scaled.iloc[1] == pytest.approx(reference.iloc[1], rel=5e-3)


@pytest.mark.parametrize("precision", RECIPES)
def test_audits_run_at_their_interval_and_change_nothing(tmp_path, precision):
    workload = "text-gpt" if RECIPES[precision].quantization else "digits-cnn"
    settings = {"workload": workload, "precision": precision, "steps": 5, "batch_size": 8, "accumulate": 2}
    plain = run_of(tmp_path / "plain", **settings)
    run = run_of(tmp_path / "audited", audit_every=2, **settings)
    check_audits(run, precision)
    pd.testing.assert_series_equal(plain.steps["loss"], run.steps["loss"], check_exact=True)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_audits_measure_gradients_before_clipping(tmp_path, precision):
    settings = {"workload": "digits-cnn", "precision": precision, "steps": 5, "batch_size": 8, "accumulate": 2}
    run = run_of(tmp_path / "audited", audit_every=2, clip_norm=1.0, **settings)
    check_audits(run, precision)
    # the first loss is for the same weights and batch; clipping may change later ones
    plain = run_of(tmp_path / "plain", **settings | {"steps": 1})
    assert plain.steps["loss"].iloc[0] == run.steps["loss"].iloc[0]


def check_audits(run, precision):
    assert run.head.config["audit_every"] == 2
    audits = run.audits
    assert audits["step"].unique().tolist() == [0, 2, 4]
    assert set(audits["precision"]) == {precision}
    scales = {1.0, 65536.0} if RECIPES[precision].scaler else {1.0}
    assert set(audits["loss_scale"]) == scales
    matrices = audits[audits["name"].isin(["head.weight", "tokens.weight"]) & (audits["loss_scale"] == max(scales))]
    rounds = precision not in ("fp32", "tf32")
    assert ((matrices["rel_error"].iloc[:1] > 0) == rounds).all()
