"""What every page needs is imported once, before somebody waits for the first one.

    warm.up()      # as the server starts, or in the first pass; only the first call does anything

pandas, pyarrow, plotly and the pages' own parts take half a second. They make some hundred thousand objects that stay
as long as the server; Streamlit collects garbage after every pass of a page, and looking through those took 80 ms each
time, in which no page was sent. They are set aside here: collecting goes on, over what pages make.
"""

import functools
import gc
import importlib
import pkgutil

import pages.parts
from pages.parts import memory_back


@functools.cache
def up() -> None:
    """Settle where memory comes from, import all parts and what they import, and set aside what is there."""
    memory_back.at_once()
    for part in pkgutil.walk_packages(pages.parts.__path__, "pages.parts."):
        importlib.import_module(part.name)
    gc.collect()
    gc.freeze()
