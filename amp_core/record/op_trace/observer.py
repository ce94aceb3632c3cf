"""Traces one step operator by operator: dtypes, modules, and the autocast policy that applied.

    watch(model, optimizer, scaler=scaler, into="runs/a", trace_ops=2)        # traces step 2 into the table `ops`

In that step every operator is recorded (forward, loss, backward, optimizer), with the casts that autocast made for it,
weights it took from autocast's cache, and its floating-point operations. The step takes longer, its results are the
same bit for bit, and afterwards all hooks are detached. Operators in a compiled graph are not visible. If an optimizer
calls its closure several times, as LBFGS does, the first call is traced, which the row of the step describes.
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
from amp_core.text.errors import in_one_line

STEP = 2
"""Traced by default: the first steps allocate optimizer state and choose kernels."""


class OpTrace(Observer):
    """Traces one step of `model` and writes the table `ops`, with an event that reports what was traced, or why not."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module, step: int = STEP) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise RunError(f"trace_ops={step!r} is not a step number; trace_ops={STEP} traces step {STEP}")
        self._writer = writer
        self._model = model
        self._step = step
        self._counter: OpCounter | None = None
        self._mode: OpCounterMode | None = None
        self._done = False
        self._reason = ""

    def step_began(self, step: int) -> None:
        """Trace the requested step, or the first one after it."""
        self._leave()
        if self._done or self._counter is not None or step < self._step:
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
            self._reason = "the steps began within a compiled part of the loop"
            return
        if _get_current_dispatch_mode_stack():  # if it is left before ours, it would remove ours instead
            self._reason = "another TorchDispatchMode was active"
            return
        model = unwrapped(self._model)
        types = [p.device.type for p in own.parameters(model)]
        self._step = step
        self._counter = OpCounter(model, (*types, *BACKENDS), self.at_own_work)
        self._counter.attach()
        self._mode = OpCounterMode(self._counter)
        self._mode.__enter__()

    def called(self, what: str, optimizer: int | None) -> None:
        """Calls other than `scale` belong to the optimizer phase, until another forward begins."""
        if self._counter is not None:
            self._counter.phase = "forward" if what == "scale" else "optimizer"

    def step_ended(self, step: int) -> None:
        """Detach and write the rows."""
        self._leave()
        if self._counter is not None:
            self._finish()

    def close(self) -> None:
        """Detach. A step that never came, or was not finished, is reported."""
        self._leave()
        if self._counter is not None:
            self._not_recorded("the run ended before the traced step did, so only part of it is recorded", None)
            self._finish()
        elif not self._done:
            self._done = True
            self._not_recorded(self._reason or f"the run ended before step {self._step}", None)

    def _leave(self) -> None:
        """Leave the mode; where that is not possible it stays, idle, until the next moment."""
        if self._mode is not None and self._mode.leave():
            self._mode = None

    def _finish(self) -> None:
        counter, self._counter, self._done = self._counter, None, True
        assert counter is not None
        counter.detach()
        rows = counter.rows()
        if rows["op"]:
            self._writer.append("ops", {"step": [self._step] * len(rows["op"])} | rows)
        seen = f"{counter.calls:,} operators"
        regions = {
            f"{dtype} on {device.partition(':')[0]}"
            for dtype, device in zip(rows["autocast"], rows["device"], strict=True)
            if dtype not in (None, "disabled")
        }
        detail = f"{seen}; autocast: {', '.join(sorted(regions)) or 'none'}"
        self._writer.event("traced", name="ops", detail=detail, step=self._step)
        if counter.error is not None:
            self._not_recorded(f"counting stopped after {seen}: {in_one_line(counter.error)}", self._step)

    def _not_recorded(self, why: str, step: int | None) -> None:
        self._writer.event("warning", name="not recorded", detail=f"operators: {why}", step=step)
