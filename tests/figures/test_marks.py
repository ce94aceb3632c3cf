"""Marks of skipped steps have their own axis, are described in the alternative text, and are absent without steps."""

import itertools

import pandas as pd
import pytest

from amp_core.figures import loss_figure
from amp_core.figures.marks import MAX_ROWS_WITHIN, with_marks, with_rows

CURVE = pd.DataFrame({"run": "a", "precision": "fp16", "step": range(4), "loss": 2.0, "smooth": 2.0})


def marks(**columns):
    frame = {"step": [1, 3], "samples": [8.0, 24.0], "time_s": [0.1, 0.3], "kind": ["skipped", "change"]}
    return pd.DataFrame(frame | {"what": ["step skipped", "sampling interval: 10 to 20"]} | columns)


def test_marks_have_their_own_axis_and_a_description():
    plain = loss_figure(CURVE)
    marked = with_marks(loss_figure(CURVE), marks(), "samples")
    added = marked.data[len(plain.data) :]
    assert [trace.yaxis for trace in added] == ["y9", "y9"] and [list(t.x) for t in added] == [[8], [24]]
    assert marked.layout.yaxis.range == plain.layout.yaxis.range
    assert marked.layout.yaxis9.domain[1] < marked.layout.yaxis.domain[0]  # in a strip below, where they cover no curve
    assert "1 marked as skipped step" in marked.layout.meta["alt"]
    assert len({trace.marker.symbol for trace in added}) == 2


def test_a_figure_without_marks_is_unchanged():
    plain = loss_figure(CURVE)
    assert with_marks(loss_figure(CURVE), marks().iloc[:0]) == plain
    assert with_marks(loss_figure(CURVE), marks(time_s=[None, None]), "time_s") == plain


def test_each_of_several_runs_has_a_row_in_its_own_colour_and_the_legend_names_each_kind_once():
    marked = loss_figure(CURVE)
    for row, (name, hue) in enumerate({"first": "#112233", "second": "#445566"}.items()):
        marked = with_marks(marked, marks(), label=name, hue=hue, row=row)
    rows = [trace for trace in marked.data if trace.yaxis]
    assert [trace.yaxis for trace in rows] == ["y9", "y9", "y10", "y10"]
    assert marked.layout.yaxis9.domain[1] == marked.layout.yaxis10.domain[0] < marked.layout.yaxis10.domain[1]
    assert [trace.marker.color for trace in rows] == ["#112233"] * 2 + ["#445566"] * 2
    assert [trace.showlegend for trace in rows] == [True, True, False, False]
    assert all(trace.hovertemplate.startswith("second, step") for trace in rows[2:])
    assert "1 of second marked as phase change" in marked.layout.meta["alt"]


@pytest.mark.parametrize("height", [200, 260, 360, 1400])
def test_a_row_is_at_least_as_high_as_a_mark(height):
    low = loss_figure(CURVE)
    low.layout.height = height
    strip = with_marks(low, marks()).layout
    pixels = (strip.yaxis9.domain[1] - strip.yaxis9.domain[0]) * max(height - 155, 48)
    assert pixels >= 12 - 1e-9 and strip.yaxis.domain[0] < 0.5


def test_a_phase_change_does_not_hide_a_skipped_step_of_the_same_place():
    both = pd.concat([marks().iloc[:1].assign(kind=kind, what="x") for kind in ("skipped", "change")])
    skipped, change = with_marks(loss_figure(CURVE), both).data[-2:]
    assert (skipped.name, change.name) == ("skipped step", "phase change")
    assert skipped.x.tolist() == change.x.tolist() and skipped.y[0] - change.y[0] > 0.5


def test_many_skipped_steps_are_strokes_of_one_line_with_a_hover_text_each():
    many = marks().iloc[:1].loc[[0] * 100].assign(step=range(100), samples=range(100))
    strokes = with_marks(loss_figure(CURVE), many).data[-1]
    assert strokes.mode == "lines" and strokes.name == "skipped step"
    tops = strokes.x[1::3]
    assert tops.tolist() == list(range(100)) == strokes.x[::3].tolist()
    assert strokes.customdata[1::3].tolist() == list(range(100)) and ": step skipped<" in strokes.hovertemplate
    assert (strokes.y[::3] < 0).all() and (strokes.y[2::3] < 0).all()  # one path with gaps between the strokes
    assert ((strokes.y[1::3] > 0) & (strokes.y[1::3] < 1)).all()


def domains(figure):
    """Bottom and top of each strip, lowest first, and of the plot of the curves."""
    layout = figure.layout.to_plotly_json()
    return [
        layout[name]["domain"] for name in sorted((n for n in layout if n[:5] == "yaxis"), key=lambda n: n[5:].zfill(2))
    ]


@pytest.mark.parametrize("count", [2, MAX_ROWS_WITHIN, MAX_ROWS_WITHIN + 1, 9, 15])
def test_marks_of_many_runs_have_a_row_each_below_curves_of_unchanged_height(count):
    runs = [(f"run {i}", marks(), "#112233") for i in range(count)]
    drawn = with_rows(loss_figure(CURVE), runs)
    curves, *strips = domains(drawn)
    assert len(strips) == count and all(low < high for low, high in strips)
    assert all(below[1] == pytest.approx(above[0]) for below, above in itertools.pairwise(strips))
    assert strips[-1][1] < curves[0]
    plot = drawn.layout.height - 155
    assert (strips[0][1] - strips[0][0]) * plot >= 12 - 1e-9 and (curves[1] - curves[0]) * plot >= 0.7 * (360 - 155)


def test_a_row_drawn_after_higher_ones_does_not_move_the_curves_over_them():
    drawn = loss_figure(CURVE)
    for row in (MAX_ROWS_WITHIN, 0):
        drawn = with_marks(drawn, marks(), label=f"run {row}", hue="#112233", row=row)
    curves, low, high = domains(drawn)
    assert low[1] < high[1] < curves[0]


def test_the_step_axis_is_below_the_lowest_row():
    second = with_marks(loss_figure(CURVE), marks(), label="second", hue="#445566", row=1)
    assert second.layout.xaxis.anchor == "y10" and len(domains(second)) == 2
    both = with_marks(second, marks(), label="first", hue="#112233", row=0)
    assert both.layout.xaxis.anchor == "y9"
    skipped = with_rows(loss_figure(CURVE), [("a", marks().iloc[:0], "#112233"), ("b", marks(), "#445566")])
    assert skipped.layout.xaxis.anchor == "y9" and len(domains(skipped)) == 2  # no row for a run without marks
