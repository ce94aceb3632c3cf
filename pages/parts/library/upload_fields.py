"""The upload field of Library: packed runs, profiler traces, Transformer Engine's logs; their content tells which."""

from typing import Literal

import streamlit as st

from pages.parts import callbacks, picker, words
from pages.parts.library import messages, upload

FILES, FOLDER = "files", "folder"
TAKEN = "library.taken"
"""Streamlit's numbers of the files that were read, imported or refused."""
READING = ":material/hourglass_top:"


def show() -> None:
    """Draw the field, and what became of the last upload below it."""
    _field(
        FILES,
        "Upload a run (.zip), profiler traces (.json, .json.gz) or Transformer Engine logs (.log)",
        ["zip", "json", "gz", "log"],
        True,
        "`ampscope pack RUN` and Share make a .zip. Chrome traces that torch.profiler exported, one or one of each "
        "rank, become a run; larger ones: `ampscope import-trace TRACE --out RUN`. So do the statistics logs that "
        "nvdlfw-inspect writes for Transformer Engine, one of each rank.",
    )
    messages.show()
    with st.popover("Other sources", icon=":material/folder_open:"):
        _field(
            FOLDER,
            "A run folder, or a folder of traces or Transformer Engine logs",
            None,  # event files of TensorBoard have no ending of their own
            "directory",
            "Choose the folder that directly contains run.json, or the traces of all ranks, or the log_dir of "
            "nvdlfw-inspect, or its TensorBoard folder.",
        )
        st.caption("TensorBoard: `ampscope import-tensorboard LOGDIR --out RUN`")


def _field(kind: str, label: str, types: list[str] | None, several: Literal[True, "directory"], help_: str) -> None:
    key = _key(kind)
    st.file_uploader(
        label, type=types, accept_multiple_files=several, key=key, on_change=_take, args=(kind, key), help=help_
    )


def _key(kind: str) -> str:
    """The key of the current upload field for this kind of file."""
    return f"library.take.{kind}.{callbacks.get(_turn(kind), 0)}"


def _turn(kind: str) -> str:
    return f"library.turn.{kind}"


@callbacks.uninterrupted
def _take(kind: str, key: str) -> None:
    """Callback of the upload field with that key: import the files, choose the last run, and keep the answer. A file
    that was dropped while another was read comes with that one, in the previous field."""
    seen = callbacks.get(TAKEN, frozenset())
    files = [file for file in callbacks.get(key) or () if file.file_id not in seen]
    if not files:
        return
    toast = callbacks.do(st.toast, f"Reading {words.escape(files[0].name)} …", icon=READING)

    def progress(line: str) -> None:
        callbacks.do(toast.toast, f"{words.escape(line[:1].upper() + line[1:])} …", icon=READING)

    taken: list[str] = []
    with messages.refusals():
        # Runs that were imported before an error stay in the list.
        taken.extend(upload.take([(file.name, file.getvalue()) for file in files], progress))
    if taken:
        picker.choose(taken[-1])
        names = [run.rsplit("/", 1)[-1] for run in taken]
        sentence = f"{', '.join(names)} {'is' if len(taken) == 1 else 'are'} in the library"
        chosen = "and chosen" if len(taken) == 1 else f"and {names[-1]} is chosen"
        messages.success(f"{sentence}.", taken[-1], f"{sentence} {chosen}.")
    callbacks.put(TAKEN, seen.union(file.file_id for file in files))
    if key == _key(kind):  # an empty field, for this kind alone: the same file may be uploaded again
        callbacks.put(_turn(kind), callbacks.get(_turn(kind), 0) + 1)
