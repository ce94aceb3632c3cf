"""One batch of parameters after a step: what the step in float64 would have made of them, and the rows of `updates`."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import dtype_name
from amp_core.record.updates.held import Part, local, spaced
from amp_core.record.updates.losses import COLUMNS, Sums, loss_sums
from amp_core.record.updates.replay import Replay, ReplayError

MASTERS, KAHAN, STOCHASTIC = "fp32 masters", "kahan summation", "stochastic rounding"
"""Values of `updates.cure`."""
COMPENSATION_NAMES = ("kahan", "comp")
"""Parts of the names under which optimizers keep what Kahan summation still has to add (optimi, torchdistx)."""
KAHAN_RATIO = 0.5
"""Kahan summation is at work if less than this share of the loss remains once its remainder is counted in."""
MIN_JUMPS = 8
JUMPS_RATIO = 0.5
"""Weights are rounded stochastically if this number of them jump for updates that are far too small, and this share of
those that then would."""
MAX_OFF_FRAC = 0.02
"""Share of a tensor's elements for which rounding may fail to explain the difference to the repeated step."""

MAX_LOOKED_AT = 64
"""Elements by which a state is recognised as the FP32 master of a parameter."""


@dataclass(frozen=True)
class View:
    """What counts as the weight: the parameter; its FP32 master; or the parameter and what is still to be added."""

    key: str = ""
    """Name of the state with the master or the remainder."""
    sign: float = 0.0
    """Of the remainder; 0 for the others."""

    @property
    def is_master(self) -> bool:
        """Whether the weight is a rounded copy of what the optimizer updates."""
        return bool(self.key) and not self.sign

    def of(self, weight: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """The weight in that sense. State that does not exist before the first step begins as 0, a master as a copy."""
        held: torch.Tensor | None = state.get(self.key)
        if held is None:
            return weight
        if not self.sign:
            return held
        remainder = held.to(torch.float64) * self.sign
        return remainder + weight


class Comparison:
    """Parameters of one optimizer, device, dtype and kind of state. `send` begins it; `rows` needs its transfer."""

    def __init__(self, step: int, index: int, optimizer: torch.optim.Optimizer, parts: list[Part]) -> None:
        self.step = step
        self.optimizer = index
        self.transfer = HostTransfer()
        self._parts = parts
        self._kind = type(optimizer).__name__
        self._views = [View(), *other_views(parts, optimizer)]
        keys = {view.key for view in self._views if view.key}
        self._states = [{key: part.state_now(optimizer, key) for key in keys} for part in parts]
        self._decays = any(optimizer.param_groups[part.group].get("weight_decay") for part in parts)

    def send(self, replay: Replay, found_inf: torch.Tensor | None) -> None:
        """Repeat the step and start the copy of the sums. Raises `ReplayError`."""
        parts = self._parts
        after = [part.now() for part in parts]
        exact = replay.step(parts)
        undecayed = exact_undecayed = None
        if self._decays:
            exact_undecayed = replay.step(parts, decay=False)
            undecayed = (
                _rounded(exact_undecayed, parts) if replay.rounds_once else replay.step(parts, decay=False, wide=False)
            )
        for number, view in enumerate(self._views):
            info = torch.finfo(torch.float32 if view.is_master else parts[0].weight.dtype)

            def seen(
                weights: Sequence[torch.Tensor], states: Sequence[dict[str, Any]], view: View = view
            ) -> list[torch.Tensor]:
                return [view.of(weight, state) for weight, state in zip(weights, states, strict=True)]

            def of(copies: list[Part] | None, seen: Callable[..., list[torch.Tensor]] = seen) -> Any:
                return None if copies is None else seen([c.weight for c in copies], [c.state for c in copies])

            sums = loss_sums(
                of(parts), seen(after, self._states), of(exact), of(undecayed), of(exact_undecayed), info.eps, info.tiny
            )
            self.transfer.put(f"sums{number}", sums)
        if found_inf is not None:
            self.transfer.put("found_inf", found_inf)
        self.transfer.send()

    def rows(self) -> list[dict[str, Any]]:
        """Rows of `updates`; none if the optimizer left the step out. Raises `ReplayError` where the repeated step is
        not the one that was made."""
        if self.transfer.value("found_inf"):
            return []
        tables = [
            self.transfer.values(f"sums{i}").reshape(len(self._parts), len(COLUMNS)) for i in range(len(self._views))
        ]
        judged = [self._judged([Sums(*table[number]) for table in tables]) for number in range(len(self._parts))]
        plain = [sums for cure, sums in judged if cure is None]
        jumps, likely = sum(sums.jumps for sums in plain), sum(sums.likely_jumps for sums in plain)
        stochastic = jumps >= max(MIN_JUMPS, JUMPS_RATIO * likely)
        return [
            self._row(part, STOCHASTIC if stochastic and cure is None else cure, sums)
            for part, (cure, sums) in zip(self._parts, judged, strict=True)
        ]

    def _judged(self, views: list[Sums]) -> tuple[str | None, Sums]:
        """Whether FP32 masters or Kahan summation are at work for a tensor, and the sums of the weight that counts."""
        masters = next((sums for view, sums in zip(self._views, views, strict=True) if view.is_master), None)
        if masters is not None:
            return MASTERS, masters
        as_is = views[0]
        counted_in = [sums for view, sums in zip(self._views, views, strict=True) if view.sign]
        best = min(counted_in, key=lambda sums: sums.lost, default=as_is)
        return (KAHAN, best) if best.lost < KAHAN_RATIO * as_is.lost else (None, as_is)

    def _row(self, part: Part, cure: str | None, sums: Sums) -> dict[str, Any]:
        if not math.isfinite(sums.mass + sums.lost):  # what is not finite has findings of its own
            sums = sums._replace(moved=0, mass=0.0, decay=0.0)
        elif sums.off > MAX_OFF_FRAC * sums.elements + 1:
            share = f"{sums.off / sums.elements:.0%} of {part.name}"
            raise ReplayError(f"differs from the replay on copies, in {share}")
        # Stochastic rounding moves each weight too far or not at all; on average nothing is lost.
        lost = sums.lost if cure != STOCHASTIC else max(0.0, sums.mass - sums.net)
        return {
            "step": self.step,
            "name": part.name,
            "optimizer": self.optimizer,
            "dtype": dtype_name(part.weight.dtype),
            "numel": part.parameter.numel(),
            "elements": int(sums.elements),
            "moved": int(sums.moved),
            "unchanged_frac": sums.unchanged / sums.moved if sums.moved else None,
            "lost_mass_frac": _share(lost / sums.mass) if sums.mass else None,
            "lost_decay_frac": _share(1 - sums.decayed / sums.decay) if sums.decay and cure != STOCHASTIC else None,
            "cure": cure,
            "update_rms": math.sqrt(sums.squares / sums.elements) if sums.moved else None,
            "weight_rms": math.sqrt(sums.squares_before / sums.elements),
        }


def other_views(parts: Sequence[Part], optimizer: torch.optim.Optimizer) -> Iterator[View]:
    """What else than the parameters may count as the weights: states with FP32 masters, or with remainders."""
    states = [optimizer.state.get(part.parameter, {}) for part in parts]
    for key, value in states[0].items():
        held = [state.get(key) for state in states]
        shapes = [tuple(h.shape) if isinstance(h, torch.Tensor) else None for h in held]
        if shapes != [tuple(part.parameter.shape) for part in parts]:
            continue
        if any(name in key.lower() for name in COMPENSATION_NAMES):
            yield from (View(key, 1.0), View(key, -1.0))
        elif value.dtype is torch.float32 and is_master_of(value, parts[0].parameter):
            yield View(key)


def is_master_of(state: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a state in FP32 is the master of a narrower parameter. Waits for the device, a few elements long."""
    if parameter.element_size() >= state.element_size():
        return False
    master, weight = (spaced(local(t), MAX_LOOKED_AT) for t in (state, parameter))
    return bool((master.to(weight.dtype) == weight).all())


def _rounded(copies: list[Part], parts: list[Part]) -> list[Part]:
    """The copies with weights rounded to the dtype of the parameters."""
    for copied, part in zip(copies, parts, strict=True):
        copied.weight = copied.weight.to(part.weight.dtype)
    return copies


def _share(value: float) -> float:
    """Within 0–1: an update whose parts are rounded one by one may land further off than if nothing had moved."""
    return float(np.clip(value, 0.0, 1.0))
