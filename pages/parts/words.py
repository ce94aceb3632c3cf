"""Numbers and states as the pages write them: those of `amp_core.text.formatting`, looks and labels, and Markdown's
escapes.

>>> scale(65536.0), size(3_400_000), escape("a_b")
('2¹⁶', '3.24 MiB', 'a\\\\_b')
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from amp_core.text.formatting import (
    KIND_LABELS,
    NONE,
    about,
    amount,
    compact,
    count,
    duration,
    exactly,
    loss,
    number,
    percent,
    plural,
    raised,
    ratio,
    scale,
    sentence,
    share_of,
    size,
    span,
    whole_range,
)

__all__ = [
    "KIND_LABELS",
    "NONE",
    "STATUS_LOOK",
    "about",
    "amount",
    "compact",
    "count",
    "duration",
    "escape",
    "exactly",
    "loss",
    "number",
    "percent",
    "plural",
    "raised",
    "ratio",
    "scale",
    "sentence",
    "share_of",
    "size",
    "span",
    "unbroken",
    "whole_range",
    "workload",
]

Color = Literal["red", "orange", "blue", "green", "gray"]

STATUS_LOOK: dict[str, tuple[Color, str]] = {
    "running": ("blue", ":material/sync:"),
    "starting": ("blue", ":material/hourglass_top:"),
    "queued": ("gray", ":material/schedule:"),
    "finished": ("green", ":material/check_circle:"),
    "stopped": ("orange", ":material/stop_circle:"),
    "failed": ("red", ":material/error:"),
    "lost": ("red", ":material/link_off:"),
    "damaged": ("red", ":material/broken_image:"),
}
"""Colour and icon for each status of a run; the word itself is always shown too."""


def workload(config: Mapping[str, Any]) -> str:
    """The workload that a run trained, with its size; for a user's own script the file's name without its folder."""
    name = str(config.get("workload") or "")
    own = Path(name).name if ".py:" in name else name
    return " ".join(part for part in (own, str(config.get("size") or "")) if part)


def unbroken(text: str) -> str:
    """`text` with numbers and their units on one line."""
    return re.sub(r"(?<=\d) (?=(?:%|×|s|ms|min|h|W|°C|bytes|[KMG]iB)(?!\w))", "\u00a0", text)


def escape(text: object) -> str:
    """`text` escaped for Markdown: a run or layer may have any name."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]()#+-.!|~$<>:^=" else c for c in str(text)).replace("\n", " ")


def prose(text: str) -> str:
    """`text` escaped for Markdown, but for what stands in backticks: code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one of them has no other
        return escape(text)
    return "".join(f"`{part}`" if place % 2 else escape(part) for place, part in enumerate(parts))
