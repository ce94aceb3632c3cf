"""Which runs are there, how did they go, and how do I add or delete one?"""

from collections import Counter

import streamlit as st

from amp_core.library.permissions import current
from pages.parts import charts, head, tables, words
from pages.parts.library import actions, messages, run_list, run_table, ticks, upload_fields
from pages.parts.library.run_list import Entry

MAX_ROWS = 50  # before "Show more"
ROW_PIXELS = 35
MAX_VISIBLE_ROWS = 16  # before the table scrolls
MAX_WAITING = 5  # queued runs whose reason is shown


def folders(entries: dict[str, Entry]) -> str | None:
    """A field for a folder of runs that were made together. None for all runs, and if there is no such folder."""
    groups = Counter(entry.group for entry in entries.values() if entry.group)
    if not groups:
        return None
    return st.selectbox(
        "Folder",
        list(groups),
        index=None,
        format_func=lambda name: f"{name} ({words.plural(groups[name], 'run')})",
        placeholder="All",
        width=260,
        key="library.folder",
    )


head.title("Library")
entries: dict[str, Entry] = st.session_state["entries"]
answer = st.container()
with st.container():
    actions.show_trash()
left, right = charts.grid("library")
with right:
    if current().read_only:
        messages.show()
    else:
        upload_fields.show()
with st.container():
    if entries:
        with left, st.container(horizontal=True, vertical_alignment="bottom"):
            asked = st.text_input(
                "Search", key="library.search", placeholder="fp16, lstm, failed, a tag, …", persist_state="session"
            )
            folder = folders(entries)
        matching = [entry for entry in entries.values() if run_table.matches(entry, asked)]
        shown, folded = (matching, {}) if asked and folder is None else run_table.in_folder(matching, folder)
        most = st.session_state.setdefault("library.most", MAX_ROWS)
        page, more = shown[:most], max(0, len(shown) - most)
        st.session_state["library.shown"] = [entry.key for entry in page]
        with left:
            actions.actions(head.entry(), [key for key in st.session_state.get("library.ticked", []) if key in entries])
        table, waiting = run_table.table(page)
        with answer:
            damaged = table[table["Status"] == "damaged"] if len(table) else table
            damaged_count = max(len(damaged), sum(entry.status == "damaged" for entry in entries.values()))
            aside = f", {damaged_count} of them damaged" if damaged_count else ""
            match_count = f" {len(matching):,} found." if asked else ""
            disk = sum(run_list.size_bytes(entry.path) for entry in entries.values())
            head.headline(f"{words.plural(len(entries), 'run')}{aside}. {words.size(disk)} on disk.{match_count}")
        if len(table):
            st.caption("Tick a run to choose it, or several to compare them.")
            tables.show(
                table,
                column_config=run_table.columns(table),
                column_order=[c for c in table if c != "Sentence" and table[c].notna().any()],
                row_height=ROW_PIXELS,
                height=ROW_PIXELS * (1 + min(len(table), MAX_VISIBLE_ROWS)) + 3,  # with the header and the border
                key=ticks.table_key(),
                on_select=ticks.pick,
                selection_mode="multi-row",
                selection_default={"selection": {"rows": ticks.at_first(ticks.table_key())}},
                alt="All runs with verdict, recipe, loss, speed, size, status, workload, steps and date.",
            )
            run_table.read_waiting(waiting)
            if more and st.button(f"Show {min(more, MAX_ROWS)} more"):
                st.session_state["library.most"] = most + MAX_ROWS
                st.rerun()
            for entry in [entry for entry in page if entry.status == "queued" and entry.sentence][:MAX_WAITING]:
                st.caption(f"**{words.escape(entry.name)}** is queued: {words.escape(entry.sentence)}")
            for name, sentence in damaged[["Name", "Sentence"]].itertuples(index=False):
                st.caption(f"**{words.escape(name)}** cannot be read: {words.escape(words.sentence(sentence))}")
        elif not folded:
            st.info("No run matches all of these words.", icon=":material/info:")
        if folded:
            names = ", ".join(f"{words.escape(name)} ({words.plural(count, 'run')})" for name, count in folded.items())
            st.caption(f"Trainings of searches are folded: {names}. Choose the folder, or search, to see them.")
    else:
        with left:
            st.write("No runs yet. Upload one, or start one.")
            st.page_link("pages/start_run.py", label="Start a run", icon=":material/play_circle:")
