import math
from pathlib import Path

import numpy as np
import pytest

from amp_core import Run, RunError, load_run
from amp_core.analysis import class_shares, exponent_shares, kinds_present, sampled_steps
from amp_core.analysis.numerics import ranges
from tests.synthetic import LAYERS, measure, write_rows


def tensors(*rows: dict[str, object]) -> dict[str, list[object]]:
    """Rows as columns; missing counts are filled in to fit the histogram."""
    filled = []
    for row in rows:
        counts = sum(row.get("exp_counts", []))  # type: ignore[arg-type, call-overload]
        usual = {"kind": "weight_grad", "zero": 0, "subnormal": 0, "normal": counts, "inf": 0, "nan": 0}
        whole = usual | {"exp_min": 0, "exp_counts": [], "loss_scale": 1.0, "absmax": 1.0, "rms": 1.0} | row
        filled.append({"numel": sum(whole[c] for c in ranges.CLASSES)} | whole)
    return {column: [row[column] for row in filled] for column in filled[0]}


@pytest.fixture
def small(tmp_path: Path) -> Run:
    rows = tensors(
        {"step": 0, "name": "b", "exp_min": -3, "exp_counts": [1, 2, 1], "loss_scale": 8.0, "zero": 4, "absmax": 0.9},
        {"step": 0, "name": "a", "exp_min": 5, "exp_counts": [10], "loss_scale": 8.0, "inf": 5, "nan": 5},
        {"step": 0, "name": "dead", "zero": 7, "absmax": 0.0, "rms": 0.0},
        {"step": 20, "name": "b", "exp_min": -2, "exp_counts": [4], "loss_scale": 16.0, "rms": 3.0, "absmax": 7.0},
        {"step": 20, "name": "b", "kind": "activation", "exp_min": 0, "exp_counts": [1]},
    )
    return load_run(write_rows(tmp_path / "small", tensors=rows))


def shares(run: Run, **how: object) -> dict[str, dict[int, float]]:
    frame = exponent_shares(run, "weight_grad", **how)  # type: ignore[arg-type]
    return {n: dict(zip(g["exponent"], g["share"], strict=True)) for n, g in frame.groupby("name", sort=False)}


def test_shares_are_of_all_finite_nonzero_values_of_a_tensor(small: Run) -> None:
    assert shares(small, step=0) == {"b": {-3: 0.25, -2: 0.5, -1: 0.25}, "a": {5: 1.0}}
    assert shares(small) == {"b": {-3: 1 / 8, -2: 6 / 8, -1: 1 / 8}, "a": {5: 1.0}}  # both steps together


def test_rms_is_over_the_rows_that_have_one_and_nan_if_none_has(tmp_path: Path) -> None:
    rows = tensors(
        {"step": 0, "name": "a", "exp_counts": [8], "rms": None},
        {"step": 1, "name": "a", "exp_counts": [4], "rms": 3.0},
        {"step": 0, "name": "b", "exp_counts": [8], "rms": None},
    )
    rms = class_shares(load_run(write_rows(tmp_path / "a", tensors=rows)), "weight_grad")["rms"]
    assert rms[0] == pytest.approx(3.0) and math.isnan(rms[1])


def test_tensors_keep_the_order_of_the_run(small: Run) -> None:
    assert exponent_shares(small, "weight_grad")["name"].unique().tolist() == ["b", "a"]
    assert class_shares(small, "weight_grad")["name"].tolist() == ["b", "a", "dead"]


def test_the_last_sampled_step_at_or_before_the_requested_one_is_used(small: Run) -> None:
    assert sampled_steps(small, "weight_grad") == [0, 20]
    assert shares(small, step=19) == shares(small, step=0)
    assert shares(small, step=20) == shares(small, step=10**6) == {"b": {-2: 1.0}}
    assert shares(small, step=-1) == {}


def test_true_exponents_are_those_before_scaling(small: Run) -> None:
    # Scaled by 2^3 at step 0 and by 2^4 at step 20.
    assert shares(small, step=0, true_exponents=True) == {"b": {-6: 0.25, -5: 0.5, -4: 0.25}, "a": {2: 1.0}}
    assert shares(small, true_exponents=True)["b"] == {-6: 5 / 8, -5: 2 / 8, -4: 1 / 8}


def test_a_scale_that_is_not_a_power_of_two_shifts_by_the_nearest_one(tmp_path: Path) -> None:
    rows = tensors({"step": 0, "name": "a", "exp_counts": [1], "exp_min": 10, "loss_scale": 1000.0})
    run = load_run(write_rows(tmp_path / "run", tensors=rows))
    assert shares(run, true_exponents=True) == {"a": {0: 1.0}}  # log2(1000) = 9.97


def test_classes_are_shares_of_all_elements_and_add_up_to_one(small: Run) -> None:
    frame = class_shares(small, "weight_grad", step=0).set_index("name")
    assert frame.loc["b", ["zero_frac", "normal_frac", "inf_frac", "nan_frac"]].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert frame.loc["a", ["zero_frac", "normal_frac", "inf_frac", "nan_frac"]].tolist() == [0.0, 0.5, 0.25, 0.25]
    assert frame.loc["dead", "zero_frac"] == 1.0
    assert np.allclose(frame[[f"{c}_frac" for c in ranges.CLASSES]].sum(axis=1), 1.0)


def test_magnitudes_over_several_steps(small: Run) -> None:
    b = class_shares(small, "weight_grad").set_index("name").loc["b"]
    assert (b["numel"], b["counted"]) == (8, 12)
    assert b["absmax"] == 7.0
    assert b["rms"] == pytest.approx(math.sqrt((8 * 1.0 + 4 * 9.0) / 12))  # every finite value weighs the same
    assert (b["exp_low"], b["exp_high"]) == (-3, -1)
    dead = class_shares(small, "weight_grad").set_index("name").loc["dead"]
    assert math.isnan(dead["exp_low"]) and math.isnan(dead["exp_high"])


def test_counts_that_were_not_recorded_are_not_zero(tmp_path: Path) -> None:
    run = load_run(write_rows(tmp_path / "run", tensors={"step": [0], "name": ["a"], "numel": [9], "absmax": [2.0]}))
    row = class_shares(run, "weight_grad").iloc[0]
    assert math.isnan(row["zero_frac"]) and math.isnan(row["inf_frac"]) and row["absmax"] == 2.0
    assert not len(exponent_shares(run, "weight_grad"))


def test_a_normal_distribution_has_the_analytic_shares(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(400_000)
    row = measure(values.astype(np.float32), "float32") | {"step": 0, "name": "n", "kind": "activation"}
    run = load_run(write_rows(tmp_path / "run", tensors={k: [v] for k, v in row.items()}))
    shares = exponent_shares(run, "activation").set_index("exponent")["share"]
    for exponent in range(-5, 3):
        expected = math.erf(2.0 ** (exponent + 1) / math.sqrt(2)) - math.erf(2.0**exponent / math.sqrt(2))
        assert shares[exponent] == pytest.approx(expected, abs=0.003)
    assert class_shares(run, "activation")["rms"].iloc[0] == pytest.approx(1.0, abs=0.01)


def test_large_tables_are_expanded_in_parts(runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = exponent_shares(runs["overflowing"], "output_grad", true_exponents=True)
    monkeypatch.setattr(ranges, "_CHUNK_ROWS", 7)
    parts = exponent_shares(runs["overflowing"], "output_grad", true_exponents=True)
    assert whole.equals(parts) and len(whole) > 50


def test_shares_of_a_real_run_show_its_underflow(runs: dict[str, Run]) -> None:
    assert kinds_present(runs["healthy"]) == ["weight_grad", "output_grad"]
    assert kinds_present(runs["bare"]) == []
    under = class_shares(runs["underflowing"], "output_grad").set_index("name")
    assert under.loc["embed", "zero_frac"] > 0.9  # flushed: they were nonzero before float16
    assert under.loc["head", "subnormal_frac"] > 0.5
    assert class_shares(runs["overflowing"], "output_grad", step=0)["inf_frac"].max() > 0
    healthy = class_shares(runs["healthy"], "output_grad")
    assert healthy["zero_frac"].max() == pytest.approx(0.1, abs=0.01)  # only true zeros
    assert len(healthy) == len(LAYERS)


def test_an_unknown_kind_is_refused_in_a_sentence(runs: dict[str, Run]) -> None:
    for function in (exponent_shares, class_shares, sampled_steps):
        with pytest.raises(RunError, match="kind='gradient' is unknown; choose one of weight_grad"):
            function(runs["healthy"], "gradient")


def test_a_histogram_without_its_lowest_exponent_is_refused(tmp_path: Path) -> None:
    rows = tensors({"step": 0, "name": "a", "exp_counts": [1], "exp_min": 10**12})
    with pytest.raises(RunError, match="exp_min=1000000000000"):
        exponent_shares(load_run(write_rows(tmp_path / "run", tensors=rows)), "weight_grad")
