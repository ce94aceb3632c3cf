"""Which runs are there, and how do I bring one in or take one away?"""

import pandas as pd
import streamlit as st

from amp_core import RunError
from pages.parts import head, incoming, picker, shelf, tables, words
from pages.parts.library import Entry


def take(kind: str) -> None:
    """An upload has arrived: bring it in and choose it, or keep the sentence that says why not."""
    files = st.session_state[f"library.{kind}.{st.session_state['library.turn']}"]
    if not files:
        return
    try:
        if kind == "zip":
            key = incoming.take_zip(files.name, files.getvalue())
        elif kind == "trace":
            key = incoming.take_traces([(f.name, f.getvalue()) for f in files])
        else:
            key = incoming.take_folder((f.name, f.getvalue()) for f in files)
    except (RunError, OSError) as error:
        st.session_state["library.said"] = ("error", words.sentence(error))
    else:
        picker.choose(key)
        st.session_state["library.said"] = ("success", f"{key.rsplit('/', 1)[-1]} is in the library and chosen.")
    st.session_state["library.turn"] += 1  # a fresh uploader: the file was dealt with, and the same may come again


STAYS = {"sample": "Samples stay.", "elsewhere": "It lies in another place; delete it there."}


def table_key() -> str:
    """The table is a new one, with its tick on the right row, whenever the picker in the sidebar was used."""
    return f"library.table.{st.session_state.get('picker.turn', 0)}"


def pick() -> None:
    """A row of the table was clicked: make it the chosen run."""
    rows = st.session_state[table_key()]["selection"]["rows"]
    keys = list(st.session_state["entries"])
    if rows and rows[0] < len(keys):
        picker.choose(keys[rows[0]])


head.title("Library")
entries: dict[str, Entry] = st.session_state["entries"]
st.session_state.setdefault("library.turn", 0)
if said := st.session_state.pop("library.said", None):
    kind, sentence = said
    (st.success if kind == "success" else st.error)(words.escape(sentence))

if entries:
    table = pd.DataFrame([shelf.row(e) for e in entries.values()])
    damaged = table[table["Status"] == "damaged"]
    aside = f", {len(damaged)} of them damaged" if len(damaged) else ""
    head.verdict(f"{words.plural(len(table), 'run')}{aside}.")
    st.caption("Click the start of a row to choose a run.")
    tables.show(
        table,
        column_config=shelf.COLUMNS,
        column_order=[c for c in table if c != "Sentence" and table[c].notna().any()],
        hide_index=True,
        placeholder=words.NONE,
        key=table_key(),
        on_select=pick,
        selection_mode="single-row",
        selection_default={"selection": {"rows": [list(entries).index(st.session_state["run"])]}},
        alt="All runs with status, recipe, workload, steps, last loss, date and size.",
    )
    for name, sentence in damaged[["Name", "Sentence"]].itertuples(index=False):
        st.caption(f"**{words.escape(name)}** cannot be read: {words.escape(words.sentence(sentence))}")
    entry = head.entry()
    with st.container(horizontal=True, vertical_alignment="center", border=True):
        color, icon = words.STATUS_LOOK[entry.status]
        st.markdown(f"**{words.escape(entry.name)}**", width="content")
        st.badge(entry.status, icon=icon, color=color)
        st.space("stretch")
        if st.button("Open", icon=":material/monitor_heart:", type="primary", disabled=entry.status == "damaged"):
            st.switch_page("pages/run_overview.py")
        if entry.readable:
            st.download_button(
                "Download",
                lambda: shelf.packed(entry),
                f"{entry.path.name}.zip",
                "application/zip",
                icon=":material/download:",
                on_click="ignore",
            )
        why = STAYS[entry.origin] if not entry.mine else "Stop it first." if entry.under_way else None
        if st.button("Delete", icon=":material/delete:", disabled=why is not None, help=why):
            shelf.confirm_deletion(entry)
else:
    st.write("No runs yet. Bring one in below, or start one.")
    st.page_link("pages/start_run.py", label="Start a run", icon=":material/play_circle:")

st.subheader("Bring in a run", anchor=False)
turn = st.session_state["library.turn"]
left, middle, right = st.columns(3)
left.file_uploader(
    "A packed run (.zip, up to 64 MB)",
    type=["zip"],
    key=f"library.zip.{turn}",
    on_change=take,
    args=("zip",),
    help="`ampscope pack RUN` or the Download button makes one.",
)
middle.file_uploader(
    "Profiler traces (.json, .json.gz, up to 64 MB a file)",
    type=["json", "gz"],
    accept_multiple_files=True,
    key=f"library.trace.{turn}",
    on_change=take,
    args=("trace",),
    help="Chrome traces that torch.profiler exported: one, or one of each rank. Kernels, operators and steps become a "
    "run. Larger ones: `ampscope import-trace TRACE --out RUN`.",
)
right.file_uploader(
    "A run folder (up to 64 MB a file)",
    type=["json", "parquet", "arrows", "log"],
    accept_multiple_files="directory",
    key=f"library.folder.{turn}",
    on_change=take,
    args=("folder",),
    help="Choose the folder that directly contains run.json.",
)
