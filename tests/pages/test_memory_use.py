"""Memory: the parts of the peak, over the moments of a step, and compared with another run."""

import pytest

from amp_core import load_run
from amp_core.analysis import memory_breakdown
from amp_core.traces import import_traces
from pages.parts.words import size
from tests.pages.conftest import metric, titles, words
from tests.synthetic import live, write, write_rows
from tests.synthetic_memory import memory_rows
from tests.traces.made import write as write_trace
from tests.traces.test_memory import training

PAGE = "pages/memory_use.py"


def test_a_gpu_run_shows_its_peak_and_its_parts(home, open_app):
    write(home.runs / "a", "bf16")
    app = open_app(PAGE, run="run/a")
    result = memory_breakdown(load_run(home.runs / "a"))
    assert f"Peak memory {size(result.total_bytes)}, in backward" in words(app)
    assert "activations (" in words(app)
    assert metric(app, "Peak").value == size(result.total_bytes)
    assert metric(app, "Peak").delta == f"{size(result.reserved_bytes)} reserved"
    assert [c.label for c in app.metric][1:] == ["Peak of forward", "Peak of backward", "Peak of optimizer"]
    assert {"Memory at the peak", "Memory through step 64"} <= set(titles(app))
    assert "`ampscope tune --max-batch --workload text-gpt --size tiny --precision bf16 --device cuda:0`" in words(app)
    table = app.dataframe[0].value
    assert table["Share"].sum() == pytest.approx(100.0)
    assert "autocast's copies of weights" in table["Part"].tolist()


def test_a_cpu_run_names_the_memory_of_the_process(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app(PAGE, run="run/a")
    page_text = words(app)
    result = memory_breakdown(load_run(home.runs / "a"))
    held = size(result.parts.loc[result.parts["category"] != "other", "bytes"].sum())
    assert f"Peak tensor memory {held}, in the forward of blocks.3: mostly activations" in page_text
    assert f"The process used {size(result.total_bytes)}" in page_text
    assert metric(app, "Peak of forward").value == held and metric(app, "Peak of forward").delta == "in tensors"
    assert metric(app, "Process").value == size(result.total_bytes)
    assert metric(app, "Process").delta == "resident set"
    assert app.dataframe[0].value["Share"].sum() == pytest.approx(100.0)
    assert app.dataframe[0].value["Share"].isna().tolist()[-1]
    assert titles(app)[0] == "Peak tensor memory"
    assert app.dataframe[0].value["Part"].tolist()[-1] == "other"


def test_the_batch_search_is_not_offered_for_a_loop_of_the_user(home, open_app):
    write(home.runs / "a", "bf16", config={"workload": "mine.py:build"})
    assert "max-batch" not in words(open_app(PAGE, run="run/a"))


def test_another_step_can_be_chosen(home, open_app):
    write(home.runs / "a", "fp32")
    app = open_app(PAGE, run="run/a")
    app.get("button_group")[0].set_value(4).run()
    assert not app.exception and "Memory through step 4" in titles(app)


def test_compared_with_fp32_each_category_has_a_reason_for_its_difference(home, open_app):
    write(home.runs / "amp", "profiled")
    write(home.runs / "reference", "profiled-fp32")
    app = open_app(PAGE, run="run/amp")
    assert not app.exception and "Memory at the peak, side by side" in titles(app)  # FP32 is the default baseline
    table = app.dataframe[1].value.set_index("Part")
    assert table.loc["activations", "Difference"].startswith("−")
    assert "GEMM/conv saves inputs in 16 bits" in table.loc["activations", "Why"]
    assert table.loc["autocast's copies of weights", "Difference"].startswith("+")


def test_a_run_without_a_sampled_step_says_so_and_shows_memory_over_time(home, open_app):
    write(home.runs / "a", "one-step")
    app = open_app(PAGE, run="run/a")
    assert "No memory breakdown recorded: it has fewer than two steps." in words(app) and len(titles(app)) == 1
    write(home.runs / "b", "bare")
    app = open_app(PAGE, run="run/b")
    assert "Memory was not measured at any step" in words(app) and titles(app) == []
    app = open_app(PAGE, run="run/a")


def test_rows_of_another_program_without_numbers_are_not_a_sample(home, open_app):
    write_rows(home.runs / "a", steps={"step": [0, 1], "loss": [2.0, 1.0]}, memory={"step": [1]})
    app = open_app(PAGE, run="run/a")
    assert not app.exception and "No memory breakdown recorded: another program wrote it" in words(app)


def test_the_other_run_may_have_no_memory_rows(home, open_app):
    write(home.runs / "a", "fp32")
    write(home.runs / "b", "one-step")
    app = open_app(PAGE, run="run/a")
    app.selectbox(key="baseline").select("run/b").run()
    assert "b has no memory breakdown" in words(app)


def test_memory_that_was_not_attributed_is_named(home, open_app):
    with live(home.runs / "a", "healthy") as run:
        run.advance(1)
        rows = memory_rows(1, "cpu", "fp32")
        rows["activations_bytes"] = rows["autocast_bytes"] = [None] * len(rows["step"])
        run.writer.append("memory", rows)
        detail = "activations and autocast's casts in memory: the program has saved-tensor hooks of its own"
        run.writer.event("warning", "not recorded", detail)
    app = open_app(PAGE, run="run/a")
    assert "Not recorded: activations and autocast's casts in memory: the program has" in words(app)


def test_a_trace_tells_its_peak_and_modules_but_not_what_for(home, open_app, tmp_path):
    import_traces([write_trace(tmp_path / "t.json", training().document())], home.runs / "a")
    app = open_app("pages/memory_use.py", run="run/a")
    assert "Peak memory 19.0 MiB, in fc in backward. A trace records how much is allocated, not for what." in words(app)
    assert "Memory through step 3" in titles(app) and "Memory at the peak" not in titles(app)
    assert app.dataframe[-1].value["name"].tolist()[:2] == ["fc", "fc"]


def test_a_trace_without_steps_shows_its_memory(home, open_app, tmp_path):
    document = training().document()
    document["traceEvents"] = [event for event in document["traceEvents"] if "ProfilerStep" not in event["name"]]
    import_traces([write_trace(tmp_path / "t.json", document)], home.runs / "a")
    app = open_app(PAGE, run="run/a")
    assert not app.exception and "Peak memory 19.0 MiB" in words(app)
    assert "Memory through the profiled window" in titles(app) and not [t for t in titles(app) if "step" in t]
