"""What a run showed of its own loss scales bounds what is predicted of them."""

import numpy as np
import pytest

from amp_core import load_run
from amp_core.analysis import safe_window, safe_window_over_time, scale_summary, scale_trace
from tests.analysis.numerics.test_what_if import row
from tests.synthetic import SAMPLES, write, write_rows

CONFIG = {"autocast_dtype": "float16", "scaler": {"enabled": True}}


@pytest.mark.parametrize("name", ["fp16-overflow", "fp16-healthy", "overflowing", "calibrating"])
def test_no_skipped_step_lies_inside_the_window(name, tmp_path):
    run = load_run(SAMPLES[name] if name in SAMPLES else write(tmp_path / "run", name))
    window, trace = safe_window_over_time(run), scale_trace(run)
    skipped = trace[trace["skipped"] & (trace["step"] >= window["step"].iloc[0])]
    at = np.searchsorted(window["step"], skipped["step"], side="right") - 1
    assert len(skipped) and (skipped["loss_scale"].to_numpy() > window["highest"].to_numpy()[at]).all()
    whole = safe_window(run)
    seen = skipped[skipped["step"] >= whole.first_step]
    assert not (seen["loss_scale"] <= whole.highest).any()


def run_at(folder, rows, scales, skipped):
    steps = {"step": range(len(scales)), "loss_scale": scales, "skipped": skipped, "loss": [1.0] * len(scales)}
    tensors = {column: [r.get(column) for r in rows] for column in rows[0]}
    return load_run(write_rows(folder, config=CONFIG, steps=steps, tensors=tensors))


def test_a_step_made_at_a_scale_shows_that_it_held(tmp_path):
    rows = [row("fc.weight", [10], -10, step=s, absmax=0.9) for s in (0, 1)]
    run = run_at(tmp_path / "run", rows, [2.0**17] * 2, [False, True])
    frame = safe_window_over_time(run)
    assert frame["highest"].tolist() == [2.0**17, 2.0**15]  # 65520 / 0.9 holds 2^16, less half an octave


def test_what_survived_an_overflow_predicts_nothing(tmp_path):
    rows = [row("fc.weight", [10], -40, step=0, inf=3), row("fc.weight", [10], -10, step=1)]
    run = run_at(tmp_path / "run", rows, [2.0**20, 2.0**10], [True, False])
    assert safe_window_over_time(run)["step"].tolist() == [1]


def test_a_scale_at_which_gradients_underflowed_lies_below_the_window():
    window = safe_window(load_run(SAMPLES["fp16-underflow"]))
    assert window.underflowed_at == 1.0 < window.lowest <= window.recommended <= window.highest
    assert window.lowest_by == "head"
    assert safe_window(load_run(SAMPLES["fp16-healthy"])).underflowed_at is None


def test_skips_of_calibration_are_counted_apart():
    summary = scale_summary(load_run(SAMPLES["fp16-overflow"]))
    assert (summary.skips, summary.calibration_skips, summary.settled_skips, summary.settled_steps) == (40, 18, 22, 375)
