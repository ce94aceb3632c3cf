"""Updates: which tensors no longer change, what helps, and why a run has no update ledger."""

import pytest

from amp_core import load_run
from tests.analysis.numerics.test_update_losses import updates
from tests.pages.conftest import metric, titles, words
from tests.synthetic import write, write_rows

PAGE = "pages/update_losses.py"
STEPS = {"step": [0, 10, 20], "loss": [3.0, 2.0, 1.0]}


def write_updates(folder, lost, averages=None, **others):
    tables = {"updates": updates(lost, **others)} | ({"averages": averages} if averages else {})
    return write_rows(folder, steps=STEPS, **tables)


def test_the_headline_says_how_much_is_lost_and_which_tensors_stand_still(home, open_app):
    write_updates(home.runs / "a", {"head": [0.2, 0.9, 0.9], "norm": [0.1, 0.1, 0.1]}, lost_decay_frac=1.0)
    app = open_app(PAGE, run="run/a")
    assert not app.exception
    sentence = "Rounding loses 50.0 % of the updates: 1 of 2 tensors no longer change, the first of them since step 10."
    assert sentence in words(app)
    assert metric(app, "Lost updates").value == "50.0 %" and metric(app, "Lost updates").delta == "bfloat16 weights"
    assert metric(app, "Lost weight decay").value == "100 %"
    assert titles(app) == ["Updates lost to rounding"]
    table = app.dataframe[0].value
    assert table["name"].tolist() == ["head", "norm"] and table["lost_mass_frac"][0] == 90
    assert [tab.label for tab in app.tabs] == ["FP32 masters", "Kahan summation", "Stochastic rounding"]


def test_another_share_is_drawn(home, open_app):
    write_updates(home.runs / "a", {"head": [0.9]}, lost_decay_frac=1.0)
    app = open_app(PAGE, run="run/a")
    app.get("button_group")[0].set_value("lost_decay_frac").run()
    assert not app.exception and titles(app) == ["Weight decay lost to rounding"]


def test_a_cure_is_named_and_none_is_advised(home, open_app):
    write_updates(home.runs / "a", {"head": [0.01]}, cure="kahan summation")
    app = open_app(PAGE, run="run/a")
    assert "Kahan summation: rounding loses 1.00 % of the updates of 1 tensor." in words(app)
    assert not app.tabs


def test_averages_that_stand_still_are_counted(home, open_app):
    averages = {"step": [0, 10], "name": ["head"] * 2, "dtype": ["bfloat16"] * 2, "unchanged_frac": [0.9] * 2}
    write_updates(home.runs / "a", {"head": [0.1]}, averages)
    app = open_app(PAGE, run="run/a")
    assert "1 of 1 average of weights no longer change." in words(app)
    assert metric(app, "Unchanged averages").value == "1"


@pytest.mark.parametrize(
    ("events", "config", "model", "expected"),
    [
        (
            [{"kind": "warning", "name": "not recorded", "detail": "updates: the step of Mine calls a collective"}],
            {},
            {},
            "No update was compared: the step of Mine calls a collective.",
        ),
        (
            [{"kind": "phase change", "name": "updates", "detail": "those of Lion are compared with `watch(…)`"}],
            {},
            {},
            "No update was compared: those of Lion are compared with",
        ),
        ([], {"updates": False}, {"tensors_by_dtype": {"float32": 4}}, "This run keeps its weights in FP32"),
        ([], {"updates": False}, {"tensors_by_dtype": {"bfloat16": 4}}, "No step of this run was compared"),
        ([], {}, {}, "This run has no update ledger"),
    ],
)
def test_without_a_ledger_the_reason_is_shown(home, open_app, events, config, model, expected):
    write_rows(home.runs / "a", steps=STEPS, config=config, model=model, events=events)
    app = open_app(PAGE, run="run/a")
    assert not app.exception and not app.get("plotly_chart")
    assert expected in words(app)


def test_compare_sets_the_lost_shares_of_runs_side_by_side(home, open_app):
    write_updates(home.runs / "a", {"head": [0.9]})
    write_updates(home.runs / "b", {"head": [0.001]}, cure="fp32 masters")
    app = open_app("pages/compare_runs.py", section="Numerics", **{"with": ["run/a", "run/b"]})
    assert not app.exception and "Updates lost to rounding" in words(app)
    (table,) = [f.value for f in app.dataframe if "lost_mass_frac" in f.value]
    assert table["run"].tolist() == ["a", "b"] and table["lost_mass_frac"].tolist() == pytest.approx([90.0, 0.1])


def test_compare_shows_no_updates_where_none_were_compared(home, open_app):
    for name in ("a", "b"):
        write(home.runs / name, "fp32", steps=20)
    app = open_app("pages/compare_runs.py", section="Numerics", **{"with": ["run/a", "run/b"]})
    assert "Updates lost to rounding" not in words(app)


def test_page_and_notebook_draw_the_same(home, open_app):
    path = write_updates(home.runs / "a", {"head": [0.9, 0.8, 0.7]})
    drawn = load_run(path).plot("updates")
    assert titles(open_app(PAGE, run="run/a")) == [drawn.layout.title.text]


def test_compare_says_where_two_runs_part_and_takes_the_noise_floor_from_a_third(home, open_app):
    for name, losses in (("a", [3.0, 2.0, 1.0]), ("b", [3.0, 2.02, 1.5]), ("c", [3.0, 2.01, 1.02])):
        write_rows(home.runs / name, steps=STEPS | {"loss": losses})
    app = open_app("pages/compare_runs.py", section="Numerics", **{"with": ["run/a", "run/b", "run/c"]})
    assert "They diverge at step 10, in the forward, first in the loss" in words(app)
    app.selectbox(key="compare.floor").select("c").run()
    assert not app.exception and "They diverge at step 20, in the forward, first in the loss" in words(app)


def test_with_a_baseline_each_tensor_shows_by_how_much_it_differs(home, open_app):
    write_updates(home.runs / "a", {"head": [0.9, 0.9, 0.8], "norm": [0.1, 0.1, 0.1]})
    write_updates(home.runs / "b", {"head": [0.1, 0.12, 0.1], "norm": [0.1, 0.1, 0.1]})
    app = open_app(PAGE, run="run/a", baseline="run/b")
    assert not app.exception and titles(app)[-1] == "Difference in lost updates"
    assert "**1 of 2 tensors differs in lost updates**" in words(app) and "86.7 % instead of 10.7 %" in words(app)
    assert titles(open_app(PAGE, run="run/a", baseline="none")) == ["Updates lost to rounding"]


def test_a_baseline_without_a_ledger_is_said_to_be_incomparable(home, open_app):
    write_updates(home.runs / "a", {"head": [0.9]})
    write_rows(home.runs / "b", steps=STEPS)
    app = open_app(PAGE, run="run/a", baseline="run/b")
    assert "b has no update ledger" in words(app) and len(titles(app)) == 1
