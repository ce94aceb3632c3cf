"""Errors that ended a run, in runs that record less than ours."""

from pathlib import Path

import pytest

from amp_core import load_run
from amp_core.findings import diagnose
from amp_core.store.writer import RunWriter


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"class": "Adam"}, "has a gradient"),  # a missing record does not indicate parameters of another model
        ({"class": "Adam", "parameters": 4, "outside_model": 0}, "has a gradient"),
        ({"class": "Adam", "parameters": 4, "outside_model": 4}, "has a gradient (they do not belong to the model)"),
    ],
)
def test_parameters_are_called_foreign_only_if_that_was_recorded(
    tmp_path: Path, settings: dict[str, object], text: str
) -> None:
    writer = RunWriter(tmp_path / "run", config={"optimizers": ["Adam"], "optimizer_settings": [settings]})
    writer.append("steps", {"step": [0]})
    writer.close("failed", "AssertionError: No inf checks were recorded for this optimizer.")
    (finding,) = [f for f in diagnose(load_run(tmp_path / "run")) if f.code == "no-gradients"]
    assert finding.title.endswith(text)


@pytest.mark.parametrize(("steps", "told"), [((0, 1, 2), True), ((0, 2), False)])
def test_parameters_that_never_get_a_gradient_are_named_as_an_info(
    tmp_path: Path, steps: tuple[int, ...], told: bool
) -> None:
    with RunWriter(tmp_path / "run", config={"optimizers": ["Adam"]}) as writer:
        writer.append("steps", {"step": range(5)})
        for step in steps:
            writer.event("missing gradients", "body.weight", step=step, count=2, limit=6.0)
    named = [f for f in diagnose(load_run(tmp_path / "run")) if f.code == "no-gradients"]
    assert [(f.where, f.severity) for f in named] == ([("body.weight", "info")] if told else [])
    assert not named or named[0].title == "2 of the optimizer's 6 tensors get no gradient"


def test_an_unknown_call_is_not_parsed_as_an_optimizer_index(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", config={"optimizers": ["Adam", "SGD"], "optimizer_settings": [{}, {}]})
    writer.append("steps", {"step": [0]})
    writer.event("calls", "backward scaler.step:last", step=0)
    writer.close("failed", "AssertionError: No inf checks were recorded for this optimizer.")
    (finding,) = [f for f in diagnose(load_run(tmp_path / "run")) if f.code == "no-gradients"]
    assert finding.where == "Adam (optimizer 0)"


@pytest.mark.parametrize(("steps", "text"), [(1, "called twice for one step"), (0, "before any optimizer step")])
def test_an_update_without_a_step_is_not_reported_as_missing_gradients(steps: int, text: str, tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", config={"optimizers": ["Adam"], "optimizer_settings": [{}]})
    if steps:
        writer.append("steps", {"step": range(steps)})
    writer.close("failed", "AssertionError: No inf checks were recorded prior to update.")
    (finding,) = [f for f in diagnose(load_run(tmp_path / "run")) if f.severity == "error"]
    assert finding.code == "update-without-step" and text in finding.title and "update()" in finding.advice


def test_the_largest_modules_entirely_in_16_bits_are_named(tmp_path: Path) -> None:
    """Neither their layers nor modules with a part in FP32 are named."""
    half = ["blocks.1.mlp.up.weight", "blocks.1.mlp.down.weight", "blocks.2.up.weight", "head.0.weight"]
    wide = ["blocks.0.up.weight", "blocks.1.norm.weight", "blocks.2.norm.weight", "head.1.weight"]
    model = {"dtypes": dict.fromkeys(half, "float16"), "shapes": {n: [4, 4] for n in half + wide}}
    with RunWriter(tmp_path / "run", model=model) as writer:
        writer.append("steps", {"step": [0]})
    (finding,) = [f for f in diagnose(load_run(tmp_path / "run")) if f.code == "half-model"]
    assert finding.where == "blocks.1.mlp" and finding.value == 0.5
    assert finding.title.startswith("blocks.1.mlp and 2 more modules were converted to float16: 4 of 8 parameters")
