"""Detects optimizers whose second moments are stored in 16 bits, be it only between two steps."""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import has_values, local_values, named_parameters, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import dtype_name
from amp_core.store.writer import RunWriter

INSPECTED_STEP = 2
"""The step before and after which second moments are inspected."""
MAX_TENSORS, MAX_ELEMENTS = 32, 4096
"""Second moments of an optimizer that are inspected, and elements of each."""
MIN_FIRST_MOMENT = 1e-15
"""Its square, times 1 - beta2, is in the range of float32's normal numbers."""
FIRST_MOMENTS = ("exp_avg", "m", "mu")
MIN_NONZERO = 64
"""Second moments in float32 that 16 bits all hold exactly were in 16 bits before: of a mean of squares, few are."""


class SecondMoments(Observer):
    """Reports once, after the first steps, optimizers whose second moments are stored in 16 bits, or were between two
    steps."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._writer = writer
        self._names = {id(p): n for n, p in named_parameters(unwrapped(model))}
        self._optimizers = optimizers
        self._step = 0
        self._stepping: set[int] = set()  # optimizers that were inspected before a step
        self._sent: list[tuple[int, int, str, torch.dtype | None, float | None, HostTransfer]] = []

    def step_began(self, step: int) -> None:
        self._step = step

    def called(self, what: str, optimizer: int | None) -> None:
        due = what == "optimizer.step" and self._step >= INSPECTED_STEP
        if due and optimizer is not None and optimizer not in self._stepping:
            self._stepping.add(optimizer)
            self._inspect(optimizer, torch.float32)

    def step_ended(self, step: int) -> None:
        for index in range(len(self._optimizers)) if step in (0, INSPECTED_STEP) else ():
            # What is lost in 8 bits may end a training before the inspected step.
            self._inspect(index, *(NARROW if step else (torch.int8,)))
        self._write(wait=False)
        if step >= INSPECTED_STEP:
            self.awake = bool(self._sent)

    def close(self) -> None:
        self._write(wait=True)

    def _inspect(self, index: int, *dtypes: torch.dtype) -> None:
        """Inspect second moments in these dtypes. Those in float32 may have been in 16 bits since the last step."""
        second_moments: list[tuple[torch.Tensor, torch.Tensor, Any, dict[str, Any]]] = []
        optimizer = self._optimizers[index]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if not isinstance(state, dict) or len(second_moments) >= MAX_TENSORS:
                    continue
                second = second_moment(state)
                if second is not None and second.dtype in dtypes and has_values(second):
                    first = next((state[key] for key in FIRST_MOMENTS if key in state), None)
                    second_moments.append((parameter, local_values(second), first, group))
        if not second_moments:
            return
        parameter, second, _, group = second_moments[0]
        betas = group.get("betas")
        decay = betas[1] if isinstance(betas, tuple | list) and len(betas) > 1 else group.get("alpha")
        transfer = HostTransfer()
        counts = [vanished(v, m) for _, v, m, _ in second_moments]
        transfer.put("counts", torch.stack([count.to(counts[0].device) for count in counts]))
        stored = second.dtype if second.dtype != torch.float32 else None
        if stored is None:
            exact = [_exact(v) for _, v, _, _ in second_moments]
            transfer.put("exact", torch.stack([count.to(exact[0].device) for count in exact]))
        transfer.send()
        limit = 1.0 - decay if isinstance(decay, float) else None
        self._sent.append((self._step, index, self._names.get(id(parameter), ""), stored, limit, transfer))

    def _write(self, *, wait: bool) -> None:
        while self._sent and self._sent[0][-1].ready(wait):
            step, index, name, dtype, limit, transfer = self._sent.pop(0)
            if dtype is None:
                nonzero, *exact = transfer.values("exact").reshape(-1, 1 + len(NARROW)).sum(axis=0)
                fits = (d for d, count in zip(NARROW, exact, strict=True) if count == nonzero >= MIN_NONZERO)
                if (dtype := next(fits, None)) is None:
                    continue
            vanished, known = transfer.values("counts").reshape(-1, 2).sum(axis=0)
            share = float(vanished / known) if known else 0.0
            more: dict[str, Any] = {"value": share, "limit": limit, "optimizer": index, "dtype": dtype_name(dtype)}
            self._writer.event("second moments", name, step=step, **more)


def _exact(second: torch.Tensor) -> torch.Tensor:
    """How many second moments are not zero, and how many of those each 16-bit dtype holds exactly."""
    v = second.detach().reshape(-1)[:MAX_ELEMENTS]
    return torch.stack([(v != 0).sum(), *(((v.to(dtype).to(v.dtype) == v) & (v != 0)).sum() for dtype in NARROW)])


def second_moment(state: dict[str, Any]) -> torch.Tensor | None:
    """The second moment in an optimizer's state of one parameter, as torch and others call it."""
    keys = (key for key in state if isinstance(key, str) and ("sq" in key or key in ("v", "nu")))
    values = (state[key] for key in keys)
    return next((v for v in values if isinstance(v, torch.Tensor) and v.dim() and _holds_moments(v)), None)


def _holds_moments(tensor: torch.Tensor) -> bool:
    """Whether 0 stands for a moment of zero: in integers of other types it may be a code for any number."""
    return tensor.is_floating_point() or (type(tensor) is torch.Tensor and tensor.dtype is torch.int8)


def vanished(second: torch.Tensor, first: Any) -> torch.Tensor:
    """How many second moments are zero beside a first moment that is not, and how many such first moments there are:
    two integers. First moments whose squares underflow float32 too are left out."""
    v = second.detach().reshape(-1)[:MAX_ELEMENTS]
    m = local_values(first).detach().reshape(-1)[:MAX_ELEMENTS] if isinstance(first, torch.Tensor) else v
    known = m.abs() > (MIN_FIRST_MOMENT if m.is_floating_point() else 0)
    return torch.stack([((v == 0) & known).sum(), known.sum()]) if len(m) == len(v) else v.new_zeros(2).long()
