"""What the server does before it accepts its first request: `st.App("app.py", lifespan=ready)`.

`streamlit run app.py` takes it from there; `ampscope serve`, which adds checks of its own, from server.py.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import streamlit as st
from streamlit import cli_util
from streamlit.runtime.pages_manager import PagesManager
from streamlit.web.server import server_util

LISTENS_S = 0.2
"""Maximum time from the end of `ready` until the server listens."""


@asynccontextmanager
async def ready(_app: st.App) -> AsyncIterator[None]:
    """What pages need is there before the first visitor is let in, and the other samples are analysed meanwhile."""
    from pages.parts import warm_up  # not at the top: its caches need the runtime, which exists only now

    # Without this the server would take `pages/` for Streamlit's old scheme until `st.navigation`, which sets the same,
    # has run once: the first visitor of a page's address would see "Page not found" first.
    PagesManager.uses_pages_directory = False
    warm_up.prepare_process()
    warm_up.analyse_first_page()
    warm_up.analyse_samples()
    if not st.get_option("server.headless"):  # `streamlit run` does not open an `st.App` itself
        asyncio.get_running_loop().call_later(LISTENS_S, cli_util.open_browser, address())
    yield


def address() -> str:
    """The address of the server for a browser on this machine."""
    return server_util.get_url(server_util.get_display_address(st.get_option("server.address") or "localhost"))
