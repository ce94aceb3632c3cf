"""The memory of a sampled step by category, at each of its moments.

    MemoryWatch(writer, model, [optimizer], torch.device("cuda:0"))      # an observer: see `observers`

A row of `memory` is a moment: the end of a module's forward, the arrival of a parameter's gradient, or a transition
between phases. It holds the allocated bytes, and how many of them are parameters, buffers, gradients, optimizer state,
activations and autocast's copies of weights, counted by the storages behind the tensors. On CUDA it also holds the peak
since the previous moment, so that a peak is shown with what was alive just after it. On a CPU no allocator counts
bytes; the row holds the resident set size of the process beside the tensors.

Only steps 1, 4, 16, 64, … are measured. Their computation is unchanged. On CUDA torch's own peak is reset at each
moment (see `Cuda.read_allocator`); the run keeps the true peak.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import graph

from amp_core.record.backends import backend_of
from amp_core.record.model import own
from amp_core.record.model.modules import is_compiled
from amp_core.record.model.parameters import (
    has_values,
    named_modules,
    named_parameters,
    optimizer_tensors,
    unwrapped,
)
from amp_core.record.observer import Observer
from amp_core.record.observers.storages import Saved, storage_of, storages
from amp_core.record.torch_internals.module_calls import after_call
from amp_core.store.writer import RunWriter
from amp_core.text.errors import in_one_line

MAX_MODULES = 150
"""Modules whose end is a moment: in a deep model, those nearer to the root."""
MAX_GRADIENTS = 150
"""Gradients whose arrival is a moment, spread evenly over the model; all of them are counted."""
MAX_MOMENTS = 2000
"""Moments of one step. With very many micro-batches, later ones are omitted, except transitions between phases."""


def sampled(step: int) -> bool:
    """Whether a step is measured: 1, 4, 16, 64, … Step 0 allocates the optimizer state, so it is not representative."""
    return step > 0 and step & (step - 1) == 0 and step.bit_length() % 2 == 1


class MemoryWatch(Observer):
    """Writes rows of `memory` for the sampled steps of one training loop."""

    def __init__(
        self,
        writer: RunWriter,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        due: Callable[[int], bool] = sampled,
    ) -> None:
        self._writer = writer
        self._model = unwrapped(model)
        self._optimizers = optimizers
        self._device = device
        self._due = due
        self._backend = backend_of(device)
        self._compiled = is_compiled(model)
        self._saved = Saved(device)
        self._counts_saved = False
        self._reported = False
        self._broken = False
        self._step: int | None = None
        self._phase = "forward"
        self._handles: list[Any] = []
        self._to_hook: list[tuple[torch.Tensor, Callable[..., None]]] = []
        self._on_nodes: list[Any] = []
        self._rows: list[dict[str, Any]] = []
        self._held: dict[str, int] = {}
        self._gradients: dict[int, int] = {}
        self._backend.forget_readings()

    # moments of the loop

    def step_began(self, step: int) -> None:
        self._leave()
        self.awake = not self._broken and self._due(step)
        if not self.awake:
            return
        self._step, self._rows, self._phase = step, [], "forward"
        try:
            self._begin()
        except Exception:  # the caller reports it; no hook stays on the model
            self._leave()
            raise

    def _begin(self) -> None:
        fixed = storages(own.parameters(self._model), self._device)
        buffers = storages(own.buffers(self._model), self._device)
        self._held = {"parameters_bytes": sum(fixed.values()), "buffers_bytes": sum(buffers.values())}
        self._attach()
        reason = "hooks do not see the tensors of a compiled model" if self._compiled else None
        reason = reason or self._saved.start(ignored=fixed.keys() | buffers.keys())
        self._counts_saved = reason is None
        self._report_uncounted(reason)
        self._backend.read_allocator()  # the peak before the step does not count
        self._transition("step begins")

    def forward_ended(self, output: Any) -> None:
        self._phase = "forward"
        self._transition("forward ends")
        self._saved.before_release = self._loss_done

    def _loss_done(self) -> None:
        """The first saved tensor is released. Without a scaler the first gradient that a hook receives is the model
        output's; by then the tensors saved for the loss are already released."""
        self._safely(lambda: self._note("loss computed"))

    def backward_began(self) -> None:
        self._saved.before_release = None
        self._phase = "forward"  # also if another module than the watched one was called
        self._transition("backward begins")
        self._phase = "backward"
        self._attach_to_gradients()

    def backward_ended(self) -> None:
        self._transition("backward ends")
        self._phase = "optimizer"

    def called(self, what: str, optimizer: int | None) -> None:
        if what == "scale":
            return
        self._detach()
        if self._step is not None and self._rows[-1]["moment"] != "optimizer begins":
            self._transition("optimizer begins")

    def step_ended(self, step: int) -> None:
        self._detach()
        if self._step is None:
            return
        self._report_uncounted(self._saved.interrupted)
        self._phase = "optimizer"
        self._transition("step ends")
        if self._step is not None:
            columns = {name: [row.get(name) for row in self._rows] for name in self._rows[0]}
            self._writer.append("memory", columns)
        self._leave()

    def close(self) -> None:
        self._leave()
        self._backend.forget_readings()

    # hooks of a step

    def _attach(self) -> None:
        if self._compiled:  # a hook on a part of a compiled model would cause a recompilation
            return
        for name, module in _outer_modules(self._model):
            self._handles.append(after_call(module, self._after_module(name)))
        named = ((n, p) for n, p in named_parameters(self._model) if has_values(p))
        trained = [(n, p) for n, p in named if p.requires_grad and p.is_leaf and p.layout is torch.strided]
        stride = max(1, -(-len(trained) // MAX_GRADIENTS))
        for i, (name, parameter) in enumerate(trained):
            hook = self._after_gradient(parameter, name if i % stride == 0 or i == len(trained) - 1 else None)
            if hasattr(parameter, "to_local"):  # FSDP2 gives its sharded parameters their gradients itself
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            else:
                self._to_hook.append((parameter, hook))

    def _attach_to_gradients(self) -> None:
        """Hook the nodes that accumulate gradients in the backward that begins. A hook on a parameter would leave
        autograd something to call in every later backward, even once it is removed."""
        self._detach_from_gradients()
        for parameter, hook in self._to_hook:
            if not parameter.requires_grad:  # frozen since the step began, as a critic is while its generator trains
                continue
            node = graph.get_gradient_edge(parameter).node
            self._on_nodes.append(node.register_hook(hook))

    def _detach_from_gradients(self) -> None:
        for handle in self._on_nodes:
            handle.remove()
        self._on_nodes = []

    def _detach(self) -> None:
        self._saved.stop()
        for handle in self._handles:
            handle.remove()
        self._handles, self._to_hook = [], []
        self._detach_from_gradients()

    def _leave(self) -> None:
        self._detach()
        self._step = None

    def _after_module(self, name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch.is_grad_enabled() and not self.at_own_work():
                if self._phase == "optimizer":  # the next micro-batch
                    self._phase = "forward"
                self._safely(lambda: self._note("module", name))

        return hook

    def _after_gradient(self, parameter: torch.Tensor, name: str | None) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._safely(lambda: self._gradient(parameter, name))

        return hook

    def _gradient(self, parameter: torch.Tensor, name: str | None) -> None:
        if parameter.grad is not None and self._phase == "backward":
            storage = storage_of(parameter.grad, self._device)
            if storage is not None:
                self._gradients[storage[0]] = storage[1]
            if name is not None:
                self._note("gradient", name)

    def _safely(self, measure: Callable[[], None]) -> None:
        """Measure within the program's own forward or backward. An exception is reported once, never propagated."""
        if self._broken:
            return
        try:
            measure()
        except Exception as error:
            self._broken, self._step = True, None
            detail = f"what memory is made of, from now on: {in_one_line(error)}"
            self._writer.event("warning", name="not recorded", detail=detail)

    def _report_uncounted(self, why: str | None) -> None:
        if why is not None and not self._reported:
            self._reported = True
            detail = f"activations and autocast's casts in memory: {why}"
            self._writer.event("warning", name="not recorded", detail=detail, step=self._step)

    # a moment

    def _transition(self, moment: str) -> None:
        """A moment between phases."""
        if self._step is not None:
            self._safely(lambda: self._at_transition(moment))

    def _at_transition(self, moment: str) -> None:
        """Count gradients and optimizer state again, and note the moment."""
        grads = (p.grad for p in own.parameters(self._model) if p.grad is not None)
        self._gradients = storages(grads, self._device)
        state = storages(optimizer_tensors(self._optimizers), self._device)
        self._held["optimizer_bytes"] = sum(state.values())
        self._note(moment, transition=True)

    def _note(self, moment: str, name: str = "", *, transition: bool = False) -> None:
        if self._step is None or (len(self._rows) >= MAX_MOMENTS and not transition):
            return
        whole = self._counts_saved and self._saved.interrupted is None
        seen = whole and (self._saved.seen or moment == "step begins")
        self._rows.append(
            {
                "step": self._step,
                "number": len(self._rows),
                "moment": moment,
                "name": name,
                "phase": self._phase,
                "device": str(self._device),
                **self._backend.read_allocator()._asdict(),
                **self._held,
                "gradients_bytes": sum(self._gradients.values()),
                "activations_bytes": self._saved.activations if seen else None,
                "autocast_bytes": self._saved.autocast if seen else None,
            }
        )


def _outer_modules(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """At most `MAX_MODULES` modules of one depth, or leaves above it: none contains another."""
    named = [(name, module) for name, module in named_modules(model) if name]
    depths = sorted({name.count(".") for name, _ in named})
    chosen: list[tuple[str, torch.nn.Module]] = []
    for depth in depths:
        level = [(n, m) for n, m in named if n.count(".") == depth or (n.count(".") < depth and not _has_children(m))]
        if chosen and len(level) > MAX_MODULES:
            break
        chosen = level
    return chosen[:MAX_MODULES]


def _has_children(module: torch.nn.Module) -> bool:
    return next(own.children(module), None) is not None
