"""Healthy runs have no findings, and long runs are diagnosed quickly."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from amp_core import Run, load_run
from amp_core.findings import Finding, diagnose
from amp_core.store.writer import RunWriter
from amp_core.train import TrainConfig, train
from tests.call_count import count_calls
from tests.synthetic import SAMPLES

HEALTHY_SAMPLES = ("bf16", "bf16-blocks", "fp16-healthy", "fp32")
STEPS, TENSORS = 10_000, 300


def errors_and_warnings(run: Run) -> list[Finding]:
    return [f for f in diagnose(run) if f.severity != "info"]


@pytest.mark.parametrize("name", HEALTHY_SAMPLES)
def test_healthy_samples_raise_no_warning(name: str) -> None:
    assert errors_and_warnings(load_run(SAMPLES[name])) == []


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(("workload", "seed"), [("digits-cnn", 1), ("text-lstm", 2), ("text-gpt", 3)])
def test_built_in_workloads_raise_no_warning(workload: str, seed: int, precision: str, tmp_path: Path) -> None:
    config = TrainConfig(workload=workload, precision=precision, steps=12, seed=seed, device="cpu", evaluate=False)
    train(config, tmp_path / "run")
    assert errors_and_warnings(load_run(tmp_path / "run")) == []


def long_run(folder: Path) -> Path:
    """10,000 steps of 300 layers, sampled every tenth, in FP16 with a scaler."""
    random = np.random.default_rng(0)
    layers = [f"blocks.{i}" for i in range(TENSORS)]
    model = {"layers": dict.fromkeys(layers, "Linear"), "shapes": {f"{n}.weight": [64, 64] for n in layers}}
    config = {"precision": "fp16", "autocast_dtype": "float16", "scaler": {"enabled": True}, "device": "cpu"}
    steps, ones = np.arange(STEPS), np.ones(STEPS)
    with RunWriter(folder, config=config, model=model) as writer:
        loss = 3 - steps / STEPS + random.normal(0, 0.01, STEPS)
        scales = {
            "loss_scale": 65536 * ones,
            "growth_tracker": steps % 2000,
            "grad_norm": random.lognormal(0, 0.1, STEPS),
        }
        times = {"step_ms": 100 * ones, "watch_ms": ones}
        writer.append("steps", {"step": steps, "loss": loss, "skipped": np.zeros(STEPS, bool)} | scales | times)
        sampled = np.repeat(np.arange(0, STEPS, 10), TENSORS)
        rows, bins = len(sampled), 24
        counts = random.integers(1, 300, (rows, bins))
        lists = pa.ListArray.from_arrays(np.arange(0, rows * bins + 1, bins, dtype=np.int32), counts.reshape(-1))
        total = counts.sum(1)
        for kind, dtype in (("weight_grad", "float32"), ("output_grad", "float16")):
            names = [f"{n}.weight" for n in layers] if kind == "weight_grad" else layers
            table = {"step": sampled, "name": names * (rows // TENSORS), "kind": [kind] * rows, "dtype": [dtype] * rows}
            table |= {"loss_scale": np.full(rows, 65536.0), "numel": total, "normal": total, "exp_counts": lists}
            table |= {"exp_min": np.full(rows, -12), "absmax": np.full(rows, 2.0**10), "abs_sum": np.full(rows, 100.0)}
            writer.append("tensors", table | {c: np.zeros(rows, np.int64) for c in ("zero", "subnormal", "inf", "nan")})
    return folder


def test_a_long_run_is_diagnosed_without_a_call_for_each_row(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "run")
    findings = diagnose(load_run(folder))  # the first call imports modules
    rows = load_run(folder).table("tensors").num_rows
    assert rows == 2 * STEPS // 10 * TENSORS
    assert count_calls(lambda: diagnose(load_run(folder))) < rows
    assert [f.code for f in findings if f.severity != "info"] == []
