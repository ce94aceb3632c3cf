"""`Recorder`: finds the steps of a training loop, looks at each, and writes what it saw.

Steps are found from the scaler and the optimizer themselves:

- `scaler.scale(loss)` gives the loss, or without a scaler the single number that backward starts from;
- gradients are looked at once per optimizer step, as they come out of backward: at the first of `scaler.unscale_`,
  `clip_grad_norm_`, `clip_grad_value_`, `scaler.step` and `optimizer.step`;
- an optimizer that is given a closure is looked at after the closure was called first;
- a step is attempted when `scaler.step(optimizer)` is called, or `optimizer.step()` outside of it;
- whether it was skipped is read from `found_inf` after `scaler.step` and before `scaler.update`.

Nothing here changes what is watched: hooks return nothing, random number generators are not touched, and every value
that the training goes on using is copied before it is kept.
"""

import functools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_core import _ending
from amp_core.record import clipping, notices_patch
from amp_core.record import scaler as scaling
from amp_core.record._patch import Patches
from amp_core.record._stumbles import Stumbles
from amp_core.record.attempt import Attempt, memory_bytes
from amp_core.record.audit import Replay, audit
from amp_core.record.captures import UNSEEN, capturing, unless_capturing
from amp_core.record.clock import CudaClock, HostClock, Phases
from amp_core.record.entries import Entries
from amp_core.record.environment import recipe_found
from amp_core.record.gathered import Gathered
from amp_core.record.gradients import (
    in_backward,
    learning_rate,
    local_values,
    named_parameters,
    norms,
    unwrapped,
    written_class,
)
from amp_core.record.measure import dtype_name, measure_together
from amp_core.record.observers import Observer, Observers
from amp_core.record.outbox import Outbox
from amp_core.record.outputs import Outputs, is_compiled, tensors_in
from amp_core.record.regions import RegionSeen
from amp_core.record.sampling import Sampling
from amp_core.record.tensors import Tensors
from amp_core.runlog import RunWriter
from amp_core.schema import RunError

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""What `Recorder.audit` can replay beside the run's own recipe."""

LOGGABLE = ("loss", "lr", "samples", "grad_norm")


def _borne(hook: Callable[..., None]) -> Callable[..., None]:
    """What goes wrong in a hook of the recorder does not reach the forward or backward that called it."""

    @functools.wraps(hook)
    def borne(self: "Recorder", *args: Any) -> None:
        try:
            hook(self, *args)
        except Exception as error:
            self._stumbled(error)

    return borne


class Recorder:
    """What `watch` returns: it holds the hooks, and takes what the loop itself wants to add."""

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
        observers: Sequence[Observer] = (),
    ) -> None:
        self.writer = writer
        self._model = model
        self._optimizers = optimizers
        self._scaler = scaler
        self._sampling = sampling
        self._kinds = kinds
        self._names = {id(p): n for n, p in named_parameters(unwrapped(model))}
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._phases = Phases(CudaClock() if self._device.type == "cuda" else HostClock())
        self._stumbles = Stumbles(writer)
        self._phases.failed = self._stumbled
        self._outputs = Outputs(unwrapped(model), wanted, kinds, self._phases, lambda: self._auditing or capturing())
        self._tensors = Tensors(self._names, kinds, wanted, self._outputs)
        self._observers = Observers(writer, observers, self._at_own_work)
        if self._observers.has("phase_entered"):
            self._phases.changed = functools.partial(self._observers.tell, "phase_entered")
        self._step = writer.earlier.next_step if writer.earlier is not None else 0
        self._began = False  # whether the present step's begin was seen
        self._sampled: dict[int, int] = {}  # by optimizer: when its gradients were last measured tensor by tensor
        self._stepped: set[int] = set()  # optimizers that have stepped under the present number
        self._open: dict[int, Attempt] = {}  # by optimizer: gradients seen, step not yet attempted
        self._pending: list[Attempt] = []  # attempted; `log` may still add to the last
        self._outbox = Outbox(writer, self._phases, sampling)
        self._gathered = Gathered(scaled=scaler is not None)
        self._seen: set[str] = set()  # phases whose start was seen since the last attempt
        self._logged: dict[str, Any] = {}
        self._inside_scaler_step = False
        self._stepping: set[int] = set()  # optimizers that are at work on a step, or were when an exception came
        self._repeating = False  # a closure is called again within its step
        self._described = False
        self._region: RegionSeen | None = None  # until the first backward
        self._auditing = False
        self._met_capture = False
        self._autocast_dtype: torch.dtype | None = None
        self._patches = Patches()
        self._handles: list[Any] = []
        if kinds:  # kernels compile at their first use, which no step should have to pay for
            measure_together([torch.zeros(1, device=self._device)])
        self._config = {k: v for k, v in writer.head.config.items() if k in ("device", "precision")}  # as given
        self._install(model)
        writer.before_end = self._end
        watching = f"watching {written_class(unwrapped(model)).__name__}"
        writer.event("started", name=writer.head.name, detail=watching, value=time.time())
        if is_compiled(model) and kinds & {"output_grad", "activation"}:
            unseen = " and ".join(sorted(kinds & {"output_grad", "activation"}))
            writer.event("warning", name="not recorded", detail=f"{unseen}: hooks do not reach into a compiled graph")
            self._kinds -= {"output_grad", "activation"}

    def __repr__(self) -> str:
        hooks = len(self._handles) + len(self._entries)
        return f"Recorder(into={str(self.writer.into)!r}, step={self._step}, hooks={hooks})"

    @property
    def step(self) -> int:
        """The number of the present step, as `steps.step` has it: how many steps are over."""
        return self._step

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            self.close(*_ending.describe(kind, error))

    def log(self, **values: float | torch.Tensor) -> None:
        """Add what only the loop knows of the present step: `loss`, `lr`, `samples` or `grad_norm`.

        Between `optimizer.step()` and the next forward it belongs to the step just made, else to the coming one. The
        last value given for a step stands. Tensors are not waited for. Raises `RunError` for another name.
        """
        with self._phases.watching(raises=True):
            for key, value in values.items():
                if key not in LOGGABLE:
                    raise RunError(f"{key}={value!r} cannot be logged; choose from {', '.join(LOGGABLE)}")
                if isinstance(value, torch.Tensor):
                    if value.numel() != 1:
                        raise RunError(f"{key} is a tensor of shape {tuple(value.shape)}; log one number per step")
                    value = value.detach().clone()
                into = self._pending[-1].logged if self._pending else self._logged
                into[key] = value

    def audit(
        self,
        closure: Callable[[], torch.Tensor],
        loss_scales: Sequence[float] | None = None,
        precision: str | None = None,
    ) -> None:
        """Measure what the recipe loses of each gradient, by replaying one batch in FP32 and in the recipe.

        `closure` computes and returns the loss of that batch; it is called once for FP32 and once for each of
        `loss_scales`, by default the present one. With `precision` `fp16` or `bf16`, what autocast to that would lose
        is measured, whatever the run itself uses. Nothing else changes: see `amp_core.record.audit`. Takes as long as
        so many forward and backward passes. Raises `RunError` before the first forward and for an unknown precision.
        """
        if not self._described:
            raise RunError("audit was called before the model's first forward; call it once training has begun")
        if precision is not None and precision not in AUTOCAST:
            raise RunError(f"precision={precision!r} cannot be audited; choose one of {', '.join(AUTOCAST)}")
        with self._phases.watching(raises=True):
            given = {id(p): p for o in self._optimizers for g in o.param_groups for p in g["params"] if p.requires_grad}
            named = [(self._names[key], p) for key, p in given.items() if key in self._names]
            scaled = scaling.is_active(self._scaler)
            scales = loss_scales if loss_scales is not None else [self._scaler.get_scale() if scaled else 1.0]
            dtype = AUTOCAST[precision] if precision is not None else self._autocast_dtype
            replay = Replay(self._model, [p for _, p in named], closure, self._device, dtype)
            step = self._pending[-1].step if self._pending else self._step
            self._auditing = True
            try:
                recipe = precision or str(self.writer.head.config.get("precision"))
                rows = audit(replay, [n for n, _ in named], scales, step, recipe)
            finally:
                self._auditing = False
            self.writer.append("audits", rows)

    def mirror(self, tracker: Any) -> None:
        """Send the headline numbers of every step from now on to `tracker` too, as `amp/loss`, `amp/loss_scale` and so
        on: a run of wandb, or anything with `log(dict, step=)`.

        Whatever the tracker does, training goes on: a thread of its own talks to it, and what goes wrong there is an
        event of this run. Steps are numbered as here. A wandb run takes nothing for a step that it is past: where the
        loop itself logs to it under other numbers, give this one a run of its own. Raises `RunError` without `log`.
        """
        from amp_core.record.mirror import Mirror

        self._outbox.mirrors.append(Mirror(tracker, self.writer))

    def paused(self) -> AbstractContextManager[None]:
        """While this context lasts, between two steps, the time belongs to no step: for a loop that has to wait."""
        return self._phases.left_out()

    def close(self, status: str = "finished", end_reason: str | None = None) -> None:
        """Remove every hook, restore every wrapped method, write what is left and the end. Twice is harmless."""
        if self.writer.closed:
            return
        self._remove()
        self.writer.close(status, end_reason)

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def _install(self, model: torch.nn.Module) -> None:
        unless = functools.partial(unless_capturing, met=self._on_capture)
        self._entries = Entries(model, unless(self._on_forward), unless(self._on_forward_end))
        for index, optimizer in enumerate(self._optimizers):
            self._handles += [
                optimizer.register_step_pre_hook(unless(self._before_optimizer(index))),
                optimizer.register_step_post_hook(unless(self._after_optimizer(index))),
            ]
        if self._scaler is not None:
            for name, around in (
                ("scale", self._around_scale),
                ("unscale_", self._around_unscale),
                ("step", self._around_step),
                ("update", self._around_update),
            ):
                self._patches.wrap(self._scaler, name, self._around_outside_captures(around))
        clipping.listen(self._on_clip)
        notices_patch.backward.listen(self._on_loss)
        notices_patch.grouped_for_clipping.listen(self._on_grouped)

    def _around_outside_captures(
        self, around: Callable[..., Any]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda original: unless_capturing(around(original), self._on_capture, original)

    def _on_capture(self) -> None:
        if not self._met_capture:
            self._met_capture = True
            self.writer.event("warning", name="not recorded", detail=UNSEEN, step=self._step)

    def _at_own_work(self) -> bool:
        return self._auditing or self._phases.present == "watch" or capturing()

    def _remove(self) -> None:
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._entries.remove()
        self._outputs.take_off()
        self._look_for_regions_no_more()
        self._patches.restore()
        clipping.unlisten(self._on_clip)
        notices_patch.backward.unlisten(self._on_loss)
        notices_patch.grouped_for_clipping.unlisten(self._on_grouped)

    @_borne
    def _on_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._auditing or in_backward():
            return
        self._finish_pending()
        if not torch.is_grad_enabled():  # an evaluation between two steps
            return
        self._phases.enter("forward")
        self._seen.add("forward")
        if self._repeating:
            return
        if self._gathered.broken_off or self._stepping:
            self._abandon()
        with self._phases.watching():
            first = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.dim()), None)
            self._gathered.entered(module, len(first) if first is not None else 0)
            if not self._described:
                self._describe_precision()
            if self._may_be_sampled() and self._kinds & {"output_grad", "activation"}:
                self._outputs.put_on()
            self._begin()

    @_borne
    def _on_forward_end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._auditing or in_backward() or not torch.is_grad_enabled():
            return
        for leaf in tensors_in(output):
            if leaf.requires_grad:
                leaf.register_hook(self._on_backward)
                self._gathered.hooked = True
        self._tell("forward_ended", output)

    @_borne
    def _on_backward(self, grad: torch.Tensor) -> None:
        if self._phases.present == "backward" or self.writer.closed or capturing():
            return
        self._phases.enter("backward")
        self._seen.add("backward")
        self._gathered.arrived()
        self._look_for_regions_no_more()
        engine = torch.autograd.Variable._execution_engine  # its one way to be told of the end; DDP and FSDP use it too
        engine.queue_callback(self._on_backward_end)
        self._tell("backward_began")

    @_borne
    def _on_backward_end(self) -> None:
        self._gathered.ended()
        self._phases.enter("after_backward")
        self._tell("backward_ended")

    @_borne
    def _on_clip(self) -> None:
        if not self._seen or capturing():  # clipping elsewhere in the program, before any step of ours began
            return
        self._phases.enter("optimizer")
        self._tell("called", "clip", None)
        self._look_before_clipping()

    def _on_grouped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Gradients are put together for clipping: by norm, of which `_on_clip` is told, or by value."""
        by_value = sys._getframe(2).f_code.co_name == "clip_grad_value_"  # 1 is the wrapper around what was called
        if by_value and self._seen and not self._auditing and not capturing():
            self._look_before_clipping()

    def _look_before_clipping(self) -> None:
        with self._phases.watching():
            for index in range(len(self._optimizers)):
                if self._has_gradients(index):
                    self._observe(index)

    def _on_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Backward is called. What the scaler did not see it starts from is the loss."""
        if self._repeating or self._auditing or in_backward() or "forward" not in self._seen or capturing():
            return
        roots = [t for t in tree_leaves(kwargs.get("tensors", args[:1])) if isinstance(t, torch.Tensor)]
        weighted = kwargs.get("grad_tensors", args[1] if len(args) > 1 else None) is not None
        with self._phases.watching():
            self._gathered.called(roots[0] if len(roots) == 1 and roots[0].numel() == 1 and not weighted else None)

    def _before_optimizer(self, index: int) -> Callable[..., Any]:
        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            if self._inside_scaler_step:
                self._tell("called", "optimizer.step", index)
                return None
            self._repeating = False
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if not callable(closure):
                self._before_step(index)
                return None
            watched = self._around_closure(index, closure)
            if "closure" in kwargs:
                return args, {**kwargs, "closure": watched}
            return (args[0], watched, *args[2:]), kwargs

        return hook

    def _before_step(self, index: int) -> None:
        self._tell("called", "optimizer.step", index)
        self._phases.enter("optimizer")
        with self._phases.watching():
            self._observe(index)
        self._stepping.add(index)

    def _around_closure(self, index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def closure(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not self._repeating:
                self._before_step(index)
                self._repeating = True
            return result

        return closure

    def _after_optimizer(self, index: int) -> Callable[..., None]:
        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self._repeating = False
            self._stepping.discard(index)
            if not self._inside_scaler_step:
                self._attempted(index, None)

        return hook

    def _around_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(outputs: Any) -> Any:
            with self._phases.watching():
                self._finish_pending()
                self._begin()
            self._tell("called", "scale", None)
            result = original(outputs)
            with self._phases.watching():
                if isinstance(outputs, torch.Tensor) and outputs.numel() == 1:
                    self._gathered.add(outputs)
                for leaf in tensors_in(result):
                    if leaf.requires_grad:
                        leaf.register_hook(self._on_backward)
            return result

        return scale

    def _around_unscale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def unscale_(optimizer: torch.optim.Optimizer) -> Any:
            index = self._index(optimizer)
            if index is not None:
                self._phases.enter("optimizer")
                self._tell("called", "unscale_", index)
                with self._phases.watching():
                    self._observe(index)
            return original(optimizer)

        return unscale_

    def _around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            index = self._index(optimizer)
            if index is None:
                return original(optimizer, *args, **kwargs)
            self._phases.enter("optimizer")
            self._tell("called", "scaler.step", index)
            with self._phases.watching():
                self._observe(index)
            self._inside_scaler_step = True
            self._stepping.add(index)
            found = None
            try:
                result = original(optimizer, *args, **kwargs)
            finally:
                self._inside_scaler_step = False
            self._stepping.discard(index)
            with self._phases.watching():
                found = scaling.found_inf(self._scaler, optimizer) if scaling.is_active(self._scaler) else None
            self._attempted(index, found)
            return result

        return step

    def _around_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update(*args: Any, **kwargs: Any) -> Any:
            self._phases.enter("optimizer")
            self._tell("called", "update", None)
            result = original(*args, **kwargs)
            if self._pending:
                self._pending[-1].spans += self._phases.take()
            self._phases.enter("data")
            self._next_number()
            return result

        return update

    # ---- one attempt after another ----------------------------------------------------------------------------------

    def _index(self, optimizer: torch.optim.Optimizer) -> int | None:
        return next((i for i, o in enumerate(self._optimizers) if o is optimizer), None)

    def _has_gradients(self, index: int) -> bool:
        return any(p.grad is not None for g in self._optimizers[index].param_groups for p in g["params"])

    def _tell(self, moment: str, *values: Any) -> None:
        if self._observers.has(moment):
            with self._phases.watching():
                self._observers.tell(moment, *values)

    def _begin(self) -> None:
        """Something of a step is about to happen: its first forward, or in loops without one what comes first."""
        if not self._began:
            self._began = True
            self._observers.tell("step_began", self._step)

    @_borne
    def _next_number(self) -> None:
        if self._stepped:
            self._tell("step_ended", self._step)
            self._step += 1
            self._stepped.clear()
            self._began = False
            self._entries.settle()

    def _due(self, index: int) -> bool:
        """Whether the gradients of optimizer `index` are measured tensor by tensor in the present step.

        Where optimizers take turns, each in a step of its own, every tenth step may always be the same one's turn: who
        has waited for as long as the interval is measured too.
        """
        if self._stumbles.paused(self._step):
            return False
        waited = self._step - self._sampled.get(index, -self._sampling.interval)
        return self._sampling.due(self._step) or (len(self._optimizers) > 1 and waited >= self._sampling.interval)

    def _may_be_sampled(self) -> bool:
        """The same in a forward, when it is not known yet which optimizer will step. One may have stopped for good."""
        if self._stumbles.paused(self._step):
            return False
        waited = [self._step - last for last in self._sampled.values()] if len(self._optimizers) > 1 else []
        interval = self._sampling.interval
        return self._sampling.due(self._step) or any(interval <= steps < 2 * interval for steps in waited)

    def _observe(self, index: int) -> Attempt:
        """Look at the gradients of optimizer `index`, once per attempt, as they come out of backward."""
        if index in self._open:
            return self._open[index]
        self._finish_pending()
        if index in self._stepped:
            self._next_number()
        self._begin()
        optimizer = self._optimizers[index]
        attempt = Attempt(self._step, index, sampled=self._due(index))
        if attempt.sampled:
            self._sampled[index] = self._step
        attempt.scaled = scaling.still_scaled(self._scaler, optimizer)
        if scaling.is_active(self._scaler):
            attempt.put("loss_scale", scaling.scale(self._scaler))
            attempt.put("growth_tracker", scaling.growth_tracker(self._scaler))
        named = [
            (self._names.get(id(p), f"optimizer{index}.group{g}.{i}"), local_values(p.grad))
            for g, group in enumerate(optimizer.param_groups)
            for i, p in enumerate(group["params"])
            if p.grad is not None
        ]
        attempt.gradients = [name for name, _ in named]
        if attempt.sampled:
            # Gradients that the loop unscaled by itself no longer have the factor of the output gradients.
            alike = attempt.scaled == scaling.is_active(self._scaler)
            self._tensors.sample(attempt, optimizer, named, alike=alike)
        if named and not attempt.all_measured:
            found, attempt.norm_order = norms([grad for _, grad in named])
            attempt.put("norms", found)
        self._open[index] = attempt
        return attempt

    @_borne
    def _attempted(self, index: int, found_inf: torch.Tensor | None) -> None:
        """The optimizer's step is over, made or skipped."""
        attempt = None
        with self._phases.watching():
            attempt = self._observe(index)  # mostly the one that is open
            del self._open[index]
            self._look_for_regions_no_more()
            attempt.put("found_inf", found_inf)
            loss, attempt.samples = self._gathered.take()
            attempt.put("loss", loss)
            attempt.lr = learning_rate(self._optimizers[index])
            attempt.seen = frozenset(self._seen)
            attempt.memory = memory_bytes(self._device)
            attempt.time_s = self.writer.time_s()
            attempt.logged = self._logged
            self._logged = {}
            self._pending.append(attempt)
            self._outputs.take_off()
            if not attempt.sampled:
                self._outputs.take()
        self._seen.clear()
        self._stepped.add(index)
        spans = self._phases.take()
        if attempt is not None:
            attempt.spans = spans
        self._phases.enter("data")
        if self._scaler is None and len(self._stepped) == len(self._optimizers):
            self._next_number()

    def _finish_pending(self) -> None:
        """Nothing more can be logged for the steps made: send their numbers off, and write those that have come."""
        if not self._pending:
            return
        with self._phases.watching():
            pending, self._pending = self._pending, []
            self._outbox.send(pending)

    def _end(self) -> None:
        """The run is ending, perhaps in the middle of anything."""
        self._remove()
        pending, self._pending = self._pending, []
        self._outbox.empty(pending)
        self._observers.tell("close")

    def _describe_precision(self) -> None:
        """Once, in the first forward: what autocast really does here."""
        self._described = True
        kind = self._device.type
        autocast = torch.is_autocast_enabled(kind)
        self._tell_precision(torch.get_autocast_dtype(kind) if autocast else None)
        if not autocast:
            self._region = RegionSeen(kind)

    def _abandon(self) -> None:
        """An exception broke the step off and the loop goes on: forget what was gathered for it."""
        for index in self._stepping:
            self._open.pop(index, None)
        self._stepping.clear()
        self._gathered.forget()
        self._outputs.take()

    def _stumbled(self, error: Exception) -> None:
        """Watching went wrong: the step is looked at no further, and the training goes on."""
        self._open.clear()
        self._outputs.take_off()
        self._outputs.take()
        if self._stumbles.note(error, self._step):
            self._remove()

    def _look_for_regions_no_more(self) -> None:
        if self._region is not None:
            region, self._region = self._region, None
            dtype = region.stop()
            if dtype is not None:
                self._tell_precision(dtype)

    def _tell_precision(self, autocast_dtype: torch.dtype | None) -> None:
        self._autocast_dtype = autocast_dtype
        dtype = dtype_name(autocast_dtype) if autocast_dtype is not None else None
        config = {"device": str(self._device), **self._config, "autocast_dtype": dtype}
        config.setdefault("precision", recipe_found(self._optimizers, self._scaler, dtype, self._device))
        self.writer.update_head(config=dict(self.writer.head.config) | config)
