"""Number ranges: fields for step and tensors, the tensors over steps, and the table of classes."""

import functools
from collections.abc import Callable, Collection, Sequence

import pandas as pd
import streamlit as st

from amp_core import Run
from amp_core.analysis import (
    changed_tensors,
    class_shares,
    exponent_changes,
    kinds_present,
    sampled_steps,
    scale_trace,
    shares_over_steps,
    step_marks,
)
from amp_core.analysis.numerics.layers import first_nonfinite, layer_trace, tensor_names
from amp_core.analysis.numerics.module_tree import deepest, folded_name, matching_names, readable_depth
from amp_core.figures import exponent_change_heatmap, step_heatmap
from amp_core.figures.marks import with_marks
from amp_core.figures.tensors_over_steps import MAX_CLICKABLE_CELLS
from amp_core.findings import Origin, measured_underflow
from amp_core.views import RANGES
from pages.parts import address, baseline, charts, clicks, empty, loaders, tables, words
from pages.parts.choice import one_of
from pages.parts.diagnosed import chain
from pages.parts.numbers import prediction, tensor

OVER_STEPS = {"subnormal_frac": "subnormal", "zero_frac": "exactly zero", "absmax": "largest magnitude"}
CLASS_COLUMNS = {
    "name": st.column_config.TextColumn("Tensor", pinned=True, width=190),
    "tensors": tables.count("Tensors", help_="Summed in this row"),
    "inf_frac": tables.share("Inf", width=96),
    "nan_frac": tables.share("NaN", width=96),
    "subnormal_frac": tables.share("Subnormal", width=96),
    "zero_frac": tables.share("Zero", width=96),
    "normal_frac": tables.share("Normal", width=96),
    "absmax": st.column_config.NumberColumn("Largest |x|", format="%.3g", width=80),
    "rms": st.column_config.NumberColumn("RMS", format="%.3g", width=70, help="Root mean square of the finite values"),
    "exponents": st.column_config.TextColumn("Exponents", help="Lowest and highest exponent with a value in it"),
    "dtype": st.column_config.TextColumn("dtype", width=70),
    "numel": tables.count("Elements", width=80),
}

CHANGE_COLUMNS = {
    "name": st.column_config.TextColumn("Tensor", pinned=True, width=135),
    "moved_frac": tables.percent("Changed", help_="Elements with another exponent, or now zero or infinite", width=80),
    "nonzero_change": tables.percent("Nonzero", help_="Change in the share of finite nonzero elements", width=80),
    "exponent": st.column_config.TextColumn("Most at", help="The exponent whose share changed the most", width=70),
    "change": tables.percent("Change there", width=95),
    "noise": tables.percent("Noise ±", help_="Two standard errors over steps, or deviations over seeds", width=80),
}
MIN_SHOWN_FRAC = 0.001
"""A smaller share is less than a pixel of a bar; the heatmap's margin and the table show it."""


def prepare(run: Run) -> None:
    """Run the analyses that the page needs first."""
    kinds = loaders.analysed(kinds_present, run)
    for kind in [kind for kind in words.KIND_LABELS if kind in kinds][:1]:
        loaders.analysed(sampled_steps, run, kind)
        RANGES.frame(run, loaders.analysed, kind=kind)
        classes = loaders.analysed(class_shares, run, kind, None)
        headline(classes, kind, functools.partial(when, run, kind), origins(run, kind, chain(run).origin))
        loaders.analysed(measured_underflow, run)
        names = classes["name"].tolist()
        _over_steps(run, kind, names, readable_depth(names))
        if kind in tensor.SCALED:
            prediction.at_all_scales(run, kind, "fp16")


def headline(
    shares: pd.DataFrame,
    kind: str,
    when: Callable[[str], tuple[str, str]] = lambda _name: ("", ""),
    origins: Sequence[str] = (),
) -> str:
    """The page's answer: non-finite values first, then subnormal ones, else that all is well. `when` says at which
    steps a tensor was not finite. `origins`: names of tensors where a fault began, the likeliest first; the others
    only received what began there."""
    label = words.KIND_LABELS[kind].lower()
    bad = shares.assign(bad_frac=shares["inf_frac"] + shares["nan_frac"])
    bad = bad[bad["bad_frac"] > 0]
    if len(bad):
        first = next((name for name in origins if name in set(bad["name"])), None)
        worst = (bad.nlargest(1, "bad_frac") if first is None else bad[bad["name"] == first]).iloc[0]
        matching = len(bad)
        most = "; most of all" if first is None else ", first in"
        hold, most = ("holds", ":") if matching == 1 else ("hold", most)
        frac = float(worst["bad_frac"])
        where, skipped = when(worst["name"])
        over = " over all sampled steps" if where else ""  # the share at the step itself is larger
        share = f", {words.percent(frac)} of its elements{over}" if frac >= MIN_SHOWN_FRAC else ""
        return (
            f"{matching:,} of {words.plural(len(shares), 'tensor')} ({label}) {hold} infinities or NaN{most} "
            f"{words.escape(worst['name'])}{where}{share}{skipped}."
        )
    if shares["subnormal_frac"].isna().all():  # imported from a log with other histograms
        return f"The recorded {label} do not show how many values are subnormal or lost."
    worst = shares.nlargest(1, "subnormal_frac").iloc[0]
    if worst["subnormal_frac"] > 0:
        began = shares[shares["name"].isin(origins[:1]) & (shares["subnormal_frac"] > 0)]
        if len(began) and began["name"].iloc[0] != worst["name"]:
            here = began.iloc[0]
            return (
                f"All {label} are finite. Underflow begins in {words.escape(here['name'])}, "
                f"{words.percent(here['subnormal_frac'])} of its elements subnormal; {words.escape(worst['name'])} "
                f"has the most, {words.percent(worst['subnormal_frac'])}."
            )
        return (
            f"All {label} are finite. {words.escape(worst['name'])} has the most subnormal values, "
            f"{words.percent(worst['subnormal_frac'])} of its elements, which have lost precision."
        )
    return f"All {label} are finite, and none is subnormal in its own dtype."


def when(run: Run, kind: str, name: str) -> tuple[str, str]:
    """The clauses of `not_finite_at` for a tensor of the run."""
    steps = scale_trace(run)
    return not_finite_at(loaders.analysed(layer_trace, run, kind, name), steps.loc[steps["skipped"], "step"].tolist())


def origins(run: Run, kind: str, began: Origin | None) -> list[str]:
    """The tensors of a kind where a fault began: that of the diagnosis, and the first that was not finite."""
    firsts = loaders.analysed(first_nonfinite, run, kind)
    first = [firsts[min(firsts)]] if firsts else []
    return ([began.name] if began is not None and began.kind == kind else []) + first


def not_finite_at(trace: pd.DataFrame, skipped: Collection[int]) -> tuple[str, str]:
    """At how many sampled steps a tensor was not finite; and whether those were skipped: its infinities then reached no
    weight, and no finding reports them."""
    bad = trace.loc[(trace["inf_frac"] + trace["nan_frac"]) > 0, "step"].tolist()
    if not bad:
        return "", ""
    one = len(bad) == 1
    where = f", only at step {bad[0]:,}" if one else f", at {len(bad):,} of {len(trace):,} sampled steps"
    if not set(bad) <= set(skipped):
        return where, ""
    return where, f"; the scaler skipped {'that step' if one else 'each of those steps'}"


def pick_step(steps: list[int]) -> int | None:
    """One sampled step, or None for all together."""
    key = f"ranges.step.{len(steps)}"
    address.take("step", key, address.whole(steps), -1)
    choice = st.select_slider(
        "Sampled step",
        [-1, *steps],
        format_func=lambda step: "all steps" if step < 0 else f"{step:,}",
        key=key,
        width=180,
    )
    address.keep("step", key, "" if choice < 0 else str(choice))
    return None if choice < 0 else choice


def pick_layers(names: list[str], kind: str) -> tuple[list[str], int]:
    """Fields for the search and for the depth to which the module tree is unfolded."""
    address.take("search", "ranges.search", str)
    asked = st.text_input("Search layers", key="ranges.search", placeholder="attn 0, head, …", width=260)
    matching = matching_names(names, asked)
    depths = list(range(1, deepest(matching) + 1))
    at_first = readable_depth(matching)
    address.take("depth", f"ranges.depth.{kind}", lambda text: int(text) if text.isdecimal() else None)
    if st.session_state.get(f"ranges.depth.{kind}") not in depths:
        st.session_state[f"ranges.depth.{kind}"] = at_first
    depth = depths[0]
    if len(depths) > 1:
        depth = one_of(
            "Depth of the module tree",
            depths,
            f"ranges.depth.{kind}",
            format_func=lambda n: "each tensor" if n == depths[-1] else str(n),
            help="Deeper modules are summed in one row, whose name ends in `.*`; click it to expand them.",
        )
    address.keep("search", "ranges.search", asked)
    address.keep("depth", f"ranges.depth.{kind}", str(depth) if depth != at_first else "")
    if not matching:
        empty.nothing(f"No layer matches all of these words: {words.escape(asked)}.")
    return matching, depth


def pick_column(run: Run, kind: str, names: list[str], depth: int) -> str:
    """What the heatmap over the steps shows, one of `OVER_STEPS`."""
    shares = _over_steps(run, kind, names, depth)
    at_first = "subnormal_frac" if (shares["subnormal_frac"] > 0).any() else "absmax"
    key = f"ranges.over.{at_first}"
    return address.choose("over", "Over the steps", list(OVER_STEPS), at_first, key, format_func=OVER_STEPS.get)


def over_steps(run: Run, kind: str, names: list[str], depth: int, shown: str) -> None:
    """A heatmap of the column `shown` of the tensors over steps: a cell for each sampled step, which can be clicked."""
    shares = _over_steps(run, kind, names, depth)
    dark = charts.dark()
    title = f"{words.KIND_LABELS[kind]} over steps: {OVER_STEPS[shown]}"
    figure = with_marks(step_heatmap(shares, shown, dark, title), loaders.analysed(step_marks, run), dark=dark)
    clicked = clicks.points(charts.show(figure, "ranges.steps", clicks=True, half=True), f"ranges.steps.{kind}")
    pooled = shares["until"] > shares["step"]
    if pooled.any():
        st.caption("A column covers several sampled steps and shows the largest value.")
    for point in clicked[:1]:
        if not isinstance(point["y"], str):  # a mark of a skipped step or a phase, not of a tensor
            continue
        cell = shares[(shares["name"] == point["y"]) & (shares["step"] == int(float(point["x"])))]
        last = int(cell["until"].iloc[0]) if len(cell) else int(float(point["x"]))
        go(kind, point["y"], (int(float(point["x"])), last))


def _over_steps(run: Run, kind: str, names: list[str], depth: int) -> pd.DataFrame:
    rows = len({folded_name(name, depth) for name in names})
    chosen = frozenset(names) if len(names) < len(loaders.analysed(tensor_names, run, kind)) else None
    return loaders.analysed(shares_over_steps, run, kind, depth, chosen, max_steps=max(8, MAX_CLICKABLE_CELLS // rows))


def against_baseline(run: Run, kind: str, names: list[str], depth: int) -> None:
    """Where the tensors' values differ from the baseline's by more than its noise; nothing without a baseline."""
    bases = baseline.repeats()
    if not bases:
        return
    base = words.escape(bases[0].name)
    if kind not in loaders.analysed(kinds_present, bases[0]):
        st.caption(f"{base} sampled no {words.KIND_LABELS[kind].lower()} to compare with.")
        return
    chosen = frozenset(names) if len(names) < len(loaders.analysed(tensor_names, run, kind)) else None
    changes = loaders.analysed(exponent_changes, [*bases, run], kind, depth, chosen)
    changed = changed_tensors(changes)
    left, right = charts.grid("ranges.baseline")
    with left:
        title = f"{words.KIND_LABELS[kind]}: difference from {bases[0].name}"
        figure = exponent_change_heatmap(changes, bases[0].name, charts.dark(), title)
        clicked = clicks.points(charts.show(figure, "ranges.change", clicks=True, half=True), f"ranges.change.{kind}")
    with right:
        st.markdown(change_in_words(changes, changed, base))
        if len(changed):
            tables.show(
                changed.assign(exponent=[words.scale(2.0**e) for e in changed["exponent"]]),
                column_config=CHANGE_COLUMNS,
                column_order=list(CHANGE_COLUMNS),
                alt=f"Tensors whose values differ from {bases[0].name} by more than its noise.",
            )
    for point in clicked[:1]:
        go(kind, str(point["y"]), None)


def change_in_words(changes: pd.DataFrame, changed: pd.DataFrame, base: str) -> str:
    """How many tensors differ from the baseline `base` by more than its noise, and which one the most."""
    if not len(changes):
        return f"{base} sampled none of these tensors at the same steps."
    shown = changed[changed["moved_frac"] >= MIN_SHOWN_FRAC]
    tensors = words.plural(changes["name"].nunique(), "tensor")
    share = words.number(100 * MIN_SHOWN_FRAC, "%", 1)
    if not len(shown):
        return f"None of {tensors} differs from {base} by more than its noise in {share} of the elements or more."
    most, flushed = shown.iloc[0], shown.nsmallest(1, "nonzero_change").iloc[0]
    text = (
        f"**{len(shown):,} of {tensors} differ{'s' * (len(shown) == 1)} from {base}** by more than its noise, in "
        f"{share} of the elements or more. Largest difference: {words.escape(most['name'])}, where "
        f"{words.percent(most['moved_frac'])} of the elements have a different exponent"
    )
    if flushed["nonzero_change"] <= -MIN_SHOWN_FRAC:
        less = words.percent(-flushed["nonzero_change"])
        fewer = (f"{less} fewer are nonzero", f"has {less} fewer nonzero elements")
        text += (
            f" and {fewer[0]}" if flushed["name"] == most["name"] else f". {words.escape(flushed['name'])} {fewer[1]}"
        )
    return words.unbroken(f"{text}.")


def go(kind: str, name: str, steps: tuple[int, int] | None) -> None:
    """Callback of a row: unfold a module, or open a tensor in Layer detail."""
    if name.endswith(".*"):
        st.session_state["ranges.unfold"] = name.removesuffix("*")
        st.rerun()
    tensor.jump(kind, name, steps)


def table(classes: pd.DataFrame, kind: str) -> list[str]:
    """The classes of each tensor in numbers; returns the names of the rows that were just clicked."""
    key = f"ranges.table.{kind}"
    event = tables.show(
        classes.assign(exponents=[span(e.exp_low, e.exp_high) for e in tables.rows(classes)]),
        column_config=CLASS_COLUMNS,
        column_order=[column for column in CLASS_COLUMNS if column != "tensors" or (classes["tensors"] > 1).any()],
        key=key,
        on_select="rerun",
        selection_mode="single-row",
        alt="Class shares and magnitudes per tensor.",
    )
    return [str(classes["name"].iloc[row]) for row in clicks.rows(event, key, len(classes))]


def span(low: float, high: float) -> str:
    """Lowest and highest exponent as powers of two."""
    return f"{words.scale(2.0**low)} to {words.scale(2.0**high)}" if low == low else words.NONE
