"""Other spellings of a page's address: `/overview`, `/Loss_scale` and `/8-and-4-bits` open the page that they name.
An address that names none opens the default page with a notice.

page = st.navigation(spellings.added(pages))
spellings.address(page)                        # "loss-scale", also at `/Loss_scale`
spellings.show_unknown(page)                   # "There is no page nonsense here."
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import streamlit as st
from streamlit.navigation.page import StreamlitPage

from pages.parts import words

MAX_LENGTH = 100
"""Characters of the longest address that gets an entry."""


def added(pages: Mapping[str, Sequence[StreamlitPage]]) -> dict[str, list[StreamlitPage]]:
    """`pages` by section, and at the end a hidden entry for each other address that this session opened.

    Streamlit opens a page only at its exact address, and the default page only at `/`; elsewhere it covers that with a
    dialog. An entry for each file's name would mislead AppTest, which would open that file without `app.py`.
    """
    every = [page for group in pages.values() for page in group]
    named = {_plain(name): page for page in every for name in (page.title, page.url_path, _file(page).stem)}
    opened: set[str] = st.session_state.setdefault("spellings.opened", set())  # for the browser's Back
    requested = unquote(urlsplit(st.context.url or "").path.rstrip("/").rpartition("/")[2])
    if len(requested) <= MAX_LENGTH and all(requested != page.url_path for page in every):
        opened.add(requested)
    default = every[0]
    meant = {spelling: named.get(_plain(spelling), default) for spelling in sorted(opened)}
    st.session_state["spellings.unknown"] = {spelling for spelling in opened if _plain(spelling) not in named}
    st.session_state["spellings.meant"] = {spelling: page.url_path for spelling, page in meant.items()}
    hidden = [_hidden(page, spelling) for spelling, page in meant.items()]
    *others, last = pages  # a link to a file goes to its first entry
    return {**{section: [*pages[section]] for section in others}, last: [*pages[last], *hidden]}


def address(page: StreamlitPage) -> str:
    """The address in `pages` of a page that may have been opened at another spelling."""
    meant: dict[str, str] = st.session_state["spellings.meant"]
    return meant.get(page.url_path, page.url_path)


def show_unknown(page: StreamlitPage) -> None:
    """Above the page: its address names no page, so this is the default one."""
    if page.url_path in st.session_state["spellings.unknown"]:
        shown = f"This is {page.title}; all pages are in the sidebar."
        st.warning(f"There is no page {words.escape(page.url_path)} here. {shown}", icon=":material/link_off:")


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")


def _hidden(page: StreamlitPage, spelling: str) -> StreamlitPage:
    return st.Page(_file(page), title=page.title, url_path=spelling, visibility="hidden")


def _file(page: StreamlitPage) -> Path:
    assert isinstance(page._page, Path)  # Streamlit has no public name for it
    return page._page
