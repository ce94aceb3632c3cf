"""One run of the library: its row in the table, its zip, its deletion."""

import shutil
import tempfile
from pathlib import Path

import pandas as pd
import streamlit as st

from amp_core import RunError
from amp_core.addresses import Address
from amp_core.analysis import overview
from amp_core.packing import pack
from pages.parts import library, loaders, words
from pages.parts.library import Entry

COLUMNS = {
    "Name": st.column_config.TextColumn(pinned=True, width="medium"),
    "Loss": st.column_config.NumberColumn(format="%.4g", help="Last recorded loss"),
    "Steps": st.column_config.TextColumn(help="Steps done of steps planned"),
    "Created (UTC)": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm"),
    "Size (MiB)": st.column_config.NumberColumn(format="%.2f", help="Bytes on disk; 1 MiB is 1,048,576 bytes"),
}


def row(entry: Entry) -> dict[str, object]:
    """What the table says of one run; a damaged one gives its sentence."""
    config = entry.config or {}
    found: dict[str, object] = {
        "Name": entry.name,
        "Status": entry.status,
        "Recipe": config.get("precision"),
        "Workload": " ".join(str(config[k]) for k in ("workload", "size") if config.get(k)) or None,
        "Steps": None,
        "Loss": None,
        "Created (UTC)": pd.to_datetime(entry.created_at, errors="coerce", utc=True),
        "Size (MiB)": None if isinstance(entry.path, Address) else library.size_bytes(entry.path) / 2**20,
        "Sentence": entry.sentence or None,
        "Kind": {"sample": "sample", "run": "own run", "upload": "upload", "elsewhere": "another place"}[entry.origin],
    }
    if entry.readable and not isinstance(entry.path, Address):  # a table must not fetch every run of a bucket
        try:
            about = loaders.analysed(overview, loaders.open_run(entry))
        except RunError as error:
            return found | {"Status": "damaged", "Sentence": str(error)}
        planned = f" of {about.steps_planned:,}" if about.steps_planned else ""
        found |= {"Steps": f"{about.steps_done:,}{planned}", "Loss": about.loss_last}
    return found


def delete(entry: Entry) -> None:
    """Remove a run's folder for good."""
    try:
        shutil.rmtree(entry.path)
    except OSError as error:
        st.session_state["library.said"] = ("error", f"{entry.path} cannot be removed: {error.strerror or error}.")


@st.dialog("Delete this run?")
def confirm_deletion(entry: Entry) -> None:
    """Ask before anything is removed."""
    st.write(f"**{words.escape(entry.name)}** and its files in `{entry.path}` will be gone for good.")
    with st.container(horizontal=True):
        options = {"type": "primary", "icon": ":material/delete:", "on_click": delete, "args": (entry,)}
        if st.button("Delete", key="library.delete.yes", **options):
            st.rerun()  # closes the dialog
        if st.button("Keep", key="library.delete.no"):
            st.rerun()


def packed(entry: Entry) -> bytes:
    """The run as a zip; called when the download is asked for, not before."""
    with tempfile.TemporaryDirectory(prefix="ampscope-pack-") as aside:
        return pack(entry.path, Path(aside) / "run.zip").read_bytes()
