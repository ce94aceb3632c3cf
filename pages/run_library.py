"""Which runs are there, how did they fare, and how do I bring one in or take one away?"""

import time
import zlib
from collections import Counter

import streamlit as st

from amp_core import RunError
from amp_core.library.permissions import current
from pages.parts import head, picker, tables, words
from pages.parts.library import actions, run_list, run_table, upload
from pages.parts.library.run_list import Entry

MAX_ROWS = 50  # rows of the table at first
TOLD_S = 10.0
ROW = 35  # pixels
ROWS = 16  # of the table before it scrolls


def field(kind: str) -> str:
    """The key of the field that takes such files at this time."""
    return f"library.take.{kind}.{st.session_state.setdefault(f'library.turn.{kind}', 0)}"


def take(kind: str, key: str) -> None:
    """An upload has arrived in the field of that key: bring it in and choose it, or keep the sentence that says why
    not. A file that was dropped while another was read may still come in the field of before."""
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
    if key == field(kind):  # a fresh one, and this one alone: the file was dealt with, and the same may come again
        st.session_state[f"library.turn.{kind}"] += 1


def tell() -> None:
    """What came of the last upload or deletion, for a while: the page may run again by itself at once."""
    said = st.session_state.get("library.said")
    told, since = st.session_state.get("library.told", (None, 0.0))
    if said is not None and said is not told:
        since = time.monotonic()
        st.session_state["library.told"] = (said, since)
    if said is not None and time.monotonic() - since < TOLD_S:
        kind, sentence = said
        (st.success if kind == "success" else st.error)(words.escape(sentence))


def table_key() -> str:
    """The table is a new one, with its ticks on the right rows, whenever the picker was used or other runs stand in
    it: the browser knows ticks by the numbers of rows."""
    shown = "\n".join(st.session_state["library.shown"])
    return f"library.table.{st.session_state.get('picker.turn', 0)}.{zlib.crc32(shown.encode())}"


def ticks(key: str) -> list[int]:
    """The rows that are ticked when the table of that key is first drawn: the chosen run, and those ticked before."""
    drawn, numbers = st.session_state.get("library.ticks", ("", []))
    if drawn != key:
        wanted = {st.session_state["run"], *st.session_state.get("library.ticked", [])}
        numbers = [row for row, shown in enumerate(st.session_state["library.shown"]) if shown in wanted]
        st.session_state["library.ticks"] = (key, numbers)
    return numbers


def pick() -> None:
    """Rows of the table were ticked: the one that was ticked last becomes the chosen run."""
    keys: list[str] = st.session_state["library.shown"]
    ticked = [keys[row] for row in st.session_state[table_key()]["selection"]["rows"] if row < len(keys)]
    before = st.session_state.get("library.ticked", [])
    st.session_state["library.ticked"] = ticked
    picker.choose(run_table.chosen(ticked, before, st.session_state["run"]))


def folders(entries: dict[str, Entry]) -> str | None:
    """A choice among folders of runs that were made together; None for all runs, and where there is no such folder."""
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
    """Bring in a packed run, traces or a folder."""
    st.header("Bring in a run", anchor=False)
    row = st.container(horizontal=True)  # wraps on a narrow page
    row.file_uploader(
        "A packed run (.zip)",
        type=["zip"],
        key=field("zip"),
        on_change=take,
        args=("zip", field("zip")),
        help="`ampscope pack RUN` or Share makes one.",
    )
    row.file_uploader(
        "Profiler traces (.json, .json.gz)",
        type=["json", "gz"],
        accept_multiple_files=True,
        key=field("trace"),
        on_change=take,
        args=("trace", field("trace")),
        help="Chrome traces that torch.profiler exported: one, or one of each rank. Kernels, operators and steps "
        "become a run. Larger ones: `ampscope import-trace TRACE --out RUN`.",
    )
    row.file_uploader(
        "A run folder",
        type=["json", "parquet", "arrows", "log"],
        accept_multiple_files="directory",
        key=field("folder"),
        on_change=take,
        args=("folder", field("folder")),
        help="Choose the folder that directly contains run.json.",
    )
    st.caption("A TensorBoard log: `ampscope import-tensorboard LOGDIR --out RUN` makes a run of it.")


head.title("Library")
entries: dict[str, Entry] = st.session_state["entries"]
with st.container():  # holds its place, so that nothing below is drawn twice while the page changes
    tell()

answer = st.container()
with st.container():
    actions.bin_line()
with st.container():  # so that the fields below stay where they are, and a file on its way comes in
    if entries:
        with st.container(horizontal=True, vertical_alignment="bottom"):
            asked = st.text_input(
                "Search", key="library.search", placeholder="fp16, lstm, failed, a tag, …", persist_state="session"
            )
            folder = folders(entries)
        found = [entry for entry in entries.values() if run_table.matches(entry, asked)]
        shown, folded = (found, {}) if asked and folder is None else run_table.in_folder(found, folder)
        most = st.session_state.setdefault("library.most", MAX_ROWS)
        page, more = shown[:most], max(0, len(shown) - most)
        st.session_state["library.shown"] = [entry.key for entry in page]
        actions.actions(head.entry(), [key for key in st.session_state.get("library.ticked", []) if key in entries])
        table, waiting = run_table.table(page)
        with answer:
            damaged = table[table["Status"] == "damaged"] if len(table) else table
            lost = max(len(damaged), sum(entry.status == "damaged" for entry in entries.values()))
            aside = f", {lost} of them damaged" if lost else ""
            found_here = f" {len(found):,} found." if asked else ""
            disk = sum(run_list.size_bytes(entry.path) for entry in entries.values())
            head.headline(f"{words.plural(len(entries), 'run')}{aside}. {words.size(disk)} on disk.{found_here}")
        if len(table):
            st.caption("Tick a run to choose it, or several to compare them.")
            tables.show(
                table,
                column_config=run_table.COLUMNS,
                column_order=[c for c in table if c != "Sentence" and table[c].notna().any()],
                hide_index=True,
                row_height=ROW,
                height=ROW * (1 + min(len(table), ROWS)) + 3,  # the header is a row, and lines are drawn around
                key=table_key(),
                on_select=pick,
                selection_mode="multi-row",
                selection_default={"selection": {"rows": ticks(table_key())}},
                alt="All runs with verdict, recipe, loss, speed, size, status, workload, steps and date.",
            )
            run_table.look_on(waiting)
            if more and st.button(f"Show {min(more, MAX_ROWS)} more"):
                st.session_state["library.most"] = most + MAX_ROWS
                st.rerun()
            for name, sentence in damaged[["Name", "Sentence"]].itertuples(index=False):
                st.caption(f"**{words.escape(name)}** cannot be read: {words.escape(words.sentence(sentence))}")
        elif not folded:
            st.info("No run has all of these words.", icon=":material/info:")
        if folded:
            said = ", ".join(f"{words.escape(name)} ({words.plural(count, 'run')})" for name, count in folded.items())
            st.caption(f"Trainings of searches are folded: {said}. Choose the folder, or search, to see them.")
    else:
        st.write("No runs yet. Bring one in below, or start one.")
        st.page_link("pages/start_run.py", label="Start a run", icon=":material/play_circle:")

if not current().read_only:
    uploads()
