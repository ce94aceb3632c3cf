"""The Forecast page: always states that nothing was measured, forecasts from a traced step, or says how to record
one."""

import json
import shutil

from amp_core import load_run
from amp_core.forecast import forecast, step_time_changes, traces_of_run
from amp_core.text.formatting import number
from tests.pages.conftest import titles, words
from tests.synthetic import SAMPLES, write

PAGE = "pages/gpu_forecast.py"


def test_a_traced_run_is_forecast_for_the_chosen_gpus(home, open_app):
    run = load_run(write(home.runs / "a", "traced-cpu"))
    app = open_app(PAGE, run="run/a")
    assert not app.exception
    page_text = words(app)
    assert page_text.count("Forecast, not measured") >= 2
    assert all("forecast, not measured" in title for title in titles(app)) and len(titles(app)) == 2
    expected = forecast(traces_of_run(run), ["V100", "A100", "H100"]).table
    frame = app.dataframe[0].value
    runs = expected[expected["why_not"] == ""]
    assert list(frame["gpu"]) == list(runs["gpu"]) and len(frame) == 10
    assert "TF32 is not forecast for V100: no TF32 before Ampere (compute capability 8.0)." in page_text.replace(
        "\\", ""
    )
    app.multiselect[0].set_value(["B200"]).run()
    assert set(app.dataframe[0].value["gpu"]) == {"B200"} and not app.exception
    app.multiselect[0].set_value([]).run()
    assert "Choose at least one GPU" in words(app)


def test_a_run_without_a_trace_says_how_to_get_one(home, open_app):
    write(home.runs / "a", "healthy", steps=20)
    app = open_app(PAGE, run="run/a")
    assert not app.exception and "--trace-ops" in words(app) and not app.dataframe


def test_a_trace_of_another_program_gives_a_reason_for_no_forecast(home, open_app):
    write(home.runs / "a", "traced-foreign")
    app = open_app(PAGE, run="run/a")
    assert not app.exception and "has no traced step" in words(app)


def test_shares_in_8_and_4_bits_are_forecast_beside_bf16_and_kept_in_the_address(home, open_app):
    write(home.runs / "a", "traced-cpu")
    app = open_app(PAGE, run="run/a", gpu="H100,B200", fp8="90")
    assert not app.exception
    assert set(app.dataframe[0].value["recipe"]) == {"FP32", "TF32", "BF16", "FP16", "FP8"}
    next(e for e in app.number_input if e.key == "forecast.fp4").set_value(50).run()
    frame = app.dataframe[0].value
    assert frame[frame["recipe"] == "NVFP4"]["gpu"].tolist() == ["B200"]
    assert frame.set_index(["gpu", "recipe"])["bf16"]["B200", "NVFP4"].endswith(")")
    assert (app.query_params["fp8"], app.query_params["fp4"]) == ("90", "50")
    assert "NVFP4 is not forecast for H100: no FP4 on tensor cores before Blackwell" in words(app).replace("\\", "")


def test_a_run_that_emulates_its_recipe_is_not_forecast(home, open_app):
    folder = write(home.runs / "a", "traced-cpu")
    head = json.loads((folder / "run.json").read_text())
    head["config"] |= {"precision": "nvfp4", "emulated": True}
    (folder / "run.json").write_text(json.dumps(head))
    page_text = words(open_app(PAGE, run="run/a"))
    assert "emulates nvfp4, so its operators are those of the emulation; trace a run in bf16" in page_text
    assert "NVFP4 is emulated: the numerics are valid, times and memory are not" in page_text


def test_with_a_baseline_the_forecast_says_by_how_much_the_step_differs(home, open_app):
    for name in ("fp32", "fp16-healthy"):
        shutil.copytree(SAMPLES[name], home.runs / name)
    app = open_app(PAGE, run="run/fp16-healthy")  # FP32 of the same task is the baseline
    assert not app.exception
    changes = step_time_changes(load_run(SAMPLES["fp32"]), load_run(SAMPLES["fp16-healthy"]), ["V100"])
    row = changes.iloc[0]
    shown = f"V100 **{number(row['ratio'], digits=2)} ×** its step time ({number(row['low'], digits=2)}–"
    assert shown in words(app)


def test_a_baseline_without_a_traced_step_is_said_to_be_incomparable(home, open_app):
    write(home.runs / "a", "traced-cpu")
    write(home.runs / "b", "fp32")
    app = open_app(PAGE, run="run/a", baseline="run/b")
    assert not app.exception and "is not possible" in words(app) and "no traced step" in words(app)
