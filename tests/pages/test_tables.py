"""Every table of a page can be had as CSV and Parquet."""

import ast
import io
from pathlib import Path

import numpy as np
import pandas as pd

from pages.parts import tables
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


def test_no_page_shows_a_table_that_cannot_be_had():
    for file in ROOT.rglob("*.py"):
        calls = [n.func for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
        shown = [c for c in calls if isinstance(c, ast.Attribute) and c.attr == "dataframe"]
        direct = [c for c in shown if isinstance(c.value, ast.Name) and c.value.id == "st"]
        assert not direct or file.name == "tables.py", file


def test_both_files_hold_what_was_shown():
    frame = pd.DataFrame({"a": [1.5, np.nan], "b": ["x", None], "c": ["–", 3], "d": [True, False]}, index=[7, 9])
    back = pd.read_parquet(io.BytesIO(tables.as_parquet(frame)))
    assert list(back.columns) == ["a", "b", "c", "d"] and back["a"].isna().tolist() == [False, True]
    assert back["c"].tolist() == ["–", "3"] and back["d"].tolist() == [True, False]
    text = pd.read_csv(io.BytesIO(tables.as_csv(frame)))
    assert text["a"].isna().tolist() == [False, True] and text["c"].tolist() == ["–", "3"]
    assert tables.file_name("Memory by category.") == "memory-by-category"
