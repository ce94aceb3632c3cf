"""8 and 4 bits: fields, the answer, the table of layers, the code, and audits beside predictions."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from amp_core import Run, RunError
from amp_core.analysis import kinds_present
from amp_core.analysis.comparison.mean_change import layer_error_changes
from amp_core.analysis.numerics.audits import quantized_audits
from amp_core.analysis.numerics.layer_choice import LIMIT, Choice, choose, in_db
from amp_core.analysis.numerics.layer_choice_code import FRAMEWORKS, code_for, train_flags
from amp_core.analysis.numerics.layers import tensor_names
from amp_core.figures import difference_figure
from amp_core.quantization import RECIPES, Recipe
from pages.parts import address, baseline, charts, clicks, empty, loaders, tables, words
from pages.parts.numbers import tensor

DEFAULT = ["mxfp8-e4m3", "nvfp4"]
HOW = (
    "Record blocks with `watch(…, blocks=True)` in your own loop, or `ampscope train … --blocks`; BF16 or FP32 runs on "
    "any machine will do. The losses stay the same bit for bit."
)
ABOUT = (
    "Predicted, not measured: the error of each layer's worst product (forward, input gradient, weight gradient), in "
    "dB, the larger the better. The most harmful layers come first: those that are predicted to change the loss most "
    "if they alone are quantized, from their rounding errors and the gradients of the second half of the run. Click a "
    "cell, or the start of a row of the table, to see its tensor over time."
)
PRODUCTS = {"forward": "forward", "input_grad": "input gradient", "weight_grad": "weight gradient"}
COLUMNS = {
    "layer": st.column_config.TextColumn("Layer", pinned=True, width=190),
    "format": st.column_config.TextColumn("Format", width=110),
    "rank": tables.count("Rank", width=60, help_="By predicted harm, 1 the most harmful"),
    "rel_error": tables.measured("Relative error", width=90, help_="Of the worst product"),
    "rel_error_db": tables.measured("dB", width=60, help_="The same: the larger, the better"),
    "goes": st.column_config.TextColumn("Runs in", width=110, help="Under the limit"),
    "product": st.column_config.TextColumn("Worst product", width=110),
    "operand": st.column_config.TextColumn("Worse operand", width=110),
    "flops_frac": tables.share("GEMM FLOPs", help_="Share of all GEMM FLOPs"),
}
MEASURED = {
    "name": st.column_config.TextColumn("Weight", pinned=True, width=240),
    "format": st.column_config.TextColumn("Format", width=110),
    "predicted": tables.measured("Predicted error", width=110, help_="Of the weight gradient's product alone"),
    "rel_error": tables.measured("Measured error", width=110, help_="Of the gradient, all layers quantized at once"),
    "cosine": st.column_config.NumberColumn("Measured cosine", width=110, format="%.4f"),
    "loss_change": st.column_config.NumberColumn("Loss change", width=100, format="%.3g", help="Of the batch"),
    "step": tables.count("Step", width=70),
}


def not_recorded(run: Run) -> None:
    """Say why the run has no blocks, if known, and how to record them. Ends the page."""
    events = run.events
    reasons = events.loc[(events["name"] == "not recorded") & events["detail"].str.startswith("blocks: "), "detail"]
    lead = "This run was recorded without blocks, so its errors in 8 and 4 bits cannot be predicted"
    if not len(reasons):
        empty.nothing(f"{lead}. {HOW}", run=run, tables=("blocks",))
    reason = words.sentence(str(reasons.iloc[-1]).removeprefix("blocks: "))
    empty.nothing(f"{lead}: {words.escape(reason)} {HOW}", run=run, tables=("blocks",))


def pick_formats() -> list[str]:
    """The recipes to show, in the order of `RECIPES`."""
    known = list(RECIPES)
    address.take("formats", "low.formats", address.several(known), DEFAULT)
    chosen = st.pills(
        "Formats", known, selection_mode="multi", format_func=lambda name: RECIPES[name].label, key="low.formats"
    )
    address.keep("formats", "low.formats", ",".join(chosen) if chosen != DEFAULT else "")
    return [name for name in known if name in chosen]


def pick_limit() -> str:
    """The limit, as typed."""
    address.take("limit", "low.limit", str, f"{LIMIT:g}")
    typed = st.text_input(
        "Largest error", key="low.limit", max_chars=20, width=140, help="A relative error such as 0.1, or 20dB"
    )
    address.keep("limit", "low.limit", typed if typed != f"{LIMIT:g}" else "")
    return typed


def choices(errors: pd.DataFrame, recipes: Sequence[Recipe], limit: float) -> list[Choice]:
    """What goes to each recipe."""
    return [choose(errors, recipe, limit) for recipe in recipes]


def headline(chosen: Sequence[Choice]) -> str:
    """The page's answer."""
    parts = []
    for choice in chosen:
        layers = len(choice.go) + len(choice.stay)
        known = choice.flops_frac == choice.flops_frac
        share = f" ({words.percent(choice.flops_frac)} of GEMM FLOPs)" if known and choice.go else ""
        worst = f"; {words.escape(choice.stay[0])} first of all stays in BF16" if choice.go and choice.stay else ""
        count = f"all {words.plural(layers, 'linear layer')}" if not choice.stay else f"{len(choice.go)} of {layers}"
        parts.append(f"{count if choice.go else 'no layer'} can go to {choice.recipe.label}{share}{worst}")
    limit = chosen[0].limit
    text = "; ".join(parts)
    return f"Predicted: {text}. The limit is a relative error of {limit:.3g} ({in_db(limit):.1f} dB)."


def against_baseline(run: Run, recipes: tuple[Recipe, ...]) -> None:
    """By how much each layer's predicted error differs from the baseline's, with its noise; nothing without a
    baseline."""
    bases = baseline.repeats()
    if not bases:
        return
    base = bases[0].name
    if bases[0].blocks.empty:
        st.caption(f"{words.escape(base)} was recorded without blocks, so errors cannot be compared with it.")
        return
    try:
        changes = loaders.analysed(layer_error_changes, [*(b for b in bases if len(b.blocks)), run], recipes)
    except RunError as error:
        st.caption(f"Errors cannot be compared with {words.escape(base)}: {words.escape(words.sentence(error))}")
        return
    labels = [f"{row.layer or 'the model'}, {RECIPES[row.format].label}" for row in tables.rows(changes)]
    named = changes.assign(name=labels)
    what = "predicted error"
    st.markdown(baseline.changes_in_words(named, base, "product", what, words.number))
    title = f"Difference in {what}"
    charts.show(difference_figure(named, base, "difference in relative error", charts.dark(), title), "low.change")


def table(errors: pd.DataFrame, limit: float) -> list[tuple[str, str]]:
    """The errors in numbers; returns layer and recipe of the row that was just clicked."""
    labels = [RECIPES[name].label for name in errors["format"]]
    goes = [label if error <= limit else "BF16" for label, error in zip(labels, errors["rel_error"], strict=True)]
    shown = errors.assign(
        format=labels,
        goes=goes,
        product=errors["product"].map(PRODUCTS),
        operand=errors["operand"].str.replace("_", " "),
    )
    with st.expander("Errors in numbers"):
        event = tables.show(
            shown,
            column_config=COLUMNS,
            column_order=list(tables.known(shown, COLUMNS)),
            key="low.table",
            on_select="rerun",
            selection_mode="single-row",
            alt="Predicted errors of linear layers by format.",
        )
    return [(errors["layer"].iloc[i], errors["format"].iloc[i]) for i in clicks.rows(event, "low.table", len(errors))]


def go(run: Run, errors: pd.DataFrame, layer: str, name: str) -> None:
    """Open the worse operand of a layer in Layer detail, or another tensor of that layer that was sampled."""
    row = errors[(errors["layer"] == layer) & (errors["format"] == name)].iloc[0]
    weights = f"{layer}.weight" if layer else "weight"
    wanted = [(row["operand"], row["tensor"]), ("weight_grad", weights), ("output_grad", layer)]
    kinds = loaders.analysed(kinds_present, run)
    for kind, tensor_name in wanted:
        if kind in kinds and tensor_name in loaders.analysed(tensor_names, run, kind):
            tensor.jump(kind, tensor_name)
    st.info(f"No tensor of {words.escape(layer)} was sampled over time.", icon=":material/info:")


def code(chosen: Sequence[Choice]) -> None:
    """The choice as code."""
    st.header("As code", anchor=False)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        by_name = {choice.recipe.name: choice for choice in chosen}
        names = list(by_name)
        key = f"low.code.{'.'.join(names)}"
        name = address.choose("code", "Train in", names, names[-1], key, format_func=lambda n: RECIPES[n].label)
        library = address.choose(
            "library", "With", list(FRAMEWORKS), "torchao", "low.library", format_func=FRAMEWORKS.__getitem__
        )
    st.code(code_for(library, by_name[name]), language="python", wrap_lines=True)
    if given := train_flags(by_name[name]):
        st.markdown("With `ampscope train` and the settings of your run:")
        st.code(f"ampscope train … {given}", language="bash", wrap_lines=True)
    _forecast(by_name[name])


def _forecast(choice: Choice) -> None:
    """A link to Forecast with the share of GEMM FLOPs that may take so few bits."""
    percent = round(100 * choice.flops_frac) if choice.flops_frac > 0 else 0  # NaN if not recorded
    if not percent:
        return
    bits = 4 if choice.recipe.element.bits <= 4 else 8  # six bits have the rate of eight
    st.page_link(
        "pages/gpu_forecast.py",
        label=f"Forecast with {percent} % of GEMM FLOPs in {bits} bits",
        icon=":material/query_stats:",
        query_params={"run": st.session_state["run"], f"fp{bits}": str(percent)},
    )


def measured(run: Run) -> None:
    """Audits in these recipes beside the predictions."""
    st.header("Measured", anchor=False)
    rows = quantized_audits(run)
    if rows.empty:
        st.markdown(
            "All numbers above are predictions. To measure, call `rec.audit(lambda: loss_fn(model(x), y), "
            'precision="nvfp4")` in the loop: it replays a batch with the GEMMs of all linear layers quantized.'
        )
        return
    shown = rows.assign(format=[RECIPES[name].label for name in rows["precision"]])
    changes = shown.drop_duplicates(["step", "format"])
    st.markdown(
        "Audits replayed a batch in FP32 with the products of all linear layers on quantized operands. Loss of the "
        "batch: " + "; ".join(f"{r.format} {r.loss_change:+.3g} at step {r.step:,}" for r in tables.rows(changes)) + "."
    )
    tables.show(shown, column_config=MEASURED, column_order=list(MEASURED), alt="Measured errors of weight gradients.")
    st.caption(
        "The prediction is of the weight gradient's own product. The measured error also has what comes from the other "
        "layers, forward and backward, and is relative to a gradient in which tokens may cancel: it is larger."
    )
