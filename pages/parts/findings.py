"""Finding cards: what is wrong, where, the number and the limit it crossed, and what to try."""

from collections.abc import Sequence

import streamlit as st

from amp_core import Finding
from pages.parts import words

LOOK = {
    "error": ("red", ":material/error:"),
    "warning": ("orange", ":material/warning:"),
    "info": ("blue", ":material/info:"),
}


def show(found: Sequence[Finding], summary: str, *, ended_well: bool) -> None:
    """The verdict in one line, then a card per finding, the gravest first."""
    grave = [f for f in found if f.severity != "info"]
    if not grave and not ended_well:
        st.markdown(words.escape(summary))
    elif not grave:
        st.success(f"Nothing wrong was found. {words.escape(summary)}", icon=":material/check_circle:")
    else:
        say = st.error if any(f.severity == "error" for f in grave) else st.warning
        say(f"{words.escape(words.sentence(grave[0].title))} {words.escape(summary)}", icon=LOOK[grave[0].severity][1])
    for finding in sorted(found, key=lambda f: list(LOOK).index(f.severity)):
        card(finding)


def card(finding: Finding) -> None:
    """One finding with its evidence and its advice."""
    color, icon = LOOK[finding.severity]
    with st.container(border=True):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.badge(finding.severity, icon=icon, color=color)
            st.markdown(f"**{words.escape(finding.title)}**", width="content")
        st.caption(" · ".join(evidence(finding)))
        st.markdown(words.escape(finding.advice))
        if finding.snippet:
            with st.expander("Code"):
                st.code(finding.snippet, language="python")


def evidence(finding: Finding) -> list[str]:
    """Where, when, and the number beside its limit."""
    said = [words.escape(finding.where)] if finding.where else []
    if finding.steps is not None:
        first, last = finding.steps
        said.append(f"step {first:,}" if first == last else f"steps {first:,}–{last:,}")
    if finding.value is not None:
        limit = f", limit {words.number(finding.limit)}" if finding.limit is not None else ""
        said.append(words.escape(f"{words.number(finding.value)}{limit} {finding.unit or ''}".strip()))
    return said
