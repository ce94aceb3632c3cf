"""The steps of a training loop: `Steps` numbers them, measures their gradients, and sends their rows to be written.

    >>> steps = Steps(model, [optimizer], scaler, writer, sampling=sampling, kinds=frozenset({"weight_grad"}), …)
    >>> steps.begin()                    # `Hooks` calls this at a forward, …
    >>> steps.observe(0)                 # … this as soon as optimizer 0 has its gradients, …
    >>> steps.attempted(0, found_inf)    # … and this after its step, made or skipped

Gradients are measured once per optimizer and step, as backward leaves them. An attempt stays pending until the next one
begins, because the loop may still log to it; then its numbers leave the device in one host transfer.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from amp_core.record.backends import backend_of
from amp_core.record.loop.adoption import Adoption, share
from amp_core.record.loop.attempt import Attempt
from amp_core.record.loop.autocast_regions import PrecisionDetector
from amp_core.record.loop.error_budget import ErrorBudget
from amp_core.record.loop.loss_and_samples import LossAndSamples
from amp_core.record.loop.parameter_plan import ParameterPlan
from amp_core.record.loop.row_writer import RowWriter
from amp_core.record.loop.sampled_tensors import Tensors
from amp_core.record.loop.sampling import LEFT_OUT, Sampling
from amp_core.record.loop.unrecorded import NO_VALUES, Unrecorded
from amp_core.record.model import own
from amp_core.record.model import scaler_state as scaling
from amp_core.record.model.parameters import device_of, learning_rate, local_values, named_parameters, unwrapped
from amp_core.record.observer import Observer, Observers
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.module_outputs import Outputs
from amp_core.record.stats.norms import norms, norms_of_plain
from amp_core.record.step_phases import Phases
from amp_core.record.torch_internals.captures import out_of_sight
from amp_core.store.writer import RunWriter


def isolated(hook: Callable[..., None]) -> Callable[..., None]:
    """Report exceptions of a method to `self._phases.failed`; never propagate them."""

    @functools.wraps(hook)
    def wrapper(self: Any, *args: Any) -> None:
        try:
            hook(self, *args)
        except Exception as error:
            self._phases.failed(error)

    return wrapper


class Steps:
    """The attempts of a run, in order. Optimizers are identified by their index in `optimizers`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer],
        scaler: Any,
        writer: RunWriter,
        *,
        sampling: Sampling,
        kinds: frozenset[str],
        wanted: Callable[[str], bool],
        observers: Sequence[Observer],
    ) -> None:
        self.writer = writer
        self.optimizers = optimizers
        self._model = unwrapped(model)
        self._adoption = Adoption(self._model, optimizers)
        self.names = {id(p): n for n, p in named_parameters(unwrapped(model))}
        self.device = device_of(model)
        self.number = writer.earlier.next_step if writer.earlier is not None else 0
        """The number of the current step, as in `steps.step`."""
        self.auditing = False
        """Whether the present forwards and backwards belong to an audit."""
        self.repeating = False
        """Whether a closure is called again within one optimizer step, whose row describes the first call."""
        self.on_step_end: Callable[[], None] = lambda: None
        """Called at the end of each step."""
        self.on_forwards_lost: Callable[[], None] = lambda: None
        """Called once the model's forward, which earlier steps had, is missing."""
        self._backend = backend_of(self.device)
        self.phases = self._phases = Phases(self._backend.clock())
        self.precision = PrecisionDetector(writer, self._model, optimizers, scaler, self.device)
        self.loss_and_samples = LossAndSamples(
            lambda: list(own.parameters(self._model)), optimizers, lambda: self.precision.in_fp16
        )
        self.outputs = Outputs(unwrapped(model), wanted, kinds, self.phases, lambda: self.auditing)
        self.row_writer = RowWriter(writer, self.phases, sampling)
        self.error_budget = ErrorBudget(writer)
        self.seen: set[str] = set()
        """Phases that began since the last attempt."""
        self.stepping: set[int] = set()
        """Indices of optimizers that are within a step, or were when an exception was raised."""
        self._scaler = scaler
        self._sampling = sampling
        self._tensors = Tensors(self.names, kinds, wanted, self.outputs)
        self._observers = Observers(writer, observers, self._at_own_work, self.phases.watching, self._transfer)
        self.row_writer.on_nonfinite_loss = functools.partial(self._observers.notify, "loss_nonfinite")
        self.row_writer.on_vanished_gradients = functools.partial(self._observers.notify, "gradients_vanished")
        if self._observers.wants("phase_entered"):
            self.phases.changed = functools.partial(self._observers.notify, "phase_entered")
        self._plans = [ParameterPlan(o, self.names, f"optimizer{i}") for i, o in enumerate(optimizers)]
        self._bare = False  # whether the current step is run with as few hooks as possible
        self._began = False  # whether the current step has begun
        self._sampled: dict[int, int] = {}  # by optimizer: when its gradients were last measured tensor by tensor
        self._stepped: set[int] = set()  # optimizers that have stepped in the current step
        self._replaced: set[int] = set()  # optimizers that others have replaced
        self._open: dict[int, Attempt] = {}  # by optimizer: gradients measured, step not yet attempted
        self._pending: list[Attempt] = []  # attempted; `log` may still add to the last one
        self._logged: dict[str, Any] = {}
        self._first = self.number
        self._unrecorded = Unrecorded(writer, self.number)

    def index(self, optimizer: Any) -> int | None:
        """The index of an optimizer, or of the one that a proxy stands in for; None for one that is not watched.

        fastai gives its scaler an object that is not an optimizer, but has the `param_groups` of one.
        """
        place = next((i for i, o in enumerate(self.optimizers) if o is optimizer), None)
        if place is not None or isinstance(optimizer, torch.optim.Optimizer):
            return place
        held = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
        groups = ((i, group) for i, o in enumerate(self.optimizers) for group in o.param_groups)
        return next((i for i, group in groups if any(id(p) in held for p in group["params"])), None)

    def holder(self, parameters: Any) -> int | None:
        """The index of the optimizer that holds the first of these parameters with a gradient; None if none does, or if
        they come from an iterator, which can be read only once."""
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        if not isinstance(parameters, list | tuple):
            return None
        first = next((p for p in parameters if isinstance(p, torch.Tensor) and p.grad is not None), None)
        held = (
            i for i, o in enumerate(self.optimizers) for g in o.param_groups if any(p is first for p in g["params"])
        )
        return next(held, None) if first is not None else None

    def index_or_adopt(self, optimizer: Any, *, stepping: bool, own_backward: bool) -> tuple[int | None, bool]:
        """The index of an optimizer that is about to step (`stepping`), perhaps with a backward of its own, or to
        unscale, and whether it was just adopted."""
        index = self.index(optimizer)
        if index is not None or not isinstance(optimizer, torch.optim.Optimizer) or self.stepping:
            return index, False  # an optimizer that steps within another's step is part of it
        is_copy = any(optimizer.param_groups is known.param_groups for known in self.optimizers)  # a shallow one
        backwards = self._unrecorded.backwards + (own_backward and not is_copy)
        if not self._adoption.wanted(optimizer, backwards, stepping=stepping):
            return None, False
        return self._adopt_optimizer(optimizer), True

    def _adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> int:
        index = self._adoption.place(optimizer)
        kind = type(optimizer).__name__
        if index == len(self.optimizers):
            self._replaced = set(range(index))
            self.optimizers.append(optimizer)
            detail = (
                f"{kind}, which steps parameters of the model, was not given to `watch`: added as optimizer {index}"
            )
        else:
            before = self.optimizers[index]
            self._replaced |= {i for i, o in enumerate(self.optimizers) if i != index and share(o, optimizer)}
            self._open.pop(index, None)
            self.optimizers[index] = optimizer
            detail = f"a new {kind} steps parameters of optimizer {index}, a {type(before).__name__}, and replaces it"
        self._adoption.adopted(optimizer)
        self.names.update((id(p), n) for n, p in named_parameters(self._model))
        self._plans[index : index + 1] = [ParameterPlan(optimizer, self.names, f"optimizer{index}")]
        self.writer.event("phase change", name="optimizer", detail=detail, step=self.number)
        config = dict(self.writer.head.config) | {"optimizers": [type(o).__name__ for o in self.optimizers]}
        self.writer.update_head(config=config)
        self.precision.refresh()
        with self.phases.watching():
            self._observers.notify("optimizer_found", index, optimizer)
        return index

    def use(self, scaler: Any) -> None:
        """From now on losses are scaled by `scaler`."""
        self._scaler = scaler

    def adopt(self, scaler: Any) -> None:
        """Use a scaler that `watch` was not given, and that is about to scale the loss of the current step."""
        self.use(scaler)
        self.precision.adopt(scaler)
        with self.phases.watching():
            self._observers.notify("scaler_found", scaler)

    def has_gradients(self, index: int) -> bool:
        """Whether any parameter of the optimizer has a gradient."""
        return any(p.grad is not None for g in self.optimizers[index].param_groups for p in g["params"])

    @property
    def last(self) -> int:
        """The number of the last attempted step while it can still be logged to, else of the current one."""
        return self._pending[-1].step if self._pending else self.number

    def log(self, values: Mapping[str, Any]) -> None:
        """Add to the last step while it is pending, else to the coming one."""
        (self._pending[-1].logged if self._pending else self._logged).update(values)

    def notify(self, moment: str, *values: Any) -> None:
        """Call the observers that override that moment."""
        if self._observers.wants(moment):
            with self.phases.watching():
                self._observers.notify(moment, *values)

    def begin(self) -> None:
        """A step is about to begin: at its first forward, or in loops without one at whatever comes first."""
        if not self._began:
            self._began = True
            bare = not self.may_be_sampled() and self.row_writer.calibration.wants_bare(self.number)
            self._bare = self._observers.begin(self.number, bare or self._sampling.lean > 0)

    def observe(self, index: int) -> Attempt:
        """Measure the gradients of optimizer `index`, once per attempt, as backward leaves them."""
        if index in self._open:
            return self._open[index]
        self.finish_pending()
        if index in self._stepped:
            self._next_number()
        self.begin()
        optimizer = self.optimizers[index]
        attempt = Attempt(self.number, index, sampled=self._due(index), bare=self._bare)
        if attempt.sampled:
            self._sampled[index] = self.number
        attempt.scaled = scaling.still_scaled(self._scaler, optimizer)
        if attempt.sampled or self._sampling.lean < len(LEFT_OUT):
            self._measure(attempt, index)
        self._open[index] = attempt
        return attempt

    def _measure(self, attempt: Attempt, index: int) -> None:
        """Measure the gradients of an optimizer: one by one in a sampled step, else their norms alone."""
        attempt.gradients, grads = self._plans[index].gradients()
        self.notify("gradients_read", index, attempt.gradients)
        plain = None if attempt.sampled or not grads else norms_of_plain(grads)
        if plain is not None:
            attempt.norm_order = range(len(grads))
            attempt.put("norms", plain)
            return
        grads = list(map(local_values, grads))
        if any(grad.is_meta for grad in grads):
            valued = [(name, grad) for name, grad in zip(attempt.gradients, grads, strict=True) if not grad.is_meta]
            attempt.gradients, grads = [name for name, _ in valued], [grad for _, grad in valued]
            self._unrecorded.report_once(NO_VALUES, self.number)
        if attempt.sampled:
            # Gradients that the loop itself unscaled no longer have the factor of the output gradients.
            alike = attempt.scaled == scaling.is_active(self._scaler)
            named = list(zip(attempt.gradients, grads, strict=True))
            self._tensors.sample(attempt, self.optimizers[index], named, alike=alike)
            self._unrecorded.check_kernels(own.parameters(self._model), self.number)
        if grads and not attempt.all_measured:
            values, attempt.norm_order = norms(grads)
            attempt.put("norms", values)

    @isolated
    def attempted(self, index: int, found_inf: torch.Tensor | None) -> None:
        """The optimizer's step was made or skipped."""
        attempt = None
        with self.phases.watching():
            self._unrecorded.attempted(self.number, self.seen)
            attempt = self.observe(index)  # mostly the open one
            del self._open[index]
            self.precision.stop()
            attempt.put_copies({"found_inf": found_inf} | self._scaling_of(attempt))
            loss, attempt.samples = self.loss_and_samples.take()
            attempt.put("loss", loss)
            attempt.lr = learning_rate(self.optimizers[index])
            attempt.seen = frozenset(self.seen)
            attempt.memory = self._backend.memory_bytes()
            attempt.time_s = self.writer.time_s()
            attempt.logged = self._logged
            self._logged = {}
            self._pending.append(attempt)
            self.outputs.detach()
            if not attempt.sampled:
                self.outputs.forget()
        self.seen.clear()
        self._stepped.add(index)
        self._replaced.discard(index)
        self._adoption.given_stepped(self.optimizers[index], self._unrecorded.backwards)
        spans = self.phases.take()
        if attempt is not None:
            attempt.spans = spans
        self.phases.enter("data")
        if self._scaler is None and len(self._stepped | self._replaced) == len(self.optimizers):
            self._next_number()

    def _scaling_of(self, attempt: Attempt) -> dict[str, torch.Tensor | None]:
        """Loss scale and growth tracker at an attempt, unless it has them already."""
        if "loss_scale" in attempt.put_in or not scaling.is_active(self._scaler):
            return {}
        return {
            "loss_scale": scaling.scale(self._scaler),
            "growth_tracker": scaling.growth_tracker(self._scaler),
        }

    def before_update(self) -> None:
        """The scaler is about to change its state: attempts whose step comes later keep that of their gradients."""
        for attempt in self._open.values():
            attempt.put_copies(self._scaling_of(attempt))

    def updated(self) -> None:
        """The scaler was updated, which ends a step with a scaler; the time of the update belongs to the step."""
        if self._pending:
            self._pending[-1].spans += self.phases.take()
        self.phases.enter("data")
        self._next_number()

    def finish_pending(self) -> None:
        """Nothing more can be logged for the attempted steps: start their host transfers, and write what has
        arrived."""
        if not self._pending:
            return
        with self.phases.watching():
            pending, self._pending = self._pending, []
            self._unrecorded.check_losses(pending)
            self.row_writer.send(pending)

    def end(self) -> None:
        """The run ends, possibly within a step."""
        if self.number == self._first and not self._stepped:
            self._unrecorded.no_step(bool(self.seen))
        pending, self._pending = self._pending, []
        try:
            self._unrecorded.check_losses(pending, last=True)
            self.row_writer.empty(pending)
        finally:  # even if rows cannot be written, observers restore what they patched
            self._observers.notify("close")

    def abandon(self) -> None:
        """An exception aborted the step and the loop continues: forget what was measured for it."""
        for index in self.stepping:
            self._open.pop(index, None)
        self.stepping.clear()
        self.loss_and_samples.forget()
        self.outputs.forget()

    def watching_failed(self, error: Exception) -> bool:
        """Watching raised `error`: the step is not measured further. True if watching should end."""
        self._open.clear()
        self.outputs.detach()
        self.outputs.forget()
        return self.error_budget.note(error, self.number)

    def may_be_sampled(self) -> bool:
        """Whether the step may be sampled. Called in a forward, when it is not yet known which optimizer will step; one
        may have stopped for good."""
        if self.error_budget.paused(self.number):
            return False
        waited = [self.number - last for last in self._sampled.values()] if len(self.optimizers) > 1 else []
        interval = self._sampling.interval
        return self._sampling.due(self.number) or any(interval <= steps < 2 * interval for steps in waited)

    def _due(self, index: int) -> bool:
        """Whether the gradients of optimizer `index` are measured tensor by tensor in the current step.

        Where optimizers alternate, each in its own step, every tenth step may always belong to the same one: an
        optimizer that was not measured for an interval is measured too.
        """
        if self.error_budget.paused(self.number):
            return False
        waited = self.number - self._sampled.get(index, -self._sampling.interval)
        return self._sampling.due(self.number) or (len(self.optimizers) > 1 and waited >= self._sampling.interval)

    @isolated
    def _next_number(self) -> None:
        if self._stepped:
            self.notify("step_ended", self.number)
            self.number += 1
            self._stepped.clear()
            self._began = False
            self.on_step_end()
            if self._unrecorded.step_over(self.number):
                self.on_forwards_lost()

    def backward_seen(self) -> None:
        """A backward reached the model."""
        self._unrecorded.backward_seen(self.number)

    def _transfer(self) -> HostTransfer | None:
        """That of the last attempt; None if watching it failed."""
        return self._pending[-1].transfer if self._pending else None

    def _at_own_work(self) -> bool:
        return self.auditing or self.repeating or self.phases.present == "watch" or out_of_sight()
