"""Every table of a page can be downloaded as CSV and Parquet."""

import ast
import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from amp_core import load_run
from amp_core.analysis import compare
from pages.parts import tables
from pages.parts.compare import comparison
from tests.synthetic import write

ROOT = Path(tables.__file__).resolve().parents[1]


def test_a_page_offers_each_of_its_tables_twice(home, open_app):
    write(home.runs / "a", "traced-cpu")
    app = open_app("pages/gpu_forecast.py", run="run/a")
    assert not app.exception
    assert [b.label for b in app.get("download_button")] == ["CSV", "CSV", "CSV", "Parquet"]  # two charts and a table
    assert "Forecast by GPU and recipe" in [m.value for m in app.markdown]


def test_tables_of_another_page_are_not_offered(home, open_app):
    write(home.runs / "a", "traced-cpu")
    app = open_app("pages/gpu_forecast.py", run="run/a")
    app.switch_page("pages/run_overview.py").run()
    assert "Forecast by GPU and recipe" not in [m.value for m in app.markdown]
    assert [b.label for b in app.get("download_button")] == ["Report", "CSV", "CSV", "CSV"]  # three charts


def test_every_table_on_a_page_can_be_downloaded():
    for file in ROOT.rglob("*.py"):
        calls = [n.func for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
        shown = [c for c in calls if isinstance(c, ast.Attribute) and c.attr == "dataframe"]
        direct = [c for c in shown if isinstance(c.value, ast.Name) and c.value.id == "st"]
        assert not direct or file.name in ("tables.py", "warm_up.py"), file  # the second one never shows a table


def test_fractions_are_shown_in_percent_and_stored_unchanged(home, open_app):
    write(home.runs / "a", "profiled")
    app = open_app("pages/step_cost.py", run="run/a")
    shown = next(table.value for table in app.dataframe if "frac" in table.value)
    kept = app.session_state["tables.shown"]["Parts of a step with their share and time."]
    assert shown["frac"].sum() == pytest.approx(100) and kept["frac"].sum() == pytest.approx(1)


def test_pages_use_the_shared_columns_for_fractions_and_counts():
    for file in ROOT.rglob("*.py"):
        calls = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
        named = {
            k.value.value for c in calls for k in c.keywords if k.arg == "format" and isinstance(k.value, ast.Constant)
        }
        assert file.name == "tables.py" or not named & {"percent", "localized"}, file


def test_both_files_hold_the_shown_table():
    frame = pd.DataFrame({"a": [1.5, np.nan], "b": ["x", None], "c": ["–", 3], "d": [True, False]}, index=[7, 9])
    back = pd.read_parquet(io.BytesIO(tables.as_parquet(frame)))
    assert list(back.columns) == ["a", "b", "c", "d"] and back["a"].isna().tolist() == [False, True]
    assert back["c"].tolist() == ["–", "3"] and back["d"].tolist() == [True, False]
    text = pd.read_csv(io.BytesIO(tables.as_csv(frame)))
    assert text["a"].isna().tolist() == [False, True] and text["c"].tolist() == ["–", "3"]
    assert tables.file_name("Memory by category.") == "memory-by-category"


def test_measured_numbers_are_rounded_as_in_sentences():
    values = [2245.3, 335.8, 23.84, 0.01234567, 0.0, -1234.6, np.nan, None]
    frame = pd.DataFrame({"a": pd.Series(values, dtype=object), "b": 0.12345, "c": 7})
    shown = tables._as_written(frame, {"a": tables.measured("A"), "b": tables.share("B"), "c": tables.count("C")})
    assert (
        shown["a"].tolist()[:6] == [2245, 336, 23.8, 0.0123, 0.0, -1235]
        and shown["a"].isna().tolist()[6:] == [True] * 2
    )
    assert shown["b"].iloc[0] == pytest.approx(12.345) and shown["c"].iloc[0] == 7 and frame["b"].iloc[0] == 0.12345


def test_an_empty_column_is_omitted():
    frame = pd.DataFrame({"a": ["–", ""], "b": [np.nan, None], "c": [0.0, np.nan], "d": ["–", "x"], "e": [None, None]})
    columns = {name: tables.count(name) for name in frame}
    assert list(tables.known(frame, columns)) == ["c", "d"]
    assert list(tables.known(frame.iloc[:0], columns)) == list(columns)


def test_a_comparison_of_different_tasks_has_no_column_of_incomparable_losses(home):
    result = compare([load_run(write(home.runs / name, name)) for name in ("fp32", "healthy")]).recipes
    assert "Loss change" in comparison.recipes(result)
    without_loss_change = comparison.recipes(result.assign(loss_change_frac=float("nan")))
    assert "Loss change" not in without_loss_change and "Final loss" in without_loss_change
