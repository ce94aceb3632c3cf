"""The sample runs are what their README says, and small."""

import json
from pathlib import Path

import numpy as np
import pytest

from amp_core import diagnose, load_run

SAMPLES = Path(__file__).resolve().parent.parent / "sample_runs"
NAMES = ("fp32", "bf16", "fp16-healthy", "fp16-overflow", "fp16-underflow")


@pytest.fixture(scope="module")
def runs():
    return {name: load_run(SAMPLES / name) for name in NAMES}


def small_shares(run):
    """Share of subnormals and of exact zeros among all elements of the output gradients, after the first steps."""
    rows = run.tensors(kind="output_grad", steps=(100, 400))
    return rows.subnormal.sum() / rows.numel.sum(), rows.zero.sum() / rows.numel.sum()


def test_there_are_no_others():
    assert sorted(p.name for p in SAMPLES.iterdir() if p.is_dir() and p.name[0] not in "._") == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_is_whole_sealed_and_small(runs, name):
    run = runs[name]
    run.validate(full=True)
    assert run.status == "finished" and len(run.steps) == 400
    files = [p for p in (SAMPLES / name).rglob("*") if p.is_file()]
    assert {p.suffix for p in files} == {".json", ".parquet"}
    assert sum(p.stat().st_size for p in files) < 2**20
    head = json.loads((SAMPLES / name / "run.json").read_text(encoding="utf-8"))
    assert head["process"] == {} and head["schema"] == 1


def test_all_are_the_same_training(runs):
    first = {name: run.steps.loss.iloc[0] for name, run in runs.items()}
    assert np.ptp(list(first.values())) < 0.01
    assert len({json.dumps(run.head.config["data"], sort_keys=True) for run in runs.values()}) == 1
    assert len({run.head.config["seed"] for run in runs.values()}) == 1


def test_the_healthy_one_grows_its_scale_and_hardly_skips(runs):
    steps = runs["fp16-healthy"].steps
    assert 1 <= steps.skipped.sum() <= 4
    assert steps.loss_scale.max() > steps.loss_scale.iloc[0]
    assert not [f for f in diagnose(runs["fp16-healthy"]) if f.severity != "info"]


def test_the_overflowing_one_skips_at_the_start_and_again_and_again(runs):
    steps = runs["fp16-overflow"].steps
    assert steps.skipped[:5].all()
    assert steps.skipped[100:].mean() > 0.05
    skips = runs["fp16-overflow"].events.query("kind == 'skipped'")
    assert len(skips) == steps.skipped.sum() and (skips.name != "").all()
    (finding,) = diagnose(runs["fp16-overflow"])
    assert (finding.code, finding.severity) == ("calibration-skips", "warning") and finding.value > finding.limit


def test_the_underflowing_one_loses_what_the_healthy_one_keeps(runs):
    subnormal, zero = small_shares(runs["fp16-underflow"])
    healthy_subnormal, healthy_zero = small_shares(runs["fp16-healthy"])
    assert subnormal > 10 * healthy_subnormal and subnormal > 0.2
    assert zero > healthy_zero
    assert (runs["fp16-underflow"].steps.loss_scale == 1).all()
    assert [(f.code, f.severity) for f in diagnose(runs["fp16-underflow"])] == [("fp16-without-scaler", "error")]
