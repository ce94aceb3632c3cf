"""The safe window: its ends in closed form, over time, and for runs with few data."""

import numpy as np
import pytest

from amp_core import Run, RunError
from amp_core.analysis import safe_window, safe_window_over_time
from amp_core.analysis.numerics.safe_window import MAX_ERROR, MIN_COSINE, MIN_GROWTH_INTERVAL
from amp_core.analysis.numerics.scale_limits import _first_smallest
from tests.analysis.numerics.test_what_if import row, run_of

MODEL = {
    "layers": {"emb": "Embedding", "norm": "LayerNorm", "fc": "Linear", "lstm": "LSTM"},
    "shapes": {"emb.weight": [9, 8], "norm.weight": [8], "fc.weight": [8, 8], "fc.bias": [8]}
    | {"lstm.weight_ih_l0": [32, 8], "lstm.weight_hh_l0": [32, 8]},
}


SEEN = row("norm", [10], 0, kind="output_grad")
"""Tells that output gradients were recorded; that of a norm stays in FP32 and does not count."""


def window(tmp_path, rows, model=None, **config):
    return safe_window(run_of(tmp_path / "run", rows, model or MODEL, **config))


def test_the_error_limit_has_a_margin_to_the_cosine():
    assert 1 / np.sqrt(1 + (5 * MAX_ERROR) ** 2) == pytest.approx(MIN_COSINE, abs=1e-4)


def test_both_ends_in_closed_form(tmp_path):
    # All values in one octave, 2^e … 2^(e+1), rounded to multiples of u = 2^-24: error² = u²/12 / (7/3 · 4^(e+k)).
    result = window(tmp_path, [SEEN, row("fc.weight", [1000], -20, absmax=1.9 * 2.0**-20)])
    error = 2.0 ** (-24 - (-20 + np.log2(result.lowest))) / np.sqrt(28)
    assert error <= MAX_ERROR < 2 * error
    assert result.highest == 2.0 ** np.floor(np.log2(65520 / (1.9 * 2.0**-20)) - 0.5)
    assert result.recommended == result.highest / 4
    assert result.exists and (result.lowest_by, result.highest_by) == ("fc.weight", "fc.weight")
    assert (result.first_step, result.last_step) == (0, 0)


@pytest.mark.parametrize("lowest_exponent", [-40, -25, -10])
def test_rounding_real_values_errs_as_much_as_the_lower_end_says(tmp_path, lowest_exponent):
    random = np.random.default_rng(1)
    values = np.exp2(random.normal(lowest_exponent + 5, 2, 100_000))
    exponents = np.frexp(values)[1] - 1
    low = int(exponents.min())
    counts = np.bincount(exponents - low).tolist()
    result = window(tmp_path, [SEEN, row("fc.weight", counts, low, absmax=values.max())])

    def error(scale):
        stored = (values * scale).astype(np.float16).astype(np.float64) / scale
        return np.linalg.norm(stored - values) / np.linalg.norm(values)

    assert error(result.lowest) < 1.1 * MAX_ERROR < 2.4 * error(result.lowest)
    assert error(result.lowest / 16) > 7 * MAX_ERROR
    assert values.max() * result.highest < 65504 < values.max() * result.highest * 4


def test_errors_of_output_gradients_add_up_on_the_way_back(tmp_path):
    def lowest(modules):
        rows = [row("fc.weight", [10], 0)]
        rows += [row(f"m{i}", [100], -20, kind="output_grad") for i in range(modules)]
        window = safe_window(run_of(tmp_path / str(modules), rows))
        return np.log2(window.lowest)

    assert lowest(16) == lowest(1) + 2  # sixteen times the square, four times the error


def test_tensors_that_stay_in_fp32_do_not_count(tmp_path):
    rows = [row("fc.weight", [10], -10), row("fc", [10], -10, kind="output_grad")]
    plain = window(tmp_path / "a", rows)
    wide = [row("emb.weight", [10], 12), row("norm.weight", [10], -60), row("norm", [10], 14, kind="output_grad")]
    result = window(tmp_path / "b", rows + wide)
    assert (result.lowest, result.highest) == (plain.lowest, plain.highest)


def test_biases_and_noise_affect_only_the_upper_end(tmp_path):
    rows = [row("fc.weight", [10], -10)]
    plain = window(tmp_path / "a", rows)
    tiny_bias = window(tmp_path / "b", [*rows, row("fc.bias", [8], -60)])
    noise = window(tmp_path / "c", [*rows, row("lstm.weight_ih_l0", [8], -40)])
    assert tiny_bias.lowest == noise.lowest == plain.lowest
    large_bias = window(tmp_path / "d", [*rows, row("fc.bias", [8], 3)])
    assert large_bias.highest < plain.highest and large_bias.highest_by == "fc.bias"


def test_recurrent_layers_have_gradients_smaller_by_the_root_of_the_number_summed(tmp_path):
    hidden = [SEEN, row("lstm.weight_hh_l0", [10], -10)]
    alone = window(tmp_path / "a", hidden)
    # 2 sequences of 128 positions and 8 units: the weight gradient is a sum of 256 products.
    with_output_gradients = window(tmp_path / "b", [*hidden, row("lstm", [2048], 0, kind="output_grad")])
    assert np.log2(with_output_gradients.lowest) == np.log2(alone.lowest) + 4


def test_the_window_follows_the_steps(tmp_path):
    rows = [row("fc.weight", [10], -10 - i, step=100 * i) for i in range(8)]
    run = run_of(tmp_path / "run", rows)
    frame = safe_window_over_time(run)
    assert frame["step"].tolist() == [100 * i for i in range(8)]
    assert np.log2(frame["lowest"]).diff().iloc[1:].tolist() == [1.0] * 7
    assert np.log2(frame["highest"]).diff().iloc[1:].tolist() == [1.0] * 7
    window = safe_window(run)
    assert (window.first_step, window.last_step) == (400, 700)
    assert window.highest == frame["highest"][4] and window.lowest == frame["lowest"][7]
    assert window.growth_interval == MIN_GROWTH_INTERVAL and "rises by one octave every 100 steps" in window.why
    early = safe_window(run, step=150)
    assert (early.first_step, early.lowest) == (100, frame["lowest"][1]) and early.growth_interval == 2000


def test_the_window_of_an_audited_run_starts_at_its_first_audit(tmp_path):
    rows = [row("fc.weight", [10], -10 - i, step=10 * i) for i in range(8)]
    audit = {"step": 25, "name": "fc.weight", "loss_scale": 1.0, "precision": "fp16"}
    window = safe_window(run_of(tmp_path / "run", rows, audits=[audit]))
    assert (window.first_step, window.last_step) == (20, 70)


def test_a_single_outlier_step_does_not_decide_the_lower_end(tmp_path):
    rows = [row("fc.weight", [10], -30 if i == 15 else -10, step=i) for i in range(22)]
    run = run_of(tmp_path / "run", rows)
    frame = safe_window_over_time(run)
    assert safe_window(run).lowest == frame["lowest"][0] < frame["lowest"][15]


def test_an_overflow_shows_that_the_scale_was_too_high(tmp_path):
    burst = row("fc", [10], 0, kind="output_grad", dtype="float16", scale=2.0**20, absmax=60000.0, inf=2)
    assert window(tmp_path / "a", [burst]).highest < 2.0**20
    # Under autocast a weight gradient is FP32, but was FP16 before.
    burst = row("fc.weight", [10], 0, scale=2.0**20, absmax=100.0, inf=2)
    assert window(tmp_path / "b", [burst], autocast_dtype="float16").highest < 2.0**20
    assert window(tmp_path / "c", [burst], autocast_dtype="bfloat16").highest > 2.0**20


def test_no_scale_suits_all_gradients_if_their_range_is_too_wide(tmp_path):
    rows = [row("fc.weight", [10], 10), row("fc", [10], -40, kind="output_grad")]
    result = window(tmp_path, rows)
    assert not result.exists and result.recommended == result.highest
    assert "No loss scale suits all" in result.why


def test_wide_formats_need_no_scale(tmp_path):
    run = run_of(tmp_path / "run", [row("fc.weight", [10], -30)], MODEL)
    window = safe_window(run, "bf16")
    assert window.recommended == 1.0 and "needs no loss scale" in window.why
    narrow = safe_window(run, "fp8-e5m2")
    assert narrow.lowest > safe_window(run).lowest and narrow.highest <= safe_window(run).highest


def test_a_recording_with_underflow_has_a_caveat(tmp_path):
    fine = [row("fc", [1, 5, 100, 100], -20, kind="output_grad", dtype="float16")]
    assert window(tmp_path / "a", fine).caveat is None
    bottom = [row("fc", [10, 10, 100], -24, kind="output_grad", dtype="float16")]
    assert "17 % of the recorded values of fc lie at the smallest magnitudes of FP16" in str(
        window(tmp_path / "b", bottom).caveat
    )
    wide = [row("fc", [10, 10, 100], -24, kind="output_grad", dtype="bfloat16")]
    assert window(tmp_path / "c", wide).caveat is None


def test_without_output_gradients_the_window_has_a_caveat(tmp_path):
    weights = [row("fc.weight", [10], -10)]
    guessed = window(tmp_path / "a", weights)
    with_output_gradients = window(tmp_path / "b", [*weights, row("fc", [10], -10, kind="output_grad")])
    assert np.log2(guessed.lowest) == np.log2(with_output_gradients.lowest) + 4
    assert "no output gradients were recorded" in str(guessed.caveat) and with_output_gradients.caveat is None


def test_a_run_without_gradients_is_refused_in_a_sentence(tmp_path):
    run: Run = run_of(tmp_path / "run", [row("fc", [10], 0, kind="activation")])
    with pytest.raises(RunError, match="has no recorded gradients; a prediction needs weight_grad and output_grad"):
        safe_window(run)
    assert safe_window_over_time(run).empty
    with pytest.raises(RunError, match="format='fp12' is unknown"):
        safe_window_over_time(run, "fp12")


def test_the_index_of_the_smallest_value_per_step_ignores_nan() -> None:
    nan, inf = float("nan"), float("inf")
    values = np.array([3.0, 1.0, 1.0, nan, 2.0, nan, nan, -inf, inf])
    assert _first_smallest(values, np.array([0, 3, 5, 7])).tolist() == [1, 4, 5, 7]
