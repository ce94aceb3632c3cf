"""What was first is named, and what follows from it stands under it."""

from pathlib import Path
from typing import Any

from amp_core import Run, load_run
from amp_core.findings import diagnose, first_cause
from tests.synthetic import write_rows

OUTPUT = {"kind": "non-finite output", "dtype": "float16", "limit": 65504.0, "phase": "forward", "op": "Linear"}


def run_of(path: Path, events: list[dict[str, Any]], losses: list[float], skipped: list[bool]) -> Run:
    scales = [2.0**-i for i in range(len(losses))]
    steps = {"step": range(len(losses)), "loss": losses, "loss_scale": scales, "skipped": skipped}
    return load_run(write_rows(path, steps=steps, events=events, config={"scaler": {"enabled": True}}))


def test_forward_comes_before_the_gradients_that_it_spoils(tmp_path: Path) -> None:
    nan = float("nan")
    events = [
        {"kind": "skipped", "name": "head.weight", "step": 0},
        OUTPUT | {"name": "blocks.1.up", "step": 0, "value": 300.0, "count": 9},
    ]
    run = run_of(tmp_path / "run", events, [nan] * 8, [True] * 8)
    cause = first_cause(run, 0, 7)
    assert cause is not None
    assert (cause.phase, cause.where, cause.op, cause.step, cause.clean) == (
        "forward",
        "blocks.1.up",
        "Linear",
        0,
        True,
    )
    found = {f.code: f for f in diagnose(run)}
    assert {found[c].where for c in ("activation-overflow", "loss-nonfinite", "scale-collapse")} == {"blocks.1.up"}
    assert found["loss-nonfinite"].follows == found["scale-collapse"].follows == "activation-overflow"
    assert found["activation-overflow"].follows == ""
    assert found["activation-overflow"].title.endswith("(Linear) overflows float16 from input of up to 300")


def test_an_input_whose_size_was_not_recorded_is_not_spoken_of(tmp_path: Path) -> None:
    events = [OUTPUT | {"name": "blocks.1.up", "step": 0, "count": 9}]
    (finding,) = [
        f
        for f in diagnose(run_of(tmp_path / "run", events, [float("nan")] * 8, [True] * 8))
        if f.code == "activation-overflow"
    ]
    assert finding.title.endswith("(Linear) overflows float16") and finding.value is None


def test_a_finite_loss_leaves_only_backward(tmp_path: Path) -> None:
    events = [{"kind": "skipped", "name": "blocks.2.up.weight", "step": 3}]
    run = run_of(tmp_path / "run", events, [1.0] * 8, [False] * 3 + [True] * 5)
    cause = first_cause(run, 3, 7)
    assert cause is not None and (cause.phase, cause.where) == ("backward", "blocks.2.up.weight")


def test_weights_that_bad_gradients_left_are_not_the_cause(tmp_path: Path) -> None:
    nan = float("nan")
    events = [
        {"kind": "non-finite", "name": "blocks.0.up.weight", "step": 2},
        OUTPUT | {"name": "embed", "step": 3, "detail": "weights", "count": 9},
    ]
    run = run_of(tmp_path / "run", events, [1.0, 1.0, 1.0, nan, nan], [False] * 5)
    cause = first_cause(run, 0, 4)
    assert cause is not None and (cause.step, cause.where) == (2, "blocks.0.up.weight")
    (finding,) = [f for f in diagnose(run) if f.code == "loss-nonfinite"]
    assert finding.where == "blocks.0.up.weight"


def test_what_arises_between_two_modules_is_put_to_the_one_around_them(tmp_path: Path) -> None:
    events = [OUTPUT | {"name": "blocks.1.down", "step": 0, "detail": "input"}]
    cause = first_cause(run_of(tmp_path / "run", events, [1.0], [False]), 0, 0)
    assert cause is not None and (cause.where, cause.op) == ("blocks.1", "before blocks.1.down")


def test_nothing_recorded_names_nothing(tmp_path: Path) -> None:
    assert first_cause(run_of(tmp_path / "run", [], [1.0], [False]), 0, 0) is None
