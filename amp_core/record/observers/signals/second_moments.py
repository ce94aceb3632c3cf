"""Detects optimizers whose second moments are stored in 16 or 8 bits, be it only between two steps."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from amp_core.formats import FORMATS
from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import has_values, local_values, named_parameters, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import dtype_name
from amp_core.store.writer import RunWriter

INSPECTED_STEP = 2
"""The step after which second moments are inspected, and on a CPU before which too."""
MEASURED_STEP = 10
"""On other devices it is this one: by default it is measured anyway, and others have few launches."""
MAX_TENSORS, MAX_ELEMENTS = 32, 4096
"""Second moments of an optimizer that are inspected, and elements of each."""
MIN_FIRST_MOMENT = 1e-15
"""Its square, times 1 - beta2, is in the range of float32's normal numbers."""
FIRST_MOMENTS = ("exp_avg", "m", "mu")
EIGHT_BITS = (torch.int8, *(getattr(torch, f.dtype) for f in FORMATS.values() if f.bits == 8 and f.dtype))
"""Dtypes in which what is lost may end a training before the inspected step."""
MIN_NONZERO = 64
"""Second moments in float32 that 16 bits all hold exactly were in 16 bits before: of a mean of squares, few are."""


class _Moments(NamedTuple):
    """The moments of a parameter."""

    name: str
    second: Any
    first: Any
    decay: float | None
    """1 - beta2."""


class SecondMoments(Observer):
    """Reports once, after the first steps, optimizers whose second moments are stored in 16 bits, or were between two
    steps."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._writer = writer
        self._names = {id(p): n for n, p in named_parameters(unwrapped(model))}
        self._optimizers = optimizers
        self._step = 0
        devices = {p.device.type for o in optimizers for group in o.param_groups for p in group["params"]}
        self._copied_step = INSPECTED_STEP if devices == {"cpu"} else MEASURED_STEP
        self._stepping: set[int] = set()  # optimizers that were inspected before a step
        self._sent: list[tuple[int, int, _Moments, HostTransfer]] = []

    def step_began(self, step: int) -> None:
        self._step = step

    def called(self, what: str, optimizer: int | None) -> None:
        due = what == "optimizer.step" and self._step >= self._copied_step
        if due and optimizer is not None and optimizer not in self._stepping:
            self._stepping.add(optimizer)
            self._copy_one(optimizer)

    def step_ended(self, step: int) -> None:
        for index in range(len(self._optimizers)) if step in (0, INSPECTED_STEP) else ():
            self._inspect(index, *(NARROW if step else EIGHT_BITS))
        self._write(wait=False)
        if step >= self._copied_step:
            self.awake = bool(self._sent)

    def close(self) -> None:
        self._write(wait=True)

    def _moments(self, index: int, *dtypes: torch.dtype) -> list[_Moments]:
        """The first second moments of an optimizer in these dtypes."""
        optimizer, found = self._optimizers[index], list[_Moments]()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if not isinstance(state, dict) or len(found) >= MAX_TENSORS:
                    continue
                second = second_moment(state)
                if second is not None and second.dtype in dtypes and has_values(second):
                    first = next((_tensor_of(state[key]) for key in FIRST_MOMENTS if key in state), None)
                    name = self._names.get(id(parameter), "")
                    found.append(_Moments(name, local_values(second), first, _one_minus_beta2(group)))
        return found

    def _inspect(self, index: int, *dtypes: torch.dtype) -> None:
        if not (moments := self._moments(index, *dtypes)):
            return
        transfer = HostTransfer()
        counts = [vanished(m.second, m.first) for m in moments]
        transfer.put("counts", torch.stack([count.to(counts[0].device) for count in counts]))
        transfer.send()
        self._sent.append((self._step, index, moments[0], transfer))

    def _copy_one(self, index: int) -> None:
        """Copy the largest float32 second moment to the host: it may have been in 16 bits since the last step."""
        largest = max(self._moments(index, torch.float32), key=lambda m: m.second.numel(), default=None)
        if largest is not None:
            transfer = HostTransfer()
            for key, values in (("second", largest.second), ("first", largest.first)):
                if isinstance(values, torch.Tensor) and values.is_floating_point():
                    transfer.put(key, local_values(values).detach().reshape(-1)[:MAX_ELEMENTS])
            transfer.send()
            self._sent.append((self._step, index, largest._replace(second=None, first=None), transfer))

    def _write(self, *, wait: bool) -> None:
        while self._sent and self._sent[0][-1].ready(wait):
            step, index, moments, transfer = self._sent.pop(0)
            if transfer.has("second"):
                second = transfer.values("second")
                first = transfer.values("first") if transfer.has("first") else second
                dtype = _held_exactly_by(second)
                known = np.abs(first) > MIN_FIRST_MOMENT
                zeros, of = int((known & (second == 0)).sum()), int(known.sum())
            else:
                dtype = moments.second.dtype
                zeros, of = (int(n) for n in transfer.values("counts").reshape(-1, 2).sum(axis=0))
            if dtype is not None:
                more: dict[str, Any] = {"value": zeros / of if of else 0.0, "limit": moments.decay}
                self._writer.event(
                    "second moments", moments.name, step=step, optimizer=index, dtype=dtype_name(dtype), **more
                )


def _held_exactly_by(second: npt.NDArray[np.float64]) -> torch.dtype | None:
    """The 16-bit dtype that holds all of these float32 numbers, if enough of them are not zero."""
    values = torch.from_numpy(second[second != 0]).to(torch.float32)
    fits = (dtype for dtype in NARROW if bool((values.to(dtype).to(torch.float32) == values).all()))
    return next(fits, None) if len(values) >= MIN_NONZERO else None


def _one_minus_beta2(group: dict[str, Any]) -> float | None:
    betas = group.get("betas")
    decay = betas[1] if isinstance(betas, tuple | list) and len(betas) > 1 else group.get("alpha")
    return 1.0 - decay if isinstance(decay, float) else None


def second_moment(state: dict[str, Any]) -> torch.Tensor | None:
    """The second moment in an optimizer's state of one parameter, as torch and others call it."""
    keys = (key for key in state if isinstance(key, str) and ("sq" in key or key in ("v", "nu")))
    values = (_tensor_of(state[key]) for key in keys)
    return next((v for v in values if v is not None and v.dim() and _holds_moments(v)), None)


def _tensor_of(value: Any) -> torch.Tensor | None:
    """A state, which may be an object of the program's own that holds the stored tensor and its scale."""
    if isinstance(value, torch.Tensor):
        return value
    held = (v for v in getattr(value, "__dict__", {}).values() if isinstance(v, torch.Tensor) and v.dim())
    return max(held, key=lambda v: v.numel(), default=None)


def _holds_moments(tensor: torch.Tensor) -> bool:
    """Whether 0 stands for a moment of zero: in integers of other types it may be a code for any number."""
    return tensor.is_floating_point() or (type(tensor) is torch.Tensor and tensor.dtype is torch.int8)


def _first_of(moments: torch.Tensor) -> torch.Tensor:
    values = moments.detach().reshape(-1)[:MAX_ELEMENTS]
    return values.float() if values.dtype in EIGHT_BITS[1:] else values  # which torch does not compare


def vanished(second: torch.Tensor, first: Any) -> torch.Tensor:
    """How many second moments are zero beside a first moment that is not, and how many such first moments there are:
    two integers. First moments whose squares underflow float32 too are left out."""
    v = _first_of(second)
    m = _first_of(local_values(first)) if isinstance(first, torch.Tensor) else v
    known = m.abs() > (MIN_FIRST_MOMENT if m.is_floating_point() else 0)
    return torch.stack([((v == 0) & known).sum(), known.sum()]) if len(m) == len(v) else v.new_zeros(2).long()
