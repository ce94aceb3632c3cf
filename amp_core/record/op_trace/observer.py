"""Which operator ran in which dtype, in which module, and which autocast policy decided it: one step, traced whole.

    watch(model, optimizer, scaler=scaler, into="runs/a", trace_ops=2)        # traces step 2 into the table `ops`

On that one step every operator is seen (forward, loss, backward, optimizer), with the casts that autocast made for it,
weights it took from autocast's cache, and its floating-point operations. The step takes longer, its results are the
same bit for bit, and afterwards nothing is left in place. What runs as a compiled graph cannot be seen. Of an optimizer
that calls its closure several times, as LBFGS does, the first call is traced: the row of the step tells of that one.
"""

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp_core.record.backends import BACKENDS
from amp_core.record.model import own
from amp_core.record.model.modules import is_compiled
from amp_core.record.model.parameters import unwrapped
from amp_core.record.observer import Observer
from amp_core.record.op_trace.op_counter import OpCounter, OpCounterMode
from amp_core.record.torch_internals.compiling import mode_would_uncompile, within_compiled
from amp_core.schema import RunError
from amp_core.store.writer import RunWriter

STEP = 2
"""Traced by default: the first steps allocate optimizer state and choose kernels."""


class OpTrace(Observer):
    """Traces one step of `model` and writes the table `ops`, with an event that says what was traced or why not."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module, step: int = STEP) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise RunError(f"trace_ops={step!r} is not the number of a step; trace_ops={STEP} traces step {STEP}")
        self._writer = writer
        self._model = model
        self._step = step
        self._tally: OpCounter | None = None
        self._mode: OpCounterMode | None = None
        self._done = False
        self._hindrance = ""

    def step_began(self, step: int) -> None:
        """Begin with the step that was asked for, or with the first after it."""
        self._leave()
        if self._done or self._tally is not None or step < self._step:
            return
        if is_compiled(self._model):
            self._done = True
            self._not_recorded("the model runs as a compiled graph, in which operators cannot be seen", step)
            return
        if mode_would_uncompile():
            self._done = True
            self._not_recorded("this torch would no longer run what the program compiled as it was compiled", step)
            return
        if within_compiled():
            self._hindrance = "the steps began within what `torch.compile` made of the loop"
            return
        if _get_current_dispatch_mode_stack():  # it may end before ours does, and would end ours instead
            self._hindrance = "another TorchDispatchMode was active"
            return
        model = unwrapped(self._model)
        types = [p.device.type for p in own.parameters(model)]
        self._step = step
        self._tally = OpCounter(model, (*types, *BACKENDS), self.at_own_work)
        self._tally.attach()
        self._mode = OpCounterMode(self._tally)
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def called(self, what: str, optimizer: int | None) -> None:
        """Whatever is not the scaling of a loss belongs to the optimizer, until another forward begins."""
        if self._tally is not None:
            self._tally.phase = "forward" if what == "scale" else "optimizer"

    def step_ended(self, step: int) -> None:
        """Take everything off and write what was seen."""
        self._leave()
        if self._tally is not None:
            self._finish()

    def close(self) -> None:
        """Take everything off. A step that never came, or was not finished, is told."""
        self._leave()
        if self._tally is not None:
            self._not_recorded("the run ended before the traced step did, which is recorded as far as it went", None)
            self._finish()
        elif not self._done:
            self._done = True
            self._not_recorded(self._hindrance or f"the run ended before step {self._step}", None)

    def _leave(self) -> None:
        """Leave the mode, which otherwise stays, idle, until the next moment."""
        if self._mode is not None and self._mode.leave():
            self._mode = None

    def _finish(self) -> None:
        tally, self._tally, self._done = self._tally, None, True
        assert tally is not None
        tally.detach()
        rows = tally.rows()
        if rows["op"]:
            self._writer.append("ops", {"step": [self._step] * len(rows["op"])} | rows)
        seen = f"{tally.calls:,} operators"
        regions = {
            f"{dtype} on {device.partition(':')[0]}"
            for dtype, device in zip(rows["autocast"], rows["device"], strict=True)
            if dtype not in (None, "disabled")
        }
        detail = f"{seen}; autocast: {', '.join(sorted(regions)) or 'none'}"
        self._writer.event("traced", name="ops", detail=detail, step=self._step)
        if tally.error is not None:
            error = f"{type(tally.error).__name__}: {tally.error}"
            self._not_recorded(f"counting stopped after {seen}: {error}", self._step)

    def _not_recorded(self, why: str, step: int | None) -> None:
        self._writer.event("warning", name="not recorded", detail=f"operators: {why}", step=step)
