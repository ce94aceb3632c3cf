"""`Hooks` on model, optimizers and scaler of a training loop, which notify `Steps` of what the loop does.

    >>> hooks = Hooks(model, scaler, steps)
    >>> hooks.remove()

Steps are detected at the scaler and the optimizers:

- `scaler.scale(loss)` gives the loss; without a scaler, the single number that backward starts from does;
- gradients are measured once per optimizer step, as backward leaves them: at the first of `scaler.unscale_`,
  `clip_grad_norm_`, `clip_grad_value_`, `scaler.step` and `optimizer.step`;
- with a closure, they are measured after its first call;
- a step is attempted when `scaler.step(optimizer)` is called, or `optimizer.step()` outside of it;
- an optimizer that `watch` was not given is detected by torch's global optimizer hook; see `adoption`;
- whether a step was skipped is read from `found_inf` after `scaler.step` and before `scaler.update`.

Hooks do not change the training: they return nothing, do not touch random number generators, and copy every value that
the training continues to use.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_core.record.loop.batch_size import BatchSize
from amp_core.record.loop.entry_points import EntryPoints
from amp_core.record.loop.loss_and_samples import Call, Scaled
from amp_core.record.loop.steps import Steps, isolated
from amp_core.record.model import scaler_state as scaling
from amp_core.record.model.modules import tensors_in
from amp_core.record.model.parameters import backward_reaches, in_backward, unwrapped
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.captures import UNSEEN, capturing
from amp_core.record.torch_internals.compiling import untraced
from amp_core.record.torch_internals.optimizer_steps import after_step, before_step
from amp_core.record.torch_internals.tensor_hooks import TensorHooks


def loop_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A method of `Hooks` that the loop calls. It is not compiled with the loop, and does nothing during a capture."""

    @functools.wraps(hook)
    def listen(self: "Hooks", *args: Any) -> Any:
        if not capturing():
            return hook(self, *args)
        self._on_capture()
        return None

    return untraced(listen)


class Hooks:
    """Hooks on everything that a loop calls in a step. `scaler` is the loop's, or None."""

    def __init__(self, model: torch.nn.Module, scaler: Any, steps: Steps) -> None:
        self._steps = steps
        self.scaler = scaler
        """The scaler that the loop uses at present."""
        self._writer = steps.writer
        self._phases = steps.phases
        self._loss_and_samples = steps.loss_and_samples
        self._outputs = steps.outputs
        self._precision = steps.precision
        self._seen = steps.seen
        self._inside_scaler_step = False
        self._repeating = False  # a closure is called again within one optimizer step
        self._capture_reported = False
        # Optimizers whose scaler.step was given a proxy: their own step comes later.
        self._proxied_optimizers: set[int] = set()
        self._methods: list[tuple[patched_functions.Shared, Any]] = []  # of scalers, with their listeners
        self._on_tensors = TensorHooks()
        self._handles: list[Any] = []
        self._of_optimizer: dict[int, list[Any]] = {}
        self._model = model
        self._batch = BatchSize(unwrapped(model))
        self._entry_points = EntryPoints(model, self._on_forward, self._on_forward_end)
        try:
            self._install()
        except BaseException:
            self.remove()
            raise

    def __len__(self) -> int:
        return len(self._handles) + len(self._entry_points)

    def _install(self) -> None:
        self._steps.on_step_end = self._entry_points.narrow
        self._steps.on_forwards_lost = self._find_entry_points
        for index, optimizer in enumerate(self._steps.optimizers):
            self._listen_to(index, optimizer)
        self._handles.append(before_step(self._before_any_optimizer))
        if self.scaler is not None:
            self._patch_scaler(self.scaler)
        patched_functions.clipped_by_norm.listen(self._on_clip)
        patched_functions.backward.listen(self._on_backward_call)
        patched_functions.backward.listen_after(self._after_loss)
        patched_functions.grad.listen(self._on_grad)
        patched_functions.grad.listen_after(self._after_loss)
        patched_functions.grouped_for_clipping.listen(self._on_grouped)

    def _find_entry_points(self) -> None:
        """Search for entry points again: the loop no longer enters the model where it did, and may call a part of
        it."""
        self._entry_points.remove()
        self._entry_points = EntryPoints(self._model, self._on_forward, self._on_forward_end)
        self._steps.on_step_end = self._entry_points.narrow

    def _listen_to(self, index: int, optimizer: torch.optim.Optimizer) -> None:
        for handle in self._of_optimizer.pop(index, ()):  # of the optimizer that it replaces
            handle.remove()
            self._handles.remove(handle)
        self._of_optimizer[index] = [
            before_step(functools.partial(self._before_optimizer, index), optimizer),
            after_step(functools.partial(self._after_optimizer, index), optimizer),
        ]
        self._handles += self._of_optimizer[index]

    def _place(self, optimizer: Any, *, stepping: bool = False, own_backward: bool = False) -> int | None:
        """The index of an optimizer; one that the loop starts to use during the run may be adopted."""
        index, new = None, False
        with self._phases.watching():
            index, new = self._steps.index_or_adopt(optimizer, stepping=stepping, own_backward=own_backward)
            if new and index is not None:
                self._listen_to(index, optimizer)
        return index

    def _patch_scaler(self, scaler: Any) -> None:
        for name, before, after in (
            ("scale", self._on_scale, self._on_scaled),
            ("unscale_", self._on_unscale, None),
            ("step", self._on_scaler_step, self._on_scaler_stepped),
            ("update", self._on_update, self._on_updated),
        ):
            method = patched_functions.method_of(scaler, name)
            if name == "step":
                method.listen_failed(self._on_scaler_step_failed, of=scaler)
            method.listen(before, of=scaler)
            if after is not None:
                method.listen_after(after, of=scaler)
            self._methods.append((method, (before, after, self._on_scaler_step_failed)))

    def adopt(self, scaler: Any) -> Callable[[Any, Any], None]:
        """Adopt a scaler that the loop uses and that is within `scale`. Returns a function to be called with the losses
        and the scaled losses."""
        self.scaler = scaler
        self._steps.adopt(scaler)
        self._patch_scaler(scaler)
        self._before_scale()
        return self._after_scale

    def _on_capture(self) -> None:
        if not self._capture_reported:
            self._capture_reported = True
            self._writer.event("warning", name="not recorded", detail=UNSEEN, step=self._steps.number)

    def remove(self) -> None:
        """Remove every hook and restore every patched method. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._entry_points.remove()
        self._batch.detach()
        self._outputs.remove()
        self._on_tensors.remove()
        for method, listeners in self._methods:
            method.unlisten(*listeners)
        self._methods = []
        patched_functions.clipped_by_norm.unlisten(self._on_clip)
        patched_functions.backward.unlisten(self._on_backward_call)
        patched_functions.backward.unlisten(self._after_loss)
        patched_functions.grad.unlisten(self._on_grad)
        patched_functions.grad.unlisten(self._after_loss)
        patched_functions.grouped_for_clipping.unlisten(self._on_grouped)
        self._precision.stop()

    @loop_hook
    @isolated
    def _on_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._steps.auditing or in_backward():
            return
        if not torch.is_grad_enabled():  # an evaluation between two steps
            self._steps.finish_pending()
            self._steps.notify("evaluation_began")
            return
        self._phases.enter("forward")
        self._seen.add("forward")
        if self._repeating:
            return
        with self._phases.watching():
            self._steps.finish_pending()
            if self._loss_and_samples.interrupted or self._steps.stepping:
                self._steps.abandon()
            self._batch.began(module, args, kwargs)
            self._loss_and_samples.entered(module)
            self._precision.forward_began()
            if self._steps.may_be_sampled():
                self._outputs.attach()
            self._steps.begin()

    @loop_hook
    @isolated
    def _on_forward_end(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._steps.auditing or in_backward():
            return
        if not torch.is_grad_enabled():
            self._steps.notify("evaluation_returned")
            return
        if not self._repeating:
            self._loss_and_samples.counted(self._batch.ended(output))
        for leaf in tensors_in(output):
            if leaf.requires_grad:
                self._on_tensors.attach(
                    leaf, "output", functools.partial(self._on_backward, self._loss_and_samples.hooked(leaf))
                )
        self._steps.notify("forward_ended", output)

    @untraced  # backward may be called by what is compiled
    @isolated
    def _on_backward(self, call: Call | None, grad: torch.Tensor) -> None:
        if call is not None:
            self._loss_and_samples.reached(call)
        if self._phases.present == "backward" or self._writer.closed or capturing():
            return
        self._phases.enter("backward")
        self._seen.add("backward")
        self._steps.backward_seen()
        self._loss_and_samples.arrived()
        self._precision.stop()
        engine = (
            torch.autograd.Variable._execution_engine
        )  # its only callback for the end of backward; DDP and FSDP use it too
        engine.queue_callback(self._on_backward_end)
        self._steps.notify("backward_began")

    @untraced
    @isolated
    def _on_scaled_backward(self, scaled: Scaled, grad: torch.Tensor) -> None:
        self._loss_and_samples.through(scaled)
        if backward_reaches(self._model):  # it may be the loss of another model with the same scaler
            self._on_backward(None, grad)

    @untraced
    @isolated
    def _on_backward_end(self) -> None:
        self._loss_and_samples.ended()
        self._phases.enter("after_backward")
        self._steps.notify("backward_ended")

    @isolated
    def _on_clip(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._seen or capturing():  # clipping elsewhere in the program, before a step of this run began
            return
        self._phases.enter("optimizer")
        with self._phases.watching():
            threshold = _argument(args, kwargs, 1, "max_norm")
            # An infinite threshold clips nothing: the loop wants the norm.
            what = "norm" if isinstance(threshold, float) and threshold == math.inf else "clip"
            self._steps.notify("called", what, self._steps.holder(_argument(args, kwargs, 0, "parameters")))
            self._observe_before_clipping()

    def _on_grouped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Gradients are grouped for clipping by value, or by norm, which `_on_clip` handles."""
        if patched_functions.clips_by_value() and self._seen and not self._steps.auditing and not capturing():
            with self._phases.watching():
                self._observe_before_clipping()

    def _observe_before_clipping(self) -> None:
        for index in range(len(self._steps.optimizers)):
            if self._steps.has_gradients(index):
                self._steps.observe(index)

    def _on_backward_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Backward is called: its roots are the loss."""
        if self._outside_step():
            return
        tensors, weights, inputs = (
            _argument(args, kwargs, *a) for a in ((0, "tensors"), (1, "grad_tensors"), (5, "inputs"))
        )
        with self._phases.watching():
            self._loss_and_samples.called(
                *_roots(tensors, weights), counts=inputs is None or self._holds_model_parameters(inputs)
            )

    def _on_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`torch.autograd.grad` is called. With `create_graph` a backward through its result follows."""
        if self._outside_step():
            return
        outputs, inputs, weights = (
            _argument(args, kwargs, *a) for a in ((0, "outputs"), (1, "inputs"), (2, "grad_outputs"))
        )
        counts = not _argument(args, kwargs, 4, "create_graph") and self._holds_model_parameters(inputs)
        with self._phases.watching():
            self._loss_and_samples.called_grad(*_roots(outputs, weights), counts=counts)

    def _after_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not self._outside_step():
            with self._phases.watching():
                if self._loss_and_samples.returned():
                    self._steps.backward_seen()

    def _outside_step(self) -> bool:
        return self._repeating or self._steps.auditing or in_backward() or capturing()

    def _holds_model_parameters(self, tensors: Any) -> bool:
        return any(id(t) in self._steps.names for t in tree_leaves(tensors))

    @loop_hook
    @isolated
    def _before_any_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer steps, anywhere in the program."""
        if not self._steps.auditing and all(optimizer is not known for known in self._steps.optimizers):
            closure = _argument(args, kwargs, 1, "closure")
            index = self._place(optimizer, stepping=True, own_backward=callable(closure))
            if index is None and not self._steps.stepping:
                self._loss_and_samples.stepped_elsewhere()

    @loop_hook
    def _before_optimizer(self, index: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self._inside_scaler_step:
            self._steps.notify("called", "optimizer.step", index)
            return None
        if index in self._proxied_optimizers:
            self._phases.enter("optimizer")
            return None
        self._repeating = False
        closure = _argument(args, kwargs, 1, "closure")
        if not callable(closure):
            self._before_step(index)
            return None
        watched = self._around_closure(index, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _before_step(self, index: int) -> None:
        self._phases.enter("optimizer")
        with self._phases.watching():
            self._steps.notify("called", "optimizer.step", index)
            self._steps.observe(index)
        self._steps.stepping.add(index)

    def _around_closure(self, index: int, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def closure(*args: Any, **kwargs: Any) -> Any:
            if self._repeating:
                self._steps.notify("closure_repeated", index)
                self._steps.repeating = (
                    True  # observers are notified of the first call alone: the step's row describes that one
                )
                try:
                    return original(*args, **kwargs)
                finally:
                    self._steps.repeating = False
            result = original(*args, **kwargs)
            self._before_step(index)
            self._repeating = True
            return result

        return closure

    @loop_hook
    def _after_optimizer(self, index: int, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._repeating = False
        self._steps.stepping.discard(index)
        if not self._inside_scaler_step and index not in self._proxied_optimizers:
            self._steps.attempted(index, None)

    def _on_scale(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        scaler = args[0]
        if scaler is not self.scaler:  # where several alternate, the last one to scale counts
            self.scaler = scaler
            self._steps.use(scaler)
            if not self._writer.head.config.get("scalers_in_turn"):
                self._writer.update_head(config=dict(self._writer.head.config) | {"scalers_in_turn": True})
        self._before_scale()

    def _on_scaled(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._after_scale(patched_functions.argument(args, kwargs, "outputs"), result)

    @loop_hook
    def _before_scale(self) -> None:
        with self._phases.watching():
            self._steps.finish_pending()
            self._steps.begin()
        self._steps.notify("called", "scale", None)

    @loop_hook
    def _after_scale(self, outputs: Any, result: Any) -> None:
        with self._phases.watching():
            factor = functools.partial(scaling.scale, self.scaler)
            for loss, leaf in zip(tensors_in(outputs), tensors_in(result), strict=True):
                if leaf.requires_grad:
                    scaled = self._loss_and_samples.scaled(loss, leaf, factor)
                    self._on_tensors.attach(leaf, "scaled", functools.partial(self._on_scaled_backward, scaled))

    def _on_unscale(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before_unscale(patched_functions.argument(args, kwargs, "optimizer"))

    @loop_hook
    def _before_unscale(self, optimizer: Any) -> None:
        index = self._place(optimizer)
        if index is not None:
            self._phases.enter("optimizer")
            with self._phases.watching():
                self._steps.notify("called", "unscale_", index)
                self._steps.observe(index)

    def _on_scaler_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before_scaler_step(patched_functions.argument(args, kwargs, "optimizer"))

    def _on_scaler_stepped(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._after_scaler_step(patched_functions.argument(args, kwargs, "optimizer"))

    def _on_scaler_step_failed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._inside_scaler_step = False

    @loop_hook
    def _before_scaler_step(self, optimizer: Any) -> None:
        index = self._place(optimizer)
        if index is None:  # of another model with the same scaler, which may leave out the optimizer's own step
            self._loss_and_samples.stepped_elsewhere()
            return
        self._phases.enter("optimizer")
        with self._phases.watching():
            self._steps.notify("called", "scaler.step", index)
            self._steps.observe(index)
        self._inside_scaler_step = True
        self._steps.stepping.add(index)

    @loop_hook
    def _after_scaler_step(self, optimizer: Any) -> None:
        self._inside_scaler_step = False
        index = self._steps.index(optimizer)
        if index is None:
            return
        self._steps.stepping.discard(index)
        found_inf = None
        with self._phases.watching():
            found_inf = scaling.found_inf(self.scaler, optimizer) if scaling.is_active(self.scaler) else None
        self._steps.attempted(index, found_inf)
        if not isinstance(optimizer, torch.optim.Optimizer):
            self._proxied_optimizers.add(index)

    def _on_update(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before_update()

    def _on_updated(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._after_update()

    @loop_hook
    def _before_update(self) -> None:
        self._phases.enter("optimizer")
        with self._phases.watching():
            self._steps.before_update()
        self._steps.notify("called", "update", None)

    @loop_hook
    def _after_update(self) -> None:
        self._proxied_optimizers.clear()
        self._steps.updated()


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return kwargs.get(name, args[place] if len(args) > place else None)


def _roots(tensors: Any, weights: Any) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The roots of a backward, and for each the gradient that was given, or None."""
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    given = [weights] if weights is None or isinstance(weights, torch.Tensor) else list(weights)
    return roots, given if len(given) == len(roots) else [None] * len(roots)
