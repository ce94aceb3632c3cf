"""Is the loss scale where it should be, and what does it cost in skipped steps?"""

import pandas as pd
import streamlit as st

from amp_core.analysis import ScaleSummary, scale_summary, skip_episodes
from amp_core.analysis.numerics.layers import tensor_names
from amp_core.views import GRAD_NORM, LOSS_SCALE
from pages.parts import cards, charts, clicks, empty, glossary, head, loaders, tables, words
from pages.parts.hardware import ranks
from pages.parts.numbers import prediction, tensor

EPISODE_COLUMNS = {
    "steps": st.column_config.TextColumn("Steps", pinned=True),
    "skips": tables.count("Skipped in a row", width=110),
    "before": st.column_config.TextColumn("Scale before", width=95),
    "after": st.column_config.TextColumn("Scale after", width=90),
    "origin": st.column_config.TextColumn(
        "Arose in", help="Forward: the loss was not finite already. Backward: it was, and a gradient overflowed."
    ),
    "tensors": st.column_config.TextColumn(
        "Gradients that were not finite", width="large", help="The first in backward stands first"
    ),
}
EPISODES = "Episodes of skipped steps with scales."


def headline(about: ScaleSummary, episodes: int, recipe: str) -> str:
    """The page's answer in one or two sentences."""
    if about.last is None and not about.skips_recorded:
        return "Neither a loss scale nor skipped steps were recorded in this run."
    if not about.has_scaler:
        return f"{recipe} has no loss scale: no step is skipped for it, and nothing is lifted out of underflow."
    ended = f"The scale went from {words.scale(about.first)} to {words.scale(about.last)}"
    if about.first == about.last:
        ended = f"The scale began and ended at {words.scale(about.last)}"
    span = f"{ended} and stayed between {words.scale(about.lowest)} and {words.scale(about.highest)}."
    if about.lowest == about.highest:
        span = f"The scale stood at {words.scale(about.last)} all the time."
    if about.skips == 0:
        return f"No step was skipped. {span}"
    times = f"{words.plural(about.skips, 'step')} of {about.attempts:,} ({words.percent(about.skip_frac)}) skipped"
    return f"{times}, in {words.plural(episodes, 'episode')}. {span}"


def show_cards(about: ScaleSummary, episodes: int, interval: object) -> None:
    """The current loss scale, skipped steps, and how often the scale decreased and increased."""
    clean = f"after {interval:,} clean steps each" if isinstance(interval, int) else "from one step to the next"
    share = f"{words.percent(about.skip_frac)} of {about.attempts:,}"
    left, right = cards.pairs()
    with left:
        at_first = f"{words.scale(about.first)} at first"
        cards.card("Loss scale", words.scale(about.last), at_first, help_=glossary.tip("loss scaling"))
        cards.card("Skipped steps", words.count(about.skips), share, help_=glossary.tip("skipped step"))
    with right:
        down = f"in {words.plural(episodes, 'episode')} of skips" if episodes else "no step was skipped"
        cards.card("Backed off", f"{about.backoffs:,} ×", down, help_=glossary.tip("backoff"))
        cards.card("Grew", f"{about.growths:,} ×", clean, help_=glossary.tip("growth interval"))


def table(episodes: pd.DataFrame) -> pd.DataFrame:
    """The episodes as text."""
    rows = [
        {
            "steps": f"{e.first:,}" if e.first == e.last else f"{e.first:,}–{e.last:,}",
            "skips": e.skips,
            "before": words.scale(e.scale_before),
            "after": words.scale(e.scale_after),
            "origin": e.origin or words.NONE,
            "tensors": e.tensors or words.NONE,
        }
        for e in episodes.itertuples()
    ]
    return pd.DataFrame(rows, columns=list(EPISODE_COLUMNS))


def tensors_of(episodes: pd.DataFrame, rows: list[int]) -> list[str]:
    """Names of the tensors of the selected episode; empty if none is selected."""
    if not rows or rows[0] >= len(episodes):
        return []
    return str(episodes["tensors"].iloc[rows[0]]).partition(" and ")[0].split(", ")


def open_step(step: int) -> None:
    """Callback of a clicked step: open Layer detail around it, on the gradient that was not finite there, if known."""
    names = loaders.analysed(tensor_names, run, "weight_grad")
    here = episodes[(episodes["first"] <= step) & (step <= episodes["last"])]
    culprits = [name for name in tensors_of(here, [0]) if name in names]
    if culprits or names:
        tensor.jump("weight_grad", (culprits or names)[0], (step, step))


head.title("Loss scale")
run = head.run()
about = loaders.analysed(scale_summary, run)
episodes = loaders.analysed(skip_episodes, run)

window = prediction.window(run)
sentence = headline(about, len(episodes), words.escape(run.head.config.get("precision") or "This run"))
head.headline(
    f"{sentence} {prediction.window_headline(window, about.last if about.has_scaler else None)}" if window else sentence
)
if about.has_scaler:
    show_cards(about, len(episodes), run.head.config.get("growth_interval"))
    shown = LOSS_SCALE.frame(run, loaders.analysed)
    figure = LOSS_SCALE.figure(shown, charts.dark())
    clicked = clicks.points(charts.show(figure, "loss_scale.scale", clicks=True), "loss_scale.scale")
    if shown.interrupted:
        st.caption("Where the band is interrupted, no single loss scale served every gradient.")
    for point in clicked[:1]:
        open_step(int(float(point["x"])))
if window:
    st.caption(prediction.about_window(window))
ranks.agreement(run)

norms = GRAD_NORM.frame(run, loaders.analysed)
if about.last is None and norms.table["grad_norm"].isna().all():
    empty.nothing("`watch` records both, and the norm of the gradients.", sample=True)
charts.show(GRAD_NORM.figure(norms, charts.dark()), "loss_scale.norm")

if len(episodes):
    st.header("Skipped steps, one line per episode", anchor=False)
    opening = st.container()
    event = tables.show(
        table(episodes),
        column_config=EPISODE_COLUMNS,
        hide_index=True,
        key="loss_scale.episodes",
        on_select="rerun",
        selection_mode="single-row",
        alt=EPISODES,
    )
    # The table shows text; its downloads hold the numbers.
    tables.remember(episodes.rename(columns={"first": "first_step", "last": "last_step"}), EPISODES)
    with opening:
        names = tensors_of(episodes, event["selection"]["rows"])
        for name in [n for n in names if n in loaders.analysed(tensor_names, run, "weight_grad")]:
            row = episodes.iloc[event["selection"]["rows"][0]]
            tensor.link(st.session_state["run"], "weight_grad", name, (int(row["first"]), int(row["last"])))
        if not names:
            st.caption("Click the start of a row to open the tensors of an episode and see them over time.")
