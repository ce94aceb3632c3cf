"""The Forecast page: always states that nothing was measured, forecasts from a traced step, or says how to record
one."""

from amp_core import load_run
from amp_core.forecast import forecast, traces_of_run
from tests.pages.conftest import titles, words
from tests.synthetic import write

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
    assert "Choose one GPU or more" in words(app)


def test_a_run_without_a_trace_says_how_to_get_one(home, open_app):
    write(home.runs / "a", "healthy", steps=20)
    app = open_app(PAGE, run="run/a")
    assert not app.exception and "--trace-ops" in words(app) and not app.dataframe


def test_a_trace_of_another_program_gives_a_reason_for_no_forecast(home, open_app):
    write(home.runs / "a", "traced-foreign")
    app = open_app(PAGE, run="run/a")
    assert not app.exception and "has no traced step" in words(app)
