"""The upload field of Library: packed runs, profiler traces, Transformer Engine's logs; their content tells which."""

import streamlit as st

from pages.parts import picker, words
from pages.parts.library import messages, upload

FILES, FOLDER = "files", "folder"
_READING = ":material/hourglass_top:"


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


def _field(kind: str, label: str, types: list[str] | None, several: object, help_: str) -> None:
    key = _key(kind)
    st.file_uploader(
        label, type=types, accept_multiple_files=several, key=key, on_change=_take, args=(kind, key), help=help_
    )


def _key(kind: str) -> str:
    """The key of the current upload field for this kind of file."""
    return f"library.take.{kind}.{st.session_state.setdefault(f'library.turn.{kind}', 0)}"


def _take(kind: str, key: str) -> None:
    """Callback of the upload field with that key: import the files and choose the run, or keep the error sentence. A
    file that was dropped while another was read may still arrive in the previous field."""
    files = st.session_state.get(key)
    if not files:
        return
    message = st.toast(f"Reading {words.escape(files[0].name)} …", icon=_READING)
    with messages.refusals():
        taken = upload.take(
            [(file.name, file.getvalue()) for file in files],
            lambda line: message.toast(f"{words.escape(line[:1].upper() + line[1:])} …", icon=_READING),
        )
        picker.choose(taken[-1])
        names = ", ".join(key.rsplit("/", 1)[-1] for key in taken)
        messages.success(f"{names} {'is' if len(taken) == 1 else 'are'} in the library and chosen.")
    if key == _key(kind):  # an empty field, for this kind alone: the same file may be uploaded again
        st.session_state[f"library.turn.{kind}"] += 1
