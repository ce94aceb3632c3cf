"""What-if: closed forms, one bin at a time, and the advice for layers."""

import warnings

import numpy as np
import pandas as pd
import pytest

from amp_core import Run, RunError, load_run
from amp_core.analysis import (
    layer_advice,
    predicted_and_audited,
    safe_window,
    safe_window_over_time,
    what_if,
    whole_model,
)
from amp_core.analysis.numerics.what_if import MAX_SOURCE_UNDERFLOW_FRAC
from amp_core.store.writer import RunWriter


def row(name, counts, low, *, kind="weight_grad", dtype="float32", scale=1.0, step=0, absmax=None, capped=None, **more):
    """One row of `tensors`: `counts` values with exponents from `low` on."""
    total = int(sum(counts))
    top = low + len(counts) - 1
    values = {"step": step, "name": name, "kind": kind, "dtype": dtype, "loss_scale": scale, "numel": total}
    values |= {"zero": 0, "subnormal": 0, "normal": total, "inf": 0, "nan": 0, "exp_min": low, "exp_counts": counts}
    values |= {"absmax": 1.5 * 2.0**top if absmax is None else absmax}
    values |= {"capped_min": capped[0] if capped else None, "capped_counts": capped[1] if capped else None}
    return values | more


def run_of(folder, rows, model=None, audits=None, **config) -> Run:
    with RunWriter(folder, config=config, model=model or {}) as writer:
        if rows:
            columns = sorted({key for r in rows for key in r})
            writer.append("tensors", {c: [r.get(c) for r in rows] for c in columns})
        if audits:
            writer.append("audits", {c: [r.get(c) for r in audits] for c in audits[0]})
    return load_run(folder)


def at(frame, **wanted):
    for column, value in wanted.items():
        frame = frame[frame[column] == value]
    assert len(frame) == 1
    return frame.iloc[0]


def test_each_exponent_is_classified_as_in_the_format(tmp_path):
    # One value per octave, at the exponents around the edges of FP16: 2^-25 is the last that rounds up to 2^-24.
    run = run_of(tmp_path / "run", [row("w", [1] * 43, -26)])
    prediction = at(what_if(run, ("fp16",), (0,)), name="w")
    assert prediction.underflow_frac == pytest.approx(1 / 43)
    assert prediction.subnormal_frac == pytest.approx(11 / 43)  # -25 … -15
    mass = 1.5 * 2.0 ** np.arange(-26, 17)
    assert prediction.underflow_mass_frac == pytest.approx(mass[0] / mass.sum())
    # 16 overflows whole; of octave 15 the part from 65520 on, 16 of 32768 values spread evenly.
    assert prediction.overflow_frac == pytest.approx((1 + 16 / 32768) / 43)


def test_a_scale_shifts_the_histogram(tmp_path):
    run = run_of(tmp_path / "run", [row("w", [4, 0, 3, 1], -30)])
    frame = what_if(run, ("fp16", "bf16"), (0, 3, 5, 6, -100))
    fractions = [at(frame, format="fp16", log2_scale=k).underflow_frac for k in (0, 3, 5, 6)]
    assert fractions == [1.0, 0.5, 0.0, 0.0]  # at 2^3, values with exponent -28 reach 2^-25
    assert at(frame, format="bf16", log2_scale=0).underflow_frac == 0.0
    assert at(frame, format="bf16", log2_scale=-100).subnormal_frac == pytest.approx(1.0)


def test_values_recorded_at_a_loss_scale_are_divided_by_it(tmp_path):
    run = run_of(tmp_path / "run", [row("w", [10, 30], -10, scale=2.0**16)])
    assert at(what_if(run, ("fp16",), (0,)), name="w").underflow_frac == pytest.approx(0.25)
    assert at(what_if(run, ("fp16",), (16,)), name="w").underflow_frac == 0.0


def test_a_scale_that_is_not_a_power_of_two_splits_octaves(tmp_path):
    # Divided by 1.25 · 2^16, values m · 2^-9 come to lie in octave -25 where m >= 1.25, else in -26: a quarter.
    run = run_of(tmp_path / "run", [row("w", [400], -9, scale=1.25 * 2.0**16)])
    prediction = at(what_if(run, ("fp16",), (0,)), name="w")
    assert prediction.underflow_frac == pytest.approx(0.25)
    values = np.linspace(1, 2, 4001)[:-1] * 2.0**-9 / (1.25 * 2.0**16)
    assert (values.astype(np.float16) == 0).mean() == pytest.approx(0.25, abs=0.001)


@pytest.mark.parametrize("scale", [1.0, 1000.0, 2.0**-7])
def test_predictions_agree_with_rounding_real_values(tmp_path, scale):
    random = np.random.default_rng(0)
    values = np.exp2(random.normal(-22, 5, 200_000)).astype(np.float32)
    exponents = np.frexp(values * scale)[1] - 1
    low = int(exponents.min())
    run = run_of(tmp_path / "run", [row("w", np.bincount(exponents - low).tolist(), low, scale=scale)])
    frame = what_if(run, ("fp16",), range(-6, 20, 3))
    for result in frame.itertuples():
        with np.errstate(over="ignore"):
            stored = (values.astype(np.float64) * 2.0**result.log2_scale).astype(np.float16)
        assert result.underflow_frac == pytest.approx((stored == 0).mean(), abs=0.004)
        assert result.underflow_mass_frac == pytest.approx(values[stored == 0].sum() / values.sum(), abs=0.001)
        subnormal = (stored > 0) & (stored < 2.0**-14)
        assert result.subnormal_frac == pytest.approx(subnormal.mean(), abs=0.006)
        assert result.overflow_frac == pytest.approx(np.isinf(stored).mean(), abs=0.004)


def test_nothing_overflows_below_the_largest_value(tmp_path):
    run = run_of(tmp_path / "run", [row("w", [100], 15, absmax=65000.0)])
    frame = what_if(run, ("fp16",), (0, 1))
    assert at(frame, log2_scale=0).overflow_frac == 0.0 and at(frame, log2_scale=1).overflow_frac == 1.0


def test_a_weight_gradient_underflows_with_the_output_gradients_of_its_channel(tmp_path):
    rows = [
        row("fc.weight", [50, 50], -20, capped=(-27, [25, 0, 0, 0, 0, 0, 0, 25, 50])),
        row("fc", [1, 3], -26, kind="output_grad"),
    ]
    prediction = at(what_if(run_of(tmp_path / "run", rows), ("fp16",), (0,)), name="fc.weight")
    assert prediction.underflow_frac == 0.25
    # The smallest mass of 25 of the 100 values: half of the lower bin.
    assert prediction.underflow_mass_frac == pytest.approx(25 * 1.5 * 2.0**-20 / (50 * 1.5 * (2.0**-20 + 2.0**-19)))
    assert prediction.source_underflow_frac == 0.25 > MAX_SOURCE_UNDERFLOW_FRAC


def test_tensors_that_autocast_leaves_in_fp32_lose_nothing_except_in_a_pure_model(tmp_path):
    model = {"layers": {"fc": "Linear", "norm": "LayerNorm", "emb": "Embedding"}}
    model["shapes"] = {"fc.weight": [4, 4], "fc.bias": [4], "norm.weight": [4], "emb.weight": [9, 4]}
    rows = [row(name, [8], -30) for name in model["shapes"]]
    rows += [row(name, [8], -30, kind="output_grad") for name in ("fc", "norm", "emb")]
    run = run_of(tmp_path / "run", rows, model)
    frame = what_if(run, ("fp16",), (0,)).set_index(["name", "kind"])
    rounded = {"fc.weight", "fc.bias", "fc"}
    assert {name for (name, _), r in frame.iterrows() if r["rounded"]} == rounded
    assert frame["underflow_frac"].tolist() == frame["rounded"].astype(float).tolist()
    assert (what_if(run, ("fp16",), (0,), pure=True)["underflow_frac"] == 1).all()


def test_a_tied_weight_has_the_precision_of_its_matrix_product(tmp_path):
    model = {"layers": {"emb": "Embedding", "head": "Linear"}, "shapes": {"emb.weight": [9, 4]}}
    run = run_of(tmp_path / "a", [row("emb.weight", [8], -30)], model)
    assert not what_if(run, ("fp16",), (0,))["rounded"].any()
    tied = run_of(tmp_path / "b", [row("emb.weight", [8], -30)], model | {"tied": {"head.weight": "emb.weight"}})
    assert what_if(tied, ("fp16",), (0,))["rounded"].all()


def test_recorded_dtypes_take_precedence_over_module_classes(tmp_path):
    model = {"layers": {"a": "Linear", "b": "Linear"}, "shapes": {"a.weight": [2, 2], "b.weight": [2, 2]}}
    rows = [row("a.weight", [4], -30), row("b.weight", [4], -30)]
    rows += [row("b", [4], -3, kind="output_grad"), row("a", [4], -3, kind="output_grad", dtype="float16")]
    frame = what_if(run_of(tmp_path / "run", rows, model), ("fp16",), (0,)).set_index("name")
    assert frame["rounded"].to_dict() == {"a.weight": True, "b.weight": False, "b": False, "a": True}


def test_fp8_has_a_scale_per_tensor(tmp_path):
    run = run_of(tmp_path / "run", [row("w", [1] * 30, -40, absmax=1.75 * 2.0**-11), row("v", [1] * 30, -10)])
    frame = what_if(run, ("fp8-e4m3", "fp8-e5m2"), (0, -3, 1))
    own = frame[frame["log2_scale"] == 0].set_index(["name", "format"])["own_log2_scale"]
    assert own["w", "fp8-e4m3"] == 19  # 1.75 · 2^8 = 448
    assert own["v", "fp8-e5m2"] == 15 - 19
    here = frame[frame["log2_scale"] == 0]
    assert (here["overflow_frac"] == 0).all()
    # e4m3 spans 2^8 to 2^-9 and values that round up to 2^-9: 19 of the 30 octaves.
    assert at(here, name="w", format="fp8-e4m3").underflow_frac == pytest.approx(11 / 30)
    assert at(frame, name="w", format="fp8-e4m3", log2_scale=-3).underflow_frac == pytest.approx(14 / 30)
    assert at(frame, name="w", format="fp8-e4m3", log2_scale=1).overflow_frac > 0
    loss = what_if(run, ("fp8-e4m3",), (0,), scaling="loss")
    assert at(loss, name="w").underflow_frac == 1.0 and at(loss, name="w").own_log2_scale == 0


def test_the_row_of_the_whole_model_weights_tensors_by_their_values(tmp_path):
    run = run_of(tmp_path / "run", [row("a", [10], -30), row("b", [30], 0)])
    totals = whole_model(what_if(run, ("fp16",), (0,)))
    assert len(totals) == 1 and totals["underflow_frac"].item() == pytest.approx(0.25)
    assert totals["underflow_mass_frac"].item() == pytest.approx(10 * 2.0**-30 / (30 + 10 * 2.0**-30))
    assert totals["nonzero"].item() == 40


def test_steps_are_pooled_or_separate(tmp_path):
    rows = [row("w", [10], -30, step=0), row("w", [30], 0, step=10)]
    run = run_of(tmp_path / "run", rows)
    result = [what_if(run, ("fp16",), (0,), step=s)["underflow_frac"].item() for s in (None, 0, 9, 10, 50)]
    assert result == [0.25, 1.0, 1.0, 0.0, 0.0]
    assert what_if(run, ("fp16",), (0,), step=-1).empty


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"formats": ("fp12",)}, "format='fp12' is unknown; choose one of fp64, fp32"),
        ({"kinds": ("grads",)}, "kinds='grads' is unknown; choose from weight_grad"),
        ({"log2_scales": [0.5]}, "log2_scales=0.5 is not a whole number"),
        ({"log2_scales": [float("inf")]}, "log2_scales=inf is not a whole number"),
        ({"scaling": "block"}, "scaling='block' is unknown; choose one of loss, tensor"),
    ],
)
def test_a_wrong_argument_is_one_sentence(tmp_path, wrong, says):
    with pytest.raises(RunError, match=says):
        what_if(run_of(tmp_path / "run", [row("w", [1], 0)]), **wrong)


def test_one_format_and_one_kind_need_no_list(tmp_path):
    run = run_of(tmp_path / "run", [row("w", [1], 0)])
    assert what_if(run, "fp16", [0], "output_grad").equals(what_if(run, ["fp16"], [0], ["output_grad"]))
    assert len(what_if(run, "fp16", 2, "weight_grad")) == 1


def test_a_run_without_gradients_gives_empty_frames(tmp_path):
    run = run_of(tmp_path / "run", [])
    assert what_if(run).empty and layer_advice(run).empty and predicted_and_audited(run).empty
    assert whole_model(what_if(run)).empty


def test_layers_that_no_common_scale_suits_become_islands(tmp_path):
    kinds = {"a": "Linear", "b": "Linear", "c": "Linear", "small": "Linear", "norm": "LayerNorm"}
    model = {"layers": kinds, "shapes": {f"{n}.weight": [8, 8] for n in kinds} | {"norm.weight": [8]}}
    rows = []
    for name in kinds:
        low = {"small": -46}.get(name, -14)
        rows.append(row(f"{name}.weight", [10, 40, 10], low))
        rows.append(row(name, [10, 40, 10], low, kind="output_grad"))
    rows.append(row("a.bias", [8], -3))
    frame = layer_advice(run_of(tmp_path / "run", rows, model)).set_index("layer")
    assert frame.index.tolist() == list(kinds)  # in the model's order
    assert frame["island"].to_dict() == {"a": False, "b": False, "c": False, "small": True, "norm": False}
    assert frame["best_format"].to_dict() == dict.fromkeys("abc", "fp16") | {"small": "bf16", "norm": "fp32"}
    assert "keep it in BF16" in frame["why"]["small"] and "FP32" in frame["why"]["norm"]
    assert frame["underflow_frac"]["small"] == 1.0 and frame["underflow_frac"]["a"] == 0.0
    # 1.5 · 2^-3 from the bias: the recommendation stays half an octave below 2^18.4.
    assert frame["highest_log2"]["a"] == 17
    assert set(frame["fp8_format"]) == {"fp8-e4m3"}
    assert frame["fp8_error"]["a"] == pytest.approx(2**-3 / np.sqrt(28), rel=1e-3)


def test_fp8_gives_a_wide_tensor_the_format_with_more_range(tmp_path):
    rows = [row("fc", [2**20] * 1 + [0] * 22 + [1], -30, kind="output_grad"), row("fc.weight", [5], -8)]
    wide = layer_advice(run_of(tmp_path / "run", rows)).set_index("layer")
    assert wide["fp8_underflow_frac"]["fc"] > 0.9
    rows = [row("fc", [2**30] + [0] * 18 + [1], -30, kind="output_grad"), row("fc.weight", [5], -8)]
    assert layer_advice(run_of(tmp_path / "wide", rows))["fp8_format"].tolist() == ["fp8-e5m2"]


def test_fp8_advice_has_the_scale_of_what_if(tmp_path):
    gradient = row("fc", [10] * 40, -40, kind="output_grad")
    run = run_of(tmp_path / "run", [gradient, row("fc.weight", [5], -8)])
    advice = layer_advice(run).set_index("layer").loc["fc"]
    predicted = what_if(run, (advice["fp8_format"],), (0,), ("output_grad",), pure=True).iloc[0]
    assert predicted["own_scale"] not in (1, 2.0 ** round(np.log2(predicted["own_scale"])))
    assert advice["fp8_underflow_frac"] == predicted["underflow_frac"] > 0


def test_audits_are_paired_with_predictions_for_their_step(tmp_path):
    rows = [row("w", [25, 75], -26), row("w", [100], -5, step=10)]
    audit = {"name": "w", "precision": "fp16", "numel": 100, "nonzero": 100, "lost": 24, "nonfinite": 0}
    audit |= {"lost_mass_frac": 0.15, "rel_error": 0.2, "cosine": 0.98}
    audits = [
        audit | {"step": 0, "loss_scale": 1.0},
        audit | {"step": 0, "loss_scale": 2.0**0.5, "lost": 10, "rel_error": 0.01},
        audit | {"step": 5, "loss_scale": 1.0},
        audit | {"step": 10, "loss_scale": 1.0, "precision": "fp32"},
    ]
    frame = predicted_and_audited(run_of(tmp_path / "run", rows, audits=audits))
    assert frame["audited_frac"].tolist() == pytest.approx([0.24, 0.1, 0.24, 0.24])
    assert frame["predicted_frac"].tolist() == pytest.approx([0.25, 0.125, np.nan, np.nan], nan_ok=True)
    assert frame["at_best"].tolist() == pytest.approx([0.01, 0.01, np.nan, np.nan], nan_ok=True)


STRANGE = {
    "tiny": row("w", [1], -1000, absmax=1e308),
    "huge": row("w", [1], 1000),
    "empty tensor": row("w", [], 0, absmax=0.0),
    "infinite largest value": row("w", [5], 0, absmax=float("inf"), inf=3),
    "no scale": row("w", [5], 0, absmax=float("nan"), scale=0.0),
    "infinite scale": row("w", [5], 0, scale=float("inf")),
    "tiny scale": row("w", [5], 0, scale=1e-300),
    "no dtype": row("w", [5], 0, dtype=None),
    "dtype of another program": row("w", [5], 0, kind="output_grad", dtype="posit16"),
    "zeros alone": row("w", [0, 0], -5, absmax=0.0),
}


@pytest.mark.parametrize("case", STRANGE)
@pytest.mark.parametrize("analysis", [what_if, safe_window, safe_window_over_time, layer_advice])
def test_odd_rows_give_numbers_or_one_sentence(tmp_path, case, analysis):
    run = run_of(tmp_path / "run", [STRANGE[case]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if analysis is safe_window and case in ("empty tensor", "zeros alone"):
            with pytest.raises(RunError, match="no recorded gradients"):
                analysis(run)
            return
        result = analysis(run)
    if isinstance(result, pd.DataFrame):
        for column in result.columns[result.columns.str.contains("frac") & (result.columns != "source_underflow_frac")]:
            known = result[column].dropna()
            assert known.between(0, 1).all(), column
