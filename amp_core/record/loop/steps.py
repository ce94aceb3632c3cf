"""The steps of a training loop: `Steps` numbers them, looks at the gradients of each, and sends off what is written.

    >>> steps = Steps(model, [optimizer], scaler, writer, sampling=sampling, kinds=frozenset({"weight_grad"}), …)
    >>> steps.begin()                    # `Hooks` tells of a forward, …
    >>> steps.observe(0)                 # … of the first moment at which optimizer 0 has its gradients, …
    >>> steps.attempted(0, found_inf)    # … and of its step, made or skipped

Gradients are looked at once per optimizer and step, as they come out of backward. What is seen of an attempt stays open
until the next one begins, because the loop may still log to it; then its numbers leave the device in one copy.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from amp_core.record.backends import backend_of
from amp_core.record.loop.adoption import Adoption, share
from amp_core.record.loop.attempt import Attempt
from amp_core.record.loop.autocast_regions import PrecisionSeen
from amp_core.record.loop.error_budget import ErrorBudget
from amp_core.record.loop.loss_and_samples import LossAndSamples
from amp_core.record.loop.parameter_plan import ParameterPlan
from amp_core.record.loop.row_writer import RowWriter
from amp_core.record.loop.sampled_tensors import Tensors
from amp_core.record.loop.sampling import Sampling
from amp_core.record.model import own
from amp_core.record.model import scaler_state as scaling
from amp_core.record.model.parameters import device_of, learning_rate, named_parameters, unwrapped
from amp_core.record.observer import Observer, Observers
from amp_core.record.stats import dispatch
from amp_core.record.stats.module_outputs import Outputs
from amp_core.record.stats.norms import norms
from amp_core.record.step_phases import Phases
from amp_core.record.torch_internals.captures import out_of_sight
from amp_core.store.writer import RunWriter

NO_FORWARD_ANY_MORE = (
    "forward of the model: none is seen any more, nor of a part of it, so the time of forward, samples and what "
    "modules put out are missing"
)
BLIND = 5
"""After so many steps of which none began with a forward of the model, the run says so."""
NO_FORWARD = (
    "forward of the model: none was seen in the first steps, so the time of forward, samples and what modules put out "
    "are missing; compile the model before `watch` is called, and give `watch` the model that the loop calls"
)
NO_STEP = "steps: no optimizer that was given to `watch` has stepped; give it the one that the loop steps"
NOTHING = (
    "steps: neither a forward nor a backward of the model nor a step of its optimizer was seen; give `watch` the model "
    "and the optimizer of the loop"
)
NO_LOSS = (
    "loss: none could be told from what backward was called on since step {step}; log it in each step with "
    "`rec.log(loss=loss)`"
)
LOST = 3
"""Steps from the last one with a forward, itself counted, after which all modules are listened to once more."""
FEW = 3
"""Steps in a row without a loss after which the run says so."""
MAX_TOLD = 5
"""Times that it says so."""
NO_MORE_STEPS = (
    "steps: {count} backward passes have come since the last step of an optimizer that `watch` was given; give it the "
    "optimizer that the loop steps, and one that is a `torch.optim.Optimizer`"
)
NO_VALUES = "gradients of parameters on the meta device: they hold no values"
MANY = 50
"""After so many backward passes without a step the run says so, or after `FEW` times as many as any step had."""


def isolated(hook: Callable[..., None]) -> Callable[..., None]:
    """A method of something with `_phases`: what goes wrong in it is told to `Phases.failed`, and goes no further."""

    @functools.wraps(hook)
    def bearing(self: Any, *args: Any) -> None:
        try:
            hook(self, *args)
        except Exception as error:
            self._phases.failed(error)

    return bearing


class Steps:
    """One attempt after another. Optimizers are known by their place among `optimizers`."""

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
        """Of the present step, as `steps.step` has it."""
        self.auditing = False
        """Whether the forwards and backwards of just now are an audit's."""
        self.repeating = False
        """Whether a closure is called again within its step, whose row tells of the first call."""
        self.over: Callable[[], None] = lambda: None
        """Called at the end of each step."""
        self.lost_forwards: Callable[[], None] = lambda: None
        """Called after a step without a forward of the model, where those before had one."""
        self._backend = backend_of(self.device)
        self.phases = self._phases = Phases(self._backend.clock())
        self.loss_and_samples = LossAndSamples(lambda: list(own.parameters(self._model)))
        self.precision = PrecisionSeen(writer, self._model, optimizers, scaler, self.device)
        self.outputs = Outputs(unwrapped(model), wanted, kinds, self.phases, lambda: self.auditing or out_of_sight())
        self.row_writer = RowWriter(writer, self.phases, sampling)
        self.error_budget = ErrorBudget(writer)
        self.seen: set[str] = set()
        """Phases whose start was seen since the last attempt."""
        self.stepping: set[int] = set()
        """Optimizers that are at work on a step, or were when an exception came."""
        self._scaler = scaler
        self._sampling = sampling
        self._tensors = Tensors(self.names, kinds, wanted, self.outputs)
        self._observers = Observers(writer, observers, self._at_own_work)
        if self._observers.has("phase_entered"):
            self.phases.changed = functools.partial(self._observers.tell, "phase_entered")
        self._plans = [ParameterPlan(o, self.names, f"optimizer{i}") for i, o in enumerate(optimizers)]
        self._bare = False  # whether the present step is run with as few hooks as can be
        self._began = False  # whether the present step's begin was seen
        self._sampled: dict[int, int] = {}  # by optimizer: when its gradients were last measured tensor by tensor
        self._stepped: set[int] = set()  # optimizers that have stepped under the present number
        self._replaced: set[int] = set()  # optimizers that step no more, since others do
        self._open: dict[int, Attempt] = {}  # by optimizer: gradients seen, step not yet attempted
        self._pending: list[Attempt] = []  # attempted; `log` may still add to the last
        self._logged: dict[str, Any] = {}
        self.backwards = 0
        """Backward passes seen so far."""
        self._first = self.number
        self._told: set[str] = set()
        self._fallbacks_reported: set[str] = set()  # device types
        self._sees_forward: bool | None = None  # not known yet
        self._without_forward = 0  # steps in a row, since the last with one
        self._backwards_then = 0  # at the last step
        self._most_backwards = 0  # of one step
        self._says_no_steps = True
        self._last_loss = self.number - 1  # the last step that has a loss
        self._missed = False  # whether the steps of just now have none
        self._losses_missed = 0  # times that it was said

    def index(self, optimizer: Any) -> int | None:
        """The place of an optimizer, or of that for which something else stands in; None for one that is not watched.

        fastai gives its scaler an object that is no optimizer, but has the `param_groups` of one.
        """
        place = next((i for i, o in enumerate(self.optimizers) if o is optimizer), None)
        if place is not None or isinstance(optimizer, torch.optim.Optimizer):
            return place
        held = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
        groups = ((i, group) for i, o in enumerate(self.optimizers) for group in o.param_groups)
        return next((i for i, group in groups if any(id(p) in held for p in group["params"])), None)

    def index_or_adopt(self, optimizer: Any, *, stepping: bool) -> tuple[int | None, bool]:
        """The place of an optimizer that is about to step (`stepping`) or to unscale, and whether it is a new one's."""
        index = self.index(optimizer)
        if index is not None or not isinstance(optimizer, torch.optim.Optimizer) or self.stepping:
            return index, False  # within the step of another, which holds it, it is that one's part
        if not self._adoption.wanted(optimizer, self.backwards, stepping=stepping):
            return None, False
        return self._adopt_optimizer(optimizer), True

    def _adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> int:
        index = self._adoption.place(optimizer)
        kind = type(optimizer).__name__
        if index == len(self.optimizers):
            self._replaced = set(range(index))
            self.optimizers.append(optimizer)
            detail = f"{kind}, which steps parameters of the model, was not given to `watch`: it is optimizer {index}"
        else:
            before = self.optimizers[index]
            self._replaced |= {i for i, o in enumerate(self.optimizers) if i != index and share(o, optimizer)}
            self._open.pop(index, None)
            self.optimizers[index] = optimizer
            detail = (
                f"a new {kind} steps parameters of optimizer {index}, a {type(before).__name__}, and takes its place"
            )
        self._adoption.adopted(optimizer)
        self.names.update((id(p), n) for n, p in named_parameters(self._model))
        self._plans[index : index + 1] = [ParameterPlan(optimizer, self.names, f"optimizer{index}")]
        self.writer.event("phase change", name="optimizer", detail=detail, step=self.number)
        config = dict(self.writer.head.config) | {"optimizers": [type(o).__name__ for o in self.optimizers]}
        self.writer.update_head(config=config)
        self.precision.look_again()
        with self.phases.watching():
            self._observers.tell("optimizer_found", index, optimizer)
        return index

    def use(self, scaler: Any) -> None:
        """From now on losses are scaled by `scaler`."""
        self._scaler = scaler

    def adopt(self, scaler: Any) -> None:
        """The loop turned out to use `scaler`, which is about to scale the loss of the present step."""
        self.use(scaler)
        self.precision.adopt(scaler)
        with self.phases.watching():
            self._observers.tell("scaler_found", scaler)

    def has_gradients(self, index: int) -> bool:
        """Whether any parameter of the optimizer has one."""
        return any(p.grad is not None for g in self.optimizers[index].param_groups for p in g["params"])

    @property
    def last(self) -> int:
        """The number of the last step attempted, while it can still be logged to, else of the present one."""
        return self._pending[-1].step if self._pending else self.number

    def log(self, values: Mapping[str, Any]) -> None:
        """Add to the last step while it is pending, else to the coming one."""
        (self._pending[-1].logged if self._pending else self._logged).update(values)

    def tell(self, moment: str, *values: Any) -> None:
        """Call the observers that care for that moment."""
        if self._observers.has(moment):
            with self.phases.watching():
                self._observers.tell(moment, *values)

    def begin(self) -> None:
        """Something of a step is about to happen: its first forward, or in loops without one what comes first."""
        if not self._began:
            self._began = True
            bare = not self.may_be_sampled() and self.row_writer.calibration.wants_bare(self.number)
            self._bare = self._observers.begin(self.number, bare or self._sampling.lean)

    def observe(self, index: int) -> Attempt:
        """Look at the gradients of optimizer `index`, once per attempt, as they come out of backward."""
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
        if scaling.is_active(self._scaler):
            attempt.put("loss_scale", scaling.scale(self._scaler))
            attempt.put("growth_tracker", scaling.growth_tracker(self._scaler))
        attempt.gradients, grads = self._plans[index].gradients()
        if any(grad.is_meta for grad in grads):
            valued = [(name, grad) for name, grad in zip(attempt.gradients, grads, strict=True) if not grad.is_meta]
            attempt.gradients, grads = [name for name, _ in valued], [grad for _, grad in valued]
            self._tell_once(NO_VALUES)
        if attempt.sampled:
            # Gradients that the loop unscaled by itself no longer have the factor of the output gradients.
            alike = attempt.scaled == scaling.is_active(self._scaler)
            named = list(zip(attempt.gradients, grads, strict=True))
            self._tensors.sample(attempt, optimizer, named, alike=alike)
            self._report_fallbacks()
        if grads and not attempt.all_measured:
            found, attempt.norm_order = norms(grads)
            attempt.put("norms", found)
        self._open[index] = attempt
        return attempt

    def _report_fallbacks(self) -> None:
        """Write one event for each device type of the model on which plain torch has to measure."""
        for kind in dispatch.fallbacks.keys() - self._fallbacks_reported:
            self._fallbacks_reported.add(kind)
            if any(p.device.type == kind for p in own.parameters(self._model)):
                detail = f"those on {kind} come from plain torch, which is slower: {dispatch.fallbacks[kind]}"
                self.writer.event("phase change", name="statistics", detail=detail, step=self.number)

    @isolated
    def attempted(self, index: int, found_inf: torch.Tensor | None) -> None:
        """The optimizer's step is over, made or skipped."""
        attempt = None
        with self.phases.watching():
            self._look_out_for_forwards()
            attempt = self.observe(index)  # mostly the one that is open
            del self._open[index]
            self.precision.stop_looking()
            attempt.put("found_inf", found_inf)
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
                self.outputs.take()
        self.seen.clear()
        self._stepped.add(index)
        self._replaced.discard(index)
        self._most_backwards = max(self._most_backwards, self.backwards - self._backwards_then)
        self._backwards_then = self.backwards
        self._adoption.given_stepped(self.optimizers[index], self.backwards)
        spans = self.phases.take()
        if attempt is not None:
            attempt.spans = spans
        self.phases.enter("data")
        if self._scaler is None and len(self._stepped | self._replaced) == len(self.optimizers):
            self._next_number()

    def updated(self) -> None:
        """The scaler has been updated, which ends a step that has one; its time is the step's."""
        if self._pending:
            self._pending[-1].spans += self.phases.take()
        self.phases.enter("data")
        self._next_number()

    def finish_pending(self) -> None:
        """Nothing more can be logged for the steps made: send their numbers off, and write those that have come."""
        if not self._pending:
            return
        with self.phases.watching():
            pending, self._pending = self._pending, []
            self._look_out_for_losses(pending)
            self.row_writer.send(pending)

    def end(self) -> None:
        """The run is ending, perhaps in the middle of anything."""
        if self.number == self._first and not self._stepped:
            detail = NO_STEP if self.backwards or self.seen else NOTHING
            self.writer.event("warning", name="not recorded", detail=detail)
        pending, self._pending = self._pending, []
        try:
            self._look_out_for_losses(pending, last=True)
            self.row_writer.empty(pending)
        finally:  # whatever cannot be written, the observers restore what they patched
            self._observers.tell("close")

    def abandon(self) -> None:
        """An exception broke the step off and the loop goes on: forget what was gathered for it."""
        for index in self.stepping:
            self._open.pop(index, None)
        self.stepping.clear()
        self.loss_and_samples.forget()
        self.outputs.take()

    def watching_failed(self, error: Exception) -> bool:
        """Watching went wrong: the step is looked at no further. True where nothing is to be watched any more."""
        self._open.clear()
        self.outputs.detach()
        self.outputs.take()
        return self.error_budget.note(error, self.number)

    def may_be_sampled(self) -> bool:
        """Asked in a forward, when it is not known yet which optimizer will step. One may have stopped for good."""
        if self.error_budget.paused(self.number):
            return False
        waited = [self.number - last for last in self._sampled.values()] if len(self.optimizers) > 1 else []
        interval = self._sampling.interval
        return self._sampling.due(self.number) or any(interval <= steps < 2 * interval for steps in waited)

    def _due(self, index: int) -> bool:
        """Whether the gradients of optimizer `index` are measured tensor by tensor in the present step.

        Where optimizers take turns, each in a step of its own, every tenth step may always be the same one's turn: who
        has waited for as long as the interval is measured too.
        """
        if self.error_budget.paused(self.number):
            return False
        waited = self.number - self._sampled.get(index, -self._sampling.interval)
        return self._sampling.due(self.number) or (len(self.optimizers) > 1 and waited >= self._sampling.interval)

    @isolated
    def _next_number(self) -> None:
        if self._stepped:
            self.tell("step_ended", self.number)
            self.number += 1
            self._stepped.clear()
            self._began = False
            self.over()
            self._without_forward += 1
            if self._sees_forward and self._without_forward == LOST:
                self.lost_forwards()
            elif self._sees_forward and self._without_forward == LOST + BLIND:
                self._tell_once(NO_FORWARD_ANY_MORE)

    def _look_out_for_forwards(self) -> None:
        if "forward" in self.seen:
            self._sees_forward, self._without_forward = True, 0
        elif self._sees_forward is None and self.number == self._first + BLIND:
            self._sees_forward = False
            self.writer.event("warning", name="not recorded", detail=NO_FORWARD, step=self.number)

    def backward_seen(self) -> None:
        """A backward came to the model."""
        self.backwards += 1
        since = self.backwards - self._backwards_then
        if self._says_no_steps and self._most_backwards and since > max(MANY, FEW * self._most_backwards):
            self._says_no_steps = False
            detail = NO_MORE_STEPS.format(count=since)
            self.writer.event("warning", name="not recorded", detail=detail, step=self.number)

    def _look_out_for_losses(self, pending: Sequence[Attempt], *, last: bool = False) -> None:
        for attempt in pending:
            if "loss" in attempt.put_in or attempt.logged.get("loss") is not None:
                self._last_loss = attempt.step
                self._missed = False
            missed = attempt.step - self._last_loss
            if not self._missed and (missed >= FEW or (last and missed and self._last_loss < self._first)):
                self._missed = True
                self._losses_missed += 1
                if self._losses_missed <= MAX_TOLD:
                    detail = NO_LOSS.format(step=self._last_loss + 1)
                    self.writer.event("warning", name="not recorded", detail=detail, step=attempt.step)

    def _tell_once(self, what: str) -> None:
        """Write that something is not recorded, the first time that it is so."""
        if what not in self._told:
            self._told.add(what)
            self.writer.event("warning", name="not recorded", detail=what, step=self.number)

    def _at_own_work(self) -> bool:
        return self.auditing or self.repeating or self.phases.present == "watch" or out_of_sight()
