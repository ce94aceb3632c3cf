"""What the server does before its first visitor is let in: `st.App("app.py", lifespan=ready)`.

`streamlit run app.py` takes it from there, `ampscope serve`, which adds checks of its own, from server.py.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import streamlit as st
from streamlit import cli_util
from streamlit.runtime.pages_manager import PagesManager
from streamlit.web.server import server_util

LISTENS_S = 0.2
"""From the end of `ready` until the server listens, at most."""


@asynccontextmanager
async def ready(_app: st.App) -> AsyncIterator[None]:
    """What pages need is there before the first visitor is let in, and the samples are analysed meanwhile."""
    from pages.parts import warm_up  # not above: its caches ask for the runtime, which is there only now

    # Without this the server would take `pages/` for Streamlit's old scheme until `st.navigation`, which sets the same,
    # has run once: whoever came first, by the address of a page, was told that it is not found before it was shown.
    PagesManager.uses_pages_directory = False
    warm_up.up()
    warm_up.ahead()
    if not st.get_option("server.headless"):  # an `st.App` is not shown by `streamlit run` itself
        asyncio.get_running_loop().call_later(LISTENS_S, cli_util.open_browser, address())
    yield


def address() -> str:
    """Where a browser on this machine finds the server."""
    return server_util.get_url(server_util.get_display_address(st.get_option("server.address") or "localhost"))
