"""Where do the values of each layer lie, and do they fit the format?"""

import pandas as pd
import streamlit as st

from amp_core.analysis import class_shares, exponent_shares, kinds_present, sampled_steps
from amp_core.analysis.folding import deepest, fold_classes, fold_shares, matching, readable_depth
from amp_core.figures import class_bars, exponent_heatmap
from amp_core.formats import FORMATS
from pages.parts import (
    address,
    charts,
    clicks,
    empty,
    glossary,
    head,
    loaders,
    prediction,
    tables,
    tensor,
    words,
)

LIMITS = ["fp16", "bf16", "fp8-e4m3", "fp8-e5m2"]
SHARE = {"format": "percent", "min_value": 0.0, "max_value": 1.0}
CLASS_COLUMNS = {
    "name": st.column_config.TextColumn("Tensor", pinned=True, width="medium"),
    "tensors": st.column_config.NumberColumn("Tensors", help="Taken together in this row"),
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
    if shares["subnormal_frac"].isna().all():  # a run imported from a log that keeps other histograms
        return f"What was recorded of {label} does not tell how many values are subnormal or lost."
    worst = shares.loc[shares["subnormal_frac"].idxmax()]
    if worst["subnormal_frac"] > 0:
        return (
            f"All {label} are finite. {words.escape(worst['name'])} has the most subnormal values, "
            f"{words.percent(worst['subnormal_frac'])} of its elements: these have lost bits."
        )
    return f"All {label} are finite, and none is subnormal in its own dtype."


def pick_step(steps: list[int]) -> int | None:
    """One sampled step, or None for all together."""
    key = f"ranges.step.{len(steps)}"
    address.take("step", key, lambda text: int(text) if text.isdecimal() and int(text) in steps else None, -1)
    choice = st.select_slider(
        "Sampled step",
        [-1, *steps],
        format_func=lambda step: "all steps" if step < 0 else f"{step:,}",
        key=key,
    )
    address.keep("step", key, "" if choice < 0 else str(choice))
    return None if choice < 0 else choice


def pick_layers(names: list[str], kind: str) -> tuple[list[str], int]:
    """The tensors that are searched for, and the depth at which the module tree is folded."""
    address.take("search", "ranges.search", str)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        asked = st.text_input("Search layers", key="ranges.search", placeholder="attn 0, head, …", width=260)
        found = matching(names, asked)
        depths = list(range(1, deepest(found) + 1))
        at_first = readable_depth(found)
        address.take("depth", f"ranges.depth.{kind}", lambda text: int(text) if text.isdecimal() else None)
        if st.session_state.get(f"ranges.depth.{kind}") not in depths:
            st.session_state[f"ranges.depth.{kind}"] = at_first
        depth = depths[0]
        if len(depths) > 1:
            depth = st.segmented_control(
                "Depth of the module tree",
                depths,
                required=True,
                format_func=lambda n: "each tensor" if n == depths[-1] else str(n),
                key=f"ranges.depth.{kind}",
                help="What lies deeper is added up, and its row ends in `.*`; a click on it unfolds it.",
            )
    address.keep("search", "ranges.search", asked)
    address.keep("depth", f"ranges.depth.{kind}", str(depth) if depth != at_first else "")
    if not found:
        empty.nothing(f"No layer has all of these words: {words.escape(asked)}.")
    return found, depth


def go(kind: str, name: str, step: int | None) -> None:
    """A row was clicked: unfold a module, or open a tensor in Layer detail."""
    if name.endswith(".*"):
        st.session_state["ranges.unfold"] = name.removesuffix("*")
        st.rerun()
    tensor.jump(kind, name, None if step is None else (step, step))


def span(low: float, high: float) -> str:
    """Lowest and highest exponent as powers of two."""
    return f"{words.scale(2.0**low)} to {words.scale(2.0**high)}" if low == low else words.NONE


head.title("Number ranges")
run = head.run()
kinds = loaders.analysed(kinds_present, run)
if not kinds:
    empty.nothing(
        "This run sampled no tensors, so their ranges are not known. `watch(…, every=10)` samples them.", sample=True
    )

answer = st.container()
label_of = words.KIND_LABELS.__getitem__
order = [k for k in words.KIND_LABELS if k in kinds]
with st.container(horizontal=True, vertical_alignment="bottom"):
    address.take("kind", "ranges.kind", address.choice(order), order[0])
    if st.session_state["ranges.kind"] not in order:  # chosen on another run
        st.session_state["ranges.kind"] = order[0]
    kind = st.segmented_control("Values of", order, required=True, format_func=label_of, key="ranges.kind")
    address.keep("kind", "ranges.kind", kind if kind != order[0] else "")
    address.take("format", "ranges.formats", address.several(LIMITS), ["fp16"])
    formats = st.pills(
        "Limits of",
        LIMITS,
        selection_mode="multi",
        format_func=lambda name: FORMATS[name].label,
        key="ranges.formats",
        help=glossary.tip("underflow"),
    )
    address.keep("format", "ranges.formats", ",".join(formats) if formats != ["fp16"] else "")
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
if unfold := st.session_state.pop("ranges.unfold", None):
    st.session_state["ranges.search"] = unfold
    st.session_state[f"ranges.depth.{kind}"] = None
found, depth = pick_layers(classes["name"].tolist(), kind)
shares = fold_shares(shares[shares["name"].isin(found)], depth)
classes = fold_classes(classes[classes["name"].isin(found)], depth)
dark = charts.dark()
title = f"{label_of(kind)} by tensor and exponent"
values = "value, loss scale taken out" if unscaled else "value as stored"
heatmap = exponent_heatmap(shares, tuple(formats), dark, title=title, values=values, classes=classes)
clicked = clicks.points(charts.show(heatmap, "ranges.heatmap", clicks=True), f"ranges.heatmap.{kind}")
st.caption("Click a cell, or the start of a row of the table, to see that tensor over time.")
if (classes[["subnormal_frac", "inf_frac", "nan_frac"]] > 0).any(axis=None):
    charts.show(class_bars(classes, dark=dark), "ranges.classes")
key = f"ranges.table.{kind}"
event = tables.show(
    classes.assign(exponents=[span(e.exp_low, e.exp_high) for e in classes.itertuples()]),
    column_config=CLASS_COLUMNS,
    column_order=[column for column in CLASS_COLUMNS if column != "tensors" or (classes["tensors"] > 1).any()],
    hide_index=True,
    key=key,
    on_select="rerun",
    selection_mode="single-row",
    alt="Class shares and magnitudes per tensor.",
)
for point in clicked[:1]:
    go(kind, str(point["y"]), step)
for row in clicks.rows(event, key, len(classes)):
    go(kind, str(classes["name"].iloc[row]), step)
prediction.show(run, kind, formats[0] if formats else "fp16")
