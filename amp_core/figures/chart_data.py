"""The numbers that a figure draws, as one long frame: `chart_data(figure)` has a row for each point of each trace."""

import base64
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from amp_core.figures.shapes import NO_X, NO_Y, ORNAMENT, STROKES
from amp_core.text.csv_safe import as_csv


def chart_data(figure: go.Figure) -> pd.DataFrame:
    """Columns: trace (its name), x, y, and z for heatmaps; axis titles, with their units, in `.attrs["axes"]`.

    Traces that only make a heatmap clickable or complete the legend, ornaments, and traces without points are left out;
    strokes have one row each. Where y only places a bar, its `ids` are the names. Coordinates of points at an edge or
    in a strip, which are not data, are NaN.
    """
    frames = []
    for number, trace in enumerate(figure.data):
        name = trace.name or f"trace {number + 1}"
        if trace.type == "heatmap":
            z = _array(trace.z)
            x, y = _array(trace.x), _array(trace.y)
            grid = np.meshgrid(np.arange(len(x)), np.arange(len(y)))
            known = pd.notna(z)
            shown = z if trace.text is None else _array(trace.text)  # the numbers behind named colours have no meaning
            x, y, z = x[grid[0][known]], y[grid[1][known]], shown[known]
            frames.append(pd.DataFrame({"trace": name, "x": x, "y": y, "z": z}))
        elif name != "cells" and trace.meta != ORNAMENT and trace.y is not None and trace.x is not None:
            rows = slice(1, None, 3) if trace.meta == STROKES else slice(None)
            x, y = _array(trace.x)[rows], _array(trace.y)[rows]
            if x.tolist() != [None]:
                x = np.full(len(x), np.nan, dtype=np.float32) if trace.meta == NO_X else x
                y = np.full(len(y), np.nan, dtype=np.float32) if trace.meta in (NO_Y, STROKES) else y
                y = y if trace.ids is None else _array(trace.ids)
                frames.append(pd.DataFrame({"trace": name, "x": x, "y": y}))
    table = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"trace": [], "x": [], "y": []})
    layout = figure.layout
    table.attrs["axes"] = {"x": layout.xaxis.title.text or "x", "y": layout.yaxis.title.text or "y"}
    return table


def chart_csv(figure: go.Figure) -> bytes:
    """`chart_data` as CSV, with the axis titles as column names."""
    table = chart_data(figure)
    return as_csv(table.rename(columns=table.attrs["axes"]))


def _array(values: Any) -> np.ndarray:
    """An array of a plotly figure, which may be packed as base64."""
    if isinstance(values, dict):
        flat = np.frombuffer(base64.b64decode(values["bdata"]), dtype=np.dtype(values["dtype"]))
        shape = tuple(int(n) for n in str(values["shape"]).split(",")) if "shape" in values else flat.shape
        return flat.reshape(shape)
    return np.asarray(values)
