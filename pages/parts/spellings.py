"""Other spellings of a page's address: `/overview`, `/Loss_scale` and `/8-and-4-bits` open the page that they name.

page = st.navigation(spellings.added(pages))
spellings.address(page)                        # "loss-scale", also at `/Loss_scale`
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

import streamlit as st
from streamlit.navigation.page import StreamlitPage


def added(pages: Mapping[str, Sequence[StreamlitPage]]) -> dict[str, list[StreamlitPage]]:
    """`pages` by section, and at the end a hidden entry for each other spelling that this session opened.

    Streamlit opens a page only at its exact address, and the default page only at `/`. An entry for each file's name
    would mislead AppTest, which would open that file without `app.py`.
    """
    every = [page for group in pages.values() for page in group]
    named = {_plain(name): page for page in every for name in (page.title, page.url_path, _file(page).stem)}
    opened: set[str] = st.session_state.setdefault("spellings.opened", set())  # for the browser's Back
    requested = unquote(urlsplit(st.context.url or "").path.rstrip("/").rpartition("/")[2])
    if _plain(requested) in named and all(requested != page.url_path for page in every):
        opened.add(requested)
    meant = {spelling: named[_plain(spelling)] for spelling in sorted(opened)}
    st.session_state["spellings.meant"] = {spelling: page.url_path for spelling, page in meant.items()}
    hidden = [_hidden(page, spelling) for spelling, page in meant.items()]
    *others, last = pages  # a link to a file goes to its first entry
    return {**{section: [*pages[section]] for section in others}, last: [*pages[last], *hidden]}


def address(page: StreamlitPage) -> str:
    """The address in `pages` of a page that may have been opened at another spelling."""
    meant: dict[str, str] = st.session_state["spellings.meant"]
    return meant.get(page.url_path, page.url_path)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")


def _hidden(page: StreamlitPage, spelling: str) -> StreamlitPage:
    return st.Page(_file(page), title=page.title, url_path=spelling, visibility="hidden")


def _file(page: StreamlitPage) -> Path:
    assert isinstance(page._page, Path)  # Streamlit has no public name for it
    return page._page
