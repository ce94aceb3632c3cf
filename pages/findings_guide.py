"""What can go wrong, how is it detected, and what repairs it?"""

from collections import Counter
from collections.abc import Sequence

import streamlit as st

from amp_core.findings import FAMILIES, Entry
from pages.parts import address, head, picker, words
from pages.parts.library import run_list, run_table
from pages.parts.overview.findings import PAGES, SEVERITY_STYLE

MAX_LINKS = 5  # to runs, below one finding


def matches(entry: Entry, asked: str) -> bool:
    """Whether the entry contains every word of the search."""
    text = " ".join((entry.code, entry.what, entry.signal, entry.threshold, entry.advice)).lower()
    return all(word in text for word in asked.lower().split())


def explain(entry: Entry, *, unfolded: bool, runs: Sequence[run_list.Entry] = ()) -> None:
    """One finding code; `unfolded` if the search asked for it. `runs` are those in which it was detected."""
    color, icon = SEVERITY_STYLE[entry.severity]
    label = f":{color}[{icon}] **{entry.code}** — {entry.what}"
    with st.expander(label, expanded=unfolded, key=f"guide.{entry.code}.{unfolded}"):
        st.badge(entry.severity, icon=icon, color=color)
        st.markdown(f"**Signal.** {entry.signal}")
        st.markdown(f"**Threshold.** {entry.threshold}")
        st.markdown(f"**What to do.** {entry.advice}")
        codes = ({"PyTorch": entry.snippet} if entry.snippet else {}) | dict(entry.frameworks)
        for name, code in codes.items():
            st.caption(name)
            st.code(code, language="python", wrap_lines=True)
        if entry.page not in PAGES:
            return
        file, name = PAGES[entry.page]
        if not runs:
            run = st.session_state.get("run")
            query = {"run": run} if run else None
            st.page_link(file, label=f"Shown on {name}", icon=":material/query_stats:", query_params=query)
        for run in runs[:MAX_LINKS]:
            label = f"{picker.label(run)}: {name}"
            st.page_link(file, label=words.escape(label), icon=":material/query_stats:", query_params={"run": run.key})
        if len(runs) > MAX_LINKS:
            st.caption(f"And {words.plural(len(runs) - MAX_LINKS, 'other run')}.")


head.title("Findings guide")
known = Counter(entry.severity for entries in FAMILIES.values() for entry in entries)
head.headline(f"AMPscope detects {known['error'] + known['warning']} faults of mixed-precision training.")
st.caption(
    f"{words.plural(known['error'], 'error')} that break training and {words.plural(known['warning'], 'warning')} that "
    f"cost quality or speed; {words.plural(known['info'], 'note')} need no change. Each is detected from what "
    "the run recorded; nothing is inferred from missing data."
)
with st.container(horizontal=True, vertical_alignment="bottom"):
    address.take("search", "guide.search", str)
    asked = st.text_input("Search", key="guide.search", placeholder="overflow, scaler, BatchNorm, …")
    address.keep("search", "guide.search", asked)
    address.take("found", "guide.found", lambda text: text == "yes" or None)
    only_found = st.toggle("Found in my runs", key="guide.found", help="In your own runs, uploads and other places")
    address.keep("found", "guide.found", "yes" if only_found else "")
shown = {family: [e for e in entries if matches(e, asked)] for family, entries in FAMILIES.items()}
by_code: dict[str, list[run_list.Entry]] = {}
if only_found:
    mine = [entry for entry in st.session_state["entries"].values() if entry.origin != "sample"]
    by_code, waiting = run_table.runs_by_code(mine)
    shown = {family: [e for e in entries if e.code in by_code] for family, entries in shown.items()}
    if waiting:
        st.caption(f"{words.plural(waiting, 'run')} still to be diagnosed.")
        run_table.read_waiting(waiting)
    elif not any(shown.values()):
        st.info("You have no runs of your own yet." if not mine else "None of these was found in your runs.")
elif not any(shown.values()):
    st.info("No entry matches all of these words.", icon=":material/info:")
families = {family: entries for family, entries in shown.items() if entries}
folded = families and not asked and not only_found
places = st.tabs([f"{family} ({len(entries)})" for family, entries in families.items()]) if folded else []
for number, (family, entries) in enumerate(families.items()):
    with places[number] if folded else st.container():
        if not folded:
            st.header(family, anchor=False)
        for entry in entries:
            explain(entry, unfolded=entry.code == asked, runs=by_code.get(entry.code, ()))
