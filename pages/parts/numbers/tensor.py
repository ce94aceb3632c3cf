"""One tensor: choosing it, its address, its history as text, and predictions for it."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from amp_core import Run
from amp_core.analysis import kinds_present, what_if
from amp_core.analysis.numerics.layers import (
    MAX_SUBNORMAL_FRAC,
    LayerHealth,
    layer_exponents,
    layer_trace,
    tensor_names,
)
from amp_core.findings import Origin
from amp_core.formats import FORMATS
from pages.parts import address, loaders, tables, words
from pages.parts.choice import one_of
from pages.parts.diagnosed import chain

PAGE = "pages/layer_detail.py"
SCALED = ("weight_grad", "output_grad")
"""Kinds of tensors that are multiplied by the loss scale."""
AROUND = 50
"""Steps shown before and after a step that was clicked."""
SCALES = (0, 4, 8, 12, 16, 20, 24)
"""log2 of the loss scales in the table of predictions."""

COLUMNS = {
    "format": st.column_config.TextColumn("Format", pinned=True, width=70),
    "scale": st.column_config.TextColumn("Loss scale", width=80),
    "underflow_frac": tables.share("Lost: elements", help_="Nonzero values that become 0"),
    "underflow_mass_frac": tables.share("Lost: mass", help_="The share of the mass Σ|x| that those carried"),
    "subnormal_frac": tables.share("Subnormal", help_="Nonzero that lose bits"),
    "overflow_frac": tables.share("Overflow", help_="Nonzero that become infinite or NaN"),
}


def pick(run: Run, kinds: Sequence[str], origin: Origin | None = None) -> tuple[str, str]:
    """Kind and name of the tensor: from the address if that changed, else as chosen here for this run, else the one
    where its fault began."""
    asked = (st.query_params.get("kind"), st.query_params.get("layer"))
    new = asked != (None, None) and asked != st.session_state.get("layer.address")
    kind, name = asked if new else (st.session_state.get("layer.kind"), st.session_state.get("layer.name"))
    if not new and origin is not None and st.session_state.get("layer.run") != st.session_state["run"]:
        kind, name = origin.kind or _kind_near(run, origin.name, kinds) or kind, origin.name
    st.session_state["layer.run"] = st.session_state["run"]
    order = [k for k in words.KIND_LABELS if k in kinds]
    if new and kind and kind not in order:
        address.refuse("kind", kind)
    address.set_value("layer.kind", kind if kind in order else order[0])
    with st.container(horizontal=True, vertical_alignment="bottom"):
        label_of = words.KIND_LABELS.__getitem__
        kind = one_of("Values of", order, "layer.kind", format_func=label_of, persist_state="session")
        names = loaders.analysed(tensor_names, run, kind)
        if new and name and not near(name, names):
            address.refuse("layer", name)
        address.set_value("layer.name", same(name, names))
        name = st.selectbox("Tensor", names, key="layer.name", persist_state="session")
    st.query_params["kind"], st.query_params["layer"] = st.session_state["layer.address"] = (kind, name)
    return kind, name


def _kind_near(run: Run, name: str, kinds: Sequence[str]) -> str | None:
    """The first kind under which a tensor of that name or module was sampled."""
    shown = [k for k in words.KIND_LABELS if k in kinds]
    return next((k for k in shown if near(name, loaders.analysed(tensor_names, run, k))), None)


def same(name: str | None, names: Sequence[str]) -> str:
    """The tensor of that name; if there is none of this kind, one of the same module, else the first."""
    if name in names:
        return str(name)
    return (near(name or "", names) or names)[0]


def near(name: str, names: Sequence[str]) -> list[str]:
    """The tensors of that name or of the same module."""
    return [n for n in names if n == name or (name and (n.startswith(f"{name}.") or name.startswith(f"{n}.")))]


def where(run_key: str, kind: str, name: str, steps: tuple[int, int] | None = None) -> dict[str, str]:
    """The address of this tensor and of the steps around the given ones."""
    query = {"run": run_key, "kind": kind, "layer": name}
    if steps is not None:
        first, last = steps
        room = max(AROUND, last - first)
        query["steps"] = f"{max(0, first - room)}-{last + room}"
    return query


def link(run_key: str, kind: str, name: str, steps: tuple[int, int] | None = None) -> None:
    """A link that opens this tensor."""
    st.page_link(
        PAGE,
        label=f"Open {words.escape(name)}",
        icon=":material/query_stats:",
        query_params=where(run_key, kind, name, steps),
    )


def jump(kind: str, name: str, steps: tuple[int, int] | None = None) -> None:
    """Open this tensor of the chosen run, with the limits of the same formats; ends the pass."""
    same_limits = {"format": st.query_params["format"]} if "format" in st.query_params else {}
    st.switch_page(PAGE, query_params=where(st.session_state["run"], kind, name, steps) | same_limits)


def headline(name: str, kind: str, health: LayerHealth, dtype: str) -> str:
    """What first went wrong with the tensor, and at which step."""
    what = f"{words.escape(name)} ({words.KIND_LABELS[kind].lower()}, {words.escape(dtype)})"
    sampled = words.plural(health.samples, "sampled step")
    sentence = []
    if health.first_nonfinite is not None:
        sentence.append(
            f"first held infinities or NaN at step {health.first_nonfinite:,}, and at {health.nonfinite_samples:,} of "
            f"{sampled} in total"
        )
    if health.first_subnormal is not None:
        sentence.append(
            f"first had more than {words.number(100 * MAX_SUBNORMAL_FRAC, '%', 1)} subnormal values at step "
            f"{health.first_subnormal:,}, {words.percent(health.worst_subnormal_frac)} at worst"
        )
    if health.first_all_zero is not None:
        sentence.append(f"was first all zeros at step {health.first_all_zero:,}")
    if not sentence:
        worst = health.worst_subnormal_frac
        few = f"at most {words.percent(worst)} of its values subnormal" if worst > 0 else "none of its values subnormal"
        return f"{what} was finite at all {sampled}, {few}."
    return f"{what} {'; it '.join(sentence)}."


def predicted(run: Run, kind: str) -> list[pd.DataFrame]:
    """`what_if` for all tensors of a kind: in 16 bits at several loss scales, in FP8 at each tensor's own scale."""
    scales = SCALES if kind in SCALED else (0,)
    return [
        loaders.analysed(what_if, run, narrow("loss"), scales, (kind,)),
        loaders.analysed(what_if, run, narrow("tensor"), (0,), (kind,)),
    ]


def narrow(scaled_by: str) -> tuple[str, ...]:
    """Formats of 16 bits or fewer that training scales by the `loss` scale, or by a scale per `tensor`."""
    return tuple(f.name for f in FORMATS.values() if f.narrow and f.scaling.by == scaled_by)


def prepare(run: Run) -> None:
    """Run the analyses that the page needs first."""
    kinds = loaders.analysed(kinds_present, run)
    for kind in [kind for kind in words.KIND_LABELS if kind in kinds][:1]:
        name = loaders.analysed(tensor_names, run, kind)[0]
        origin = chain(run).origin
        if origin is not None:
            kind, name = origin.kind or _kind_near(run, origin.name, [kind]) or kind, origin.name
        steps = loaders.analysed(layer_trace, run, kind, name)["step"].tolist()
        loaders.analysed(layer_exponents, run, kind, name, true_exponents=False, within=(steps[0], steps[-1]))
        predicted(run, kind)


def predictions(frames: Sequence[pd.DataFrame], name: str) -> pd.DataFrame:
    """The rows of `what_if` for this tensor as text."""
    rows = pd.concat([frame[frame["name"] == name] for frame in frames], ignore_index=True)
    scales = zip(rows["format"], rows["log2_scale"], rows["own_scale"], strict=True)
    own = [
        f"its own, {FORMATS[form].max_value:g} / amax = {scale:.3g}"
        if FORMATS[form].scaling.by == "tensor"
        else power_of_two(power)
        for form, power, scale in scales
    ]
    shown = rows.assign(format=[FORMATS[f].label for f in rows["format"]], scale=own)
    return shown[list(COLUMNS)]


def power_of_two(exponent: int) -> str:
    """A loss scale, given as its exponent, as text."""
    return words.raised(f"2^{exponent}")


def about_predictions(frames: Sequence[pd.DataFrame], name: str, kind: str, health: LayerHealth) -> str:
    """What kind of statement the table makes, and its caveats."""
    sentence = "Predicted from the recorded histograms, all sampled steps together; FP8 with a scale for each tensor."
    if kind not in SCALED:
        sentence += " A loss scale does not multiply these values."
    rows = pd.concat([frame[frame["name"] == name] for frame in frames])
    if not rows["rounded"].all():
        sentence += " Autocast keeps this tensor in FP32, so nothing is lost."
    if health.first_subnormal is not None:
        worst = words.percent(health.worst_subnormal_frac)
        sentence += (
            f" Up to {worst} of it was subnormal when recorded: what lay below was lost before it could be counted."
        )
    return sentence
