"""Is the loss scale where it should be, and what does it cost in skipped steps?"""

import pandas as pd
import streamlit as st

from amp_core import Run
from amp_core.analysis import ScaleSummary, baseline_band, scale_summary, scale_trace, skip_episodes
from amp_core.analysis.steps import recipe
from amp_core.figures import with_baseline
from amp_core.findings import skips_in_words
from amp_core.views import GRAD_NORM, LOSS_SCALE
from pages.parts import baseline, cards, charts, clicks, empty, glossary, head, loaders, words
from pages.parts.diagnosed import chain
from pages.parts.hardware import ranks
from pages.parts.numbers import casts, prediction
from pages.parts.numbers import episodes as episodes_table


def headline(about: ScaleSummary, episodes: int, recipe: str) -> str:
    """The page's answer in one or two sentences."""
    if about.last is None and not about.skips_recorded:
        return "This run recorded neither a loss scale nor skipped steps."
    if not about.has_scaler:
        return f"{recipe} runs without loss scaling: no skipped steps, and no protection from underflow."
    ends = f"began at {words.scale(about.first)}, ended at {words.scale(about.last)}"
    if about.first == about.last:
        ends = f"began and ended at {words.scale(about.last)}"
    span = f"The scale {ends} and ranged from {words.scale(about.lowest)} to {words.scale(about.highest)}."
    if about.lowest == about.highest:
        span = f"The scale was constant at {words.scale(about.last)}."
    if about.last is None:
        span = "The loss scale was not recorded."
    if about.skips == 0:
        return f"No step was skipped. {span}"
    times = f"{words.plural(about.skips, 'step')} {of_attempts(about)} skipped"
    return f"{times}, in {words.plural(episodes, 'episode')}: {skips_in_words(about)}. {span}"


def of_attempts(about: ScaleSummary) -> str:
    """`of 400 (10.0 %)`: of how many steps the skipped ones are; no percentage of a few."""
    return f"of {words.share_of(about.skips, about.attempts).partition(' of ')[2]}"


def show_cards(about: ScaleSummary, episodes: int, interval: object) -> None:
    """The current loss scale, skipped steps, and how often the scale decreased and increased."""
    clean = f"growth interval {interval:,} steps" if isinstance(interval, int) else "growth interval not recorded"
    known = about.last is not None
    backoffs, growths = (f"{n:,} ×" if known else words.NONE for n in (about.backoffs, about.growths))
    left, right = cards.pairs()
    with left:
        at_first = f"{words.scale(about.first)} at first" if known else "not recorded"
        cards.card("Loss scale", words.scale(about.last), at_first, help_=glossary.tip("loss scaling"))
        cards.card("Skipped steps", words.count(about.skips), of_attempts(about), help_=glossary.tip("skipped step"))
    with right:
        down = f"in {words.plural(episodes, 'episode')} of skips" if episodes else "no step was skipped"
        cards.card("Backed off", backoffs, down, help_=glossary.tip("backoff"))
        cards.card("Grew", growths, clean, help_=glossary.tip("growth interval"))


def gradient_norm(run: Run) -> None:
    """The norm of the gradients, before the baseline's."""
    figure = GRAD_NORM.draw(run, charts.dark(), loaders.analysed)
    base = baseline.run()
    if base is not None and not base.steps["grad_norm"].isna().all():
        band = loaders.analysed(norm_band, base)
        figure = with_baseline(figure, band, base.name, recipe(base), charts.dark())
    charts.show(figure, "loss_scale.norm", half=True)


def norm_band(base: Run) -> pd.DataFrame:
    """`baseline_band` of the gradient norm."""
    return baseline_band(scale_trace(base), "grad_norm")


head.title("Loss scale")
run = head.run()
about = loaders.analysed(scale_summary, run)
episodes = loaders.analysed(skip_episodes, run)

window = prediction.window(run)
sentence = headline(about, len(episodes), words.escape(run.head.config.get("precision") or "This run"))
last = about.last if about.has_scaler else None
predicted = prediction.window_headline(window, last, chain(run).recommends_scale) if window else ""
head.headline(f"{sentence} {predicted}".rstrip())
if about.has_scaler:
    show_cards(about, len(episodes), run.head.config.get("growth_interval"))
    shown = LOSS_SCALE.frame(run, loaders.analysed)
    left, right = charts.grid("loss_scale")
    with left:
        figure = LOSS_SCALE.figure(shown, charts.dark())
        clicked = clicks.points(charts.show(figure, "loss_scale.scale", clicks=True, half=True), "loss_scale.scale")
    with right:
        gradient_norm(run)
    if shown.interrupted:
        st.caption("Gaps in the band: no single loss scale suited every gradient.")
    for point in clicked[:1]:
        episodes_table.open_step(run, episodes, int(float(point["x"])))
if window:
    st.caption(prediction.about_window(window))
ranks.agreement(run)
casts.scales(run)

if about.last is None and run.steps["grad_norm"].isna().all():
    empty.nothing("`watch` records the loss scale, skipped steps and the norm of the gradients.", sample=True)
if not about.has_scaler:
    gradient_norm(run)

if len(episodes):
    episodes_table.show(run, episodes)
