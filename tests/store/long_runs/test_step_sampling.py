"""Steps of long live runs: what is counted stays exact, quantiles stay near, no spike disappears, and a look costs what
is new."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from amp_core import RunError, diagnose, load_run
from amp_core.analysis import loss_curves, overview, phase_times, rank_table, scale_trace, skip_episodes, sparkline
from amp_core.analysis.performance.step_cost import phase_cost
from amp_core.store.long_runs.extract import Extract
from amp_core.store.long_runs.step_sampling import thinned
from amp_core.store.writer import RunWriter
from tests import synthetic
from tests.serve.big_runs import big_run, write_steps

STEPS, MOST = 30_000, 4_000
RANK_POINTS = 0.03
"""So far from its place among all steps may a quantile of the sample lie."""


def made(first: int, last: int, rank: int = 0) -> dict[str, np.ndarray]:
    """Steps of a training that is sampled every tenth step, skips now and then, and slows down."""
    at = np.arange(first, last)
    random = np.random.default_rng([first, rank])
    return {
        "step": at,
        "time_s": at * 0.05,
        "loss": np.where(at == 17_003, np.nan, 3 - at / STEPS + random.normal(0, 0.05, len(at))),
        "loss_scale": 2.0 ** (10 + at // 4000),
        "skipped": at % 4000 == 3999,
        "growth_tracker": at % 4000,
        "grad_norm": np.where(at == 11_111, 1e6, np.exp(random.normal(0, 0.2, len(at)))),
        "lr": 1e-3 * (1 - at / STEPS),
        "samples": np.full(len(at), 32),
        "step_ms": np.where(at == 20_500, 9000, 50 + at / 2000 + random.gamma(4, 1, len(at))),
        "watch_ms": np.where(at % 10 == 0, 6.0, 0.1),
        "forward_ms": np.full(len(at), 16.0),
        "memory_allocated_bytes": np.where(at == 8_642, 2**33, 2**30),
        "memory_peak_bytes": np.where(at < 8_642, 2**30, 2**33),
    }


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("long") / "run"
    with RunWriter(folder, config={"precision": "fp16", "scaler": True, "steps": STEPS}, seal_bytes=60_000) as writer:
        for first in range(0, STEPS, 500):
            writer.append("steps", made(first, first + 500))
        writer.append("events", {"step": [12_345], "kind": ["phase change"], "name": ["evaluation"], "time_s": [617.0]})
    return folder


def test_a_short_run_is_whole_and_a_long_one_bounded(long: Path) -> None:
    whole, part = load_run(long), Extract(long, most_steps=(MOST, MOST))
    assert Extract(long).steps.equals(whole.steps) and "stands_for" not in whole.steps
    open_rows = 600
    assert MOST // 2 < len(part.steps) <= MOST + open_rows
    assert part.steps["stands_for"].sum() == STEPS
    kept = part.steps.drop(columns="stands_for")
    assert kept.equals(whole.steps[whole.steps["step"].isin(kept["step"])].reset_index(drop=True))  # rows, as they are
    assert {0, 12_345, STEPS - 1} <= set(kept["step"])


def test_what_is_counted_is_exact(long: Path) -> None:
    whole, part = load_run(long), Extract(long, most_steps=(MOST, MOST))
    one, other = overview(whole), overview(part)
    assert one.scale == other.scale and one.steps_done == other.steps_done == STEPS
    assert one.speed.steps == other.speed.steps and one.memory == other.memory
    for what in ("loss_first", "loss_last", "loss_lowest", "duration_s", "progress_frac"):
        assert getattr(one, what) == getattr(other, what), what
    assert skip_episodes(whole).equals(skip_episodes(part)) and len(skip_episodes(part)) == 7
    assert {f.code: (f.title, f.steps) for f in diagnose(whole)} == {f.code: (f.title, f.steps) for f in diagnose(part)}
    assert "loss-nonfinite" in {f.code for f in diagnose(part)}
    samples = loss_curves([part], "samples")["samples"].to_numpy()
    assert samples[-1] == STEPS * 32


def test_quantiles_and_means_are_near(long: Path) -> None:
    whole, part = load_run(long), Extract(long, most_steps=(MOST, MOST))
    every = np.sort(whole.steps["step_ms"])
    speed = overview(part).speed
    for value, place in ((speed.step_ms_low, 0.25), (speed.step_ms, 0.5), (speed.step_ms_high, 0.75)):
        assert np.searchsorted(every, value) / STEPS == pytest.approx(place, abs=RANK_POINTS)
    assert speed.watch_frac == pytest.approx(overview(whole).speed.watch_frac, rel=0.1)
    assert phase_cost(part).step_us == pytest.approx(phase_cost(whole).step_us, rel=0.02)
    ends = phase_times(part)["step_ms"].to_numpy(), phase_times(whole)["step_ms"].to_numpy()
    assert np.median(ends[0][:200]) == pytest.approx(np.median(ends[1][:200]), rel=0.03)
    smooth = [loss_curves([run]).set_index("step")["smooth"] for run in (whole, part)]
    both = smooth[0].loc[smooth[1].index]
    assert np.nanmax(np.abs(both - smooth[1])[500:]) < 0.03


def test_no_spike_disappears(long: Path) -> None:
    trace = scale_trace(Extract(long, most_steps=(MOST, MOST))).set_index("step")
    assert trace.loc[11_111, "grad_norm"] == 1e6
    steps = Extract(long, most_steps=(MOST, MOST)).steps
    assert steps["step_ms"].max() == 9000 and steps["memory_allocated_bytes"].max() == 2**33
    assert set(steps.loc[~np.isfinite(steps["loss"]), "step"]) == {17_003}


def test_the_course_on_a_card_is_drawn_over_steps(long: Path) -> None:
    drawn = []
    for run in (load_run(long), Extract(long, most_steps=(MOST, MOST))):
        trace = scale_trace(run)
        drawn.append(sparkline(np.log2(trace["loss_scale"]), weights=trace["stands_for"]))
    assert len(drawn[0]) == len(drawn[1]) == 50 and np.allclose(*drawn, atol=0.2)


@pytest.mark.parametrize("scenario", synthetic.SCENARIOS)
def test_findings_are_those_of_the_whole_run(scenario: str, tmp_path: Path) -> None:
    path = synthetic.write(tmp_path / "run", scenario)
    whole, part = load_run(path), Extract(path, most_steps=(60, 60))
    assert [(f.code, f.title, f.where, f.steps, f.severity) for f in diagnose(whole)] == [
        (f.code, f.title, f.where, f.steps, f.severity) for f in diagnose(part)
    ]
    assert overview(part).steps_done == overview(whole).steps_done
    assert overview(part).scale.skips == overview(whole).scale.skips


def test_a_look_at_a_live_run_reads_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []

    def count(rows: pa.Table, *given: object) -> tuple[pa.Table, int]:
        touched.append(rows.num_rows)
        return thinned(rows, *given)  # type: ignore[arg-type]

    monkeypatch.setattr("amp_core.store.long_runs.live_steps.thinned", count)
    with big_run(tmp_path / "run", 6000, 1200, 5, seal_bytes=40_000) as writer:
        run = Extract(tmp_path / "run", most_steps=(1000, 100_000))
        source = run._source
        assert run.steps["stands_for"].sum() == 6000 and len(run.steps) < 1500
        files: list[str] = []
        read = type(source).read
        monkeypatch.setattr(
            type(source), "read", lambda self, file, *rest: (files.append(file.name), read(self, file, *rest))[1]
        )
        before = run.snapshot()
        for step in range(6000, 6400, 10):
            files.clear()
            write_steps(writer, step, step + 10)
            assert run.refresh()
            assert len(files) <= 3 and not any("00000." in name for name in files)  # the open one; one that was sealed
            assert overview(run).steps_done == step + 10 and len(run.steps) < 1500
        assert max(touched) < 2500  # never as many as there are
        assert overview(before).steps_done == 6000
    run.refresh()
    assert run.status == "finished" and "stands_for" not in run.steps and len(run.steps) == 6400


def test_all_rows_of_a_step_stay_together(tmp_path: Path) -> None:
    with (
        RunWriter(tmp_path / "run", config={"precision": "fp16"}, world_size=2, seal_bytes=40_000) as zero,
        RunWriter(tmp_path / "run", rank=1, world_size=2, seal_bytes=90_000) as one,
    ):
        for first in range(0, 6000, 200):
            zero.append("steps", made(first, first + 200))
            one.append("steps", made(first, first + 200, rank=1))
    whole, part = load_run(tmp_path / "run"), Extract(tmp_path / "run", most_steps=(2000, 2000))
    assert len(part.steps) < 3000 and (part.steps.groupby("step").size() == 2).all()
    assert overview(part).steps_done == 6000
    tables = [rank_table(run).set_index("rank") for run in (whole, part)]
    for column in ("steps", "last_step", "skipped", "loss_scale", "memory_peak_bytes"):
        assert tables[0][column].equals(tables[1][column]), column
    assert np.allclose(tables[0]["step_ms"], tables[1]["step_ms"], rtol=0.03)


def test_segments_that_were_exchanged_are_read_anew(long: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(long, tmp_path / "run")
    run = Extract(folder, most_steps=(MOST, MOST))
    assert run.steps["stands_for"].sum() == STEPS
    victim = sorted((folder / "steps").glob("*.parquet"))[-1]
    rows = pa.parquet.read_table(victim).num_rows
    victim.unlink()
    assert run.refresh() and run.steps["stands_for"].sum() == STEPS - rows


def test_rows_of_an_open_segment_are_thinned_and_read_on(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", config={"precision": "fp16"}) as writer:
        run = Extract(tmp_path / "run", most_steps=(1000, 1000))
        for first in range(0, 5000, 100):
            writer.append("steps", made(first, first + 100))
            assert run.refresh() or first == 0  # nothing was asked of it before
            assert run.steps["step"].iloc[-1] == first + 99 and len(run.steps) <= 1400
            assert not run.refresh()
        assert len(list((tmp_path / "run" / "steps").glob("*.arrows"))) == 1
        snapshot = run.snapshot()
        writer.append("steps", made(5000, 5100))
        assert run.refresh() and overview(run).steps_done == 5100 and overview(snapshot).steps_done == 5000
    assert run.refresh() and overview(run).steps_done == 5100  # sealed: nothing is counted twice
    whole = load_run(tmp_path / "run")
    assert run.steps["loss"].isin(whole.steps["loss"]).all() and overview(run).scale == overview(whole).scale


def test_always_skipped_steps_are_bounded_and_counted() -> None:
    at = np.arange(20_000)
    columns = {c: np.ones(len(at)) for c in ("loss", "loss_scale", "grad_norm", "step_ms", "memory_allocated_bytes")}
    rows = pa.table({"step": at, "skipped": at % 2 == 0, "rank": at * 0, **columns})
    kept, _ = thinned(rows, 1000)
    weight, skipped = kept.column("stands_for").to_numpy(), kept.column("skipped").to_numpy()
    assert kept.num_rows <= 750 and weight.sum() == 20_000 and weight[skipped].sum() == 10_000


def test_rows_without_a_step_are_refused() -> None:
    rows = pa.table({"step": pa.array([1, None, 3], pa.int64())})
    with pytest.raises(RunError, match="without 'step'"):
        thinned(rows, 1)
