from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from amp_core import Run, load_run
from amp_core.analysis import memory_description, memory_summary, memory_trace, overview, phase_times, speed_summary
from amp_core.analysis.performance import step_time
from amp_core.store.writer import RunWriter
from tests.synthetic import write_rows


def steps(count: int, **columns: object) -> dict[str, object]:
    return {"step": range(count)} | {k: v if isinstance(v, list) else [v] * count for k, v in columns.items()}


def test_medians_and_quartiles_exclude_the_warm_up(tmp_path: Path) -> None:
    step_ms = [1000.0] * 10 + [10.0, 20.0, 30.0, 40.0, 50.0] * 9
    run = load_run(write_rows(tmp_path / "run", steps=steps(55, step_ms=step_ms, samples=30, watch_ms=3.0)))
    summary = speed_summary(run)
    assert (summary.warmup, summary.steps) == (10, 45)
    assert (summary.step_ms, summary.step_ms_low, summary.step_ms_high) == (30.0, 20.0, 40.0)
    assert summary.samples_per_s == pytest.approx(1000.0)
    assert summary.watch_frac == pytest.approx(3.0 / 30.0)
    assert speed_summary(run, warmup=0).steps == 55


def test_other_is_the_step_time_outside_all_phases(tmp_path: Path) -> None:
    phases = {"data_ms": 1.0, "forward_ms": 2.0, "backward_ms": 4.0, "optimizer_ms": 1.5, "watch_ms": 0.5}
    run = load_run(write_rows(tmp_path / "run", steps=steps(20, step_ms=10.0, **phases)))
    times = phase_times(run)
    assert np.allclose(times["other_ms"], 1.0)
    assert np.allclose(times[[f"{p}_ms" for p in step_time.PHASES]].sum(axis=1), times["step_ms"])
    assert speed_summary(run).phases_ms["other"] == pytest.approx(1.0)


def test_the_chart_shows_medians_that_ignore_a_slow_step(tmp_path: Path) -> None:
    forward = [2.0] * 30
    forward[15] = 500.0
    run = load_run(write_rows(tmp_path / "run", steps=steps(30, step_ms=510.0, forward_ms=forward)))
    assert (phase_times(run, window=5)["forward_ms"] == 2.0).all()
    assert phase_times(run, window=1)["forward_ms"].max() == 500.0


def test_long_runs_are_summarised_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_time, "MAX_POINTS", 10)
    random = np.random.default_rng(0)
    forward = random.random(95) * 10
    forward[::7] = np.nan
    watch = random.random(95)
    run = load_run(
        write_rows(tmp_path / "run", steps=steps(95, step_ms=20.0, forward_ms=list(forward), watch_ms=list(watch)))
    )
    times = phase_times(run)
    block = np.arange(95) // 10
    assert times["step"].tolist() == list(range(0, 95, 10))
    assert np.allclose(times["forward_ms"], pd.Series(forward).groupby(block).median())
    assert np.allclose(times["watch_ms"], pd.Series(watch).groupby(block).mean())
    assert times["data_ms"].isna().all()


def test_unmeasured_values_are_none(runs: dict[str, Run]) -> None:
    for scenario in ("bare", "empty"):
        summary = speed_summary(runs[scenario])
        assert summary.step_ms is summary.samples_per_s is summary.watch_frac is None
        assert set(summary.phases_ms.values()) == {None}
        assert memory_summary(runs[scenario]).peak_bytes is None
        assert not len(memory_trace(runs[scenario]))


def test_the_slowest_rank_determines_the_time_and_samples_add_up(tmp_path: Path) -> None:
    columns = {"step": [0, 0, 1, 1], "rank": [0, 1, 0, 1], "step_ms": [10.0, 14.0, 20.0, 16.0], "samples": [8, 8, 8, 6]}
    run = load_run(write_rows(tmp_path / "run", steps=columns))
    summary = speed_summary(run, warmup=0)
    assert summary.step_ms == 17.0  # median of 14 and 20
    assert summary.samples_per_s == pytest.approx(np.median([16 / 0.014, 14 / 0.020]))


def test_phases_are_those_of_the_slowest_rank_and_never_exceed_the_step(tmp_path: Path) -> None:
    columns = {
        "step": [0, 0, 1, 1],
        "rank": [0, 1, 0, 1],
        "step_ms": [20.0, 21.0, None, None],
        "data_ms": [15.0, 1.0, 1.0, 9.0],
        "forward_ms": [5.0, 20.0, 5.0, 6.0],
    }
    times = phase_times(load_run(write_rows(tmp_path / "run", steps=columns)), window=1)
    assert times["data_ms"].tolist() == [1.0, 9.0] and times["forward_ms"].tolist() == [20.0, 6.0]
    assert times["other_ms"].iloc[0] == 0.0


def test_times_of_several_optimizers_in_a_step_add_up(tmp_path: Path) -> None:
    columns = {
        "step": [0, 0, 1, 1],
        "optimizer": [0, 1, 0, 1],
        "step_ms": [10.0, 4.0, 10.0, 6.0],
        "samples": [8, None, 8, None],
        "loss": [None, 3.0, 1.0, 2.0],
    }
    run = load_run(write_rows(tmp_path / "run", steps=columns))
    assert speed_summary(run, warmup=0).step_ms == 15.0
    assert speed_summary(run, warmup=0).samples_per_s == pytest.approx(np.median([8 / 0.014, 8 / 0.016]))


def test_memory_is_described(runs: dict[str, Run]) -> None:
    cuda, cpu = memory_summary(runs["bf16"]), memory_summary(runs["healthy"])
    assert cuda.what == "allocated by torch on the GPU"
    assert cpu.what == memory_description(runs["healthy"]) == "resident set of the process"
    assert cuda.device_peak_bytes == 300 * 2**20 + 2**29 and cpu.device_peak_bytes is None
    assert cpu.peak_bytes == memory_trace(runs["healthy"])["allocated_bytes"].max()


def test_the_overview_distinguishes_an_unrecorded_loss_from_nan(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "run",
        steps={"step": [0, 1, 2, 3], "loss": [None, 4.0, float("nan"), None], "time_s": [1.0, 2.0, 3.0, 4.0]},
        config={"steps": 8, "precision": "fp16", "workload": "text-gpt"},
    )
    view = overview(load_run(path))
    assert view.loss_first == 4.0 and view.loss_last is not None and np.isnan(view.loss_last)
    assert view.loss_lowest == 4.0
    assert (view.steps_done, view.steps_planned, view.progress_frac) == (4, 8, 0.5)
    assert (view.recipe, view.workload, view.status, view.eta_s) == ("fp16", "text-gpt", "finished", None)


@pytest.mark.parametrize(("steps_made", "left_s"), [(2, None), (5, None), (6, 0.1 * 94), (80, 0.1 * 20)])
def test_the_estimated_remaining_time_ignores_the_first_steps(
    tmp_path: Path, steps_made: int, left_s: float | None
) -> None:
    with RunWriter(tmp_path / "run", config={"steps": 100}) as writer:
        writer.append(
            "steps", {"step": range(steps_made), "time_s": [1.0, *(60.0 + 0.1 * step for step in range(1, steps_made))]}
        )
        eta_s = overview(load_run(tmp_path / "run")).eta_s
        assert eta_s is None if left_s is None else eta_s == pytest.approx(left_s)


def test_the_overview_of_a_run_without_steps(runs: dict[str, Run]) -> None:
    view = overview(runs["empty"])
    assert (view.steps_done, view.loss_first, view.progress_frac, view.scale.skip_frac) == (0, None, None, None)
    assert overview(runs["stopped"]).end_reason == "stopped by SIGTERM"
