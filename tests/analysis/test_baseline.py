"""Marks on the time axis, the underflow that audits measured, and the choice of a baseline run."""

import pytest

from amp_core import load_run
from amp_core.analysis import baseline_index, lost_gradient, scale_summary, step_marks
from amp_core.store.writer import RunWriter
from tests.synthetic import write


def test_each_skipped_step_and_each_change_of_watching_is_marked(tmp_path):
    with RunWriter(tmp_path / "a") as writer:
        writer.append(
            "steps",
            {"step": [0, 1, 2], "skipped": [False, True, False], "samples": [8, 8, 8], "time_s": [0.1, 0.2, 0.3]},
        )
        writer.event("phase change", name="sampling interval", detail="10 to 20", step=2)
    marks = step_marks(load_run(tmp_path / "a"))
    assert marks[["step", "samples", "kind", "what"]].values.tolist() == [
        [1, 16, "skipped", "step skipped"],
        [2, 24, "change", "sampling interval: 10 to 20"],
    ]


def test_each_phase_is_marked_once_with_all_its_changes(tmp_path):
    rows = {"step": list(range(60)), "step_ms": [2.0] * 60, "time_s": [float(i) for i in range(60)]}
    with RunWriter(tmp_path / "a", config={"comparison": {"id": "x"}}) as writer:
        writer.append("steps", rows)
        writer.append("audits", {"step": [0, 0, 40], "name": ["w", "v", "w"], "loss_scale": [1.0] * 3, "lost": [0] * 3})
        writer.append("windows", {"step": [20, None], "steps": [3, None], "device": ["cpu", "cpu"]})
        for kind, step in (("traced", 20), ("resumed", 30), ("calls", 5), ("phase change", None)):
            writer.event(kind, name="ops", step=step)
    marks = step_marks(load_run(tmp_path / "a"))
    assert marks[["step", "what"]].values.tolist() == [
        [0, "gradients audited in FP32"],
        [10, "warm-up over: timed from here on"],
        [20, "3 steps profiled; operators traced"],
        [30, "training resumed"],
        [40, "gradients audited in FP32"],
    ]
    assert marks["time_s"].tolist() == pytest.approx([0.002, 0.022, 0.042, 0.062, 0.082])  # only its own steps


def test_the_lost_gradient_is_that_at_the_runs_own_loss_scale(tmp_path):
    with RunWriter(tmp_path / "a", config={"scaler": {"enabled": True}}) as writer:
        writer.append("steps", {"step": [5], "loss_scale": [8.0]})
        rows = {"step": [5, 5, 5], "name": ["w", "v", "w"], "loss_scale": [8.0, 8.0, 1.0], "precision": ["fp16"] * 3}
        writer.append("audits", rows | {"numel": [100] * 3, "nonzero": [100, 100, 100], "lost": [4, 0, 90]})
    assert lost_gradient(load_run(tmp_path / "a")) == pytest.approx(0.02)
    assert lost_gradient(load_run(write(tmp_path / "b", "healthy"))) is None


def test_unrecorded_skips_are_not_zero(tmp_path):
    with RunWriter(tmp_path / "a") as writer:
        writer.append("steps", {"step": [0, 1], "skipped": [None, None], "step_ms": [1.0, 1.0]})
    about = scale_summary(load_run(tmp_path / "a"))
    assert not about.skips_recorded and about.skip_frac is None
    assert scale_summary(load_run(write(tmp_path / "b", "fp32"))).skip_frac == 0


def test_the_baseline_is_fp32_of_the_same_task_and_seed():
    task = {"workload": "text-gpt", "size": "tiny", "seed": 1}
    others = [
        task | {"precision": "tf32"},
        task | {"precision": "fp32", "seed": 2},
        task | {"precision": "fp32"},
        task | {"precision": "fp32", "size": "small"},
    ]
    assert baseline_index([task | {"precision": "fp16"}, *others], 0) == 3
    assert baseline_index([task | {"precision": "fp16"}, others[0], others[3]], 0) == 1
    assert baseline_index([task | {"precision": "fp16"}, others[3]], 0) is None
    assert baseline_index([task | {"precision": "fp32"}, others[2]], 0) is None
    assert baseline_index([{"precision": "fp16"}, {"precision": "fp32"}], 0) is None
