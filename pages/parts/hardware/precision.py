"""The precision map as text, cards and tables."""

from typing import Any

import pandas as pd
import streamlit as st

from amp_core import Run
from amp_core.analysis import PrecisionMap, format_labels, precision_disagreements
from amp_core.formats import FORMATS
from amp_core.hardware.autocast_ops import POLICIES, READ_AT
from pages.parts import address, empty, tables, words
from pages.parts import cards as card_parts
from pages.parts.hardware.precision_columns import CASTS, ELSEWHERE, ISLANDS, MODULES, OPS, SETTINGS, STAYED

HOW = (
    "Record one with `watch(…, trace_ops=2)` in your own loop, or `ampscope train … --trace-ops`: every operator of "
    "one step, with what autocast decided. The losses stay the same bit for bit."
)
WITHOUT_POLICIES = (
    "This trace was written by a profiler, which does not record what autocast decided: casts by their cause, FP32 "
    f"islands and reasons are not known. {HOW}"
)
TOGETHER = ["automatic", "alike as one", "each"]
DEVICES = {"cpu": "a CPU", "cuda": "a GPU"}
CAUSES = {
    "autocast": "autocast",
    "code": "Python code: .to, .float, …",
    "operator": "an operator, inside",
    "gradient": "backward of a cast",
}


def not_recorded(run: Run) -> None:
    """Say why the run has no trace, if known, and how to record one. Ends the page."""
    events = run.events
    reasons = events.loc[(events["name"] == "not recorded") & events["detail"].str.startswith("operators: "), "detail"]
    reason = str(reasons.iloc[-1]).removeprefix("operators: ") if len(reasons) else ""
    lead = "No operators of this run were traced"
    sentence = f"{lead}: {words.escape(words.sentence(reason))} {HOW}" if reason else f"{lead}. {HOW}"
    empty.nothing(sentence, sample=True, run=run, tables=("ops",))


def pick_step(steps: list[int]) -> int | None:
    """The traced step to show; None if there is only one."""
    if len(steps) < 2:
        return None
    key = f"precision.step.{len(steps)}"
    address.take("step", key, address.whole(steps), steps[0])
    choice = st.selectbox("Traced step", steps, format_func=lambda s: f"{s:,}", key=key)
    address.keep("step", key, str(choice) if choice != steps[0] else "")
    return int(choice) if choice is not None else None


def pick_cells(view: PrecisionMap) -> tuple[str, bool | None]:
    """The phase to show, and whether modules that differ only in a number are folded (None: if there are many)."""
    phases = [p for p in ("forward", "backward", "optimizer") if (view.ops["phase"] == p).any()] or ["forward"]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        phase = address.choose("phase", "Phase", phases, phases[0], f"precision.phase.{phases[0]}")
        help_ = "`h.*.attn` stands for `h.0.attn`, `h.1.attn` and so on."
        shown = address.choose("modules", "Modules", TOGETHER, TOGETHER[0], "precision.together", help=help_)
    return phase, {"alike as one": True, "each": False}.get(shown)


def headline(view: PrecisionMap) -> str:
    """The page's answer."""
    if not view.matrix_frac and view.unknown_calls:
        return (
            f"This trace does not record in which dtype its {words.count(view.unknown_calls)} GEMM/conv operators "
            "ran: it was recorded without shapes."
        )
    if not view.matrix_frac:
        return f"This step multiplied no matrices; {words.plural(view.calls, 'operator')} ran."
    narrow = {name: share for name, share in view.matrix_frac.items() if name in FORMATS and FORMATS[name].narrow}
    where = f" on {DEVICES[view.device]}" if view.device in DEVICES else ""
    share = words.percent(sum(narrow.values()))
    if view.has_policies and view.autocast is None:
        if narrow:
            return f"There was no autocast in this step: the model itself is in {_formats(narrow)}, {share} of its "\
                   f"GEMM/conv ran in it{where}."  # fmt: skip
        return f"There was no autocast in this step: all GEMM/conv ran in {_formats(view.matrix_frac)}{where}."
    text = f"{share} of GEMM/conv ran in {_formats(narrow) or '16 bits'}{where}"
    if view.tf32_frac:
        text += f", {words.percent(view.tf32_frac)} of its kernel time in TF32, on tensor cores"
    count = int(view.stayed["modules"].sum())
    if not count:
        return f"{text}; no operator on autocast's 16-bit list stayed in FP32."
    ops = ", ".join(words.escape(op) for op in view.stayed["op"].unique()[:3])
    if not view.has_policies:
        return f"{text}; {words.plural(count, 'operator')} ({ops}) ran in FP32, which autocast would run in 16 bits."
    one = view.stayed["why"].nunique() == 1
    why = f": {words.escape(words.sentence(view.stayed['why'].iloc[0]))}" if one else "."
    return (
        f"{text}; {words.plural(count, 'operator')} ({ops}) stayed in FP32 although autocast has a 16-bit version{why}"
    )


def cards(view: PrecisionMap) -> None:
    """The numbers at the top."""
    made = view.casts[view.casts["cast_by"] == "autocast"]
    waste = view.casts[["repeated", "undone"]].sum().sum()
    left, right = card_parts.pairs()
    with left:
        region = label(view.autocast) if view.autocast else ("off" if view.has_policies else words.NONE)
        lists = f"{view.device.upper()} lists" if view.device else "device unknown"
        card_parts.card("Autocast", region, lists, help_=f"The lists of {READ_AT}; those of CPU and CUDA differ.")
        shares = [f"{words.percent(share)} {label(name)}" for name, share in view.matrix_frac.items()]
        if view.tf32_frac and shares and next(iter(view.matrix_frac)) == "fp32":
            shares = [f"{words.percent(view.tf32_frac)} TF32", f"FP32 operators: {shares[0]}", *shares[1:]]
        card_parts.card(
            "GEMM/conv",
            shares[0] if shares else words.NONE,
            ", ".join([*shares[1:3], f"by {view.weighed_by}"]),
            help_="Products of matrices, convolutions, attention, recurrent layers; forward and backward.",
        )
    if not view.has_policies:
        return
    with right:
        card_parts.card(
            "Casts by autocast",
            words.count(made["count"].sum()),
            f"{words.size(made['bytes'].sum())}, {words.count(view.cache_hits)} × from cache",
            help_="Bytes written in this step, and how often an operator reused a 16-bit copy of a weight from "
            "autocast's cache. The gradients of casts in backward are not counted.",
        )
        total = int(view.casts["count"].sum())
        card_parts.card(
            "Redundant casts",
            words.count(waste),
            f"of {words.count(total)} casts of all kinds",
            help_="Of a tensor that had been cast before, or of a cast's result back again.",
        )


def about_map(view: PrecisionMap, cells: pd.DataFrame) -> str:
    """What the map shows and omits."""
    traced = f"Step {view.step:,}, " if view.step is not None else ""
    folded = (
        " A name with \\* stands for all modules that differ in that number." if (cells["members"] > 1).any() else ""
    )
    ops = cells["op"].nunique()
    return (
        f"{traced}{words.count(view.calls)} operators in all. The map shows {words.plural(ops, 'kind')} of operator: "
        f"GEMM/conv, those on autocast's lists, and the most called.{folded} A cell shows the format of the inputs for "
        "matrix products, and of the result for other operators. FP32 may include TF32."
    )


def stayed(view: PrecisionMap) -> None:
    """Operators that ran in FP32 without need."""
    if view.stayed.empty or (view.autocast is None and view.has_policies):
        return
    st.header("FP32, although autocast has a 16-bit version", anchor=False)
    show(view.stayed, STAYED, "Operators that ran in FP32 though autocast has them in 16 bits, by module and reason.")


def settings(asked: pd.DataFrame) -> None:
    """What the program asked of each stage's precision, beside what was seen; nothing for runs that recorded
    neither."""
    if asked.empty:
        return
    st.header("Requested and observed precision", anchor=False)
    for sentence in precision_disagreements(asked):
        st.warning(words.escape(sentence), icon=":material/warning:")
    table = asked.assign(asked=asked["asked"].map(format_labels), seen=asked["seen"].map(format_labels))
    show(table, SETTINGS, "The requested and the observed precision in each stage of the first step.")


def elsewhere(view: PrecisionMap) -> None:
    """Operators that a GPU would run in another precision."""
    if view.device != "cpu" or not view.has_policies or view.autocast is None:
        return
    st.header("What CUDA's autocast would decide differently", anchor=False)
    if view.elsewhere.empty:
        st.caption(f"Nothing in this step: CUDA's lists ({READ_AT}) lead to the same formats.")
        return
    st.caption(
        f"This step ran on a CPU, whose autocast lists differ from CUDA's ({READ_AT}). "
        "Operators on neither list run in the format of their inputs, so they may change as well."
    )
    table = view.elsewhere.assign(
        ran=view.elsewhere["ran"].map(label), would_run=view.elsewhere["would_run"].map(label)
    )
    show(table, ELSEWHERE, "Operators that CUDA's autocast would run in another format.")


def casts(view: PrecisionMap) -> None:
    """Casts by cause."""
    if not view.has_policies:
        return
    st.header("Casts", anchor=False)
    if view.casts.empty:
        st.caption("This step changed no floating-point tensor from one dtype to another.")
        return
    table = view.casts.assign(
        cause=view.casts["cast_by"].map(lambda by: CAUSES.get(by, by)),
        way=[
            f"{label(a)} → {label(b)}" for a, b in zip(view.casts["from_format"], view.casts["to_format"], strict=True)
        ],
        kib=view.casts["bytes"] / 1024,
    )
    st.caption(
        f"{words.size(view.casts['bytes'].sum())} were written by casts in this step. A weight is cast once in a "
        "region and then taken from autocast's cache; an activation is cast again for each operator that reads it."
    )
    show(table, CASTS, "Casts by cause, direction and phase, with their number and bytes.")


def islands(view: PrecisionMap) -> None:
    """Modules that run in FP32 inside an autocast region."""
    if not view.has_policies or view.autocast is None:
        return
    st.header("FP32 islands inside autocast", anchor=False)
    if view.islands.empty:
        st.caption("None: no list and no disabled region kept an operator in FP32.")
        return
    table = view.islands.assign(kib=view.islands["cast_bytes"] / 1024)
    show(table, ISLANDS, "Modules with operators in FP32 inside autocast, and why.")


def details(view: PrecisionMap) -> None:
    """All operators, and the module tree."""
    with st.expander("All operators and modules"):
        by_op, by_module = st.tabs(["By operator", "By module"])
    with by_op:
        known = "; ".join(f"`{name}` {text}" for name, text in POLICIES.items())
        if view.has_policies:
            st.caption(
                f"Policies: {known}; `none`: in no list, runs in the dtype of its inputs; `not applied`: listed, but "
                "called in a way that autocast did not reach. Backward follows the dtypes that forward chose."
            )
        inputs = [", ".join(map(label, text.split(", "))) if text else "" for text in view.ops["in_dtypes"]]
        table = _measured(view.ops).assign(ran=view.ops["ran"].map(label), in_dtypes=inputs)
        table["out_dtype"] = view.ops["out_dtype"].map(label)
        show(table, OPS, "All traced operators.")
    with by_module:
        deepest = int(view.modules["depth"].max()) if len(view.modules) else 0
        depth = st.slider("Depth", 0, deepest, min(2, deepest), key=f"precision.depth.{deepest}") if deepest else 0
        tree, indent = view.modules[view.modules["depth"] <= depth], "\u2003"
        names = [indent * (d - 1) + name for name, d in zip(tree["module"], tree["depth"], strict=True)]
        table = _measured(tree).assign(module=names)
        show(table, MODULES, "The tree of modules with their GEMM/conv operations and casts.")


def show(table: pd.DataFrame, columns: dict[str, Any], alt: str) -> None:
    """A table of the columns that hold any value; an unknown text is an en dash."""
    known = tables.known(table, columns)
    texts = [name for name in known if not pd.api.types.is_numeric_dtype(table[name])]
    table = table.assign(**{name: table[name].fillna(words.NONE).replace("", words.NONE) for name in texts})
    tables.show(table, column_config=known, column_order=list(known), alt=alt)


def label(name: object) -> str:
    """A format as the app writes it: FP16, BF16."""
    if not isinstance(name, str) or not name:  # unknown in a trace without shapes
        return words.NONE
    return FORMATS[name].label if name in FORMATS else name.upper()


def _measured(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(mflop=table["flops"] / 1e6, kib=table["cast_bytes"] / 1024)


def _formats(shares: dict[str, float]) -> str:
    return " and ".join(label(name) for name in shares)
