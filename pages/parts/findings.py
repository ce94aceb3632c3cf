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
    """The verdict in one line, then a card for each error and warning, the gravest first."""
    grave = [f for f in found if f.severity != "info"]
    if not grave and not ended_well:
        st.markdown(words.escape(summary))
    elif not grave:
        st.success(f"Nothing wrong was found. {words.escape(summary)}", icon=":material/check_circle:")
    else:
        errors = sum(f.severity == "error" for f in grave)
        parts = [words.plural(n, noun) for n, noun in ((errors, "error"), (len(grave) - errors, "warning")) if n]
        say, look = (st.error, "error") if errors else (st.warning, "warning")
        say(f"{' and '.join(parts)} found. {words.escape(summary)}", icon=LOOK[look][1])
    for finding in sorted(grave, key=lambda f: list(LOOK).index(f.severity)):
        card(finding)


def remarks(found: Sequence[Finding]) -> None:
    """What is good to know and benign: it need not stand before the numbers."""
    for finding in found:
        if finding.severity == "info":
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
        limit = f", limit {amount(finding.limit, finding.unit)}" if finding.limit is not None else ""
        said.append(words.escape(f"{amount(finding.value, finding.unit)}{limit}"))
    return said


def amount(value: float, unit: str) -> str:
    """A number of a finding with its unit: loss scales as powers of two, counts as whole numbers."""
    if unit == "loss scale":
        return f"loss scale {words.scale(value)}"
    whole = value == round(value) if abs(value) < 1e6 else False
    return f"{words.count(value)} {unit}".strip() if whole else words.number(value, unit)
