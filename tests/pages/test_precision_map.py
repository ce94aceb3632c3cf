"""The precision map: its answer, what it says without a trace, and of a trace that a profiler wrote."""

import pytest

from amp_core import load_run
from amp_core.analysis import precision_map
from tests.pages.conftest import metric, titles, words
from tests.synthetic import write, write_rows

PAGE = "pages/precision_map.py"


def tables(app):
    return [set(frame.value.columns) for frame in app.dataframe]


def test_the_verdict_counts_matrix_work_and_what_stayed_behind(home, open_app):
    view = precision_map(load_run(write(home.runs / "a", "traced")))
    app = open_app(PAGE, run="run/a")
    assert not app.exception
    share = f"{100 * view.matrix_frac['fp16']:.1f} %"
    assert f"{share} of the matrix work ran in FP16 on a GPU; 3 operators (bmm, mm) stayed in FP32" in words(app)
    assert metric(app, "Autocast").value == "FP16" and metric(app, "Autocast").delta == "CUDA lists"
    assert metric(app, "Casts by autocast").value == "4"
    assert metric(app, "Matrix work").delta == "33.3 % FP32, by operations"
    assert titles(app) == ["Modules by operators, forward"]
    stayed = app.dataframe[0].value.set_index("module")
    assert stayed.loc["head", "why"] == "inside autocast(enabled=False)"
    assert stayed.loc["blocks.*.attention", "modules"] == 2
    assert "On CUDA this would be decided differently" not in words(app)


def test_a_trace_of_a_cpu_says_what_cuda_would_decide(home, open_app):
    write(home.runs / "a", "traced-cpu")
    app = open_app(PAGE, run="run/a")
    assert not app.exception
    said = words(app)
    assert "ran in BF16 on a CPU" in said and "On CUDA this would be decided differently" in said
    assert metric(app, "Autocast").delta == "CPU lists"


def test_another_phase_is_drawn(home, open_app):
    write(home.runs / "a", "traced")
    app = open_app(PAGE, run="run/a")
    app.get("button_group")[0].set_value("backward").run()
    assert not app.exception and titles(app) == ["Modules by operators, backward"]


def test_a_profilers_trace_is_shown_as_far_as_it_tells(home, open_app):
    write(home.runs / "a", "traced-foreign")
    app = open_app(PAGE, run="run/a")
    assert not app.exception
    said = words(app)
    assert "of the matrix work ran in FP16 on a GPU; 3 operators (bmm, mm) ran in FP32, which autocast would" in said
    assert "This trace was written by a profiler" in said and "trace_ops=2" in said
    assert "Casts" not in said.splitlines() and [m.label for m in app.metric] == ["Autocast", "Matrix work"]
    assert all("policy" not in names or frame.value["policy"].isna().all() for names, frame in zip(
        tables(app), app.dataframe, strict=True
    ))  # fmt: skip


def test_without_a_trace_it_says_how_to_record_one(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app(PAGE, run="run/a")
    assert not app.exception and not app.get("plotly_chart")
    assert "No operators of this run were traced. Record one with `watch(…, trace_ops=2)`" in words(app)


def test_why_there_is_no_trace_is_told(home, open_app):
    event = {"kind": "warning", "name": "not recorded", "detail": "operators: the model runs as a compiled graph"}
    write_rows(home.runs / "a", steps={"step": [0, 1], "loss": [1.0, 0.5]}, events=[event])
    app = open_app(PAGE, run="run/a")
    assert not app.exception
    assert "No operators of this run were traced: the model runs as a compiled graph." in words(app)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"op": ["aten::add"], "in_dtypes": ["float32"]}, "multiplied no matrices; 1 operator ran"),
        ({"op": ["aten::mm"], "in_dtypes": ["int8"], "flops": [8]}, "multiplied no matrices"),
        ({"op": ["aten::mm", "aten::empty"], "count": [3, 1]}, "does not tell in which dtype its 3 operators"),
        ({"op": ["aten::mm"], "in_dtypes": ["float32"], "policy": ["none"], "device": ["cpu"]}, "ran in FP32 on a CPU"),
        ({"op": ["aten::mm"], "in_dtypes": ["float16"], "policy": ["none"]}, "the model itself is in FP16"),
    ],
)
def test_few_rows_are_enough(home, open_app, rows, said):
    write_rows(home.runs / "a", steps={"step": [0]}, ops=rows)
    app = open_app(PAGE, run="run/a")
    assert not app.exception and said in words(app)
