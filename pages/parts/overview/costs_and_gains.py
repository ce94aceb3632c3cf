"""Three answers below the findings: what mixed precision costs this run, what it gains, and what to change.

costs_and_gains.show(run, view, chain(run))
"""

from collections.abc import Callable

import streamlit as st

from amp_core import Run, RunError
from amp_core.analysis import Comparison, Overview, compare, lost_gradient
from amp_core.findings import Diagnosis, skips_in_words
from amp_core.library.permissions import current
from pages.parts import bar, loaders, picker, words
from pages.parts.library.run_list import Entry
from pages.parts.start import again

COMPARE, START = "pages/compare_runs.py", "pages/start_run.py"
TITLE = 140
"""Pixels of the longest title."""


def show(run: Run, view: Overview, diagnosed: Diagnosis) -> None:
    """Draw the three answers, one below the other."""
    answers: dict[str, Callable[[], object]] = {
        "Cost": lambda: st.markdown(words.unbroken(" ".join(cost(run, view)))),
        "Benefit over FP32": lambda: gain(run, view),
        "What to change": lambda: advise(diagnosed),
    }
    with st.container(border=True, key="glance"):
        for number, (title, answer) in enumerate(answers.items()):
            row = st.container(horizontal=True, gap="small")
            row.markdown(f"**{title}**", width=TITLE)  # in pixels: a share of the width would wrap on a narrow page
            with row.container(key=f"answer-{number}"):
                answer()


def cost(run: Run, view: Overview) -> list[str]:
    """Skipped steps, underflow of gradients, overhead of recording."""
    sentences = []
    if not view.scale.skips_recorded:
        sentences.append("Skipped steps were not recorded.")
    elif view.scale.has_scaler:
        apart = f", {skips_in_words(view.scale)}" if view.scale.skips else ""
        sentences.append(f"Skipped steps: {words.share_of(view.scale.skips, view.scale.attempts)}{apart}.")
    else:
        sentences.append("No scaler, so no skipped steps.")
    lost_frac = loaders.analysed(lost_gradient, run)
    if lost_frac is not None:
        sentences.append(f"{words.percent(lost_frac)} of gradient elements underflow, by audit.")
    elif view.recipe and view.recipe != "fp32":
        why = "the audits cannot be read" if run.damaged("audits") else "not audited"
        sentences.append(f"Underflow of gradients: {why}.")
    if view.speed.watch_frac is not None:
        sentences.append(f"Recording overhead {words.percent(view.speed.watch_frac)}.")
    return sentences


def gain(run: Run, view: Overview) -> None:
    """Speed, memory and learning compared with the FP32 run of the same task, if the library has one."""
    entries: dict[str, Entry] = st.session_state["entries"]
    if view.recipe == "fp32":
        st.markdown("This is FP32, the baseline for other recipes.")
        st.page_link(COMPARE, label="Compare with 16 bits", icon=":material/compare_arrows:")
        return
    base = bar.baseline()
    compared = compared_with(base, run) if base is not None else None
    if compared is None or base is None:
        st.markdown("Unknown: the library has no FP32 run of the same task to compare with.")
        own = entries[st.session_state["run"]]
        offered = again.possible(own) and not current().read_only
        if offered and st.button("Train it in FP32", icon=":material/play_circle:", type="tertiary"):
            again.fill(own, precision="fp32")
            st.switch_page(START)
        return
    answer = next(iter(compared.answers.values())).partition(": ")[2]
    st.markdown(f"{words.escape(answer[0].upper())}{words.escape(answer[1:])}, against {words.escape(base.name)}.")
    if compared.table["speed_verdict"].iloc[-1] == "slower" and on_cpu(run):
        st.caption("Trained on a CPU without tensor cores: numerics carry over to a GPU, times do not.")
    keys = [base.key, st.session_state["run"]]
    st.page_link(
        COMPARE, label="See it on Compare", icon=":material/compare_arrows:", query_params=picker.compare_address(keys)
    )


def compared_with(base: Entry, run: Run) -> Comparison | None:
    """The comparison of the run with that baseline; None if it cannot be made."""
    try:
        compared = loaders.analysed(compare, [loaders.open_run(base), run])
    except RunError:  # the baseline is damaged: Library shows that
        return None
    return compared if compared.answers else None


def on_cpu(run: Run) -> bool:
    """Whether its head says that it was trained on a CPU."""
    return str(run.head.config.get("device", "")).startswith("cpu")


def advise(diagnosed: Diagnosis) -> None:
    """The patch of the diagnosis, or its advice; the verdict is above, other findings follow below."""
    if diagnosed.cause is None:
        st.markdown("Nothing needs to change.")
        return
    if diagnosed.patch:
        st.code(diagnosed.patch, language="python", wrap_lines=True)
    else:
        st.markdown(words.prose(diagnosed.advice))
    if diagnosed.others:
        st.caption(f"{words.plural(diagnosed.others, 'more finding')} below.")
