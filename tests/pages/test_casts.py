"""An FP8 run's scales and losses on Loss scale, Number ranges, and 8 and 4 bits."""

import pytest

from tests.findings.zoo.quantized import cast_rows
from tests.pages.conftest import words


@pytest.fixture
def fp8_run(home):
    from amp_core.store.writer import RunWriter

    rows = [*cast_rows("blocks.0.up", 512, 512), *cast_rows("blocks.0.down", 512, 512)]
    with RunWriter(home.runs / "a", config={"precision": "fp8"}) as writer:
        writer.append("steps", {"step": list(range(20)), "loss": [1.0] * 20})
        writer.append("quantized", {column: [row.get(column) for row in rows] for column in rows[0]})
        writer.event("quantized layers", "head", "", 0, value=0.8, count=2, limit=3.0)
        writer.event("not quantized", "head", "sizes", 0, op="Linear", value=0.2)
    return home


@pytest.mark.parametrize("page", ["pages/number_ranges.py", "pages/low_precision.py"])
def test_measured_losses_are_shown(fp8_run, open_app, page):
    app = open_app(page, run="run/a")
    assert not app.exception
    shown = words(app)
    assert "2 of 3 linear layers are quantized, which hold 80" in shown and "Not quantized: head." in shown
    (table,) = [t.value for t in app.dataframe if "rel_error" in t.value]
    assert len(table) == 6 and set(table["kind"]) == {"weight", "input", "output gradient"}


def test_scales_stand_on_the_page_of_the_loss_scale(fp8_run, open_app):
    app = open_app("pages/loss_scale.py", run="run/a")
    assert not app.exception
    (table,) = [t.value for t in app.dataframe if "highest" in t.value]
    assert set(table["last"]) == {224.0, 28672.0}
