"""The list of published step times: each row is of a known GPU, precision and optimizer, and stands there once."""

import csv
from collections import Counter
from pathlib import Path

import pytest

from amp_core.forecast import efficiency_of
from amp_core.forecast.roofline import why_not
from amp_core.hardware.data_sheets import NAMES, dense_rates

APART = ("launches", "start-up", "unclear", "compiled")
FILE = Path(__file__).parents[1] / "benchmarks" / "published_steps.csv"


@pytest.fixture(scope="module")
def rows():
    with FILE.open() as file:
        return list(csv.DictReader(file))


def test_no_row_stands_twice_and_each_set_is_told_apart(rows):
    assert len({tuple(row.values()) for row in rows}) == len(rows)
    sets = Counter(row["held_out"] for row in rows)
    assert set(sets) == {"no", "yes", *APART, *(f"set {i}" for i in range(1, 9))}
    apart = sum(sets[name] for name in APART)
    assert sum(sets.values()) - apart == 557  # docs/evidence.md


def test_each_row_is_of_a_gpu_with_a_data_sheet_that_runs_the_precision(rows):
    for row in rows:
        rates = dense_rates(NAMES.get(row["gpu"], row["gpu"]))
        assert rates is not None, row["gpu"]
        assert not why_not(rates, row["precision"].removesuffix("-pure")), row
        optimizers = ("none", "sgd", "adamw", "fused-adam", "bert-adam", "zero-grad", "adam-loop", "jit-lamb")
        optimizers += ("cs336-adamw", "luke396-adamw")
        assert row["optimizer"] in optimizers
        assert float(row["step_ms"]) > 5 and int(row["batch"]) > 0


def test_shares_of_a_gpu_with_published_steps_name_where_they_come_from(rows):
    for gpu in {row["gpu"] for row in rows} - {"MI100", "MI210", "MI250"}:
        assert "steps" in efficiency_of(NAMES.get(gpu, gpu)).source, gpu
