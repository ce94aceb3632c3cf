"""Every page with every kind of run (full, empty, foreign, damaged) shows content or a sentence, never an exception."""

import shutil
from pathlib import Path

import pytest

from pages.parts import address
from tests.app_test import pages
from tests.pages.conftest import run_picker, words
from tests.synthetic import SCENARIOS, live, write

OF_A_RUN = [
    "pages/run_overview.py",
    "pages/loss_scale.py",
    "pages/number_ranges.py",
    "pages/layer_detail.py",
    "pages/update_losses.py",
    "pages/memory_use.py",
    "pages/step_cost.py",
    "pages/tensor_cores.py",
]
PROFILED = {"pages/tensor_cores.py", "pages/update_losses.py"}
"""Pages that draw nothing of a run without a profiled window, or without 16-bit weights."""
FIELDS = ("selectbox", "multiselect", "button_group", "slider", "text_input", "number_input", "checkbox")


def bad_head(folder: Path) -> None:
    (folder / "run.json").write_text("{oops")


def newer_schema(folder: Path) -> None:
    (folder / "run.json").write_text('{"schema": 99, "run_id": "x", "name": "x", "created_at": ""}')


def no_head(folder: Path) -> None:
    (folder / "run.json").unlink()


def truncated_steps(folder: Path) -> None:
    file = next((folder / "steps").iterdir())
    file.write_bytes(file.read_bytes()[:300])


def steps_of_another_kind(folder: Path) -> None:
    for file in (folder / "steps").iterdir():
        shutil.copy(next((folder / "events").iterdir()), file)


ARCHETYPES = (
    "healthy",
    "overflowing",
    "collapsing",
    "empty",
    "one-step",
    "bare",
    "two-ranks",
    "profiled",
    "traced",
    "traced-foreign",
)
"""One run of each sort that pages show differently: steps or none, one or many, skips, a failure, null columns, ranks,
kernels, operators. The other scenarios differ from these in numbers, and run with --whole."""


DAMAGES = [bad_head, newer_schema, no_head, truncated_steps, steps_of_another_kind]


@pytest.mark.parametrize(
    "scenario", [s if s in ARCHETYPES else pytest.param(s, marks=pytest.mark.whole) for s in SCENARIOS]
)
def test_no_page_fails_on_any_run(home, warming, open_app, scenario):
    write(home.runs / "a", scenario)
    write(home.runs / "b", "fp32")
    app = open_app(run="run/a")
    for page in pages():
        app.switch_page(page).run()
        assert not app.exception, page
        assert app.title, page
        assert not app.error or scenario in ("collapsing", "underflowing"), [e.value for e in app.error]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_has_one_sentence_and_the_app_keeps_working(home, open_app, damage):
    write(home.runs / "a", "healthy")
    damage(home.runs / "a")
    write(home.runs / "b", "fp32")
    app = open_app(run="run/a")
    for page in OF_A_RUN:
        app.switch_page(page).run()
        assert not app.exception, page
        assert len(app.error) == 1, page
        assert app.error[0].value.startswith("This run cannot be read: ")
        assert str(home.runs) not in app.error[0].value.replace("\\", "")  # paths on the server are not shown
        assert not app.metric and not app.get("plotly_chart")
    app.switch_page("pages/run_library.py").run()
    assert not app.exception
    assert "2 runs, 1 of them damaged." in words(app)
    assert "**a** cannot be read: " in words(app) and str(home.runs) not in words(app).replace("\\", "")
    compared = open_app("pages/compare_runs.py", **{"with": ["run/a", "run/b"]})
    assert not compared.exception and [error.value.partition(": ")[0] for error in compared.error] == ["a is left out"]
    run_picker(app).select("run/b").run()
    app.switch_page(OF_A_RUN[0]).run()
    assert not app.error and app.metric


@pytest.mark.parametrize("page", OF_A_RUN)
def test_a_run_without_steps_has_a_sentence(home, open_app, page):
    write(home.runs / "a", "empty")
    app = open_app(page, run="run/a")
    assert "This run has no steps" in words(app)
    assert not app.get("plotly_chart")


@pytest.mark.parametrize("page", [page for page in OF_A_RUN[1:] if page not in PROFILED])
def test_a_trace_without_steps_links_to_the_pages_that_show_it(home, open_app, page):
    write(home.runs / "a", "traced-foreign")
    app = open_app(page, run="run/a")
    assert not app.exception and "This page needs training steps" in words(app)
    assert [link.proto.label for link in app.get("page_link")] == ["Precision map"]


@pytest.mark.parametrize("page", [page for page in OF_A_RUN[1:] if page not in PROFILED])
def test_a_live_run_shows_its_data_so_far(home, open_app, page):
    with live(home.runs / "a") as run:
        run.advance(1)
        app = open_app(page, run="run/a")
        assert not app.exception and app.get("plotly_chart")
        run.advance(60)
        next(b for b in app.button if b.label == "Read what is new").click().run()
        assert not app.exception
        assert "running" in words(app)


@pytest.mark.parametrize("page", pages())
def test_a_pass_without_changes_sets_no_field(home, open_app, page, monkeypatch):
    # A field that is set overwrites a click that happens before it reaches the browser.
    monkeypatch.setattr(address, "AGAIN_S", 0.0)
    write(home.runs / "a", "healthy")
    write(home.runs / "b", "fp32")
    app = open_app(page, run="run/a").run()
    fields = [field for kind in FIELDS for field in app.get(kind)]
    assert fields and not [field.proto.label for field in fields if field.proto.set_value]


def test_values_from_a_link_are_set_again_in_the_next_pass(home, open_app):
    # A browser may receive the next pass before it has drawn the first.
    write(home.runs / "a", "healthy")
    app = open_app("pages/number_ranges.py", run="run/a", kind="weight_grad").run()
    kind = next(field for field in app.get("button_group") if field.key == "ranges.kind")
    assert kind.proto.set_value and kind.value == "weight_grad"
