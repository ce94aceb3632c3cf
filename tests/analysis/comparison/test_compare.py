from pathlib import Path

import numpy as np
import pytest

from amp_core import Run, RunError, load_run
from amp_core.analysis import compare, loss_curves, unique_labels
from amp_core.analysis.performance.memory import memory_summary
from tests.synthetic import write, write_rows


def timed(path: Path, step_ms: np.ndarray, loss: np.ndarray | None = None, **config: object) -> Run:
    count = len(step_ms)
    columns = {"step": range(count), "step_ms": step_ms, "samples": [16] * count, "time_s": np.cumsum(step_ms) / 1e3}
    if loss is not None:
        columns["loss"] = loss
    return load_run(write_rows(path, steps=columns, config={"workload": "w", "steps": count} | config))


def falling(count: int, seed: int, end: float = 2.0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return end + 3 * np.exp(-np.arange(count) / 30) + 0.02 * random.standard_normal(count)


def test_steady_runs_have_the_exact_ratio(tmp_path: Path) -> None:
    slow, fast = timed(tmp_path / "slow", np.full(60, 30.0)), timed(tmp_path / "fast", np.full(60, 10.0))
    table = compare([slow, fast]).table.set_index("run")
    ratio = table.loc["fast", ["speed_ratio", "speed_ratio_low", "speed_ratio_high"]]
    assert ratio.tolist() == pytest.approx([3.0] * 3)
    assert table.loc["fast", "speed_verdict"] == "faster"
    assert table.loc["slow", "speed_verdict"] == "reference"
    assert table.loc["slow", ["speed_ratio", "speed_ratio_low", "speed_ratio_high"]].tolist() == [1.0] * 3
    assert compare([fast, slow]).table["speed_verdict"].tolist() == ["reference", "slower"]
    assert table.loc["fast", "warmup_steps"] == 10 and table.loc["fast", "timed_steps"] == 50


def test_the_interval_covers_the_true_ratio_at_about_its_nominal_rate(tmp_path: Path) -> None:
    covered = 0
    for seed in range(40):
        random = np.random.default_rng(seed)
        a = timed(tmp_path / f"a{seed}", 20 * np.exp(0.1 * random.standard_normal(110)))
        b = timed(tmp_path / f"b{seed}", 10 * np.exp(0.1 * random.standard_normal(110)))
        row = compare([a, b]).table.iloc[1]
        covered += row["speed_ratio_low"] <= 2.0 <= row["speed_ratio_high"]
    assert 30 <= covered <= 40  # 95 % of 40, less the error of a bootstrap of ten blocks


def test_no_difference_is_reported_only_if_there_are_enough_data(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    a = timed(tmp_path / "a", 20 + 0.2 * random.standard_normal(200))
    b = timed(tmp_path / "b", 20 + 0.2 * random.standard_normal(200))
    rough = timed(tmp_path / "rough", 20 * np.exp(0.8 * random.standard_normal(60)))
    short = timed(tmp_path / "short", np.full(6, 5.0))
    verdicts = compare([a, b, rough, short]).table["speed_verdict"].tolist()
    assert verdicts == ["reference", "no difference seen", "cannot tell: run more steps", "cannot tell: run more steps"]


def test_speed_is_per_sample(tmp_path: Path) -> None:
    one = timed(tmp_path / "one", np.full(60, 10.0))
    columns = {"step": range(60), "step_ms": [15.0] * 60, "samples": [32] * 60}  # twice the batch in 1.5 times the time
    other = load_run(write_rows(tmp_path / "other", steps=columns))
    assert compare([one, other]).table["speed_ratio"].tolist() == pytest.approx([1.0, 4 / 3])


def test_one_pair_of_runs_cannot_decide_parity(tmp_path: Path) -> None:
    a = timed(tmp_path / "a", np.full(200, 10.0), falling(200, 0))
    b = timed(tmp_path / "b", np.full(200, 10.0), falling(200, 1))
    comparison = compare([a, b])
    assert comparison.parity["a"] == "reference"
    assert comparison.parity["b"].startswith("cannot tell: run more seeds (final loss ")
    assert "over 200 common steps" in comparison.parity["b"]
    assert comparison.table["loss_ratio"].iloc[1] == pytest.approx(1.0, abs=0.01)


def test_a_gross_deviation_is_worse_whatever_the_seed(tmp_path: Path) -> None:
    a = timed(tmp_path / "a", np.full(200, 10.0), falling(200, 0))
    bad = timed(tmp_path / "bad", np.full(200, 10.0), falling(200, 1, end=2.3))
    better = timed(tmp_path / "better", np.full(200, 10.0), falling(200, 1, end=1.5))
    nan = falling(200, 2)
    nan[150:] = np.nan
    broken = timed(tmp_path / "broken", np.full(200, 10.0), nan)
    parity = compare([a, bad, better, broken]).parity
    assert parity["bad"].startswith("worse: final loss +15.0 % against a")
    assert parity["better"].startswith("cannot tell: run more seeds")
    assert parity["broken"] == "worse: the loss is not finite from step 150 on, while that of a is"


def test_losses_that_lie_apart_are_worse_however_they_scatter(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    low = timed(tmp_path / "low", np.full(200, 10.0), 0.002 * np.exp(0.6 * random.standard_normal(200)))
    high = timed(tmp_path / "high", np.full(200, 10.0), 0.04 * np.exp(0.6 * random.standard_normal(200)))
    parity = compare([low, high]).parity
    assert parity["high"].startswith("worse: final loss +") and parity["high"].endswith("is above all of low")
    assert compare([high, low]).parity["low"].startswith("cannot tell")


def test_a_deviation_within_the_noise_of_the_steps_is_not_called_worse(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    noisy = 2.0 + 0.5 * random.standard_normal(200)
    a = timed(tmp_path / "a", np.full(200, 10.0), noisy)
    b = timed(tmp_path / "b", np.full(200, 10.0), noisy + 0.2)
    assert compare([a, b]).parity["b"].startswith("cannot tell")


def test_runs_of_unequal_length_are_compared_over_common_steps_with_a_note(tmp_path: Path) -> None:
    long = timed(tmp_path / "long", np.full(300, 10.0), falling(300, 0))
    short = timed(tmp_path / "short", np.full(60, 10.0), falling(60, 1))
    comparison = compare([long, short])
    assert "over 60 common steps" in comparison.parity["short"]
    assert comparison.table["common_steps"].tolist() == [300, 60]
    assert any("different lengths" in note for note in comparison.notes)
    assert any("first 10 steps" in note for note in comparison.notes)


def test_runs_of_different_tasks_are_not_comparable(tmp_path: Path) -> None:
    a = timed(tmp_path / "a", np.full(50, 10.0), falling(50, 0))
    b = timed(tmp_path / "b", np.full(50, 10.0), falling(50, 0), workload="other")
    assert compare([a, b]).parity["b"] == "not comparable: workload differs from a"


def test_differences_list_only_settings_that_differ(runs: dict[str, Run]) -> None:
    frame = compare([runs["healthy"], runs["static"], runs["fp32"]]).differences.set_index("setting")
    assert frame.columns.tolist() == ["healthy", "static", "fp32"]
    assert frame.loc["precision"].tolist() == ["fp16", "fp16", "fp32"]
    assert frame.loc["loss_scale"].tolist() == ["dynamic", "128.0", "dynamic"]
    assert frame.loc["scaler"].tolist() == ["on", "on", "off"]
    assert frame.loc["scaler.init_scale"].tolist() == ["65536.0", "128.0", "–"]
    assert "seed" not in frame.index and "workload" not in frame.index


def test_memory_and_scale_are_compared(runs: dict[str, Run]) -> None:
    table = compare([runs["fp32"], runs["healthy"]]).table
    tensors = [memory_summary(runs[name]).tensors_peak_bytes for name in ("fp32", "healthy")]
    assert table["memory_peak_bytes"].tolist() == tensors  # on a CPU, what tensors held rather than the whole process
    assert table["memory_ratio"].tolist() == [1.0, pytest.approx(tensors[1] / tensors[0])]
    assert table["scale_last"].tolist() == [1.0, 2.0**18]
    assert table["speed_ratio"].iloc[1] == pytest.approx(2.0, rel=0.01)


def test_runs_of_the_same_name_get_distinct_labels(tmp_path: Path) -> None:
    same = [load_run(write(tmp_path / d / "run", "one-step")) for d in ("x", "y", "z")]
    assert unique_labels(same) == ["run", "run (2)", "run (3)"]
    assert compare(same).table["run"].tolist() == ["run", "run (2)", "run (3)"]


def test_no_runs_are_refused() -> None:
    with pytest.raises(RunError, match="give one run or more"):
        compare([])


def test_anything_but_a_list_of_runs_is_refused(runs: dict[str, Run]) -> None:
    for argument in (next(iter(runs.values())), "runs/a", None):
        with pytest.raises(RunError, match=r"^runs=.* is not a list of runs; give one, as in \[load_run"):
            compare(argument)  # type: ignore[arg-type]


def test_curves_keep_nan_and_drop_unrecorded_losses(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "run",
        steps={"step": range(4), "loss": [4.0, None, float("nan"), 2.0], "samples": [8] * 4, "time_s": [1.0] * 4},
        config={"precision": "bf16"},
    )
    curves = loss_curves([load_run(path)], x="samples")
    assert curves["samples"].tolist() == [8, 24, 32]  # the step without a loss used samples too
    assert np.isnan(curves["loss"].iloc[1]) and np.isnan(curves["smooth"].iloc[1])
    assert curves["smooth"].iloc[2] == pytest.approx(2.0, abs=2.0)
    assert set(curves["precision"]) == {"bf16"} and set(curves["run"]) == {"run"}
    with pytest.raises(RunError, match="x='epoch' is unknown"):
        loss_curves([load_run(path)], x="epoch")  # type: ignore[arg-type]


def test_smoothing_of_a_constant_is_the_constant(tmp_path: Path) -> None:
    run = timed(tmp_path / "run", np.full(300, 10.0), np.full(300, 2.5))
    assert np.allclose(loss_curves([run])["smooth"], 2.5)
