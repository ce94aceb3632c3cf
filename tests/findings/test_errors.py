"""Errors that ended a run, in runs that tell less of themselves than ours do."""

from pathlib import Path

import pytest

from amp_core import load_run
from amp_core.findings import diagnose
from amp_core.runlog import RunWriter


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"class": "Adam"}, "has a gradient"),  # what is not recorded is no sign of parameters of another model
        ({"class": "Adam", "parameters": 4, "outside_model": 0}, "has a gradient"),
        ({"class": "Adam", "parameters": 4, "outside_model": 4}, "has a gradient (they are not the model's)"),
    ],
)
def test_parameters_are_called_foreign_only_where_that_was_recorded(
    tmp_path: Path, settings: dict[str, object], said: str
) -> None:
    writer = RunWriter(tmp_path / "run", config={"optimizers": ["Adam"], "optimizer_settings": [settings]})
    writer.append("steps", {"step": [0]})
    writer.close("failed", "AssertionError: No inf checks were recorded for this optimizer.")
    (finding,) = [f for f in diagnose(load_run(tmp_path / "run")) if f.code == "no-gradients"]
    assert finding.title.endswith(said)


def test_a_call_that_no_recorder_wrote_is_no_number_of_an_optimizer(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", config={"optimizers": ["Adam", "SGD"], "optimizer_settings": [{}, {}]})
    writer.append("steps", {"step": [0]})
    writer.event("calls", "backward scaler.step:last", step=0)
    writer.close("failed", "AssertionError: No inf checks were recorded for this optimizer.")
    (finding,) = [f for f in diagnose(load_run(tmp_path / "run")) if f.code == "no-gradients"]
    assert finding.where == "Adam (optimizer 0)"
