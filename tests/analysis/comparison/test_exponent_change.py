"""The values of each tensor by exponent, against those of a baseline."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from amp_core import Run, load_run
from amp_core.analysis import changed_tensors, exponent_changes
from amp_core.figures import exponent_change_heatmap
from amp_core.store.writer import RunWriter
from tests.synthetic import SAMPLES

LOWEST = -3
STEPS = range(4)


def recorded(
    folder: Path,
    counts: Sequence[Sequence[int]],
    *,
    scale: float = 1.0,
    steps: Sequence[int] = STEPS,
    skipped: Sequence[int] = (),
    name: str = "w",
) -> Run:
    """A run whose tensor of 100 elements has these counts from exponent `LOWEST` on, at each of its steps."""
    shift = int(scale).bit_length() - 1
    with RunWriter(folder) as writer:
        writer.append("steps", {"step": list(steps), "skipped": [step in skipped for step in steps]})
        for step, row in zip(steps, counts, strict=True):
            writer.append(
                "tensors",
                {
                    "step": [step],
                    "name": [name],
                    "kind": ["weight_grad"],
                    "dtype": ["float32"],
                    "loss_scale": [scale],
                    "numel": [100],
                    "zero": [100 - sum(row)],
                    "normal": [sum(row)],
                    "exp_min": [LOWEST + shift],
                    "exp_counts": [list(row)],
                },
            )
    return load_run(folder)


def of(runs: Sequence[Run]) -> dict[int, tuple[float, float, bool]]:
    frame = exponent_changes(runs, "weight_grad")
    return {r.exponent: (r.change, r.noise, r.outside) for r in frame.itertuples()}


def test_values_that_underflow_are_missing_at_their_exponents_and_nowhere_else(tmp_path: Path) -> None:
    base = recorded(tmp_path / "base", [(10, 40, 50), (12, 38, 50)] * 2)
    run = recorded(tmp_path / "run", [(0, 39, 50)] * 4, scale=1024.0)  # the loss scale shifts its histogram
    changes = of([base, run])
    spread = 0.01 * (4 / 3) ** 0.5  # standard deviation of 10, 12, 10, 12 %
    assert changes[-3] == (pytest.approx(-0.11), pytest.approx(2 * spread / 2), True)
    assert changes[-2] == (pytest.approx(0.0), pytest.approx(2 * spread / 2), False)
    assert changes[-1] == (pytest.approx(0.0), pytest.approx(0.0), False)
    (row,) = changed_tensors(exponent_changes([base, run], "weight_grad")).itertuples()
    assert (row.name, row.exponent) == ("w", -3)
    assert (row.moved_frac, row.nonzero_change) == (pytest.approx(0.11), pytest.approx(-0.11))


def test_a_change_within_the_noise_of_the_baseline_is_none(tmp_path: Path) -> None:
    base = recorded(tmp_path / "base", [(5, 40, 50), (15, 40, 40)] * 2)
    run = recorded(tmp_path / "run", [(12, 40, 48)] * 4)
    changes = exponent_changes([base, run], "weight_grad")
    assert changes["change"].abs().max() == pytest.approx(0.03) and not changes["outside"].any()
    assert changed_tensors(changes).empty


def test_three_seeds_give_the_noise(tmp_path: Path) -> None:
    seeds = [recorded(tmp_path / str(n), [(n, 90 - n, 10)] * 4) for n in (8, 10, 12)]
    run = recorded(tmp_path / "run", [(13, 77, 10)] * 4)
    change, noise, outside = of([*seeds, run])[-3]
    assert (change, noise, outside) == (pytest.approx(0.03), pytest.approx(2 * 0.02), False)


def test_only_steps_that_both_sampled_and_neither_skipped_are_compared(tmp_path: Path) -> None:
    base = recorded(tmp_path / "base", [(10, 40, 50)] * 4)
    run = recorded(tmp_path / "run", [(90, 0, 0), (10, 40, 50), (90, 0, 0)], steps=(1, 2, 9), skipped=(1,))
    assert all(change == pytest.approx(0.0) for change, *_ in of([base, run]).values())
    assert exponent_changes([base, recorded(tmp_path / "later", [(1, 1, 1)], steps=(7,))], "weight_grad").empty


def test_a_tensor_that_the_baseline_lacks_has_no_rows(tmp_path: Path) -> None:
    base = recorded(tmp_path / "base", [(10, 40, 50)] * 4)
    assert exponent_changes([base, recorded(tmp_path / "run", [(1, 1, 1)] * 4, name="v")], "weight_grad").empty


def test_fp16_without_loss_scaling_flushes_what_fp32_keeps() -> None:
    runs = [load_run(SAMPLES[name]) for name in ("fp32", "fp16-underflow")]
    changes = exponent_changes(runs, "output_grad")
    assert changes.loc[changes["outside"] & (changes["exponent"] < -25), "change"].max() < 0
    assert changed_tensors(changes).iloc[0]["name"] == "head"
    figure = exponent_change_heatmap(changes, "fp32")
    (cells,) = (trace for trace in figure.data if trace.name == "cells")
    assert len(cells.y) == changes["outside"].sum()


def test_modules_are_summed_at_a_depth() -> None:
    runs = [load_run(SAMPLES[name]) for name in ("fp32", "bf16")]
    folded = exponent_changes(runs, "output_grad", 1)
    assert set(folded["name"]) == {"head", "norm", "blocks.*", "tokens"}
    assert folded.groupby("name")["value"].sum().max() <= 1.0 + 1e-9
