"""One tensor over time: its rows agree with the totals over all steps, and the first bad step is named."""

import numpy as np
import pandas as pd
import pytest

from amp_core import Run, RunError, load_run
from amp_core.analysis import class_shares, exponent_shares, kinds_present, sampled_steps
from amp_core.analysis.numerics.layers import downsample_trace, layer_exponents, layer_health, layer_trace, tensor_names
from amp_core.formats import FORMATS
from tests.synthetic import SAMPLES, SCENARIOS, write_rows

SAMPLED = [n for n in (*SCENARIOS, *(f"sample {n}" for n in SAMPLES)) if n not in ("empty", "bare")]


@pytest.mark.parametrize("scenario", SAMPLED)
def test_a_tensor_over_time_is_the_tensor_of_each_step(scenario: str, runs: dict[str, Run]) -> None:
    run = runs[scenario]
    for kind in kinds_present(run):
        name = tensor_names(run, kind)[-1]
        trace = layer_trace(run, kind, name)
        step = sampled_steps(run, kind)[-1]
        expected = class_shares(run, kind, step).set_index("name").loc[name]
        last = trace.set_index("step").loc[step]
        columns = ["zero_frac", "subnormal_frac", "normal_frac", "inf_frac", "nan_frac", "rms"]
        np.testing.assert_allclose(last[columns].astype(float), expected[columns].astype(float))
        assert trace["step"].is_monotonic_increasing and trace["step"].is_unique
        shares = exponent_shares(run, kind, step).query("name == @name").set_index("exponent")["share"]
        histogram = layer_exponents(run, kind, name).query("step == @step").set_index("exponent")["share"]
        pd.testing.assert_series_equal(histogram, shares)


def test_names_come_in_the_order_of_the_run(runs: dict[str, Run]) -> None:
    names = tensor_names(runs["healthy"], "output_grad")
    assert names == class_shares(runs["healthy"], "output_grad")["name"].tolist()


def test_true_exponents_take_the_loss_scale_of_each_step_out(runs: dict[str, Run]) -> None:
    run, kind = runs["overflowing"], "output_grad"
    scales = layer_trace(run, kind, "head").set_index("step")["loss_scale"]
    stored, true = (layer_exponents(run, kind, "head", t) for t in (False, True))
    shift = np.log2(scales.loc[stored["step"]].to_numpy())
    assert len(set(shift)) > 1
    assert (stored["exponent"].to_numpy() - shift == true["exponent"].to_numpy()).all()
    assert stored["count"].tolist() == true["count"].tolist()


def test_many_steps_are_added_up(runs: dict[str, Run]) -> None:
    run = runs["healthy"]
    all_, few = (layer_exponents(run, "weight_grad", "head.weight", max_steps=steps) for steps in (1500, 5))
    assert all_["step"].nunique() == 12 and few["step"].unique().tolist() == [0, 30, 60, 90]
    assert all_["count"].sum() == few["count"].sum()
    assert few.groupby("step")["share"].sum().tolist() == pytest.approx([1.0] * 4)


def test_histograms_of_selected_steps_are_those_of_these_steps(runs: dict[str, Run]) -> None:
    run = runs["healthy"]
    all_ = layer_exponents(run, "weight_grad", "head.weight")
    some = layer_exponents(run, "weight_grad", "head.weight", within=(20, 40), max_steps=3)
    pd.testing.assert_frame_equal(some, all_[all_["step"].between(20, 40)].reset_index(drop=True))


def test_curves_of_many_steps_keep_outliers() -> None:
    steps = np.arange(20_000)
    trace = pd.DataFrame({"step": steps, "absmax": 1.0, "subnormal_frac": 0.01, "inf_frac": 0.0, "nan_frac": 0.0})
    trace.loc[5001, "absmax"], trace.loc[7003, "subnormal_frac"], trace.loc[9007, "inf_frac"] = 1e6, 0.4, 1e-6
    drawn = downsample_trace(trace)
    assert len(drawn) < 2100 and {0, 5001, 7003, 9007, 19_999} <= set(drawn["step"])
    assert drawn.merge(trace).equals(drawn)
    assert downsample_trace(trace.iloc[:900]).equals(trace.iloc[:900])


def test_the_first_bad_step_is_named(runs: dict[str, Run]) -> None:
    run = runs["overflowing"]
    health = layer_health(layer_trace(run, "output_grad", "head"))
    shares = {s: class_shares(run, "output_grad", s).set_index("name").loc["head"] for s in range(0, 120, 10)}
    bad = [s for s, row in shares.items() if row["inf_frac"] + row["nan_frac"] > 0]
    assert health.first_nonfinite == bad[0] and health.nonfinite_samples == len(bad)
    assert health.samples == 12


def test_subnormal_values_are_counted_in_the_tensors_own_dtype(runs: dict[str, Run]) -> None:
    name = "embed"
    health = layer_health(layer_trace(runs["underflowing"], "output_grad", name))
    trace = layer_trace(runs["underflowing"], "output_grad", name)
    assert health.first_subnormal == 0 and health.worst_subnormal_frac == trace["subnormal_nonzero_frac"].max() > 0.05
    healthy = layer_health(layer_trace(runs["fp32"], "output_grad", name))
    assert healthy.first_nonfinite is healthy.first_subnormal is healthy.first_all_zero is None
    assert FORMATS["fp16"].dtype == trace["dtype"].iloc[0]


def test_tensors_that_are_all_zero_or_all_nan_are_classified(tmp_path: object) -> None:
    rows = {"step": [0, 5, 10], "name": ["a"] * 3, "kind": ["weight_grad"] * 3, "dtype": ["float32"] * 3}
    rows |= {"numel": [4] * 3, "zero": [4, 0, 0], "subnormal": [0] * 3, "normal": [0, 4, 0], "inf": [0] * 3}
    rows |= {"nan": [0, 0, 4], "absmax": [0.0, 1.5, 0.0], "rms": [0.0, 1.0, 0.0]}
    rows |= {"exp_min": [0] * 3, "exp_counts": [[], [4], []]}
    run = load_run(write_rows(tmp_path / "run", tensors=rows))  # type: ignore[operator]
    trace = layer_trace(run, "weight_grad", "a")
    health = layer_health(trace)
    assert (health.first_all_zero, health.first_nonfinite) == (0, 10)
    assert trace["absmax"].isna().tolist() == [False, False, True]
    assert layer_exponents(run, "weight_grad", "a").to_numpy().tolist() == [[5, 0, 1.0, 4]]


def test_an_unknown_tensor_is_refused(runs: dict[str, Run]) -> None:
    with pytest.raises(RunError, match="name='nowhere' was not sampled as weight_grad"):
        layer_trace(runs["healthy"], "weight_grad", "nowhere")
    with pytest.raises(RunError, match="kind='gradient'"):
        tensor_names(runs["healthy"], "gradient")
