"""The effect of other loss scales, predicted from recorded counts, and what audits measured."""

import math
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from amp_core import Run, RunError
from amp_core.analysis import (
    SafeWindow,
    predicted_and_audited,
    safe_window,
    scale_summary,
    what_if,
    whole_model,
)
from amp_core.analysis.numerics.what_if import MAX_SOURCE_UNDERFLOW_FRAC
from amp_core.figures import underflow_figure
from amp_core.findings import measured_underflow
from amp_core.formats import FORMATS
from pages.parts import address, charts, glossary, loaders, tables, words
from pages.parts.numbers import tensor

LOWEST, HIGHEST = -10, 40
AUDIT_COLUMNS = {
    "step": tables.count("Step"),
    "name": st.column_config.TextColumn("Tensor", pinned=True),
    "scale": st.column_config.TextColumn("Loss scale"),
    "predicted_frac": tables.share("Predicted, of elements", width=150),
    "audited_frac": tables.share("Measured, of elements", width=150),
    "predicted_mass_frac": tables.share("Predicted, of mass", width=130),
    "audited_mass_frac": tables.share("Measured, of mass", width=130),
    "cosine": st.column_config.NumberColumn("Cosine to FP32", format="%.5f"),
}


def show(run: Run, kind: str, form: str, names: Sequence[str]) -> None:
    """A slider for the loss scale, and the predicted underflow and overflow of these tensors."""
    if kind not in tensor.SCALED:
        st.caption(f"A loss scale multiplies gradients; {words.KIND_LABELS[kind].lower()} stay as they are.")
        return
    every = at_all_scales(run, kind, form)
    key, own = f"ranges.scale.{st.session_state['run']}", starting(run)
    address.take("scale", key, power_in_range, own)
    power = st.select_slider(
        "Loss scale",
        range(LOWEST, HIGHEST + 1),
        format_func=tensor.power_of_two,
        key=key,
        help=glossary.tip("loss scaling"),
    )
    address.keep("scale", key, str(power) if power != own else "")
    chosen = every[(every["log2_scale"] == power) & every["name"].isin(names)]
    measured = loaders.analysed(measured_underflow, run)
    if measured and power == own and form == FORMATS["fp16"].name:
        st.markdown(f"**Measured**: {words.escape(measured)}.")
    st.markdown(sentence(chosen, kind, form, power))
    if kind == "weight_grad" and (rough := int((chosen["source_underflow_frac"] > MAX_SOURCE_UNDERFLOW_FRAC).sum())):
        st.caption(
            f"Rough for {words.plural(rough, 'tensor')}: so much of the output gradients behind them would underflow "
            "that only noise remains."
        )
    if (safe := window(run)) is not None and safe.caveat:
        st.caption(f"Doubtful: {words.escape(words.sentence(safe.caveat))}")
    title = f"Predicted for {FORMATS[form].label} at a loss scale of {tensor.power_of_two(power)}"
    charts.show(underflow_figure(chosen, charts.dark(), title), "ranges.lost")
    audits = loaders.analysed(predicted_and_audited, run)
    if kind == "weight_grad" and len(audits):
        st.header("Prediction beside measurement", anchor=False)
        st.caption("Measured: the same batch, weights and random numbers replayed in FP32 and in the run's recipe.")
        shown = audits.assign(scale=[words.scale(s) for s in audits["loss_scale"]])
        tables.show(shown, column_config=AUDIT_COLUMNS, column_order=list(AUDIT_COLUMNS), alt="Audits.")


def at_all_scales(run: Run, kind: str, form: str) -> pd.DataFrame:
    """The predicted underflow and overflow of each tensor of a kind at each loss scale of the slider."""
    return loaders.analysed(what_if, run, (form,), tuple(range(LOWEST, HIGHEST + 1)), (kind,), scaling="loss")


def power_in_range(text: str) -> int | None:
    """The power of two in an address; None if the slider does not have it."""
    return int(text) if text.removeprefix("-").isdecimal() and LOWEST <= int(text) <= HIGHEST else None


def starting(run: Run) -> int:
    """The run's last loss scale as a power of two, within the slider."""
    last = loaders.analysed(scale_summary, run).last
    power = round(math.log2(last)) if last and math.isfinite(last) else 0
    return min(max(power, LOWEST), HIGHEST)


def sentence(chosen: pd.DataFrame, kind: str, form: str, power: int) -> str:
    """The prediction for all tensors together, and the worst one."""
    label = words.KIND_LABELS[kind].lower()
    if chosen.empty:
        return f"Nothing can be predicted: no finite nonzero {label} were recorded."
    total = whole_model(chosen).iloc[0]
    worst = chosen.nlargest(1, "underflow_frac").iloc[0]
    text = (
        f"Predicted: at {tensor.power_of_two(power)}, {FORMATS[form].label} would turn "
        f"{words.percent(total['underflow_frac'])} of all nonzero {label} to 0, carrying "
        f"{words.percent(total['underflow_mass_frac'])} of their mass, and leave "
        f"{words.percent(total['subnormal_frac'])} subnormal"
    )
    if worst["underflow_frac"] > 0:
        text += f"; most becomes 0 in {words.escape(worst['name'])}, {words.percent(worst['underflow_frac'])}"
    over = chosen[chosen["overflow_frac"] > 0]
    if len(over):
        text += f". **{words.plural(len(over), 'tensor')} would overflow**, {words.escape(over['name'].iloc[0])} first"
    return f"{text}."


def window(run: Run) -> SafeWindow | None:
    """The loss scales that are safe in FP16; None if no gradients were recorded."""
    try:
        return loaders.analysed(safe_window, run)
    except RunError:  # the run sampled no gradients, and nothing can be predicted
        return None


def window_headline(safe: SafeWindow, last: float | None, recommend: bool) -> str:
    """Which loss scales are safe in FP16, which is recommended, and where the run's last one stands."""
    if not safe.exists:
        return (
            f"No loss scale suits all gradients in FP16: {words.escape(safe.lowest_by)} needs at least "
            f"{words.scale(safe.lowest)}, {words.escape(safe.highest_by)} at most {words.scale(safe.highest)}."
        )
    place = "" if last is None else "above" if last > safe.highest else "below" if last < safe.lowest else "within"
    if safe.underflowed_at is not None:
        span = (
            f"FP16 is safe up to {words.scale(safe.highest)}; at a loss scale of {words.scale(safe.underflowed_at)} "
            f"gradients underflowed, first in {words.escape(safe.lowest_by)}"
        )
        place = place if place == "above" else ""
    elif safe.caveat:  # the values of output gradients are unknown
        span = f"FP16 is safe up to {words.scale(safe.highest)} (lower bound unknown)"
        place = place if place == "above" else ""
    else:
        span = f"FP16 is safe from {words.scale(safe.lowest)} to {words.scale(safe.highest)}"
    where = f", the last scale is {place if place == 'within' else f'{place} that'}" if place else ""
    recommended = f"; {words.scale(safe.recommended)} is recommended" if recommend else ""
    return f"Predicted: {span}{where}{recommended}."


def about_window(safe: SafeWindow) -> str:
    """The data behind the window, and its caveat."""
    steps = f"steps {safe.first_step:,}–{safe.last_step:,}" if safe.first_step < safe.last_step else "one step"
    text = f"The window is predicted from the gradients recorded at {steps}. "
    lower = "would come" if safe.caveat and safe.underflowed_at is None else "comes"
    text += f"Its lower end {lower} from {safe.lowest_by}, its upper end from {safe.highest_by}."
    doubt = f" Doubtful: {words.sentence(safe.caveat)}" if safe.caveat else ""
    return words.escape(f"{text}{doubt}")
