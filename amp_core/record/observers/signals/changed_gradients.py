"""Scaled gradients that the loop's own code changes before they are unscaled: shrinks to a limit, unscales itself, adds
something unscaled to, or makes finite.

    ChangedGradients(writer, optimizers, scaler, calls.scale_calls)

In the first steps, norms of gradients are taken as backward left them and as `unscale_` or `scaler.step` gets them. A
limit makes the norms of different batches alike, be it a norm, a largest value or a share of the weight's norm.
Division by a number of micro-batches or ranks, a mask, or the sum of several tasks does not. A loop that asks for the
loss scale may multiply its limit by it; it may also divide gradients by it, which `scaler.step` then does once more, or
`unscale_` has done before.

What is added unscaled, such as noise or weight decay, is tiny beside a scaled gradient. So is what a cast to 16 bits
rounds off, but that is a small part of each element, and what is added is a large part of small ones.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from amp_core.record.model import scaler_state as scaling
from amp_core.record.model.parameters import in_backward
from amp_core.record.observer import Observer
from amp_core.record.observers.signals.gradient_norms import gradient_of, norms_of
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.captures import capturing
from amp_core.store.writer import RunWriter

STEPS = 8
"""Steps whose gradients are compared."""
MIN_STEPS = 4
MAX_TENSORS = 256
MAX_KEPT_RATIO = 0.9
"""A norm below this share of what backward left was shrunk."""
MIN_SPREAD = 0.05
"""Norms of different batches that differ by less do not tell a limit from a factor."""
SPREAD_RATIO = 0.25
"""A limit leaves less than this share of the spread of the norms."""
MIN_LIMITED_FRAC = 0.7
"""Share of the shrunk tensors that have to show a limit."""
MIN_SCALE = 2.0
"""A loss scale below this does not tell an unscaled gradient from one that a rounding changed."""
MAX_SCALE_ERROR = 1e-3
"""Relative error of the factor between the norms of a gradient before and after it was divided by the loss scale."""

MAX_COPIES = 8
MAX_COPIED = 2**14
"""Elements of a gradient of which a copy is compared."""
MIN_ADDED_SCALE = 2.0**7
"""With a lower loss scale, an unscaled addition is not tiny."""
MAX_ADDED_RATIO = 16.0
"""An addition with a norm of up to this many unscaled gradients is taken for one that should have been scaled."""
MIN_UNEVENNESS = 16.0
"""Largest relative change of an element, in units of the mean one, that rounding cannot explain: a cast to 16 bits
changes all elements by a similar part, some three times the mean at most."""


class _Kept(NamedTuple):
    """Gradients of one optimizer as backward left them."""

    parameters: list[torch.Tensor]
    norms: torch.Tensor
    copies: list[tuple[int, torch.Tensor, int, torch.Tensor]]
    """Of a few small ones: index, tensor, version and copy."""


class ChangedGradients(Observer):
    """Compares until every optimizer has made `STEPS` steps through the scaler."""

    def __init__(
        self,
        writer: RunWriter,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: Any,
        scale_calls: Callable[[], int],
    ) -> None:
        self._writer = writer
        self._optimizers = optimizers
        self._scale_calls = scale_calls
        self._calls_at_begin = 0
        self._step = 0
        self._before: dict[int, _Kept] = {}
        self._sent: dict[int, list[HostTransfer]] = {}
        self._asked: dict[int, list[HostTransfer]] = {}  # of steps in which the loop asked for the loss scale
        self._unscaled: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}  # and what their norms become
        self._after: dict[int, list[HostTransfer]] = {}  # of steps in which the loop called `unscale_`, from then on
        self._scaler: Any = None
        self._listening = False
        if scaling.is_active(scaler):
            self.scaler_found(scaler)

    def scaler_found(self, scaler: Any) -> None:
        self._scaler = scaler
        if not self._listening and self._step < STEPS:
            self._listening = True
            patched_functions.backward.listen_after(self._after_backward)

    def step_began(self, step: int) -> None:
        self._step = step
        self._calls_at_begin = self._scale_calls()
        if step >= STEPS and self._listening:
            self._detach()
        if not self._listening and self._pending and all(transfer.ready() for transfer in self._pending):
            self._report()
        self.awake = self._listening

    def called(self, what: str, optimizer: int | None) -> None:
        if what == "scaler.step" and optimizer in self._unscaled:
            self._compare_unscaled(optimizer)
        if what not in ("unscale_", "scaler.step") or optimizer is None or optimizer not in self._before:
            return
        kept = self._before.pop(optimizer)
        grads = [g for p in kept.parameters if (g := gradient_of(p)) is not None]
        scale = scaling.scale(self._scaler)
        if len(grads) < len(kept.parameters) or scale is None:
            return
        transfer, norms = HostTransfer(), norms_of(grads)
        transfer.put("norms", torch.stack([kept.norms, norms]))
        if what == "unscale_":
            self._unscaled[optimizer] = kept.parameters, norms / scale.to(norms.device)
        changed = [
            _change(copy, grads[i])
            for i, tensor, version, copy in kept.copies
            if (grads[i] is not tensor or tensor._version != version) and grads[i].shape == copy.shape
        ]
        if changed:
            transfer.put("changes", torch.stack([c.to(grads[0].device) for c in changed]))
        transfer.put("scale", scale.to(torch.float32))
        transfer.send()
        asked = self._scale_calls() > self._calls_at_begin
        (self._asked if asked else self._sent).setdefault(optimizer, []).append(transfer)

    def _compare_unscaled(self, optimizer: int) -> None:
        """The loop may have divided gradients by the scale once more since `unscale_`."""
        parameters, norms = self._unscaled.pop(optimizer)
        grads = [g for p in parameters if (g := gradient_of(p)) is not None]
        scale = scaling.scale(self._scaler)
        if len(grads) == len(parameters) and scale is not None:
            transfer = HostTransfer()
            transfer.put("norms", torch.stack([norms, norms_of(grads)]))
            transfer.put("scale", scale.to(torch.float32))
            transfer.send()
            self._after.setdefault(optimizer, []).append(transfer)

    def close(self) -> None:
        if self._listening:
            self._detach()
        for transfer in self._pending:
            transfer.ready(wait=True)
        self._report()

    def _detach(self) -> None:
        patched_functions.backward.unlisten(self._after_backward)
        self._listening, self._before, self._unscaled = False, {}, {}

    @property
    def _pending(self) -> list[HostTransfer]:
        return [
            transfer
            for by_optimizer in (self._sent, self._asked, self._after)
            for sent in by_optimizer.values()
            for transfer in sent
        ]

    def _report(self) -> None:
        """All numbers have arrived."""
        for optimizer, sent in self._sent.items():
            arrived = _arrived(sent)
            rows = [norms for norms, *_ in arrived]
            added = [_added(changes, scale) for _, scale, changes in arrived]
            if sum(map(bool, added)) >= MIN_STEPS and all(added):
                self._writer.event("added unscaled", "gradients", step=0, optimizer=optimizer, count=max(added))
            alike = [row for row in rows if row.shape == rows[-1].shape]
            if len(alike) >= MIN_STEPS and (limited := _limited(np.stack(alike))):
                self._writer.event("clipped scaled", "gradients", step=0, optimizer=optimizer, count=limited)
        for optimizer, sent in (*self._asked.items(), *self._after.items()):
            divided = [_divided(norms, scale) for norms, scale, _ in _arrived(sent)]
            if sum(divided) >= MIN_STEPS and all(divided):
                self._writer.event("unscaled twice", "gradients", step=0, optimizer=optimizer, count=sum(divided))
        for optimizer in {*self._sent, *self._asked}:
            every = [*self._sent.get(optimizer, []), *self._asked.get(optimizer, [])]
            if hidden := sum(_made_finite(transfer.values("norms").reshape(2, -1)) for transfer in every):
                more: dict[str, Any] = {"optimizer": optimizer, "count": hidden, "limit": float(len(every))}
                self._writer.event("made finite", "gradients", step=0, **more)
        self._sent, self._asked, self._after = {}, {}, {}

    def _after_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self.at_own_work() or in_backward() or capturing():
            return
        for index, optimizer in enumerate(self._optimizers):
            every = (p for group in optimizer.param_groups for p in group["params"])
            held = [(p, g) for p in every if (g := gradient_of(p)) is not None][:MAX_TENSORS]
            if held:
                self._before[index] = _kept(held)


def _kept(held: list[tuple[torch.Tensor, torch.Tensor]]) -> _Kept:
    grads = [g for _, g in held]
    alike = [i for i, g in enumerate(grads) if g.dtype is grads[0].dtype and g.device == grads[0].device]
    small = sorted((i for i in alike if grads[i].numel() <= MAX_COPIED), key=lambda i: -grads[i].numel())[:MAX_COPIES]
    together = torch.cat([grads[i].detach().reshape(-1) for i in small]) if small else grads[0].new_zeros(0)
    parts = together.split([grads[i].numel() for i in small])  # one launch copies them all
    copies = [(i, grads[i], grads[i]._version, part.view(grads[i].shape)) for i, part in zip(small, parts, strict=True)]
    return _Kept([p for p, _ in held], norms_of(grads), copies)


@torch.no_grad()
def _change(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Norm of the change, norm before, and the largest relative change of an element. Those that are zero after, as a
    mask makes them, do not count, nor those that are subnormal in float16."""
    before, after = before.to(torch.float32), after.to(torch.float32)
    change = torch.where((before.abs() >= 2.0**-14) & (after != 0), after - before, 0.0)
    return torch.stack([change.norm(), before.norm(), (change / before).nan_to_num(0.0).abs().amax()])


def _arrived(sent: list[HostTransfer]) -> list[tuple[npt.NDArray[np.float64], float, npt.NDArray[np.float64]]]:
    """By step, the norms before and after, the loss scale, and the changes by tensor; of steps with finite norms."""
    read = ((t.values("norms").reshape(2, -1), float(t.values("scale")[0]), _changes(t)) for t in sent)
    return [row for row in read if np.isfinite(row[0]).all()]


def _changes(transfer: HostTransfer) -> npt.NDArray[np.float64]:
    return transfer.values("changes").reshape(-1, 3) if transfer.has("changes") else np.zeros((0, 3))


def _added(changes: npt.NDArray[np.float64], scale: float) -> int:
    """To how many tensors something was added that is too small beside a scaled gradient; 0 if one was changed
    otherwise."""
    norms, before, largest = changes.T
    changed = norms > 0
    if scale < MIN_ADDED_SCALE or not changed.any():
        return 0
    # Of all together: some gradients are zero but for rounding, such as that of a bias before a batch norm.
    ratio = np.linalg.norm(norms) / np.linalg.norm(before)
    is_added = ratio <= MAX_ADDED_RATIO / scale and (largest * before >= MIN_UNEVENNESS * norms)[changed].any()
    return int(changed.sum()) if is_added else 0


def _made_finite(norms: npt.NDArray[np.float64]) -> bool:
    """Whether gradients with an infinity or NaN became finite, and not all of them zero."""
    return not np.isfinite(norms[0]).all() and bool(np.isfinite(norms[1]).all() and norms[1, -1] > 0)


def _divided(norms: npt.NDArray[np.float64], scale: float) -> bool:
    """Whether each gradient became smaller by the loss scale between backward and `scaler.step`."""
    (before, after), present = norms, norms.min(axis=0) > 0
    if scale < MIN_SCALE or not present.any():
        return False
    factors: npt.NDArray[np.bool_] = np.abs(before[present] / after[present] / scale - 1) < MAX_SCALE_ERROR
    return bool(factors.all())


def _limited(norms: npt.NDArray[np.float64]) -> int:
    """How many tensors were shrunk to a limit: `norms`, finite, are by step, before and after, and tensor; the last
    entry is the norm of all together. 0 if few of the shrunk ones show a limit."""
    before, after = norms[:, 0], norms[:, 1]
    with np.errstate(divide="ignore", invalid="ignore"):
        shrunk: npt.NDArray[np.bool_] = np.all((after < MAX_KEPT_RATIO * before) & (after > 0), axis=0)
        spread_before, spread_after = (n.max(axis=0) / n.min(axis=0) - 1 for n in (before, after))
    limited = (spread_before > MIN_SPREAD) & (spread_after < SPREAD_RATIO * spread_before)
    number = int((shrunk & limited)[:-1].sum())
    if (shrunk & limited)[-1]:
        return int(shrunk[:-1].sum())
    varied = int((shrunk & (spread_before > MIN_SPREAD))[:-1].sum())
    return number if number >= max(2.0, MIN_LIMITED_FRAC * varied) else 0
