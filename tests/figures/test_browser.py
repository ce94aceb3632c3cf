"""The figures sent to the browser: plotly.js can detect that nothing has changed, and they look like the app's
pages."""

import json
import math
import tomllib
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from amp_core import Run
from amp_core.figures.browser import for_browser
from amp_core.figures.colours import INK, PAGE, QUIET
from tests.figures.test_contract import FRAMES, drawn, shown
from tests.paths import ROOT


def same(sent: Any, value: Any) -> bool:
    """Whether a number in the JSON equals that of the figure, to 32-bit precision."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return sent is None
    return math.isclose(sent, value, rel_tol=1e-6) if isinstance(value, float) else bool(sent == value)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", FRAMES)
def test_plotly_detects_that_nothing_has_changed(name: str, dark: bool, runs: dict[str, Run]) -> None:
    figure = shown(name, runs["overflowing"], dark)
    record = json.loads(json.dumps(for_browser(figure, dark), allow_nan=False))
    assert not {"meta", "template"} & set(record["layout"])
    for trace, sent in zip(figure.data, record["data"], strict=True):
        for part, value in sent.items():
            assert not (isinstance(value, dict) and "bdata" in value and "," not in value["shape"]), part
        for axis in {"x", "y"} & set(sent):
            if isinstance(sent[axis], list):
                assert all(map(same, sent[axis], np.asarray(trace[axis]).tolist()))


@pytest.mark.parametrize("dark", [False, True])
def test_charts_look_like_the_pages(dark: bool, runs: dict[str, Run]) -> None:
    theme = tomllib.loads((ROOT / ".streamlit" / "config.toml").read_text())["theme"][("light", "dark")[dark]]
    assert theme["backgroundColor"] == PAGE[dark] and theme["textColor"] == INK[dark]
    assert theme["grayTextColor"] == QUIET[dark]
    figure = drawn("loss_figure", runs["healthy"], dark)
    layout = for_browser(figure, dark)["layout"]
    assert layout["paper_bgcolor"] == layout["plot_bgcolor"] == PAGE[dark]
    assert layout["font"]["color"] == QUIET[dark] and layout["title"]["font"]["color"] == INK[dark]
    # The chart's own settings take precedence.
    assert layout["title"]["text"] == "Loss" and layout["xaxis"]["title"]["text"] == "step"
    assert "family" in layout["font"] and figure.layout.font.family is None


def test_numbers_have_the_digits_of_their_format_and_nan_is_none() -> None:
    narrow = np.array([0.1, 1 / 3, 0.0, -1e-40, 3e38, np.nan, np.inf, 16777216.0], dtype=np.float32)
    figure = go.Figure({"data": [{"type": "scatter", "x": narrow, "y": narrow.astype(np.float64) / 3}], "layout": {}})
    figure.layout.title.text = "numbers"
    trace = for_browser(figure)["data"][0]
    assert trace["x"] == [0.1, 0.3333333, 0.0, pytest.approx(-1e-40, rel=1e-4), float(narrow[4]), None, None, 2.0**24]
    assert trace["y"][1] == 0.111111114422480  # a third in 32 bits, to 15 digits
    assert trace["y"][5:7] == [None, None]
    names = for_browser(go.Figure({"data": [{"type": "bar", "y": np.array(["a", "b"], dtype=object)}]}))["data"][0]
    assert names["y"] == ["a", "b"]
