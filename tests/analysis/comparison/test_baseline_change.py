"""A run and its baseline in a few numbers with their noise bands."""

import math

import numpy as np
import pandas as pd
import pytest

from amp_core import load_run
from amp_core.analysis import baseline_band, baseline_changes
from amp_core.analysis.comparison.baseline_change import QUARTILES, SEEDS, STEPS
from amp_core.store.writer import RunWriter
from tests.synthetic import write

STEP_COUNT = 200


def recorded(folder, losses, *, step_ms=10.0, norm=1.0, seed=0, precision="fp32"):
    config = {"workload": "w", "size": "s", "precision": precision, "seed": seed}
    with RunWriter(folder, config=config) as writer:
        times = [step_ms + (step % 4) / 10 for step in range(STEP_COUNT)]
        norms = [norm * (1 + (step % 3) / 10) for step in range(STEP_COUNT)]
        columns = {"step": range(STEP_COUNT), "loss": losses, "step_ms": times, "grad_norm": norms}
        writer.append("steps", columns)
    return load_run(folder)


def noisy(level, seed):
    return level + np.random.default_rng(seed).normal(0, 0.1, STEP_COUNT)


def by_metric(runs):
    return baseline_changes(runs).set_index("metric")


def test_a_difference_within_the_standard_error_of_the_mean_is_within_the_band(tmp_path):
    base = recorded(tmp_path / "a", noisy(2.0, 1))
    near = by_metric([base, recorded(tmp_path / "b", noisy(2.0, 2), precision="fp16")]).loc["loss"]
    assert near["noise"] == STEPS and not near["outside"] and near["low"] < near["baseline"] < near["high"]
    # The mean of the last 20 losses: two standard errors of 0.1 / sqrt(20).
    assert near["high"] - near["baseline"] == pytest.approx(0.2 / math.sqrt(20), rel=0.5)
    far = by_metric([base, recorded(tmp_path / "c", noisy(2.3, 2), precision="fp16")]).loc["loss"]
    assert far["outside"]


def test_three_seeds_give_the_band_of_the_loss(tmp_path):
    bases = [recorded(tmp_path / f"s{seed}", np.full(STEP_COUNT, 2.0 + seed / 10), seed=seed) for seed in range(3)]
    row = by_metric([*bases, recorded(tmp_path / "b", np.full(STEP_COUNT, 2.25), precision="fp16")]).loc["loss"]
    assert row["noise"] == SEEDS and row["baseline"] == pytest.approx(2.1)
    assert (row["low"], row["high"]) == (pytest.approx(1.9), pytest.approx(2.3)) and not row["outside"]


def test_times_and_norms_are_compared_with_the_middle_half_of_the_baseline(tmp_path):
    base = recorded(tmp_path / "a", noisy(2.0, 1))
    rows = by_metric([base, recorded(tmp_path / "b", noisy(2.0, 1), step_ms=5.0, norm=3.0, precision="fp16")])
    assert rows.loc["step_ms", "noise"] == QUARTILES and rows.loc["step_ms", "outside"]
    assert 10.0 <= rows.loc["step_ms", "low"] <= rows.loc["step_ms", "high"] <= 10.3
    assert rows.loc["grad_norm", "value"] == pytest.approx(3.3) and rows.loc["grad_norm", "outside"]
    same = by_metric([base, recorded(tmp_path / "c", noisy(2.0, 1), precision="fp16")])
    assert not same.loc["step_ms", "outside"] and not same.loc["grad_norm", "outside"]


def test_what_either_run_did_not_record_has_no_row(tmp_path):
    base = recorded(tmp_path / "a", noisy(2.0, 1))  # without memory
    healthy, fp32 = (load_run(write(tmp_path / name, name)) for name in ("healthy", "fp32"))
    assert set(by_metric([base, healthy]).index) == {"loss", "step_ms", "skip_frac", "grad_norm"}
    assert "skip_frac" not in by_metric([healthy, fp32]).index  # FP32 has no scaler


def test_a_band_follows_the_quartiles_along_the_run():
    trace = pd.DataFrame({"step": range(100), "x": [1.0, 2.0, 3.0, 4.0] * 25})
    trace.loc[50, "x"] = np.inf
    band = baseline_band(trace, "x")
    assert len(band) == 99 and (band["low"] <= band["middle"]).all() and (band["middle"] <= band["high"]).all()
    assert band["middle"].between(2.0, 3.0).all()
    assert baseline_band(trace.assign(x=np.nan), "x").empty
