"""Observers whose numbers wait on the device: the host waits only for those beyond the bound, not for all of them."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from amp_core.record.observers import blocks, quantized


class Late:
    """Numbers that arrive only when they are waited for."""

    def ready(self, wait: bool = False) -> bool:
        return wait


def pending(made: type, count: int, item: Any, **attributes: Any) -> Any:
    """An observer whose numbers of that many steps are on the device."""
    observer: Any = object.__new__(made)
    observer._writer = SimpleNamespace(append=lambda *row: None, event=lambda *event, **more: None)
    observer._sent = [item(Late()) for _ in range(count)]
    for name, value in attributes.items():
        setattr(observer, name, value)
    return observer


@pytest.mark.parametrize(
    ("made", "item", "bound"),
    [
        (blocks.BlockWatch, lambda late: (0, [], late), blocks.MAX_WAITING),
        (quantized.QuantizedWatch, lambda late: (0, [], {}, late), quantized.MAX_WAITING),
    ],
)
def test_a_step_waits_for_what_is_beyond_the_bound(
    made: type, item: Any, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made, "_detach", lambda self: None)
    observer = pending(made, bound + 2, item, _measured=[], _cap=nullcontext(), _samples=0, _ever=True)
    observer.step_ended(5)
    assert len(observer._sent) == bound
