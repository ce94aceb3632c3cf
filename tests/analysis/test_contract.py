"""Contract of every analysis on every run. The tests discover the functions, so a new one is tested at once."""

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

import amp_core.analysis as analysis
from amp_core import Run, RunError, load_run
from tests.error_notes import note_on_error
from tests.synthetic import SAMPLES, SCENARIOS, live

FUNCTIONS = {n: f for n in analysis.__all__ if inspect.isfunction(f := getattr(analysis, n))}
OF_A_RUN = {n: f for n, f in FUNCTIONS.items() if next(iter(inspect.signature(f).parameters)) == "run"}
NEED_GRADIENTS = {"safe_window"}
OF_RUNS = {n: f for n, f in FUNCTIONS.items() if next(iter(inspect.signature(f).parameters)) == "runs"}


def calls(function: Callable[..., Any], given: Run | list[Run]) -> list[tuple[Any, ...]]:
    """Arguments for an analysis; if it needs a kind, each kind that the run, or the last of several, has."""
    if "kind" in inspect.signature(function).parameters:
        run = given[-1] if isinstance(given, list) else given
        return [(given, kind) for kind in analysis.kinds_present(run) or ["weight_grad"]]
    return [(given,)]


def check(result: Any) -> None:
    if dataclasses.is_dataclass(result):
        assert result.__dataclass_params__.frozen  # type: ignore[attr-defined]
    elif isinstance(result, pd.DataFrame):
        assert not result.index.has_duplicates
        assert not result.columns.has_duplicates
    else:
        assert result is None or isinstance(result, list | str | float)


def test_there_are_analyses_of_one_run_and_of_several() -> None:
    assert len(OF_A_RUN) >= 10 and len(OF_RUNS) >= 3


@pytest.mark.parametrize("scenario", [*SCENARIOS, *(f"sample {name}" for name in SAMPLES)])
def test_every_analysis_accepts_every_run(scenario: str, runs: dict[str, Run], capfd: Any) -> None:
    run = runs[scenario]
    before = run.steps.copy()
    for name, function in OF_A_RUN.items():
        with note_on_error(name), warnings.catch_warnings():
            warnings.simplefilter("error")
            for arguments in calls(function, run):
                if name in NEED_GRADIENTS and not {"weight_grad", "output_grad"} & set(analysis.kinds_present(run)):
                    with pytest.raises(RunError, match="has no recorded gradients"):
                        function(*arguments)
                else:
                    check(function(*arguments))
            pd.testing.assert_frame_equal(run.steps, before)  # an analysis does not modify its input
            assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("scenario", [*SCENARIOS, *(f"sample {name}" for name in SAMPLES)])
def test_every_comparison_accepts_several_runs(scenario: str, runs: dict[str, Run]) -> None:
    for name, function in OF_RUNS.items():
        with note_on_error(name), warnings.catch_warnings():
            warnings.simplefilter("error")
            for several in ([runs["fp32"], runs[scenario]], [runs[scenario], runs["fp32"]]):
                for arguments in calls(function, several):
                    check(function(*arguments))


@pytest.mark.parametrize("name", [n for n in OF_A_RUN if n.endswith(("_trace", "_times"))])
def test_traces_have_one_row_per_step_in_order(name: str, runs: dict[str, Run]) -> None:
    for scenario in ("healthy", "two-optimizers", "two-ranks"):
        frame = OF_A_RUN[name](runs[scenario])
        assert frame["step"].tolist() == list(range(SCENARIOS[scenario].steps))


def test_a_growing_run_is_analysed_as_it_grows(tmp_path: Any) -> None:
    with live(tmp_path / "run", steps=40) as growing:
        growing.advance(15)
        run = load_run(tmp_path / "run")
        first = analysis.overview(run)
        assert (first.live, first.status, first.steps_done, first.steps_planned) == (True, "running", 15, 40)
        assert first.eta_s == pytest.approx(25 * 0.0396, rel=0.1)  # planned at some 39.6 ms a step
        growing.advance(10)
        run.refresh()
        assert analysis.overview(run).steps_done == 25
        assert len(analysis.scale_trace(run)) == 25
        assert analysis.sampled_steps(run, "weight_grad") == [0, 10, 20]
    run.refresh()
    over = analysis.overview(run)
    assert (over.live, over.status, over.eta_s) == (False, "finished", None)
