"""The upload fields of Library: a packed run, profiler traces, or a folder."""

import streamlit as st

from pages.parts import picker, words
from pages.parts.library import messages, upload


def show() -> None:
    """Draw the fields."""
    st.header("Bring in a run", anchor=False)
    with st.container(horizontal=True):  # wraps on a narrow page
        _field("zip", "A packed run (.zip)", ["zip"], False, "`ampscope pack RUN` or Share makes one.")
        _field(
            "trace",
            "Profiler traces (.json, .json.gz)",
            ["json", "gz"],
            True,
            "Chrome traces that torch.profiler exported: one, or one of each rank. Kernels, operators and steps "
            "become a run. Larger ones: `ampscope import-trace TRACE --out RUN`.",
        )
        _field(
            "folder",
            "A run folder",
            ["json", "parquet", "arrows", "log"],
            "directory",
            "Choose the folder that directly contains run.json.",
        )
    st.caption("A TensorBoard log: `ampscope import-tensorboard LOGDIR --out RUN` makes a run of it.")


def _field(kind: str, label: str, types: list[str], several: object, help_: str) -> None:
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
    first = files if kind == "zip" else files[0]
    st.toast(f"Reading {words.escape(first.name)} …", icon=":material/hourglass_top:")
    with messages.refusals():
        if kind == "zip":
            taken = upload.take_zip(files.name, files.getvalue())
        elif kind == "trace":
            taken = upload.take_traces([(f.name, f.getvalue()) for f in files])
        else:
            taken = upload.take_folder((f.name, f.getvalue()) for f in files)
        picker.choose(taken)
        messages.success(f"{taken.rsplit('/', 1)[-1]} is in the library and chosen.")
    if key == _key(kind):  # an empty field, for this kind alone: the same file may be uploaded again
        st.session_state[f"library.turn.{kind}"] += 1
