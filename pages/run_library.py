"""Which runs are there, how did they go, and how do I add or delete one?"""

import time
import zlib
from collections import Counter

import streamlit as st

from amp_core import RunError
from amp_core.library.permissions import current
from pages.parts import head, picker, tables, words
from pages.parts.library import actions, run_list, run_table, upload
from pages.parts.library.run_list import Entry

MAX_ROWS = 50  # before "Show more"
MESSAGE_S = 10.0
ROW_PIXELS = 35
MAX_VISIBLE_ROWS = 16  # before the table scrolls


def field(kind: str) -> str:
    """The key of the current upload field for this kind of file."""
    return f"library.take.{kind}.{st.session_state.setdefault(f'library.turn.{kind}', 0)}"


def take_upload(kind: str, key: str) -> None:
    """Callback of the upload field with that key: import the files and choose the run, or keep the error sentence. A
    file that was dropped while another was read may still arrive in the previous field."""
    files = st.session_state.get(key)
    if not files:
        return
    first = files if kind == "zip" else files[0]
    st.toast(f"Reading {words.escape(first.name)} …", icon=":material/hourglass_top:")
    try:
        if kind == "zip":
            taken = upload.take_zip(files.name, files.getvalue())
        elif kind == "trace":
            taken = upload.take_traces([(f.name, f.getvalue()) for f in files])
        else:
            taken = upload.take_folder((f.name, f.getvalue()) for f in files)
    except (RunError, OSError) as error:
        st.session_state["library.said"] = ("error", words.sentence(error))
    else:
        picker.choose(taken)
        st.session_state["library.said"] = ("success", f"{taken.rsplit('/', 1)[-1]} is in the library and chosen.")
    if key == field(kind):  # an empty field, for this kind alone: the same file may be uploaded again
        st.session_state[f"library.turn.{kind}"] += 1


def show_message() -> None:
    """The result of the last upload or deletion, for `MESSAGE_S`: the page may run again by itself at once."""
    message = st.session_state.get("library.said")
    shown_message, since = st.session_state.get("library.told", (None, 0.0))
    if message is not None and message is not shown_message:
        since = time.monotonic()
        st.session_state["library.told"] = (message, since)
    if message is not None and time.monotonic() - since < MESSAGE_S:
        kind, sentence = message
        (st.success if kind == "success" else st.error)(words.escape(sentence))


def table_key() -> str:
    """Changes, which makes a new table with the right rows ticked, when the picker was used or other runs are listed:
    the browser knows ticks by row number."""
    shown = "\n".join(st.session_state["library.shown"])
    return f"library.table.{st.session_state.get('picker.turn', 0)}.{zlib.crc32(shown.encode())}"


def ticks(key: str) -> list[int]:
    """The rows that are ticked when the table with that key is first drawn: the chosen run and those ticked before."""
    drawn, numbers = st.session_state.get("library.ticks", ("", []))
    if drawn != key:
        wanted = {st.session_state["run"], *st.session_state.get("library.ticked", [])}
        numbers = [row for row, shown in enumerate(st.session_state["library.shown"]) if shown in wanted]
        st.session_state["library.ticks"] = (key, numbers)
    return numbers


def pick() -> None:
    """Callback of the table: the row that was ticked last becomes the chosen run."""
    keys: list[str] = st.session_state["library.shown"]
    ticked = [keys[row] for row in st.session_state[table_key()]["selection"]["rows"] if row < len(keys)]
    before = st.session_state.get("library.ticked", [])
    st.session_state["library.ticked"] = ticked
    picker.choose(run_table.chosen(ticked, before, st.session_state["run"]))


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


def uploads() -> None:
    """Upload fields for a packed run, traces or a folder."""
    st.header("Bring in a run", anchor=False)
    row = st.container(horizontal=True)  # wraps on a narrow page
    row.file_uploader(
        "A packed run (.zip)",
        type=["zip"],
        key=field("zip"),
        on_change=take_upload,
        args=("zip", field("zip")),
        help="`ampscope pack RUN` or Share makes one.",
    )
    row.file_uploader(
        "Profiler traces (.json, .json.gz)",
        type=["json", "gz"],
        accept_multiple_files=True,
        key=field("trace"),
        on_change=take_upload,
        args=("trace", field("trace")),
        help="Chrome traces that torch.profiler exported: one, or one of each rank. Kernels, operators and steps "
        "become a run. Larger ones: `ampscope import-trace TRACE --out RUN`.",
    )
    row.file_uploader(
        "A run folder",
        type=["json", "parquet", "arrows", "log"],
        accept_multiple_files="directory",
        key=field("folder"),
        on_change=take_upload,
        args=("folder", field("folder")),
        help="Choose the folder that directly contains run.json.",
    )
    st.caption("A TensorBoard log: `ampscope import-tensorboard LOGDIR --out RUN` makes a run of it.")


head.title("Library")
entries: dict[str, Entry] = st.session_state["entries"]
with st.container():  # a fixed place, so that nothing below is drawn twice on a page change
    show_message()

answer = st.container()
with st.container():
    actions.show_trash()
with st.container():  # keeps the upload fields in place, so that an upload in progress completes
    if entries:
        with st.container(horizontal=True, vertical_alignment="bottom"):
            asked = st.text_input(
                "Search", key="library.search", placeholder="fp16, lstm, failed, a tag, …", persist_state="session"
            )
            folder = folders(entries)
        matching = [entry for entry in entries.values() if run_table.matches(entry, asked)]
        shown, folded = (matching, {}) if asked and folder is None else run_table.in_folder(matching, folder)
        most = st.session_state.setdefault("library.most", MAX_ROWS)
        page, more = shown[:most], max(0, len(shown) - most)
        st.session_state["library.shown"] = [entry.key for entry in page]
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
                column_config=run_table.COLUMNS,
                column_order=[c for c in table if c != "Sentence" and table[c].notna().any()],
                hide_index=True,
                row_height=ROW_PIXELS,
                height=ROW_PIXELS * (1 + min(len(table), MAX_VISIBLE_ROWS)) + 3,  # with the header and the border
                key=table_key(),
                on_select=pick,
                selection_mode="multi-row",
                selection_default={"selection": {"rows": ticks(table_key())}},
                alt="All runs with verdict, recipe, loss, speed, size, status, workload, steps and date.",
            )
            run_table.read_waiting(waiting)
            if more and st.button(f"Show {min(more, MAX_ROWS)} more"):
                st.session_state["library.most"] = most + MAX_ROWS
                st.rerun()
            for name, sentence in damaged[["Name", "Sentence"]].itertuples(index=False):
                st.caption(f"**{words.escape(name)}** cannot be read: {words.escape(words.sentence(sentence))}")
        elif not folded:
            st.info("No run has all of these words.", icon=":material/info:")
        if folded:
            names = ", ".join(f"{words.escape(name)} ({words.plural(count, 'run')})" for name, count in folded.items())
            st.caption(f"Trainings of searches are folded: {names}. Choose the folder, or search, to see them.")
    else:
        st.write("No runs yet. Bring one in below, or start one.")
        st.page_link("pages/start_run.py", label="Start a run", icon=":material/play_circle:")

if not current().read_only:
    uploads()
