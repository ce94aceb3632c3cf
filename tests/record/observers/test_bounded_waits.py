"""Observers whose numbers wait on the device: the host waits only for those beyond the bound, not for all of them."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from amp_core.record.observers import blocks, quantized
from amp_core.record.observers.signals import nonfinite_outputs, state


class Late:
    """Numbers that arrive only when they are waited for."""

    def ready(self, wait: bool = False) -> bool:
        return wait

    def joined(self, keys: Any) -> Any:
        return SimpleNamespace(tolist=list)

    def values(self, key: str) -> list[float]:
        return [1.0]


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


@pytest.mark.parametrize(
    ("made", "item"),
    [
        (nonfinite_outputs.ForwardCheck, lambda late: (0, [], [], late)),
    ],
)
def test_reading_waits_for_what_is_beyond_the_bound(made: type, item: Any) -> None:
    observer = pending(made, 5, item)
    observer._read(max_pending=3)
    assert len(observer._sent) == 3
