"""The precision map: its answer, its text without a trace, and traces from a profiler."""

import shutil

import pytest

from amp_core import load_run
from amp_core.analysis import precision_map
from tests.pages.conftest import metric, titles, words
from tests.synthetic import SAMPLES, write, write_rows

PAGE = "pages/precision_map.py"


def tables(app):
    return [set(frame.value.columns) for frame in app.dataframe]


def test_the_baseline_has_the_same_answer(home, open_app):
    for name in ("fp32", "fp16-healthy"):
        shutil.copytree(SAMPLES[name], home.runs / name)
    assert "Baseline **fp32**: " in words(open_app(PAGE, run="run/fp16-healthy"))


def test_the_headline_counts_gemms_and_operators_left_in_fp32(home, open_app):
    view = precision_map(load_run(write(home.runs / "a", "traced")))
    app = open_app(PAGE, run="run/a")
    assert not app.exception
    share = f"{100 * view.matrix_frac['fp16']:.1f} %"
    assert f"{share} of GEMM/conv ran in FP16 on a GPU; 3 operators (bmm, mm) stayed in FP32" in words(app)
    assert metric(app, "Autocast").value == "FP16" and metric(app, "Autocast").delta == "CUDA lists"
    assert metric(app, "Casts by autocast").value == "4"
    assert metric(app, "GEMM/conv").delta == "33.3 % FP32, by operations"
    assert titles(app) == ["Modules by operators, forward"]
    stayed = app.dataframe[0].value.set_index("module")
    assert stayed.loc["head", "why"] == "inside autocast(enabled=False)"
    assert stayed.loc["blocks.*.attention", "modules"] == 2
    assert "What CUDA's autocast would decide differently" not in words(app)


def test_a_cpu_trace_shows_what_autocast_on_cuda_would_decide(home, open_app):
    write(home.runs / "a", "traced-cpu")
    app = open_app(PAGE, run="run/a")
    assert not app.exception
    page_text = words(app)
    assert "ran in BF16 on a CPU" in page_text and "What CUDA's autocast would decide differently" in page_text
    assert metric(app, "Autocast").delta == "CPU lists"


def test_another_phase_is_drawn(home, open_app):
    write(home.runs / "a", "traced")
    app = open_app(PAGE, run="run/a")
    app.get("button_group")[0].set_value("backward").run()
    assert not app.exception and titles(app) == ["Modules by operators, backward"]


def test_a_profiler_trace_shows_only_recorded_facts(home, open_app):
    write(home.runs / "a", "traced-foreign")
    app = open_app(PAGE, run="run/a")
    assert not app.exception
    page_text = words(app)
    assert "of GEMM/conv ran in FP16 on a GPU; 3 operators (bmm, mm) ran in FP32, which autocast would" in page_text
    assert "This trace was written by a profiler" in page_text and "trace_ops=2" in page_text
    assert "Casts" not in page_text.splitlines() and [m.label for m in app.metric] == ["Autocast", "GEMM/conv"]
    assert all("policy" not in names or frame.value["policy"].isna().all() for names, frame in zip(
        tables(app), app.dataframe, strict=True
    ))  # fmt: skip


def test_without_a_trace_it_says_how_to_record_one(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app(PAGE, run="run/a")
    assert not app.exception and not app.get("plotly_chart")
    assert "No operators of this run were traced. Record one with `watch(…, trace_ops=2)`" in words(app)


def test_the_reason_for_a_missing_trace_is_shown(home, open_app):
    event = {"kind": "warning", "name": "not recorded", "detail": "operators: the model runs as a compiled graph"}
    write_rows(home.runs / "a", steps={"step": [0, 1], "loss": [1.0, 0.5]}, events=[event])
    app = open_app(PAGE, run="run/a")
    assert not app.exception
    assert "No operators of this run were traced: the model runs as a compiled graph." in words(app)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({"op": ["aten::add"], "in_dtypes": ["float32"]}, "multiplied no matrices; 1 operator ran"),
        ({"op": ["aten::mm"], "in_dtypes": ["int8"], "flops": [8]}, "multiplied no matrices"),
        (
            {"op": ["aten::mm", "aten::empty"], "count": [3, 1]},
            "does not record in which dtype its 3 GEMM/conv operators",
        ),
        ({"op": ["aten::mm"], "in_dtypes": ["float32"], "policy": ["none"], "device": ["cpu"]}, "ran in FP32 on a CPU"),
        ({"op": ["aten::mm"], "in_dtypes": ["float16"], "policy": ["none"]}, "the model itself is in FP16"),
    ],
)
def test_few_rows_are_enough(home, open_app, rows, expected):
    write_rows(home.runs / "a", steps={"step": [0]}, ops=rows)
    app = open_app(PAGE, run="run/a")
    assert not app.exception and expected in words(app)


def test_what_was_asked_for_stands_beside_what_was_seen_also_without_a_trace(home, open_app):
    asked = [{"stage": "compute", "dtype": "bfloat16", "source": "MixedPrecisionPolicy.param_dtype"}]
    model = {"precision_asked": asked, "precision_seen": {"weights": "float32", "compute": "float32"}}
    write_rows(home.runs / "a", steps={"step": [0, 1], "loss": [1.0, 0.5]}, model=model)
    app = open_app(PAGE, run="run/a")
    assert not app.exception and "Requested and observed precision" in words(app)
    assert "MixedPrecisionPolicy.param_dtype requests BF16 compute; FP32 was observed." in words(app)
    table = app.dataframe[0].value.set_index("stage")
    assert table["seen"].to_dict() == {"weights": "FP32", "compute": "FP32"}
    assert table.loc["compute", "asked"] == "BF16"
