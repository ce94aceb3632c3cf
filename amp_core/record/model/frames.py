"""Local variables of a caller's frame, read without extending their lifetime.

>>> local_variables(sys._getframe(1)).get("self")
"""

import inspect
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from amp_core.record.model.own import attributes

_PROXIES = sys.version_info >= (3, 13)
"""From Python 3.13 on `f_locals` is a view of the frame (PEP 667)."""


def local_variables(frame: FrameType) -> Mapping[str, Any]:
    """The frame's local variables now.

    Before Python 3.13, `f_locals` of a function's frame is a dictionary that the frame then holds until it ends: every
    variable in it would outlive its `del`. It is emptied again, unless the program itself holds that dictionary, as
    `locals()` gives it out.
    """
    variables = frame.f_locals
    if _PROXIES or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return variables
    values = dict(variables)
    if sys.getrefcount(variables) == 3:  # the frame's, `variables`, and the argument of this call
        variables.clear()
    return values


def reachable_values(frame: FrameType | None) -> Iterator[Any]:
    """Values that a loop at `frame` can name, each once: local variables of it and of its callers, globals, and
    attributes of a caller's `self`. Read their `type`, not their `__class__`: unknown objects run no code then."""
    seen: dict[int, Any] = {}  # kept alive, so that ids are not reused
    while frame is not None:
        variables = local_variables(frame)
        for names in (variables, _globals(frame), attributes(variables.get("self"))):
            if id(names) not in seen:
                seen[id(names)] = names
                for value in list(names.values()):
                    if id(value) not in seen:
                        seen[id(value)] = value
                        yield value
        frame = frame.f_back


def _globals(frame: FrameType) -> dict[str, Any]:
    """The globals of the program's own modules: those of torch and of this package are thousands."""
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return {} if package in ("torch", "amp_core") else frame.f_globals
