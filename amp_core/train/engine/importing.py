"""Import torch without collecting garbage: its modules are a million objects that stay, and searching them again and
again takes a fifth of the time of a short training.

>>> with collecting_later():
...     import torch
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_later() -> Iterator[None]:
    """Within the context, Python collects no garbage; what is there after its imports is never searched. For processes
    of AMPscope's own, which have nothing else yet."""
    collects, imports = gc.isenabled(), "torch._dynamo" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if imports:
            gc.freeze()
        if collects:
            gc.enable()
