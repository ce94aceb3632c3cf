"""Register trainings in other forms than the zoo's.

@fault("clip-before-unscale", "gradients")
def lstm_data_clamp(into): ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Train = Callable[[Path], None]


@dataclass(frozen=True)
class Form:
    """A training in another form than the zoo's: `train(into)` records it."""

    code: str
    """Codes of which one is right, separated by bars; empty for a healthy one."""
    where: str
    train: Train
    each_time: bool


FAULTS: list[Form] = []
HEALTHY: list[Form] = []


def fault(code: str, where: str = "", *, each_time: bool = False) -> Callable[[Train], Train]:
    """Register a training with a fault. `each_time`: not only with `--whole`."""
    return _register(FAULTS, code, where, each_time)


def healthy(*, each_time: bool = False) -> Callable[[Train], Train]:
    """Register a training that has no fault."""
    return _register(HEALTHY, "", "", each_time)


def _register(forms: list[Form], code: str, where: str, each_time: bool) -> Callable[[Train], Train]:
    def register(train: Train) -> Train:
        forms.append(Form(code, where, train, each_time))
        return train

    return register
