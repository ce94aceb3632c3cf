"""The frame: navigation, the run picker and the address, with and without runs."""

import ast
import shutil
import tomllib
from pathlib import Path
from urllib.parse import unquote

import pytest
from streamlit.util import calc_hash

from amp_core.figures.colours import RECIPES
from pages.parts import bar
from tests.app_test import OVERVIEW, app_test, pages
from tests.pages.conftest import ROOT, run_picker, words
from tests.synthetic import write

PAGES = list(pages())


def test_every_page_file_is_in_the_navigation():
    files = {str(f.relative_to(ROOT)) for f in (ROOT / "pages").glob("*.py") if f.name != "__init__.py"}
    assert files == set(PAGES)


def test_addresses_differ_from_file_names():
    # An address equal to a file's name is served by Streamlit's old multipage scheme, without app.py.
    for file, address in pages().items():
        assert address != Path(file).stem
        assert "_" in Path(file).stem and "_" not in address


@pytest.mark.parametrize(
    ("address", "title"),
    [
        ("overview", "Overview"),
        ("Overview", "Overview"),
        ("Loss_scale", "Loss scale"),
        ("Loss%20scale", "Loss scale"),
        ("8-and-4-bits", "8 and 4 bits"),
        ("start-a-run", "Start a run"),
    ],
)
def test_other_spellings_of_an_address_open_the_page(home, address, title):
    write(home.runs / "new", "healthy")
    write(home.runs / "old", "fp32")
    app = app_test(run="run/old")
    app.context["url"] = f"http://127.0.0.1:8501/base/{address}/"
    app._page_hash = calc_hash(unquote(address))
    app.run()
    assert app.title[0].value == title and app.session_state["run"] == app.query_params["run"] == "run/old"
    assert bool([slider for slider in app.slider if slider.label == "Steps"]) == (title not in bar.WITHOUT_STEPS)


def test_a_page_at_another_spelling_compares_in_its_own_metrics(home):
    write(home.runs / "new", "overflowing")
    write(home.runs / "old", "fp32")
    app = app_test(run="run/new", baseline="run/old")
    app.context["url"] = "http://127.0.0.1:8501/Loss_scale?run=run/new&baseline=run/old"
    app._page_hash = calc_hash("Loss_scale")
    app.run()
    assert "Against **old**: Skipped steps" in words(app)


@pytest.mark.parametrize("path", ["nonsense", "base/nonsense/", "loss-scale/nonsense"])
def test_an_address_that_names_no_page_opens_the_overview_with_a_notice(home, path):
    write(home.runs / "a", "healthy")
    app = app_test(run="run/a")
    app.context["url"] = f"http://127.0.0.1:8501/{path}?run=run/a"
    app._page_hash = calc_hash("nonsense")
    app.run()
    assert app.title[0].value == "Overview" and not app.exception
    assert "There is no page nonsense here. This is Overview" in words(app)
    app.switch_page("pages/loss_scale.py").run()
    assert app.title[0].value == "Loss scale" and "There is no page" not in words(app)


def test_both_themes_have_ten_series_colours_and_nothing_is_set_for_all_themes():
    # Any setting directly in [theme] forces the light theme; with fewer than ten colours Plotly uses its own.
    theme = tomllib.loads((ROOT / ".streamlit" / "config.toml").read_text())["theme"]
    assert set(theme) == {"light", "dark"}
    for dark, name in enumerate(("light", "dark")):
        colours = theme[name]["chartCategoricalColors"]
        assert len(colours) == len(set(colours)) == 10
        assert colours[: len(RECIPES)] == [pair[dark] for pair in RECIPES.values()]


def test_the_server_listens_on_this_machine_only():
    server = tomllib.loads((ROOT / ".streamlit" / "config.toml").read_text())["server"]
    assert server["address"] == "127.0.0.1" and server["enableCORS"] and server["enableXsrfProtection"]
    assert set(server["allowedHosts"]) == {"localhost", "127.0.0.1"}


def test_app_file_stays_short():
    assert len((ROOT / "app.py").read_text().splitlines()) < 60


@pytest.mark.parametrize("page", PAGES)
def test_a_page_without_any_run_says_what_to_do(open_app, page):
    app = open_app(page)
    assert not app.exception
    page_text = words(app)
    without = ("Each precision is one run", "0.1 is not exactly representable", "faults of mixed-precision training")
    without += ("No searches yet",)
    assert "No runs yet" in page_text or any(sentence in page_text for sentence in without)


def test_opens_on_the_healthy_fp16_sample(home, open_app):
    write(home.samples / "bf16", "bf16")
    write(home.samples / "fp16-overflow", "overflowing")
    write(home.samples / "fp16-healthy", "healthy")
    app = open_app()
    assert app.session_state["run"] == "sample/fp16-healthy"
    assert app.query_params["run"] == "sample/fp16-healthy"
    assert "fp16-healthy" in words(app)


def test_opens_on_the_users_run_before_any_sample(home, open_app):
    write(home.samples / "fp16-healthy", "healthy")
    write(home.runs / "mine", "healthy")
    assert open_app().session_state["run"] == "run/mine"


def test_deep_link_opens_its_run_on_its_page(home, open_app):
    write(home.samples / "fp16-healthy", "healthy")
    write(home.runs / "deep", "overflowing")
    app = open_app("pages/loss_scale.py", run="run/deep")
    assert app.title[0].value == "Loss scale"
    assert "deep" in words(app)
    assert app.query_params["run"] == "run/deep"


def test_the_name_alone_opens_an_own_run(home, open_app):
    for folder in ("b", "cmp/a"):
        write(home.runs / folder, "healthy", steps=30)
    app = open_app(run="cmp/a", baseline="b")
    assert app.session_state["run"] == app.query_params["run"] == "run/cmp/a"
    assert app.session_state["bar.baseline"] == "run/b" and not app.warning
    app = open_app("pages/compare_runs.py", run="run/b", **{"with": ["b", "cmp/a"]})
    assert app.multiselect(key="compare.runs").value == ["run/b", "run/cmp/a"] and not app.warning


@pytest.mark.parametrize("address", ["run/nowhere", "run/../../etc", "/etc/passwd", "sample/"])
def test_an_unknown_run_in_the_address_has_a_notice(home, open_app, address):
    write(home.runs / "here", "healthy")
    app = open_app(run=address)
    assert not app.exception
    assert app.session_state["run"] == "run/here"
    assert f"There is no run {address.replace('_', '')} here; what follows is another run, here." in words(app)
    app.run()
    assert "There is no run" in words(app)  # until a run is chosen or the page changes
    app.switch_page("pages/loss_scale.py").run()
    assert "There is no run" not in words(app)


def test_a_run_that_disappears_is_replaced_with_a_notice(home, open_app):
    write(home.runs / "here", "healthy")
    path = write(home.runs / "open", "healthy")
    app = open_app("pages/number_ranges.py", run="run/open")
    shutil.rmtree(path)
    app.run()
    assert "There is no run run/open here; what follows is another run, here." in words(app)
    run_picker(app).select("run/here").run()
    assert app.session_state["run"] == "run/here"


def test_invalid_parts_of_an_address_have_a_notice(home, open_app):
    write(home.runs / "a", "healthy")
    address = {"run": "run/a", "layer": "nope", "kind": "bogus", "format": "zz", "steps": "5000-9000"}
    app = open_app("pages/layer_detail.py", **address)
    page_text = words(app)
    for name in ("layer=nope", "kind=bogus", "format=zz", "steps=5000-9000"):
        assert name in page_text
    assert app.query_params["layer"] != "nope" and not app.exception
    app = open_app("pages/layer_detail.py", run="run/a", layer=app.query_params["layer"])
    assert "The address asks for" not in words(app)


def test_picker_changes_run_and_address(home, open_app):
    write(home.runs / "one", "healthy")
    write(home.runs / "two", "fp32")
    app = open_app(run="run/one")
    run_picker(app).select("run/two").run()
    assert app.query_params["run"] == "run/two"
    assert app.metric[1].value == "none"  # FP32 has no loss scale


def test_choice_survives_a_change_of_page_and_back(home, open_app):
    write(home.runs / "one", "healthy")
    write(home.runs / "two", "fp32")
    app = open_app("pages/loss_scale.py", run="run/one")
    run_picker(app).select("run/two").run()
    app.switch_page(OVERVIEW).run()
    assert app.session_state["run"] == "run/two"


def test_address_changed_by_the_browser_is_followed(home, open_app):
    write(home.runs / "one", "healthy")
    write(home.runs / "two", "fp32")
    app = open_app(run="run/one")
    app.query_params["run"] = "run/two"
    app.run()
    assert app.session_state["run"] == "run/two"


def test_labels_are_unique_and_free_of_status(home, open_app):
    for folder in ("a", "cmp/a", "uploads/a"):
        write(home.runs / folder, "healthy")
    write(home.samples / "a", "healthy")
    write(home.samples / "cmp" / "a", "healthy")
    app = open_app()
    options = run_picker(app).options
    assert sorted(options) == ["a", "a · sample", "a · sample of cmp", "cmp/a", "uploads/a"]


def test_markdown_in_a_run_name_is_text(home, open_app):
    from amp_core.store.writer import RunWriter

    with RunWriter(home.runs / "x", name="**bold** [link](http://example.org) <b>") as run:
        run.append("steps", {"step": [0], "loss": [1.0]})
    app = open_app()
    assert not app.exception
    assert any(r"\*\*bold\*\* \[link\]\(http\:" in m.value for m in app.markdown)


@pytest.mark.parametrize("file", pages())
def test_no_page_has_a_bare_string_that_streamlit_would_show(file):
    """Streamlit shows bare expressions of a page, so pages explain constants in comments, not in strings."""
    body = ast.parse((ROOT / file).read_text()).body[1:]
    assert not [line.lineno for line in body if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)]
