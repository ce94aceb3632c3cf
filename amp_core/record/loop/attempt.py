"""One attempted optimizer step: what was gathered for it, and the rows it becomes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import INFINITIES, NANS, SQUARES, Key, packed_length


@dataclass
class Attempt:
    """An optimizer step from the first look at its gradients to the rows written for it."""

    step: int
    optimizer: int
    sampled: bool
    bare: bool = False
    """Whether the step was run with as few hooks as can be; see `calibration`."""
    transfer: HostTransfer = field(default_factory=HostTransfer)
    gradients: list[str] = field(default_factory=list)
    """Names of the optimizer's gradients, in the model's order."""
    norm_order: list[int] = field(default_factory=list)
    """Which of `gradients` each entry of `norms` in the parcel is of."""
    measured: list[Key] = field(default_factory=list)
    """Name, kind and dtype of each measurement, in the order they were put in; a module that ran twice has two."""
    capped: list[tuple[str, str]] = field(default_factory=list)
    """Name and dtype of each measurement of a capped weight gradient, likewise."""
    vectors: dict[str, list[str]] = field(default_factory=lambda: {"measured": [], "capped": []})
    """Under which keys of the host transfer they lie, one after another."""
    counts: list[int] = field(default_factory=list)
    """How many of `measured` lie under each of its keys."""
    scaled: bool = False
    """Whether the gradients were looked at before they were unscaled."""
    put_in: set[str] = field(default_factory=set)
    """Names of what was put into the parcel."""
    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    seen: frozenset[str] = frozenset()
    logged: dict[str, Any] = field(default_factory=dict)
    lr: float | None = None
    samples: int = 0
    memory: tuple[int | None, int | None] = (None, None)
    time_s: float = 0.0
    _grad_norm: tuple[float | None] | None = None
    """Once it was asked for."""
    _packed: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    """Likewise."""

    def put(self, key: str, value: torch.Tensor | float | None) -> None:
        """Keep a tensor or a number of the step; None, and a tensor without values (meta), is kept as nothing."""
        if value is not None and not (isinstance(value, torch.Tensor) and value.is_meta):
            self.transfer.put(key, value)
            self.put_in.add(key)

    def add(self, kind: str, named: Sequence[tuple[str, str]], packed: torch.Tensor) -> None:
        """The same as `add_all` for tensors of one kind, by name and dtype."""
        self.add_all([(name, kind, dtype) for name, dtype in named], packed)

    def add_all(self, keys: Sequence[Key], packed: torch.Tensor) -> None:
        """Keep measurements of tensors, by name, kind and dtype, whose packed vectors come one after another."""
        self.measured += keys
        self.counts.append(len(keys))
        self._keep("measured", packed)

    def add_capped(self, named: Sequence[tuple[str, str]], packed: torch.Tensor) -> None:
        """Keep measurements of weight gradients capped by channel, likewise."""
        self.capped += named
        self._keep("capped", packed)

    def _keep(self, what: str, packed: torch.Tensor) -> None:
        keys = self.vectors[what]
        keys.append(f"{what}:{len(keys)}")
        self.transfer.put(keys[-1], packed)

    @property
    def sort(self) -> str:
        """What kind of step it is to `calibration`."""
        return "sampled" if self.sampled else "bare" if self.bare else "plain"

    @property
    def all_measured(self) -> bool:
        """Whether every gradient was measured, in order and on one device, so that their norms are known too."""
        return 0 < len(self.gradients) <= len(self.measured) and all(
            kind == "weight_grad" and name == gradient
            for (name, kind, _), gradient in zip(self.measured, self.gradients, strict=False)
        )

    @property
    def norms(self) -> tuple[list[int], npt.NDArray[np.float64]]:
        """2-norms of gradients as they were looked at, and which of `gradients` each is of."""
        if self.transfer.has("norms"):
            return self.norm_order, self.transfer.values("norms")
        if not self.all_measured:
            return [], np.zeros(0)
        lengths = [packed_length(dtype) for _, _, dtype in self.measured[: len(self.gradients)]]
        starts = np.cumsum([0, *lengths[:-1]])
        packed = self.packed("measured")
        found = np.sqrt(packed[starts + SQUARES])
        found[packed[starts + INFINITIES] > 0] = np.inf
        found[packed[starts + NANS] > 0] = np.nan
        return list(range(len(starts))), found

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of all gradients together, without the loss scale; None where it is not known."""
        if self._grad_norm is None:  # what functools has for this takes a lock, which each step would pay for
            self._grad_norm = (self._norm_of_all(),)
        return self._grad_norm[0]

    def _norm_of_all(self) -> float | None:
        _, norms = self.norms
        scale = self.multiplied_by("weight_grad")
        if not len(norms) or not scale:  # multiplied by 0, nothing is left to tell it from
            return None
        if scale != 1.0:
            norms = norms / scale
        return math.sqrt(norms.dot(norms))

    def packed(self, what: str) -> npt.NDArray[np.float64]:
        """The packed vectors of all `measured`, or all `capped`."""
        if what not in self._packed:
            self._packed[what] = self.transfer.joined(self.vectors[what])
        return self._packed[what]

    def measured_by_part(self) -> Iterator[tuple[list[Key], npt.NDArray[np.float64]]]:
        """Each of the vectors that were added, with the keys of what it holds."""
        start = 0
        for key, count in zip(self.vectors["measured"], self.counts, strict=True):
            yield self.measured[start : start + count], self.transfer.values(key)
            start += count

    def send(self) -> None:
        """Nothing more comes: start the one copy to the host."""
        for key, value in self.logged.items():
            if isinstance(value, torch.Tensor):
                self.put(f"logged:{key}", value)
        self.transfer.send()

    def given(self, key: str) -> float | None:
        """What the loop logged under `key`."""
        if key not in self.logged:
            return None
        value = self.transfer.value(f"logged:{key}")
        logged = self.logged[key]
        return value if value is not None or isinstance(logged, torch.Tensor) else logged

    @property
    def loss_scale(self) -> float:
        """The scale in effect; 1 without a scaler. It may be 0, where one ends that is halved at every step."""
        scale = self.transfer.value("loss_scale")
        return 1.0 if scale is None else scale

    def multiplied_by(self, kind: str) -> float:
        """By what the values of that kind were multiplied when they were looked at."""
        if kind == "output_grad":
            return self.loss_scale
        return self.loss_scale if kind == "weight_grad" and self.scaled else 1.0

    @property
    def skipped(self) -> bool:
        """Whether the scaler found a non-finite gradient."""
        return bool(self.transfer.value("found_inf"))
