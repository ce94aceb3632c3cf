"""Patch methods of foreign objects so that they can be restored completely."""

from collections.abc import Callable
from typing import Any


class Patches:
    """Patched methods of objects (or functions in modules), to be restored together.

    >>> patches = Patches()
    >>> patches.wrap(scaler, "update", lambda original: lambda *a, **k: original(*a, **k))
    >>> patches.restore()
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, bool, Any, Any]] = []

    def __len__(self) -> int:
        return len(self._undo)

    def wrap(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        """Replace `owner.name` with `around(original)`."""
        own = name in vars(owner)  # False for a method of the class: restoring then means deleting
        original = getattr(owner, name)
        stored = vars(owner)[name] if own else None  # for a static method the descriptor, not the function
        wrapper = around(original)
        setattr(owner, name, wrapper)
        self._undo.append((owner, name, own, stored, wrapper))

    def restore(self) -> None:
        """Restore all, last first. An attribute that other code has replaced since is left as it is."""
        while self._undo:
            owner, name, own, stored, wrapper = self._undo.pop()
            if vars(owner).get(name) is not wrapper:
                continue
            if own:
                setattr(owner, name, stored)
            else:
                delattr(owner, name)
