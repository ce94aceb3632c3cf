"""The bar above every page: run, baseline and steps, in the address; every page follows them."""

import shutil

import pytest

from amp_core.store.writer import RunWriter
from tests.app_test import OVERVIEW, pages
from tests.pages.conftest import metric, run_picker, titles, words
from tests.synthetic import SAMPLES, write

ON_ONE_RUN = ["pages/loss_scale.py", "pages/number_ranges.py", "pages/layer_detail.py", "pages/memory_use.py"]


def slider(app):
    return next(one for one in app.slider if one.label == "Steps")


@pytest.fixture
def pair(home):
    write(home.runs / "amp", "overflowing")
    write(home.runs / "reference", "fp32")


def test_the_sidebar_is_navigation_only(pair, open_app):
    app = open_app(run="run/amp")
    assert not app.sidebar.selectbox and not app.sidebar.slider
    assert [box.label for box in app.selectbox][:2] == ["Run", "Baseline"]


@pytest.mark.parametrize("page", [OVERVIEW, *ON_ONE_RUN])
def test_fp32_of_the_same_task_is_the_baseline_and_every_page_shows_the_difference(pair, open_app, page):
    app = open_app(page, run="run/amp")
    assert app.selectbox(key="baseline").value == "run/reference"
    assert "Against **reference**: " in words(app) and "noise" in words(app)
    assert "baseline" not in app.query_params  # the default stays out of the address


def test_number_ranges_draws_the_difference_from_the_baseline(home, open_app):
    for name in ("fp32", "fp16-underflow"):
        shutil.copytree(SAMPLES[name], home.runs / name)
    app = open_app("pages/number_ranges.py", run="run/fp16-underflow")
    title = "Output gradients: difference from fp32"
    assert not app.exception and title in titles(app)
    assert "tensors differ from fp32** by more than its noise" in words(app)
    assert app.dataframe[0].value["name"].iloc[0] == "head"
    app.selectbox(key="baseline").select("none").run()
    assert title not in titles(app)


def test_number_ranges_says_which_kind_the_baseline_lacks(pair, home, open_app):
    with RunWriter(home.runs / "other") as writer:
        writer.append("steps", {"step": range(9), "loss": [1.0] * 9})
    app = open_app("pages/number_ranges.py", run="run/amp", baseline="run/other")
    assert not app.exception and "other sampled no output gradients" in words(app)


def test_another_baseline_and_none_are_in_the_address(pair, home, open_app):
    write(home.runs / "other", "healthy")
    app = open_app(run="run/amp", baseline="run/other")
    assert "Against **other**: " in words(app) and app.query_params["baseline"] == "run/other"
    app.switch_page("pages/loss_scale.py").run()
    assert "Against **other**: " in words(app)
    app.selectbox(key="baseline").select("none").run()
    assert "Against" not in words(app) and app.query_params["baseline"] == "none"
    app.selectbox(key="baseline").select("run/reference").run()
    assert "baseline" not in app.query_params


def test_a_baseline_that_is_not_there_has_a_notice_and_the_default(pair, open_app):
    app = open_app(run="run/amp", baseline="run/gone")
    assert "asks for baseline=run/gone" in words(app) and app.selectbox(key="baseline").value == "run/reference"


def test_no_run_is_its_own_baseline(pair, open_app):
    app = open_app(run="run/reference")
    assert app.selectbox(key="baseline").value == "none" and "Against" not in words(app)
    run_picker(app).select("run/amp").run()
    assert app.selectbox(key="baseline").value == "run/reference" and not app.exception


def test_the_chosen_steps_hold_on_every_page_and_in_the_address(pair, open_app):
    app = open_app(run="run/amp")
    everything = metric(app, "Skipped steps").value
    slider(app).set_range(60, 90).run()
    assert app.query_params["steps"] == "60-90" and metric(app, "Skipped steps").value != everything
    for page in ON_ONE_RUN:
        app.switch_page(page).run()
        assert slider(app).value == (60, 90) and app.query_params["steps"] == "60-90" and not app.exception
    next(button for button in app.button if button.key == "bar.all").click().run()
    assert slider(app).value == (0, 119) and "steps" not in app.query_params


def test_findings_are_about_the_whole_run(pair, open_app):
    def result(app):
        return [box.value.partition(". ")[0] for kind in ("warning", "error") for box in app.get(kind)]

    whole = result(open_app(run="run/amp"))
    assert whole and result(open_app(run="run/amp", steps="100-110")) == whole


def test_a_saved_link_to_the_steps_of_a_tensor_still_opens_them(pair, open_app):
    app = open_app("pages/layer_detail.py", run="run/amp", kind="weight_grad", layer="head.weight", steps="20-60")
    assert slider(app).value == (20, 60) and "head.weight (weight gradients" in words(app)
    assert app.query_params["steps"] == "20-60" and "The address asks for" not in words(app)


def test_steps_without_a_sample_say_so_and_show_all_again(pair, open_app):
    app = open_app("pages/layer_detail.py", run="run/amp", steps="61-63")
    assert "Only steps 61–63 are shown." in words(app)
    next(button for button in app.button if button.label == "Show all steps").click().run()
    assert "Exponents over time" in titles(app) and "steps" not in app.query_params


def test_repeats_of_the_baseline_give_the_noise_band(home, open_app):
    for seed in range(3):
        for precision in ("fp32", "fp16") if seed == 0 else ("fp32",):
            config = {"workload": "w", "size": "s", "precision": precision, "seed": seed}
            with RunWriter(home.runs / f"{precision}-{seed}", config=config) as writer:
                losses = [2.0 + seed / 10] * 50
                writer.append("steps", {"step": range(50), "loss": losses, "step_ms": [1.0] * 50})
    app = open_app(run="run/fp16-0", baseline="run/fp32-0")
    assert "Loss −4.76 % (within noise −9.5 % to +9.5 %)" in words(app)


def test_pages_without_steps_open_no_run(pair, open_app):
    for page in ("pages/run_library.py", "pages/findings_guide.py", "pages/start_run.py"):
        assert page in pages()
        app = open_app(page, run="run/amp")
        assert not [one for one in app.slider if one.label == "Steps"] and run_picker(app).value == "run/amp"


def test_skipped_steps_of_run_and_baseline_are_counts(home, open_app):
    write(home.runs / "reference", "fp32", steps=40)
    write(home.runs / "amp", "static", steps=40)
    shown = words(open_app("pages/loss_scale.py", run="run/amp", baseline="run/reference"))
    assert "Skipped steps 0 of 40, baseline 0 of 40" in shown
