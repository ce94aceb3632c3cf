"""Wrap methods of other people's objects so that every trace can be taken away again."""

from collections.abc import Callable
from typing import Any


class Patches:
    """Methods wrapped on single objects (or functions in modules), to be restored together.

    >>> patches = Patches()
    >>> patches.wrap(scaler, "update", lambda original: lambda *a, **k: original(*a, **k))
    >>> patches.restore()
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, bool, Any, Any]] = []

    def __len__(self) -> int:
        return len(self._undo)

    def wrap(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        """Put `around(original)` in the place of `owner.name`."""
        own = name in vars(owner)  # False for a method that the class provides: then restoring is deleting
        original = getattr(owner, name)
        wrapper = around(original)
        setattr(owner, name, wrapper)
        self._undo.append((owner, name, own, original, wrapper))

    def restore(self) -> None:
        """Take all wrappers away, last first. One that somebody else wrapped again since is left in their hands."""
        while self._undo:
            owner, name, own, original, wrapper = self._undo.pop()
            if vars(owner).get(name) is not wrapper:
                continue
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
