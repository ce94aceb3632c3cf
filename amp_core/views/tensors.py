"""Views of the sampled tensors of a run: their values by exponent and by class, and what their updates lose."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from amp_core.analysis import class_shares, exponent_shares, kinds_present, update_losses_over_steps
from amp_core.analysis.numerics.module_tree import fold_classes, fold_shares, readable_depth
from amp_core.store.run import Run
from amp_core.text.formatting import KIND_LABELS
from amp_core.views._view import Ask, View, figures

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


@dataclass(frozen=True)
class Ranges:
    """Data of the heatmap of exponents, folded by module."""

    shares: pd.DataFrame
    classes: pd.DataFrame
    title: str
    values: str
    """What the magnitudes describe."""


def shown_kind(run: Run, ask: Ask) -> str:
    """The default kind of tensor: the first of `KIND_LABELS` that the run sampled."""
    present = ask(kinds_present, run)
    return next((kind for kind in KIND_LABELS if kind in present), "weight_grad")


def _classes(
    run: Run,
    ask: Ask,
    kind: str | None = None,
    step: int | None = None,
    names: "Collection[str] | None" = None,
    depth: int | None = None,
) -> pd.DataFrame:
    classes: pd.DataFrame = ask(class_shares, run, kind or shown_kind(run, ask), step)
    if names is not None:
        classes = classes[classes["name"].isin(names)]
    return fold_classes(classes, depth or readable_depth(classes["name"].tolist()))


def _ranges(
    run: Run,
    ask: Ask,
    kind: str | None = None,
    step: int | None = None,
    unscaled: bool = False,
    names: "Collection[str] | None" = None,
    depth: int | None = None,
    title: str = "{kind} by tensor and exponent",
) -> Ranges:
    kind = kind or shown_kind(run, ask)
    shares = ask(exponent_shares, run, kind, step, true_exponents=unscaled)
    if names is not None:
        shares = shares[shares["name"].isin(names)]
    if depth is None:
        known = ask(class_shares, run, kind, step)["name"]
        depth = readable_depth(known[known.isin(names)].tolist() if names is not None else known.tolist())
    return Ranges(
        fold_shares(shares, depth),
        _classes(run, ask, kind, step, names, depth),
        title.format(kind=KIND_LABELS[kind]),
        "value, loss scale taken out" if unscaled else "value as stored",
    )


def _ranges_figure(frame: Ranges, dark: bool, formats: "Sequence[str]" = ("fp16",), clickable: bool = True) -> Any:
    return figures().exponent_heatmap(
        frame.shares,
        formats,
        dark,
        title=frame.title,
        values=frame.values,
        classes=frame.classes,
        clickable=clickable,
    )


RANGES = View(
    "ranges",
    "Number ranges",
    ("tensors",),
    _ranges,
    _ranges_figure,
    lambda frame: None if len(frame.classes) else "No tensor was sampled.",
)
CLASSES = View(
    "classes",
    "Classes of values",
    ("tensors",),
    _classes,
    lambda frame, dark: figures().class_bars(frame, dark=dark),
    lambda frame: None if len(frame) else "No tensor was sampled.",
)
UPDATES = View(
    "updates",
    "Updates lost to rounding",
    ("updates",),
    lambda run, ask: ask(update_losses_over_steps, run),
    lambda frame, dark, column="lost_mass_frac", title="Updates lost to rounding": figures().step_heatmap(
        frame, column, dark, title
    ),
    lambda frame: None if len(frame) else "No update of a weight was compared with the exact one.",
)
