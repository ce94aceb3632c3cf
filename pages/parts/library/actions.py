"""Actions on runs of the library: open, compare, share, label, run again, delete and restore.

actions.actions(entry, ticked_keys)
actions.show_trash()
"""

from urllib.parse import quote, urljoin

import streamlit as st

from amp_core.library.labels import Label, label_of, write_label
from amp_core.library.permissions import current
from pages.parts import callbacks, picker, words
from pages.parts.library import messages, run_table, trash
from pages.parts.library.run_list import Entry
from pages.parts.start import again

STAYS = {"sample": "Samples cannot be deleted.", "elsewhere": "It is stored elsewhere; delete it there."}


@callbacks.uninterrupted
def delete_run(entry: Entry) -> None:
    """Callback of Delete: move the run to the trash, and offer Undo."""
    with messages.refusals():
        callbacks.put("library.undo", trash.delete(entry))
        picker.mark_deleted(entry.key)


@callbacks.uninterrupted
def restore_run(run: trash.DeletedRun) -> None:
    """Callback of Undo and Restore."""
    callbacks.put("library.undo", None)
    with messages.refusals():
        picker.choose(trash.restore(run))
        messages.success(f"{run.path.name} was restored.")


@callbacks.uninterrupted
def empty_trash() -> None:
    """Callback of "Remove all for good"."""
    callbacks.put("library.undo", None)
    with messages.refusals():
        trash.empty()
        messages.success("The trash is empty.")


@callbacks.uninterrupted
def save_label(entry: Entry) -> None:
    """Callback of the label form."""
    fields = ("name", "tags", "note")
    typed = {name: callbacks.do(st.session_state.__getitem__, f"library.{name}.{entry.key}") for name in fields}
    with messages.refusals():
        current().check_change("label a run")
        # The field starts with the run's name: unchanged, it is not a label. Empty restores the recorded name.
        name = label_of(entry.path).name if typed["name"] == entry.name else typed["name"]
        write_label(entry.path, Label(name, tuple(typed["tags"].split(",")), typed["note"]))
        picker.choose(callbacks.do(st.session_state.__getitem__, "run"))  # otherwise the browser keeps the old name
        messages.success(f"The label of {entry.path.name} was saved.")


def show_trash() -> None:
    """The run that was just deleted, and the runs in the trash."""
    undo: trash.DeletedRun | None = st.session_state.get("library.undo")
    runs = trash.deleted_runs()
    if not runs or current().read_only:
        return
    with st.container(horizontal=True, vertical_alignment="center", key="library.bin"):
        if undo is not None and undo in runs:
            st.markdown(f"**{words.escape(undo.path.name)}** was deleted.", width="content")
            st.button("Undo", key="library.undo.now", icon=":material/undo:", on_click=restore_run, args=(undo,))
        size = words.size(trash.size_bytes())
        with st.popover(f"Deleted: {words.plural(len(runs), 'run')}, {size}", icon=":material/delete:"):
            for run in runs[:20]:
                st.button(
                    f"Restore {words.escape(run.path.name)}",
                    key=f"library.restore.{run.stamp}",
                    icon=":material/undo:",
                    on_click=restore_run,
                    args=(run,),
                )
            st.button(
                "Remove all for good", key="library.empty", icon=":material/delete_forever:", on_click=empty_trash
            )


def label_form(entry: Entry) -> None:
    """A form for name, tags and note of a run."""
    with st.popover("Rename, tag", icon=":material/label:"), st.form(f"library.label.{entry.key}", border=False):
        st.text_input("Name", entry.name, max_chars=120, key=f"library.name.{entry.key}")
        st.text_input("Tags, with commas between", ", ".join(entry.tags), key=f"library.tags.{entry.key}")
        st.text_area("Note", entry.note, max_chars=2000, key=f"library.note.{entry.key}")
        st.form_submit_button("Save", on_click=save_label, args=(entry,))


def actions(entry: Entry, ticked: list[str]) -> None:
    """Actions on the chosen run and the ticked ones. Always two lines, with Compare in a fixed place: the table below
    must not move between two ticks."""
    together = picker.baseline_first(dict.fromkeys([*ticked, entry.key]))
    with st.container(border=True, key="library.actions"):
        color, icon = words.STATUS_LOOK[entry.status]
        with st.container(horizontal=True, vertical_alignment="center"):
            st.markdown(f"**{words.escape(entry.name)}**", width="content")
            st.badge(entry.status, icon=icon, color=color)
        with st.container(horizontal=True, vertical_alignment="center"):
            buttons(entry, together)
    if entry.note:
        st.caption(f"Note: {words.escape(entry.note)}")


def buttons(entry: Entry, together: list[str]) -> None:
    """The second line; `together` are the keys of the ticked runs."""
    if st.button("Open", icon=":material/monitor_heart:", type="primary", disabled=entry.status == "damaged"):
        st.switch_page("pages/run_overview.py")
    several = len(together) > 1
    why = None if several else "Tick two runs or more."
    label = f"Compare these {len(together)}" if several else "Compare ticked"
    if st.button(label, key="library.compare", icon=":material/compare_arrows:", disabled=not several, help=why):
        st.switch_page("pages/compare_runs.py", query_params=picker.compare_address(together))
    if entry.readable:
        share(entry)
    if not current().read_only:
        changes(entry)


def share(entry: Entry) -> None:
    """The run as one file, and the address that opens it here."""
    with st.popover("Share", icon=":material/share:"):
        st.markdown("One file to send; it can be uploaded on this page of any AMPscope:")
        st.download_button(
            "Download",
            lambda: run_table.packed(entry),
            f"{entry.path.name}.zip",
            "application/zip",
            icon=":material/download:",
            on_click="ignore",
        )
        if here := st.context.url:
            st.markdown("A link for anyone who can reach this server:")
            st.code(urljoin(here, f"./?run={quote(entry.key, safe='')}"), language=None, wrap_lines=True)


def changes(entry: Entry) -> None:
    """Actions that a read-only server does not offer: run again, label, delete."""
    if again.possible(entry) and st.button(
        "Run again", icon=":material/replay:", help="Opens the form with these settings, to change and start"
    ):
        again.fill(entry)
        st.switch_page("pages/start_run.py")
    if entry.mine:
        label_form(entry)
    why = STAYS[entry.origin] if not entry.mine else "Stop it first." if entry.under_way else None
    st.button(
        "Delete",
        icon=":material/delete:",
        disabled=why is not None,
        help=why or "It can be undone until the trash is emptied.",
        on_click=delete_run,
        args=(entry,),
    )
