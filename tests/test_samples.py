"""The sample runs are as their README describes, and small."""

import json

import numpy as np
import pytest

from amp_core import diagnose, load_run
from tests.paths import SAMPLE_RUNS

GPT = ("fp32", "bf16", "bf16-blocks", "fp16-healthy", "fp16-overflow", "fp16-underflow")
LSTM = ("ablation/fp32", "ablation/fp16-unscaled", "ablation/fp16-static-128", "ablation/fp16-dynamic")
NAMES = (*GPT, *LSTM)


@pytest.fixture(scope="module")
def runs():
    return {name: load_run(SAMPLE_RUNS / name) for name in NAMES}


def small_shares(run):
    """Share of subnormals and of exact zeros among all elements of the output gradients, after the first steps."""
    rows = run.tensors(kind="output_grad", steps=(100, 400))
    return rows.subnormal.sum() / rows.numel.sum(), rows.zero.sum() / rows.numel.sum()


def faults(run):
    return [(f.code, f.severity) for f in diagnose(run) if f.severity != "info"]


def test_the_readme_lists_every_sample():
    assert sorted(str(p.parent.relative_to(SAMPLE_RUNS)) for p in SAMPLE_RUNS.rglob("run.json")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_sample_is_complete_sealed_and_small(runs, name):
    run = runs[name]
    run.validate(full=True)
    assert run.status == "finished" and len(run.steps) == (400 if name in GPT else 120)
    files = [p for p in (SAMPLE_RUNS / name).rglob("*") if p.is_file()]
    assert {p.suffix for p in files} == {".json", ".parquet"}
    assert sum(p.stat().st_size for p in files) < 2**20
    head = json.loads((SAMPLE_RUNS / name / "run.json").read_text(encoding="utf-8"))
    assert head["process"] == {} and head["schema"] == 1


@pytest.mark.parametrize("names", [GPT, LSTM])
def test_all_samples_are_the_same_training(runs, names):
    same = [runs[name] for name in names]
    assert np.ptp([run.steps.loss.iloc[0] for run in same]) < 0.01
    assert len({json.dumps(run.head.config["data"], sort_keys=True) for run in same}) == 1
    assert len({run.head.config["seed"] for run in same}) == 1


@pytest.mark.parametrize("name", GPT)
def test_each_gpt_sample_has_data_for_every_page(runs, name):
    run = runs[name]
    assert sorted(run.audits.step.unique()) == [0, 200] and run.ops.step.unique().tolist() == [20]
    assert run.windows[["step", "steps"]].to_numpy().tolist() == [[30, 3]] and len(run.kernels) and len(run.memory)


def test_the_loss_scale_of_the_healthy_sample_grows_with_few_skips(runs):
    steps = runs["fp16-healthy"].steps
    assert 1 <= steps.skipped.sum() <= 4
    assert steps.loss_scale.max() > steps.loss_scale.iloc[0]
    assert not faults(runs["fp16-healthy"])


def test_the_overflowing_sample_skips_at_the_start_and_repeatedly(runs):
    steps = runs["fp16-overflow"].steps
    assert steps.skipped[:5].all()
    assert steps.skipped[100:].mean() > 0.05
    skips = runs["fp16-overflow"].events.query("kind == 'skipped'")
    assert len(skips) == steps.skipped.sum() and (skips.name != "").all()
    assert faults(runs["fp16-overflow"]) == [("calibration-skips", "warning")]


def test_the_underflowing_sample_loses_gradients_that_the_healthy_one_keeps(runs):
    subnormal, zero = small_shares(runs["fp16-underflow"])
    healthy_subnormal, healthy_zero = small_shares(runs["fp16-healthy"])
    assert subnormal > 10 * healthy_subnormal and subnormal > 0.2
    assert zero > healthy_zero
    assert (runs["fp16-underflow"].steps.loss_scale == 1).all()
    assert faults(runs["fp16-underflow"]) == [("fp16-without-scaler", "error")]


def test_the_ablation_needs_a_loss_scale_of_either_kind(runs):
    held_out = {name.removeprefix("ablation/"): runs[name].head.results["eval_loss"] for name in LSTM}
    assert held_out["fp16-unscaled"] > 2 * held_out["fp32"]
    for name in ("fp16-static-128", "fp16-dynamic"):
        assert held_out[name] == pytest.approx(held_out["fp32"], rel=0.02)
        assert not faults(runs[f"ablation/{name}"])
    assert faults(runs["ablation/fp16-unscaled"]) == [("fp16-without-scaler", "error")]
