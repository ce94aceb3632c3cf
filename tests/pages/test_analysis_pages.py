"""Loss scale, Number ranges, Compare: each answers its question first, then shows the evidence."""

import json
import re

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amp_core import load_run
from amp_core.analysis import class_shares, safe_window, scale_summary, skip_episodes, what_if, whole_model
from amp_core.analysis.numerics.layers import first_nonfinite
from amp_core.figures.axes import percent
from pages.parts.numbers import ranges
from pages.parts.words import percent as percent_
from pages.parts.words import scale
from tests.pages.conftest import metric, run_picker, titles, words
from tests.synthetic import write


def test_loss_scale_counts_skips_and_lists_episodes(home, open_app):
    write(home.runs / "a", "overflowing")
    app = open_app("pages/loss_scale.py", run="run/a")
    about = scale_summary(load_run(home.runs / "a"))
    assert f"{about.skips} steps of 120" in words(app)
    assert metric(app, "Skipped steps").value == str(about.skips)
    episodes = app.dataframe[0].value
    assert episodes["skips"].sum() == about.skips
    assert "head.weight" in episodes["tensors"].iloc[0]
    assert titles(app) == ["Loss scale", "Gradient norm"]


def test_episodes_are_shown_in_words_and_stored_as_numbers(home, open_app):
    write(home.runs / "a", "overflowing")
    app = open_app("pages/loss_scale.py", run="run/a")
    result = skip_episodes(load_run(home.runs / "a"))
    shown, kept = app.dataframe[0].value, app.session_state["tables.shown"]["Episodes of skipped steps with scales."]
    assert shown["before"].iloc[0] == scale(result["scale_before"].iloc[0])
    assert (
        kept[["first_step", "last_step", "skips"]].to_numpy().tolist()
        == result[["first", "last", "skips"]].to_numpy().tolist()
    )
    assert kept["scale_before"].equals(result["scale_before"]) and kept["scale_after"].dtype == "float64"


def test_loss_scale_of_a_clean_run(home, open_app):
    write(home.runs / "a", "static")
    app = open_app("pages/loss_scale.py", run="run/a")
    assert "No step was skipped. The scale was constant at 2⁷." in words(app)


def test_a_run_without_a_scaler_is_distinguished_from_one_that_never_skipped(home, open_app):
    write(home.runs / "a", "fp32")
    app = open_app("pages/loss_scale.py", run="run/a")
    assert "fp32 runs without loss scaling" in words(app)
    assert titles(app) == ["Gradient norm"]


def test_ranges_name_the_tensor_where_it_began(home, open_app):
    write(home.runs / "a", "overflowing")
    app = open_app("pages/number_ranges.py", run="run/a")
    run = load_run(home.runs / "a")
    firsts = first_nonfinite(run, "output_grad")
    assert f"first in {firsts[min(firsts)]}" in words(app)
    where = r"at \d of \d+ sampled steps, .* % of its elements over all sampled steps"
    assert re.search(f"{where}; the scaler skipped each of those steps", words(app))
    assert titles(app)[:3] == [
        "Output gradients by tensor and exponent",
        "Output gradients over steps: subnormal",
        "Classes of values",
    ]
    assert list(app.dataframe[0].value["name"]) == list(class_shares(run, "output_grad")["name"])
    heatmap = json.loads(app.get("plotly_chart")[0].proto.spec)["data"]
    assert any(t.get("name") == "not finite" and f" ∞ {percent(0.069)}" in t["text"] for t in heatmap)


def test_ranges_and_overview_agree_on_the_first_non_finite_step_of_a_tensor():
    trace = pd.DataFrame({"step": [0, 10, 20], "inf_frac": [0.5, 0.0, 0.1], "nan_frac": [0.0, 0.0, 0.1]})
    assert ranges.not_finite_at(trace, [0, 7, 20]) == (
        ", at 2 of 3 sampled steps",
        "; the scaler skipped each of those steps",
    )
    assert ranges.not_finite_at(trace, [0]) == (", at 2 of 3 sampled steps", "")
    assert ranges.not_finite_at(trace.head(2), [0]) == (", only at step 0", "; the scaler skipped that step")
    assert ranges.not_finite_at(trace.head(2), []) == (", only at step 0", "")
    assert ranges.not_finite_at(trace[1:2], [0]) == ("", "")


def test_ranges_of_another_kind_and_one_step(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app("pages/number_ranges.py", run="run/a")
    app.get("button_group")[0].set_value("weight_grad").run()
    assert not app.exception
    assert "weight gradients" in words(app)
    assert set(app.dataframe[0].value["name"]) == set(class_shares(load_run(home.runs / "a"), "weight_grad")["name"])
    app.select_slider[0].set_value(50).run()
    assert not app.exception


def link_of(app):
    """Page and address of the link on the page that opens a tensor."""
    links = [(p.proto.page, p.proto.query_string) for p in app.get("page_link") if p.proto.label.startswith("Open")]
    return [(page, query) for page, query in links]


def test_a_row_of_the_ranges_opens_its_tensor(home, open_app):
    write(home.runs / "a", "overflowing")
    app = open_app("pages/number_ranges.py", run="run/a")
    name = app.dataframe[0].value["name"].iloc[2]
    app.session_state["ranges.table.output_grad"] = {"selection": {"rows": [2]}}
    app.run()
    assert app.title[0].value == "Layer detail"
    assert (app.query_params["kind"], app.query_params["layer"]) == ("output_grad", name)


def test_a_cell_of_the_ranges_opens_its_tensor(home, open_app):
    write(home.runs / "a", "overflowing")
    app = open_app("pages/number_ranges.py", run="run/a")
    app.session_state["ranges.heatmap"] = {"selection": {"points": [{"x": 1.5, "y": "head"}]}}
    app.run()
    assert app.title[0].value == "Layer detail" and app.query_params["layer"] == "head"


def test_a_step_of_a_tensor_opens_that_step(home, open_app):
    write(home.runs / "a", "overflowing")
    app = open_app("pages/number_ranges.py", run="run/a")
    app.session_state["ranges.steps"] = {"selection": {"points": [{"x": 60, "y": 0.015}]}}  # the mark of a skip
    app.run()
    assert app.title[0].value == "Number ranges"
    app.session_state["ranges.steps"] = {"selection": {"points": [{"x": 60.0, "y": "head"}]}}
    app.run()
    assert app.title[0].value == "Layer detail"
    assert (app.query_params["layer"], app.query_params["steps"]) == ("head", "10-110")


def test_a_skipped_step_opens_the_gradient_that_was_not_finite_around_it(home, open_app):
    write(home.runs / "a", "overflowing")
    app = open_app("pages/loss_scale.py", run="run/a")
    first = int(app.dataframe[0].value["steps"].iloc[0].partition("–")[0])
    app.session_state["loss_scale.scale"] = {"selection": {"points": [{"x": first, "y": 65536.0}]}}
    app.run()
    assert app.title[0].value == "Layer detail" and app.query_params["layer"] == "head.weight"
    low, high = map(int, app.query_params["steps"].split("-"))
    assert low <= first <= high < 119


def test_the_module_tree_is_searched_folded_and_unfolded(home, open_app):
    write(home.runs / "a", "overflowing")
    app = open_app("pages/number_ranges.py", run="run/a", depth="1", search="blocks")
    assert list(app.dataframe[0].value["name"]) == ["blocks.*"]
    app.session_state["ranges.table.output_grad"] = {"selection": {"rows": [0]}}
    app.run()
    assert app.title[0].value == "Number ranges" and app.query_params["search"] == "blocks."
    assert all(name.startswith("blocks.") for name in app.dataframe[0].value["name"])
    assert len(app.dataframe[0].value) > 1


def test_a_copied_link_opens_the_same_ranges(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app("pages/number_ranges.py", run="run/a", kind="weight_grad", format="bf16,fp8-e4m3", step="50")
    assert "weight gradients" in words(app) and app.select_slider[0].value == 50
    assert (app.query_params["format"], app.query_params["step"]) == ("bf16,fp8-e4m3", "50")
    more = open_app("pages/number_ranges.py", run="run/a", over="zero_frac", scale="-3", true="1")
    assert next(s for s in more.select_slider if s.label == "Loss scale").value == -3 and more.toggle[0].value
    assert "Output gradients over steps: exactly zero" in titles(more)
    assert [more.query_params[k] for k in ("over", "scale", "true")] == ["zero_frac", "-3", "1"]
    odd = open_app(
        "pages/number_ranges.py",
        run="run/a",
        scale="99",
        over="x",
        true="x",
        kind="x",
        format="x",
        step="x",
        depth="x",
        search="no such",
    )
    assert not odd.exception and "all of these words" in words(odd)


def test_an_episode_of_skips_opens_its_tensors(home, open_app):
    write(home.runs / "a", "overflowing")
    app = open_app("pages/loss_scale.py", run="run/a")
    app.session_state["loss_scale.episodes"] = {"selection": {"rows": [0]}}
    app.run()
    assert [q for _, q in link_of(app)] == ["run=run%2Fa&kind=weight_grad&layer=head.weight&steps=0-50"]
    assert app.dataframe[0].value["origin"].iloc[0] == "backward"


def test_ranges_without_samples_have_a_sentence(home, open_app):
    write(home.runs / "a", "bare")
    app = open_app("pages/number_ranges.py", run="run/a")
    assert "sampled no tensors" in words(app)
    assert not app.get("plotly_chart")


def test_choosing_a_loss_scale_redraws_the_predictions(home, open_app):
    write(home.runs / "a", "fp32")
    app = open_app("pages/number_ranges.py", run="run/a")
    result = what_if(load_run(home.runs / "a"), ("fp16",), (-10, 30), ("output_grad",))
    total = whole_model(result).set_index("log2_scale")
    slider = next(s for s in app.select_slider if s.label == "Loss scale")
    assert slider.value == 0 and "Predicted: at 2⁰, FP16 would turn" in words(app)
    slider.set_value(-10).run()
    worst = result.loc[result["underflow_frac"].idxmax()]
    assert titles(app)[-1] == "Predicted for FP16 at a loss scale of 2⁻¹⁰"
    assert f"would turn {percent_(total.loc[-10, 'underflow_frac'])} of all nonzero output gradients to 0" in words(app)
    assert f"carrying {percent_(total.loc[-10, 'underflow_mass_frac'])} of their mass" in words(app)
    assert f"most becomes 0 in {worst['name']}, {percent_(worst['underflow_frac'])}" in words(app)
    next(s for s in app.select_slider if s.label == "Loss scale").set_value(30).run()
    assert "tensors would overflow" in words(app)


def test_predictions_from_a_run_with_underflow_have_a_caveat(home, open_app):
    write(home.runs / "a", "underflowing")
    caveat = safe_window(load_run(home.runs / "a")).caveat
    assert caveat and f"Doubtful: {caveat}" in words(open_app("pages/number_ranges.py", run="run/a"))


def test_the_slider_begins_at_the_loss_scale_of_the_run(home, open_app):
    write(home.runs / "a", "static")
    app = open_app("pages/number_ranges.py", run="run/a")
    assert next(s for s in app.select_slider if s.label == "Loss scale").value == 7


def test_audits_are_shown_beside_predictions(home, open_app):
    folder = write(home.runs / "a", "healthy")
    audits = pa.table({"step": [50], "name": ["head.weight"], "loss_scale": [256.0], "precision": ["fp16"]}
        | {"numel": [1500], "lost": [15], "nonzero": [1350], "lost_mass_frac": [0.01], "cosine": [0.5]})  # fmt: skip
    (folder / "audits").mkdir(exist_ok=True)
    pq.write_table(audits, folder / "audits" / "00000.parquet")
    app = open_app("pages/number_ranges.py", run="run/a")
    app.get("button_group")[0].set_value("weight_grad").run()
    assert not app.exception and "Prediction beside measurement" in words(app)
    row = app.dataframe[-1].value.iloc[0]
    assert (row["name"], row["scale"], row["cosine"]) == ("head.weight", "2⁸", 0.5)
    assert row["predicted_frac"] == row["predicted_frac"] and row["audited_frac"] == pytest.approx(100 * 15 / 1350)


@pytest.mark.parametrize("scenario", ["overflowing", "fp32", "underflowing"])
def test_the_safe_window_is_in_the_headline(home, open_app, scenario):
    write(home.runs / "a", scenario)
    app = open_app("pages/loss_scale.py", run="run/a")
    window = safe_window(load_run(home.runs / "a"))
    assert window.exists
    page_text = words(app)
    doubtful = window.caveat is not None
    span = (
        f"up to {scale(window.highest)}; at a loss scale of 1 gradients underflowed, first in {window.lowest_by}"
        if doubtful
        else f"from {scale(window.lowest)} to {scale(window.highest)}"
    )
    assert f"FP16 is safe {span}" in page_text
    assert f"{scale(window.recommended)} is recommended" in page_text
    assert f"its upper end from {window.highest_by}" in page_text
    assert ("Doubtful:" in page_text) == doubtful == (scenario == "underflowing")
    if scenario == "overflowing":
        band = json.loads(app.get("plotly_chart")[0].proto.spec)["data"][1]
        assert band["name"] == "safe for FP16, predicted" and "the last scale is" in page_text
    if doubtful:
        page_text = words(open_app("pages/format_lab.py", run="run/a", section="Myths about mixed precision"))
        assert "the loss scale that FP16 needed is unknown" in page_text


def test_without_gradients_there_is_no_window(home, open_app):
    write(home.runs / "a", "bare")
    assert "safe" not in words(open_app("pages/loss_scale.py", run="run/a"))


@pytest.fixture
def three_runs(home):
    for name, scenario in (("fp32", "fp32"), ("fp16", "healthy"), ("bf16", "bf16")):
        write(home.samples / name, scenario)


def test_compare_suggests_the_runs_of_one_task_with_fp32_first(three_runs, open_app):
    app = open_app("pages/compare_runs.py")
    assert app.multiselect[0].value[0] == "sample/fp32"
    assert set(app.multiselect[0].value) == {"sample/fp32", "sample/fp16", "sample/bf16"}
    assert app.query_params["with"] == app.multiselect[0].value
    table = next(one.value for one in app.dataframe if "Convergence parity" in one.value)
    assert table["Recipe"].iloc[0] == "fp32"
    assert table.set_index("Recipe").loc["fp16", "Speed ×"].startswith("2.00 × (")
    runs = next(one.value for one in app.dataframe if "Half of steps (ms)" in one.value)
    assert set(runs["Run"]) == {"fp32", "fp16", "bf16"}
    page_text = words(app).replace("*", "")
    assert "fp16: 2.00 × faster, 40.0 % less memory, convergence parity unknown (1 seed)" in page_text
    assert "Runs were not interleaved" in page_text
    assert any("`ampscope compare`" in caption.value for caption in app.caption)  # as code, not with its backquotes
    assert table["Speed is"].iloc[0] == "baseline"
    copied = next(one.value for one in app.code)
    assert copied.startswith("| Recipe | Seeds |") and "| fp16 |" in copied
    assert titles(app) == ["Loss", "Deviation of the final loss"]
    shown = titles(open_app("pages/compare_runs.py", section="Speed and memory"))
    assert shown[:2] == ["Speed", "Peak memory"] and "Time of a step" in shown and shown[-1] == "Memory at the peak"


def test_compare_follows_its_address(three_runs, open_app):
    app = open_app("pages/compare_runs.py", **{"with": ["sample/bf16", "sample/fp32", "run/nowhere"]})
    assert app.multiselect[0].value == ["sample/bf16", "sample/fp32"]
    assert "Against bf16" in words(app).replace("*", "")
    assert "There is no run run/nowhere here; it is left out." in words(app)
    for field, chosen in ((app.multiselect[0], ["bf16 · sample", "fp32 · sample"]), (run_picker(app), None)):
        default = field.proto.default  # the state of a browser that missed the new values
        at_first = [field.options[i] for i in default] if chosen else field.options[default]
        assert at_first == (chosen or "fp16 · sample")


def test_compare_suggests_the_chosen_run_among_many_fp32_runs(home, open_app):
    for seed in range(5):
        write(home.runs / f"fp32-{seed}", "fp32", seed=seed)
    write(home.runs / "mine", "healthy")
    app = open_app("pages/compare_runs.py", run="run/mine")
    assert len(app.multiselect[0].value) == 5 and app.multiselect[0].value[-1] == "run/mine"


def test_a_comparison_of_one_seed_is_labelled_as_such(home, open_app):
    for name, scenario, seed in (("a", "fp32", 0), ("b", "fp32", 1), ("c", "healthy", 0)):
        write(home.runs / name, scenario, seed=seed)
    app = open_app("pages/compare_runs.py", section="Speed and memory", **{"with": ["run/a", "run/b", "run/c"]})
    assert "those of the first run of each recipe" in words(app)
    app.multiselect[0].set_value(["run/a", "run/c"]).run()
    assert "those of the first run of each recipe" not in words(app)


def test_compare_follows_a_link_after_runs_were_chosen(three_runs, open_app):
    app = open_app("pages/compare_runs.py")
    app.multiselect[0].set_value(["sample/fp32", "sample/fp16"]).run()
    assert app.query_params["with"] == ["sample/fp32", "sample/fp16"]
    app.query_params["with"] = ["sample/bf16", "sample/fp16"]
    app.run()
    assert app.multiselect[0].value == ["sample/bf16", "sample/fp16"]


def test_compare_with_one_run_asks_for_another(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app("pages/compare_runs.py")
    assert "Choose two runs or more" in words(app)
    assert [b.label for b in app.button if b.key.startswith("compare.second")] == [
        "Train it in FP32",
        "Train it in BF16 AMP",
    ]
    assert "ampscope compare --workload text-gpt --size tiny --precisions fp32,bf16,fp16" in app.code[-1].value
    next(b for b in app.button if b.key == "compare.second.bf16").click().run()
    assert app.title[0].value == "Start a run" and app.session_state["start.precisions"] == ["bf16"]


def test_compare_has_a_tab_for_each_subject_and_one_for_kernels_only_with_profiles(three_runs, open_app):
    app = open_app("pages/compare_runs.py")
    assert [tab.label for tab in app.tabs] == ["Result", "Speed and memory", "Numerics", "Settings"]
    charts = {tab.label: [c.proto.id for c in tab.get("plotly_chart")] for tab in app.tabs}
    assert charts["Result"] and not charts["Speed and memory"]  # only the open one is computed


def test_compare_omits_runs_that_cannot_be_read(three_runs, home, open_app):
    file = next((home.samples / "fp16" / "steps").iterdir())
    file.write_bytes(b"PAR1")
    app = open_app("pages/compare_runs.py", run="sample/fp32")
    assert not app.exception
    assert "fp16 is left out" in app.error[0].value
    assert "bf16" in words(app)
