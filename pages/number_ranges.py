"""Where do the values of each layer lie, and do they fit the format?"""

import pandas as pd
import streamlit as st

from amp_core.analysis import class_shares, exponent_shares, kinds_present, sampled_steps
from amp_core.figures import class_bars, exponent_heatmap
from amp_core.formats import FORMATS
from pages.parts import charts, empty, head, loaders, prediction, tables, tensor, words

LIMITS = ["fp16", "bf16", "fp8-e4m3", "fp8-e5m2"]
SHARE = {"format": "percent", "min_value": 0.0, "max_value": 1.0}
CLASS_COLUMNS = {
    "name": st.column_config.TextColumn("Tensor", pinned=True, width="medium"),
    "dtype": st.column_config.TextColumn("dtype"),
    "numel": st.column_config.NumberColumn("Elements", format="localized"),
    "zero_frac": st.column_config.ProgressColumn("Zero", **SHARE),
    "subnormal_frac": st.column_config.ProgressColumn("Subnormal", **SHARE),
    "normal_frac": st.column_config.ProgressColumn("Normal", **SHARE),
    "inf_frac": st.column_config.ProgressColumn("Inf", **SHARE),
    "nan_frac": st.column_config.ProgressColumn("NaN", **SHARE),
    "absmax": st.column_config.NumberColumn("Largest |x|", format="%.3g"),
    "rms": st.column_config.NumberColumn("RMS", format="%.3g"),
    "exponents": st.column_config.TextColumn("Exponents", help="Lowest and highest exponent with a value in it"),
}


def verdict(shares: pd.DataFrame, kind: str) -> str:
    """The page's answer: non-finite values first, then the worst subnormal share, else that all is well."""
    label = words.KIND_LABELS[kind].lower()
    bad = shares["inf_frac"] + shares["nan_frac"]
    if (bad > 0).any():
        worst = shares.loc[bad.idxmax()]
        return (
            f"{words.plural(int((bad > 0).sum()), 'tensor')} of {len(shares)} hold infinities or NaN ({label}); "
            f"most of all {words.escape(worst['name'])}, {words.percent(bad.max())} of its elements."
        )
    worst = shares.loc[shares["subnormal_frac"].idxmax()]
    if worst["subnormal_frac"] > 0:
        return (
            f"All {label} are finite. {words.escape(worst['name'])} has the most subnormal values, "
            f"{words.percent(worst['subnormal_frac'])} of its elements: these have lost bits."
        )
    return f"All {label} are finite, and none is subnormal in its own dtype."


def pick_step(steps: list[int]) -> int | None:
    """One sampled step, or None for all together."""
    choice = st.select_slider(
        "Sampled step",
        [-1, *steps],
        format_func=lambda step: "all steps" if step < 0 else f"{step:,}",
        key=f"ranges.step.{len(steps)}",
    )
    return None if choice < 0 else choice


def span(low: float, high: float) -> str:
    """Lowest and highest exponent as powers of two."""
    return f"{words.scale(2.0**low)} to {words.scale(2.0**high)}" if low == low else words.NONE


head.title("Number ranges")
run = head.run()
kinds = loaders.analysed(kinds_present, run)
if not kinds:
    empty.nothing("This run sampled no tensors, so their ranges are not known. `watch(…, every=10)` samples them.")

answer = st.container()
label_of = words.KIND_LABELS.__getitem__
order = [k for k in words.KIND_LABELS if k in kinds]
with st.container(horizontal=True, vertical_alignment="bottom"):
    kind = st.segmented_control(
        "Values of", order, default=order[0], required=True, format_func=label_of, key="ranges.kind"
    )
    formats = st.pills(
        "Limits of",
        LIMITS,
        selection_mode="multi",
        default=["fp16"],
        format_func=lambda name: FORMATS[name].label,
        key="ranges.formats",
    )
    unscaled = st.toggle(
        "Without the loss scale",
        key="ranges.unscaled",
        help="Moves each histogram by the loss scale of its step: where the true gradient lies.",
    )
steps = loaders.analysed(sampled_steps, run, kind)
step = pick_step(steps) if len(steps) > 1 else None

shares = loaders.analysed(exponent_shares, run, kind, step, true_exponents=unscaled)
classes = loaders.analysed(class_shares, run, kind, step)
with answer:
    head.verdict(verdict(classes, kind))
dark = charts.dark()
title = f"{label_of(kind)} by tensor and exponent"
values = "value, loss scale taken out" if unscaled else "value as stored"
heatmap = exponent_heatmap(shares, tuple(formats), dark, title=title, values=values, classes=classes)
charts.show(heatmap, "ranges.heatmap")
if (classes[["subnormal_frac", "inf_frac", "nan_frac"]] > 0).any(axis=None):
    charts.show(class_bars(classes, dark=dark), "ranges.classes")
opening = st.container()
event = tables.show(
    classes.assign(exponents=[span(e.exp_low, e.exp_high) for e in classes.itertuples()]),
    column_config=CLASS_COLUMNS,
    column_order=list(CLASS_COLUMNS),
    hide_index=True,
    key=f"ranges.table.{kind}",
    on_select="rerun",
    selection_mode="single-row",
    alt="Class shares and magnitudes per tensor.",
)
with opening:
    if rows := [row for row in event["selection"]["rows"] if row < len(classes)]:
        tensor.link(st.session_state["run"], kind, classes["name"].iloc[rows[0]])
    else:
        st.caption("Click the start of a row to open a tensor and see it over time.")
prediction.show(run, kind, formats[0] if formats else "fp16")
