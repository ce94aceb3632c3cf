"""Clicks on charts and tables that open another view, each followed once.

    event = charts.show(figure, "ranges.heatmap", clicks=True)
    for point in clicks.points(event, "ranges.heatmap"): ...

A selection outlives the click: the browser sends it again when the user comes back to the page. So it is followed
only if it differs from the last one.
"""

from typing import Any

import streamlit as st


def points(event: Any, key: str) -> list[dict[str, Any]]:
    """The points of a chart that were just clicked."""
    selected: list[dict[str, Any]] = event["selection"]["points"]
    return selected if _is_new(key, [(p.get("curve_number"), p.get("x"), p.get("y")) for p in selected]) else []


def rows(event: Any, key: str, count: int) -> list[int]:
    """The rows of a table, of `count`, that were just clicked."""
    selected = [row for row in event["selection"]["rows"] if row < count]
    return selected if _is_new(key, selected) else []


def _is_new(key: str, selection: list[Any]) -> bool:
    before = st.session_state.get(f"clicks.{key}")
    st.session_state[f"clicks.{key}"] = selection
    return bool(selection) and selection != before
