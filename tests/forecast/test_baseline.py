"""A forecast of two runs against each other."""

import pytest

from amp_core import RunError, load_run
from amp_core.forecast import forecast, step_time_changes, traces_of_run
from tests.synthetic import SAMPLES, write

GPUS = ["V100", "A100"]


@pytest.fixture(scope="module")
def sample():
    return lambda name: load_run(SAMPLES[name])


def test_the_times_are_those_of_each_runs_own_forecast(sample):
    fp32, fp16 = sample("fp32"), sample("fp16-healthy")
    changes = step_time_changes(fp32, fp16, GPUS).set_index("gpu")
    for column, run, recipe in (("baseline", fp32, "fp32"), ("value", fp16, "fp16")):
        table = forecast(traces_of_run(run), GPUS).table
        own = table[table["recipe"] == recipe].set_index("gpu")["step_ms"]
        assert changes[column].to_dict() == pytest.approx(own.to_dict())
    assert (changes["low"] <= changes["ratio"]).all() and (changes["ratio"] <= changes["high"]).all()


def test_a_run_takes_as_long_as_itself_whatever_the_gpu_reaches(sample):
    changes = step_time_changes(sample("fp32"), sample("fp32"), GPUS)
    assert (changes[["ratio", "low", "high"]] == 1.0).all(axis=None) and not changes["outside"].any()


def test_a_gpu_that_cannot_run_both_recipes_has_no_row(sample):
    assert step_time_changes(sample("fp32"), sample("bf16"), GPUS)["gpu"].tolist() == ["A100"]


def test_a_baseline_without_a_traced_step_is_refused(sample, tmp_path):
    with pytest.raises(RunError, match="no traced step"):
        step_time_changes(load_run(write(tmp_path / "a", "healthy")), sample("fp32"), GPUS)
