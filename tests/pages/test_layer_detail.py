"""Layer detail: choosing the tensor, its first bad step, its predictions."""

import pytest

from amp_core import load_run
from amp_core.analysis import what_if
from amp_core.analysis.numerics.layers import layer_health, layer_trace, tensor_names
from pages.parts.numbers.tensor import same
from tests.pages.conftest import titles, words
from tests.synthetic import write

DETAIL = "pages/layer_detail.py"


def chosen(app):
    return app.session_state["layer.kind"], app.session_state["layer.name"]


def test_an_address_opens_its_tensor_and_names_the_first_bad_step(home, open_app):
    write(home.runs / "a", "overflowing")
    app = open_app(DETAIL, run="run/a", kind="output_grad", layer="blocks.1.feedforward.up")
    run = load_run(home.runs / "a")
    health = layer_health(layer_trace(run, "output_grad", "blocks.1.feedforward.up"))
    assert chosen(app) == ("output_grad", "blocks.1.feedforward.up")
    assert health.first_nonfinite is not None
    assert (
        "blocks.1.feedforward.up (output gradients, float16) first held infinities or NaN at step "
        f"{health.first_nonfinite}, and at {health.nonfinite_samples} of 12 sampled steps in total"
    ) in words(app)
    assert titles(app) == ["Exponents over time", "Magnitudes", "Classes of values"]


def test_a_healthy_tensor_is_called_healthy(home, open_app):
    write(home.runs / "a", "fp32")
    app = open_app(DETAIL, run="run/a", kind="weight_grad", layer="head.weight")
    assert "head.weight (weight gradients, float32) was finite at all 12 sampled steps, none of its values" in words(
        app
    )


def test_subnormal_values_are_reported_and_add_a_caveat_to_predictions(home, open_app):
    write(home.runs / "a", "underflowing")
    app = open_app(DETAIL, run="run/a", kind="output_grad", layer="embed")
    assert "embed (output gradients, float16) first had more than 5 % subnormal values at step 0" in words(app)
    assert "what lay below was lost before it could be counted" in words(app)


def test_choosing_a_tensor_sets_the_address_and_choosing_a_kind_keeps_the_layer(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app(DETAIL, run="run/a")
    first = tensor_names(load_run(home.runs / "a"), "output_grad")[0]
    assert chosen(app) == ("output_grad", first) == (app.query_params["kind"], app.query_params["layer"])
    next(s for s in app.selectbox if s.key == "layer.name").set_value("head").run()
    assert app.query_params["layer"] == "head"
    app.get("button_group")[0].set_value("weight_grad").run()
    assert not app.exception and chosen(app) == ("weight_grad", "head.weight")
    app.query_params["kind"], app.query_params["layer"] = "output_grad", "embed"  # a link, or the browser's Back
    app.run()
    assert chosen(app) == ("output_grad", "embed")


@pytest.mark.parametrize("address", [{"layer": "no.such"}, {"kind": "gradient"}, {"kind": "weight", "layer": "head"}])
def test_an_unknown_tensor_falls_back(home, open_app, address):
    write(home.runs / "a", "healthy")
    app = open_app(DETAIL, run="run/a", **address)
    assert not app.exception and len(titles(app)) == 3
    assert chosen(app)[1] in tensor_names(load_run(home.runs / "a"), chosen(app)[0])


def test_predictions_are_those_of_what_if(home, open_app):
    write(home.runs / "a", "fp32")
    app = open_app(DETAIL, run="run/a", kind="output_grad", layer="embed")
    table = app.dataframe[0].value
    expected = what_if(load_run(home.runs / "a"), ("fp16",), (0, 8), ("output_grad",)).query("name == 'embed'")
    shown = table[table["format"] == "FP16"].set_index("scale")
    for row, scale in zip(expected.itertuples(), ("2⁰", "2⁸"), strict=True):
        assert shown.loc[scale, "underflow_frac"] == pytest.approx(100 * row.underflow_frac)
        assert shown.loc[scale, "underflow_mass_frac"] == pytest.approx(100 * row.underflow_mass_frac)
    assert shown.loc["2⁰", "underflow_frac"] >= 0 and len(table) == 16
    for largest in (448, 57344):
        assert table["scale"].str.startswith(f"its own, {largest} / amax = ").sum() == 1
    assert "Predicted from the recorded histograms" in words(app)


def test_without_samples_there_is_a_sentence(home, open_app):
    write(home.runs / "a", "bare")
    app = open_app(DETAIL, run="run/a")
    assert "sampled no tensors" in words(app) and not app.get("plotly_chart")


def test_another_kind_selects_the_same_layer():
    assert same("head", ["embed.weight", "head.weight"]) == "head.weight"
    assert same("head.weight", ["embed", "head"]) == "head"
    assert same("gone", ["embed", "head"]) == same(None, ["embed", "head"]) == "embed"


def test_with_a_baseline_the_exponents_stand_beside_it_with_its_noise(home, open_app):
    write(home.runs / "a", "underflowing")
    write(home.runs / "b", "fp32")
    app = open_app(DETAIL, run="run/a", baseline="run/b")
    assert not app.exception and "Exponents beside the baseline's" in titles(app)
    app = open_app(DETAIL, run="run/a", baseline="none")
    assert "Exponents beside the baseline's" not in titles(app)
