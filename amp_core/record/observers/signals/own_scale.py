"""Tells whether a loop that multiplies its loss by a constant, without a GradScaler, undoes that before it steps.

    OwnLossScale(writer, optimizers, scaler)

In the first steps, norms of gradients are taken as backward left them and as the optimizer gets them. So they are in
the steps that follow a larger loss scale than any before, where gradients may overflow. Their ratio is the loss scale
where the loop divides by it, and larger where it clips after that. It is 1 where gradients stay scaled, and the square
of the scale where the loop divides twice. A factor that is a power of two of 128 and more is a loss scale; others may
be the weight of a loss.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._pytree import tree_leaves

from amp_core.record.model import scaler_state as scaling
from amp_core.record.model.loss_factors import own_scale
from amp_core.record.model.parameters import in_backward, learning_rate
from amp_core.record.observer import Observer
from amp_core.record.observers.signals.gradient_norms import gradient_of, norm_of, norms_of
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.captures import capturing
from amp_core.store.writer import RunWriter

STEPS = 8
"""Steps whose gradients are compared, at first and after each growth of the loss scale."""
MAX_STEPS = 128
"""Steps whose gradients are compared in a run."""
MIN_STEPS = 2
"""Steps that have to agree; one where the optimizer made no other."""
MIN_CLIPPED_STEPS = 4
MAX_TENSORS = 256
MAX_ERROR = 1e-2
"""Relative error of the factor by which the program divides gradients, which may be rounded to 16 bits."""
MAX_LIMIT_FRAC = 0.1
"""A limit of more than this share of the program's own loss scale is meant for scaled gradients."""
MIN_UPDATE_RATIO = 1.0
"""A learning rate of SGD times the loss scale that is smaller undoes the scale."""


class _Before(NamedTuple):
    """Gradients of one optimizer as backward left them."""

    parameters: list[torch.Tensor]
    norms: torch.Tensor


class _Sent(NamedTuple):
    """One step of an optimizer, whose norms are on their way to the host."""

    optimizer: int
    step: int
    scales: tuple[float, ...]
    """The constants of the losses that were backpropagated for it."""
    transfer: HostTransfer


class OwnLossScale(Observer):
    """Writes an event for each optimizer of a loop that does not undo its loss scale, or clips before it does."""

    def __init__(self, writer: RunWriter, optimizers: Sequence[torch.optim.Optimizer], scaler: Any) -> None:
        self._writer = writer
        self._optimizers = optimizers
        self._step = 0
        self._scales: list[float] = []
        self._loss: torch.Tensor | None = None
        self._before: dict[int, _Before] = {}
        self._clipped: torch.Tensor | None = None  # the norm of all gradients after they were clipped
        self._unclipped: torch.Tensor | None = None  # that before, by which the loop clips
        self._largest = 0.0  # loss scale so far
        self._left = 0  # steps that are still compared
        self._compared = 0
        self._sent: list[_Sent] = []
        self._reported: set[int] = set()  # optimizers
        self.awake = not scaling.is_active(scaler)
        if self.awake:
            patched_functions.backward.listen(self._on_backward)
            patched_functions.backward.listen_after(self._after_backward)
            patched_functions.clipped_by_norm.listen_after(self._after_clip)

    def scaler_found(self, scaler: Any) -> None:
        self._sent = []
        self.close()
        self.awake = False

    def step_began(self, step: int) -> None:
        if not self.awake:
            return
        self._step = step
        self._scales, self._before, self._clipped = [], {}, None
        if self._left == 0 and self._sent and all(sent.transfer.ready() for sent in self._sent):
            self._report()
        if self._compared >= MAX_STEPS or (step >= STEPS and not self._compared):
            self.close()
            self.awake = False

    def step_ended(self, step: int) -> None:
        if self._scales:
            self._left -= 1
            self._compared += 1

    def called(self, what: str, optimizer: int | None) -> None:
        before = self._before.pop(optimizer, None) if what == "optimizer.step" and optimizer is not None else None
        if before is None or optimizer is None or self._loss is None:
            return
        grads = [g for p in before.parameters if (g := gradient_of(p)) is not None]
        if len(grads) == len(before.parameters):
            transfer = HostTransfer()
            transfer.put("norms", torch.stack([before.norms, norms_of(grads).to(before.norms.device)]))
            transfer.put("loss", self._loss.sum().to(torch.float64))
            every = norm_of([p for group in self._optimizers[optimizer].param_groups for p in group["params"]])
            if self._clipped is not None and every is not None:
                transfer.put("clipped", torch.stack([self._clipped, every.to(self._clipped.device)]))
                if self._unclipped is not None:
                    transfer.put("unclipped", self._unclipped.to(torch.float64))
            transfer.send()
            self._sent.append(_Sent(optimizer, self._step, tuple(self._scales), transfer))
        self._clipped = None

    def close(self) -> None:
        self._before = {}
        patched_functions.backward.unlisten(self._on_backward, self._after_backward)
        patched_functions.clipped_by_norm.unlisten(self._after_clip)
        self._report()

    def _report(self) -> None:
        """Write what the steps since the last report show, once for each optimizer."""
        sent, self._sent = self._sent, []
        for each in sent:
            each.transfer.ready(wait=True)
        for optimizer in sorted({each.optimizer for each in sent} - self._reported):
            self._report_of(optimizer, [each for each in sent if each.optimizer == optimizer])

    def _report_of(self, optimizer: int, sent: list[_Sent]) -> None:
        overflowed = [(each, what) for each in sent if (what := _stepped_nonfinite(each))]
        if overflowed:
            first, what = overflowed[0]
            self._event(optimizer, what, sent, len(overflowed), first)
            return
        if sent[0].step >= STEPS:
            return
        if len(sent) >= MIN_CLIPPED_STEPS and all(map(_divided_after_clip, sent)):
            scale = sent[-1].scales[-1]
            self._writer.event("clipped scaled", "gradients", "own scale", step=0, optimizer=optimizer, value=scale)
        elif len(sent) >= MIN_CLIPPED_STEPS and all(map(_kept_after_clip, sent)):
            if _takes_gradients(self._optimizers[optimizer], sent[-1].scales[-1]):
                self._event(optimizer, "clipped", sent, len(sent), sent[-1])
            return
        rows = [s for s in sent if np.isfinite(s.transfer.values("norms")).all()]
        found = {self._what(s) for s in rows}
        if len(rows) >= min(MIN_STEPS, len(sent)) and len(found) == 1 and (what := found.pop()):
            self._event(optimizer, what, rows, _kept_count(rows[-1]) if what == "some" else len(rows), rows[-1])

    def _event(self, optimizer: int, what: str, sent: list[_Sent], count: int, example: _Sent) -> None:
        self._reported.add(optimizer)
        more: dict[str, Any] = {"optimizer": optimizer, "count": count, "value": max(example.scales)}
        self._writer.event("scale not undone", "gradients", what, step=sent[0].step, **more, limit=float(len(sent)))

    def _what(self, sent: _Sent) -> str:
        """What is wrong with one step that did not clip: `kept`, `some`, `twice`, `multiplied`, `mixed`, or nothing."""
        scales, optimizer = set(sent.scales), self._optimizers[sent.optimizer]
        if len(scales) > 1:
            return "mixed" if len(self._optimizers) == 1 else ""
        scale, ratios = scales.pop(), _ratios(sent.transfer.values("norms").reshape(2, -1))
        if not len(ratios):
            return ""
        kept = _is(ratios, 1.0)
        if kept.any() and (_is(ratios, scale) | kept).all() and _takes_gradients(optimizer, scale):
            return "kept" if kept.all() else "some"
        if _is(ratios, scale**2).all():
            return "twice"
        return "multiplied" if _is(ratios, 1 / scale).all() else ""

    def _on_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._loss = None
        if self.at_own_work() or in_backward() or capturing():
            return
        roots = [t for t in tree_leaves(args[:1]) if isinstance(t, torch.Tensor)]
        scale = own_scale(roots[0]) if len(roots) == 1 else None
        if scale is None:
            return
        if scale > self._largest:
            self._largest, self._left = scale, STEPS
        if self._left > 0:
            every = (p for o in self._optimizers for group in o.param_groups for p in group["params"])
            if all(gradient_of(p) is None for p in every):  # what the loop has skipped was scaled otherwise
                self._scales = []
            self._scales.append(scale)
            self._loss = roots[0].detach()

    def _after_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if self._loss is None or self.at_own_work() or in_backward() or capturing():
            return
        for index, optimizer in enumerate(self._optimizers):
            every = (p for group in optimizer.param_groups for p in group["params"])
            held = [(p, g) for p in every if (g := gradient_of(p)) is not None][:MAX_TENSORS]
            if held:
                self._before[index] = _Before([p for p, _ in held], norms_of([g for _, g in held]))

    def _after_clip(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        parameters, limit, norm = (*args, None, None, None)[:3]
        if not self._scales or not isinstance(parameters, list | tuple) or capturing():
            return
        if isinstance(limit, int | float) and limit < MAX_LIMIT_FRAC * self._scales[-1]:
            self._clipped = norm_of(parameters)
            self._unclipped = norm.detach() if isinstance(norm, torch.Tensor) else None


def _divided_after_clip(sent: _Sent) -> bool:
    if not sent.transfer.has("clipped"):
        return False
    clipped, stepped = sent.transfer.values("clipped")
    return bool(stepped > 0 and _is(clipped / stepped, sent.scales[-1]))


def _kept_after_clip(sent: _Sent) -> bool:
    """Whether the loop clipped the gradients as backward left them, and stepped with what that gave."""
    if not sent.transfer.has("unclipped") or len(set(sent.scales)) > 1:
        return False
    clipped, stepped = sent.transfer.values("clipped")
    (unclipped,) = sent.transfer.values("unclipped")
    before = sent.transfer.values("norms").reshape(2, -1)[0, -1]
    kept = unclipped > 0 and _is(before / unclipped, 1.0) and _is(clipped / stepped, 1.0)
    return bool(stepped > 0 and kept and before > (1 + MAX_ERROR) * stepped)


def _is(ratios: npt.NDArray[np.float64], factor: float) -> Any:
    with np.errstate(invalid="ignore"):
        return np.abs(ratios / factor - 1) < MAX_ERROR


def _ratios(norms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Norm before over norm after, of each tensor that has both."""
    before, after = norms[:, :-1]
    present = (before > 0) & (after > 0)
    ratios: npt.NDArray[np.float64] = before[present] / after[present]
    return ratios


def _kept_count(sent: _Sent) -> int:
    """How many tensors are still scaled."""
    return int(_is(_ratios(sent.transfer.values("norms").reshape(2, -1)), 1.0).sum())


def _takes_gradients(optimizer: torch.optim.Optimizer, scale: float) -> bool:
    """Whether an optimizer updates by gradients as they are: those of other libraries may divide them, and a learning
    rate of SGD may be that much lower."""
    if not type(optimizer).__module__.startswith("torch.optim") or getattr(optimizer, "grad_scale", None) is not None:
        return False
    rate = learning_rate(optimizer)
    return not isinstance(optimizer, torch.optim.SGD) or rate is None or rate * scale > MIN_UPDATE_RATIO


def _stepped_nonfinite(sent: _Sent) -> str:
    """`nonfinite` if the optimizer stepped with gradients that overflowed, `replaced` if the loop made them finite."""
    before, after = sent.transfer.values("norms").reshape(2, -1)
    if np.isfinite(before).all() or not np.isfinite(sent.transfer.values("loss")).all():
        return ""
    return "nonfinite" if not np.isfinite(after).all() else "replaced" if after[-1] > 0 else ""
