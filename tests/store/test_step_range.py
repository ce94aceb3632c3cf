"""Part of a run: rows of the chosen steps, and everything that is about the run as a whole."""

import pytest

from amp_core import Run, diagnose, load_run
from amp_core.analysis import kinds_present, layer_band, overview, scale_summary
from amp_core.analysis.numerics.layers import layer_trace, tensor_names
from amp_core.store.long_runs.extract import open_extract
from amp_core.store.step_range import whole, within_steps
from tests.synthetic import live, write


@pytest.fixture
def run(tmp_path) -> Run:
    return load_run(write(tmp_path / "a", "overflowing"))


def test_tables_over_time_hold_the_chosen_steps_alone(run):
    part = within_steps(run, 30, 60)
    assert part.steps["step"].min() == 30 and part.steps["step"].max() == 60
    sampled = set(run.tensors()["step"])
    assert set(part.tensors()["step"]) == {step for step in sampled if 30 <= step <= 60} != sampled
    skips = run.steps.loc[run.steps["step"].between(30, 60), "skipped"].sum()
    assert scale_summary(part).skips == skips < scale_summary(run).skips
    assert overview(part).steps_done <= 31 and part.name == run.name


def test_recordings_of_single_steps_and_facts_about_the_run_stay(tmp_path):
    run = load_run(write(tmp_path / "p", "profiled"))
    part = within_steps(run, 0, 1)
    assert part.table("kernels") == run.table("kernels") and part.table("memory") == run.table("memory")
    kinds = set(run.events["kind"]) & {"started", "ended", "warning"}
    assert kinds <= set(part.events["kind"])


@pytest.mark.parametrize("opened", [load_run, open_extract])
def test_a_tensor_is_traced_in_the_chosen_steps(tmp_path, opened):
    run = opened(write(tmp_path / "a", "healthy"))
    kind = kinds_present(run)[0]
    name = tensor_names(run, kind)[0]
    trace = layer_trace(run, kind, name)
    middle = int(trace["step"].iloc[len(trace) // 2])
    part = within_steps(run, middle, int(trace["step"].iloc[-1]))
    assert layer_trace(part, kind, name)["step"].tolist() == trace.loc[trace["step"] >= middle, "step"].tolist()
    assert part.of_tensor(kind, name, ["absmax"]).column_names == ["absmax"]
    assert len(layer_band([run, part], kind, name)) == len(trace)


def test_a_part_has_a_fingerprint_of_its_own_and_knows_its_run(run):
    part, other = within_steps(run, 0, 10), within_steps(run, 0, 11)
    assert len({run.fingerprint(), part.fingerprint(), other.fingerprint()}) == 3
    assert whole(part) is run and whole(run) is run
    assert [f.code for f in diagnose(whole(part))] == [f.code for f in diagnose(run)]


def test_a_part_of_a_live_run_grows_with_it(tmp_path):
    with live(tmp_path / "a", "healthy") as running:
        running.advance(5)
        run = load_run(tmp_path / "a")
        part = within_steps(run, 2, 100)
        assert part.steps["step"].tolist() == [2, 3, 4]
        running.advance(3)
        assert part.refresh() and part.steps["step"].tolist() == [2, 3, 4, 5, 6, 7]
