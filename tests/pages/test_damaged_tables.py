"""A run with a damaged table: each page shows what the others tell, and names the damaged one once."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.app_test import pages
from tests.pages.conftest import words
from tests.synthetic import SAMPLES

UNREADABLE = "What this page shows is in the table {} of this run, which cannot be read."
NEEDED = {
    "pages/number_ranges.py": "tensors",
    "pages/layer_detail.py": "tensors",
    "pages/tensor_cores.py": "kernels",
    "pages/precision_map.py": "ops",
    "pages/gpu_forecast.py": "ops",
    "pages/low_precision.py": "blocks",
}
OF_A_RUN = [page for page in pages() if page not in ("pages/start_run.py", "pages/tune_recipe.py")]


def damage(folder, *tables):
    for table in tables:
        for file in (folder / table).iterdir():
            file.write_bytes(file.read_bytes()[:300])


OFTEN = ("tensors", "events", "windows")
"""Tables that most pages read; --whole damages all."""


@pytest.mark.parametrize(
    "table",
    [
        table if table in OFTEN else pytest.param(table, marks=pytest.mark.whole)
        for table in ("tensors", "blocks", "kernels", "windows", "ops", "events", "memory", "audits")
    ],
)
def test_every_page_shows_the_other_tables_and_names_the_damaged_one(home, open_app, table):
    damage(shutil.copytree(SAMPLES["bf16-blocks"], home.runs / "a"), table)
    app = open_app(run="run/a")
    for page in OF_A_RUN:
        app.switch_page(page).run()
        text = words(app)
        assert not app.exception and "This run cannot be read" not in text, page
        if app.title[0].value in ("Compare", "Library", "Format lab", "Findings guide"):
            continue
        assert text.count(f"{table}/00000.parquet is damaged") == 1, page
        assert (UNREADABLE.format(table) in text) == (NEEDED.get(page) == table), page


def test_impossible_values_set_only_their_table_aside(home, open_app):
    file = shutil.copytree(SAMPLES["bf16-blocks"], home.runs / "a") / "tensors" / "00000.parquet"
    rows = pq.read_table(file)
    pq.write_table(rows.set_column(rows.column_names.index("zero"), "zero", pa.array([-1] * rows.num_rows)), file)
    for _ in range(2):  # the second session finds the check in the cache
        app = open_app("pages/number_ranges.py", run="run/a")
        assert "tensors has a negative 'zero'" in words(app) and UNREADABLE.format("tensors") in words(app)
        assert not open_app("pages/step_cost.py", run="run/a").exception


def test_a_window_without_its_kernels_is_not_told_to_be_other_work(home, open_app):
    damage(shutil.copytree(SAMPLES["bf16-blocks"], home.runs / "a"), "kernels")
    text = words(open_app("pages/step_cost.py", run="run/a"))
    assert "The profiled windows cannot be read: these are the recorded phases of the steps." in text
    assert "% backward" in text and "other operators" not in text


def test_numbers_that_are_nan_are_said_to_be_unknown(home, open_app):
    folder = shutil.copytree(SAMPLES["fp16-overflow"], home.runs / "a")
    for file in (folder / "steps" / "00000.parquet", folder / "kernels" / "00000.parquet"):
        rows = pq.read_table(file)
        for i, field in enumerate(rows.schema):
            if pa.types.is_floating(field.type):
                rows = rows.set_column(i, field.name, pa.array([float("nan")] * rows.num_rows))
        pq.write_table(rows, file)
    text = words(open_app("pages/loss_scale.py", run="run/a"))
    assert "40 steps of 400" in text and "The loss scale was not recorded." in text and "constant at" not in text
    text = words(open_app("pages/tensor_cores.py", run="run/a"))
    assert "The times of this run's kernels were not recorded" in text and "nothing to accelerate" not in text
