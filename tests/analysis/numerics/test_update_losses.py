"""What is lost to rounding in updates over a run: per tensor, per step, and runs side by side."""

from pathlib import Path

import pytest

from amp_core import Run, load_run
from amp_core.analysis import average_losses, update_losses, update_losses_over_steps, update_summary
from tests.synthetic import write, write_rows


def updates(lost: dict[str, list[float]], **others: object) -> dict[str, list[object]]:
    """Rows of `updates`: the lost share of each tensor at steps 0, 10, 20 …"""
    rows = [(10 * i, name, share) for name, shares in lost.items() for i, share in enumerate(shares)]
    table: dict[str, list[object]] = {"step": [r[0] for r in rows], "name": [r[1] for r in rows]}
    table["lost_mass_frac"] = table["unchanged_frac"] = [r[2] for r in rows]
    fixed = {"dtype": "bfloat16", "numel": 100, "elements": 100, "update_rms": 1e-4, "weight_rms": 1.0} | others
    return table | {name: [value] * len(rows) for name, value in fixed.items()}


def run_of(folder: Path, lost: dict[str, list[float]], **others: object) -> Run:
    return load_run(write_rows(folder, steps={"step": [0, 10, 20]}, updates=updates(lost, **others)))


def test_a_tensor_stands_still_from_the_step_after_which_each_update_is_lost(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a", {"head": [0.9, 0.1, 0.9], "embed": [0.1, 0.8, 0.9], "norm": [0.1, 0.2, 0.3]})
    losses = update_losses(run).set_index("name")
    assert losses["still_since"].to_dict() == {"head": 20, "embed": 10, "norm": None}
    assert losses["lost_mass_frac"].to_dict() == {"head": 0.9, "embed": 0.8, "norm": 0.2}


def test_the_summary_weighs_tensors_by_their_elements(tmp_path: Path) -> None:
    table = updates({"head": [0.9, 0.9, 0.9], "norm": [0.1, 0.1, 0.1]})
    table["numel"] = [300] * 3 + [100] * 3
    run = load_run(write_rows(tmp_path / "a", steps={"step": [0]}, updates=table))
    row = update_summary([run]).iloc[0]
    assert row["lost_mass_frac"] == pytest.approx((300 * 0.9 + 100 * 0.1) / 400)
    assert (row["tensors"], row["still"], row["still_since"]) == (2, 1, 0)


def test_a_cure_is_named_and_its_tensors_do_not_stand_still(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a", {"head": [0.6, 0.6, 0.6]}, cure="stochastic rounding")
    row = update_summary([run]).iloc[0]
    assert (row["cure"], row["still"]) == ("stochastic rounding", 0)


def test_of_a_run_without_compared_updates_only_the_dtype_is_known(tmp_path: Path) -> None:
    row = update_summary([load_run(write(tmp_path / "a", "one-step"))]).iloc[0]
    assert row["tensors"] == 0 and row["lost_mass_frac"] != row["lost_mass_frac"]


def test_neighbouring_steps_share_a_cell_that_holds_their_largest_share(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a", {"head": [0.1, 0.8, 0.3]})
    cells = update_losses_over_steps(run, max_steps=2)
    assert cells[["step", "until", "lost_mass_frac"]].values.tolist() == [[0, 10, 0.8], [20, 20, 0.3]]


def test_averages_that_stand_still_come_first(tmp_path: Path) -> None:
    table = {"step": [0, 0], "name": ["a", "b"], "dtype": ["bfloat16"] * 2, "unchanged_frac": [0.1, 0.9]}
    run = load_run(write_rows(tmp_path / "a", steps={"step": [0]}, averages=table | {"decay": [0.999] * 2}))
    assert average_losses(run)["name"].tolist() == ["b", "a"]
