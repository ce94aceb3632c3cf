"""What can go wrong, how is it detected, and what repairs it?"""

from collections import Counter

import streamlit as st

from amp_core.findings import FAMILIES, Entry
from pages.parts import address, head, words
from pages.parts.overview.findings import PAGES, SEVERITY_STYLE


def matches(entry: Entry, asked: str) -> bool:
    """Whether the entry contains every word of the search."""
    text = " ".join((entry.code, entry.what, entry.signal, entry.threshold, entry.advice)).lower()
    return all(word in text for word in asked.lower().split())


def explain(entry: Entry, *, unfolded: bool) -> None:
    """One finding code; `unfolded` if the search asked for it."""
    color, icon = SEVERITY_STYLE[entry.severity]
    label = f":{color}[{icon}] **{entry.code}** — {entry.what}"
    with st.expander(label, expanded=unfolded, key=f"guide.{entry.code}.{unfolded}"):
        st.badge(entry.severity, icon=icon, color=color)
        st.markdown(f"**Signal.** {entry.signal}")
        st.markdown(f"**From where on.** {words.raised(entry.threshold)}")
        st.markdown(f"**What to do.** {entry.advice}")
        codes = ({"PyTorch": entry.snippet} if entry.snippet else {}) | dict(entry.frameworks)
        for name, code in codes.items():
            st.caption(name)
            st.code(code, language="python", wrap_lines=True)
        if entry.page in PAGES:
            file, name = PAGES[entry.page]
            run = st.session_state.get("run")
            query = {"run": run} if run else None
            st.page_link(file, label=f"Shown on {name}", icon=":material/query_stats:", query_params=query)


head.title("Findings guide")
known = Counter(entry.severity for entries in FAMILIES.values() for entry in entries)
head.headline(f"AMPscope knows {known['error'] + known['warning']} ways in which mixed-precision training goes wrong.")
st.caption(
    f"{words.plural(known['error'], 'error')} that break training, {words.plural(known['warning'], 'warning')} that "
    f"cost quality or speed, and {words.plural(known['info'], 'info')}, good to know. Each is detected from what a run "
    "recorded; what it did not record is not guessed."
)
address.take("search", "guide.search", str)
asked = st.text_input("Search", key="guide.search", placeholder="overflow, scaler, BatchNorm, …")
address.keep("search", "guide.search", asked)
shown = {family: [e for e in entries if matches(e, asked)] for family, entries in FAMILIES.items()}
if not any(shown.values()):
    st.info("No entry has all of these words.", icon=":material/info:")
for family, entries in shown.items():
    if entries:
        st.header(family, anchor=False)
        for entry in entries:
            explain(entry, unfolded=entry.code == asked)
