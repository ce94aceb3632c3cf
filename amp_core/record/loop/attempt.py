"""One attempted optimizer step: its measurements until they are written as rows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import INFINITIES, NANS, SQUARES, Key, packed_length


@dataclass
class Attempt:
    """An optimizer step, from the moment its gradients are measured until its rows are written."""

    step: int
    optimizer: int
    sampled: bool
    bare: bool = False
    """Whether the step was run with as few hooks as possible; see `calibration`."""
    transfer: HostTransfer = field(default_factory=HostTransfer)
    gradients: list[str] = field(default_factory=list)
    """Names of the optimizer's gradients, in the model's order."""
    norm_order: Sequence[int] = ()
    """For each entry of `norms` in the host transfer: the index of its gradient in `gradients`."""
    measured: list[Key] = field(default_factory=list)
    """Name, kind and dtype of each measurement, in the order they were added; a module that ran twice has two."""
    capped: list[tuple[str, str]] = field(default_factory=list)
    """Name and dtype of each measurement of a capped weight gradient, likewise."""
    vectors: dict[str, list[str]] = field(default_factory=lambda: {"measured": [], "capped": []})
    """Keys of their packed vectors in the host transfer, in order."""
    counts: list[int] = field(default_factory=list)
    """How many of `measured` are stored under each key."""
    scaled: bool = False
    """Whether the gradients were measured before they were unscaled."""
    put_in: set[str] = field(default_factory=set)
    """Keys that were put into the host transfer."""
    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    seen: frozenset[str] = frozenset()
    logged: dict[str, Any] = field(default_factory=dict)
    lr: float | None = None
    samples: int = 0
    memory: tuple[int | None, int | None] = (None, None)
    time_s: float = 0.0
    _grad_norm: tuple[float | None] | None = None
    """Cached in a tuple; None until it is first computed."""
    _packed: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    """Cached likewise."""

    def put(self, key: str, value: torch.Tensor | float | None) -> None:
        """Add a tensor or a number of the step; None and tensors without values (meta) are ignored."""
        if value is not None and not (isinstance(value, torch.Tensor) and value.is_meta):
            self.transfer.put(key, value)
            self.put_in.add(key)

    def put_copies(self, values: Mapping[str, torch.Tensor | None]) -> None:
        """`put` of single numbers that the training may still modify."""
        known = {key: value for key, value in values.items() if value is not None and not value.is_meta}
        self.transfer.put_copies(known)
        self.put_in |= known.keys()

    def add(self, kind: str, named: Sequence[tuple[str, str]], packed: torch.Tensor) -> None:
        """Like `add_all`, for tensors of one kind, by name and dtype."""
        self.add_all([(name, kind, dtype) for name, dtype in named], packed)

    def add_all(self, keys: Sequence[Key], packed: torch.Tensor) -> None:
        """Add measurements of tensors, by name, kind and dtype; `packed` is their packed vectors, concatenated."""
        self.measured += keys
        self.counts.append(len(keys))
        self._keep("measured", packed)

    def add_capped(self, named: Sequence[tuple[str, str]], packed: torch.Tensor) -> None:
        """Add measurements of weight gradients capped by channel, likewise."""
        self.capped += named
        self._keep("capped", packed)

    def _keep(self, what: str, packed: torch.Tensor) -> None:
        keys = self.vectors[what]
        keys.append(f"{what}:{len(keys)}")
        self.transfer.put(keys[-1], packed)

    @property
    def sort(self) -> str:
        """The sort of step, as `calibration` names it."""
        return "sampled" if self.sampled else "bare" if self.bare else "plain"

    @property
    def all_measured(self) -> bool:
        """Whether every gradient was measured, in order, so that their norms are known too."""
        return 0 < len(self.gradients) <= len(self.measured) and all(
            kind == "weight_grad" and name == gradient
            for (name, kind, _), gradient in zip(self.measured, self.gradients, strict=False)
        )

    @property
    def norms(self) -> tuple[Sequence[int], npt.NDArray[np.float64]]:
        """Indices into `gradients`, and the 2-norm of each as measured (before or after unscaling)."""
        if self.transfer.has("norms"):
            return self.norm_order, self.transfer.values("norms")
        if not self.all_measured:
            return [], np.zeros(0)
        lengths = [packed_length(dtype) for _, _, dtype in self.measured[: len(self.gradients)]]
        starts = np.cumsum([0, *lengths[:-1]])
        # Gradients of one device are in the first vector: nothing has to be joined.
        first = self.vectors["measured"][0]
        packed = self.transfer.values(first) if self.counts[0] >= len(lengths) else self.packed("measured")
        norms = np.sqrt(packed[starts + SQUARES])
        norms[packed[starts + INFINITIES] > 0] = np.inf
        norms[packed[starts + NANS] > 0] = np.nan
        return list(range(len(starts))), norms

    @property
    def grad_norm(self) -> float | None:
        """The 2-norm of all gradients together, without the loss scale; None if it is not known."""
        if (
            self._grad_norm is None
        ):  # functools.cached_property takes a lock in Python 3.11, which would cost time in each step
            self._grad_norm = (self._norm_of_all(),)
        return self._grad_norm[0]

    def _norm_of_all(self) -> float | None:
        _, norms = self.norms
        scale = self.multiplied_by("weight_grad")
        if not len(norms) or not scale:  # a product with 0 cannot be unscaled
            return None
        if scale != 1.0:
            norms = norms / scale
        return math.sqrt(norms.dot(norms))

    def packed(self, what: str) -> npt.NDArray[np.float64]:
        """The packed vectors of all `measured`, or of all `capped`."""
        if what not in self._packed:
            self._packed[what] = self.transfer.joined(self.vectors[what])
        return self._packed[what]

    def measured_by_part(self) -> Iterator[tuple[list[Key], npt.NDArray[np.float64]]]:
        """Each vector that was added, with its keys."""
        start = 0
        for key, count in zip(self.vectors["measured"], self.counts, strict=True):
            yield self.measured[start : start + count], self.transfer.values(key)
            start += count

    def send(self) -> None:
        """The attempt is complete: start its host transfer."""
        for key, value in self.logged.items():
            if isinstance(value, torch.Tensor):
                self.put(f"logged:{key}", value)
        self.transfer.send()

    def given(self, key: str) -> float | None:
        """The value that the loop logged under `key`, or None."""
        if key not in self.logged:
            return None
        value = self.transfer.value(f"logged:{key}")
        logged = self.logged[key]
        return value if value is not None or isinstance(logged, torch.Tensor) else logged

    @property
    def loss_scale(self) -> float:
        """The loss scale in effect; 1 without a scaler. It may be 0, where a scale that is halved at every step
        underflows."""
        scale = self.transfer.value("loss_scale")
        return 1.0 if scale is None else scale

    def multiplied_by(self, kind: str) -> float:
        """The factor by which values of that kind were multiplied when they were measured."""
        if kind == "output_grad":
            return self.loss_scale
        return self.loss_scale if kind == "weight_grad" and self.scaled else 1.0

    @property
    def skipped(self) -> bool:
        """Whether the scaler skipped the step because of `found_inf`."""
        return bool(self.transfer.value("found_inf"))
