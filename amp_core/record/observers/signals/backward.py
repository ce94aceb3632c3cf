"""State around forward and backward: autocast switched or left on, anomaly mode, the loss's dtype, gradients of
gradients.

Each is reported once, when it first occurs.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_core.record.backends import BACKENDS
from amp_core.record.model import scaler_state as scaling
from amp_core.record.model.loss_factors import MIN_LOSS_SCALE, factor_of
from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import in_backward
from amp_core.record.observer import Observer
from amp_core.record.observers.signals.dead_operators import dead_operator
from amp_core.record.observers.signals.loss_dtype import loss_dtype
from amp_core.record.stats.layout import dtype_name
from amp_core.record.torch_internals import patched_functions
from amp_core.store.writer import RunWriter

MAX_LEAF_NODES = 8
"""Most operators between a loss that was wrapped anew and backward: a mean over micro-batches, a loss scale."""
MAX_CHECKED_BACKWARDS = 8
"""Backward passes in which the dtype of the loss's computation is checked; as many whose roots no scaler multiplied are
searched for parameters."""
FIRST_STEPS = 3
"""Steps in which regions of autocast are watched for their device type."""
MAX_NODES = 20_000
"""Operators of such a backward that are searched."""
_SCALED = "ampscope.scaled"
"""Marks, in a node's metadata, the product of a loss and the loss scale."""


class AutocastElsewhere(Observer):
    """Reports once if the first steps ask for autocast of another device type than the model's, and not of its own.
    Writes `autocast_without_forward` into `config` if they ask for it, and no forward runs in their thread.

    torch disables a region of an unavailable device when the region is made. Of one that was made before watching, such
    as a decorator's, only that it is disabled can be seen, not by whom.
    """

    def __init__(self, writer: RunWriter, device: torch.device) -> None:
        self._writer = writer
        self._kind = device.type
        self._requested: list[str] = []
        self._disabled: list[str] = []  # of regions that were made before watching
        self._off: list[str] = []  # 16-bit dtypes of regions that the program made disabled, for the model's device
        self._made: weakref.WeakSet[torch.autocast] = weakref.WeakSet()
        self._regions = patched_functions.method_of_class(torch.autocast, "__init__")
        self._regions.listen(self._on_region)
        self._entries = patched_functions.method_of_class(torch.autocast, "__enter__")
        self._entries.listen(self._on_entry)

    def step_began(self, step: int) -> None:
        if self.awake:  # regions that were made before watching
            self._requested += [kind for kind in BACKENDS if torch.is_autocast_enabled(kind)]

    def step_ended(self, step: int) -> None:
        if step + 1 < FIRST_STEPS:
            return
        self.close()
        self.awake = False
        config = dict(self._writer.head.config)
        if self._kind in self._requested and "autocast_dtype" not in config:  # no forward in this thread
            self._writer.update_head(config=config | {"autocast_without_forward": True})
        if self._requested and self._kind not in self._requested:
            self._writer.event("autocast elsewhere", name=self._requested[0], step=step)
        elif self._disabled and not self._requested:
            self._writer.event("autocast elsewhere", name=self._disabled[0], detail="disabled", step=step)
        elif self._off and not self._requested:
            self._writer.event("autocast elsewhere", name=self._kind, detail="off", dtype=self._off[0], step=step)

    def close(self) -> None:
        self._regions.unlisten(self._on_region)
        self._entries.unlisten(self._on_entry)

    def _on_region(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._made.add(args[0])
        # torch disables a region of an unavailable device, so the requested type counts.
        kind = patched_functions.argument(args, kwargs, "device_type")
        if not isinstance(kind, str):
            return
        kind, dtype = kind.partition(":")[0], kwargs.get("dtype", args[2] if len(args) > 2 else None)
        if kwargs.get("enabled", args[3] if len(args) > 3 else True):
            self._requested.append(kind)
        elif kind == self._kind and dtype in NARROW:
            self._off.append(dtype_name(dtype))

    def _on_entry(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        region = args[0]
        if region in self._made:
            return
        kind = str(region.device)
        if region._enabled:
            self._requested.append(kind)
        elif kind != self._kind:
            self._disabled.append(kind)


class AutocastKept(Observer):
    """Reports once if autocast is not in the same state after a forward as before."""

    def __init__(self, writer: RunWriter, device: torch.device) -> None:
        self._writer = writer
        self._kind = device.type
        self._before = False

    def step_began(self, step: int) -> None:
        self._before = torch.is_autocast_enabled(self._kind)

    def forward_ended(self, output: Any) -> None:
        after = torch.is_autocast_enabled(self._kind)
        if after != self._before and self.awake:
            self.awake = False
            self._writer.event("autocast changed", name="forward", value=float(after))


class StaleCache(Observer):
    """Reports once if a step begins in the autocast region in which an optimizer has stepped before.

    Autocast keeps its 16-bit copies of FP32 weights until the outermost region ends, so the forward of that step uses
    the weights from before the update.
    """

    def __init__(self, writer: RunWriter, device: torch.device, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._writer = writer
        self._kind = device.type
        self._optimizers = optimizers
        self._outdated: str | None = None  # the optimizer that has changed weights of which there may be copies
        patched_functions.cleared_cache.listen(self._on_cleared)

    def step_began(self, step: int) -> None:
        if not self.awake:
            return
        stale = self._outdated is not None and self._keeps_copies()
        if stale:
            dtype = dtype_name(torch.get_autocast_dtype(self._kind))
            self._writer.event("stale cache", self._outdated or "", step=step, dtype=dtype)
        if stale or step > FIRST_STEPS:
            self.awake = False
            self.close()

    def called(self, what: str, optimizer: int | None) -> None:
        if what == "optimizer.step" and optimizer is not None and self._keeps_copies():
            stepping = self._optimizers[optimizer]
            if any(_is_cached(p) for group in stepping.param_groups for p in group["params"]):
                self._outdated = type(stepping).__name__

    def close(self) -> None:
        patched_functions.cleared_cache.unlisten(self._on_cleared)

    def _keeps_copies(self) -> bool:
        return torch.is_autocast_enabled(self._kind) and torch.is_autocast_cache_enabled()

    def _on_cleared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._outdated = None


def _is_cached(weight: torch.Tensor) -> bool:
    """Whether autocast keeps a copy of such a weight (aten/src/ATen/autocast_mode.cpp, `cached_cast`)."""
    return weight.dtype is torch.float32 and weight.requires_grad and weight.is_leaf and not weight._is_view()


@dataclass
class _Unscaled:
    """A parameter that backward of a loss without the loss scale reached, and its gradient after that."""

    parameter: torch.Tensor
    dtype: str | None
    grad: torch.Tensor | None = None


class BackwardState(Observer):
    """Checks the state of torch whenever `backward` or `torch.autograd.grad` is called."""

    def __init__(
        self,
        writer: RunWriter,
        device: torch.device,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: Any,
        scale_calls: Callable[[], int],
    ) -> None:
        self._writer = writer
        self._optimizers = optimizers
        self._kind = device.type
        self._scale_calls = scale_calls  # how often the loop has called get_scale
        self._step = 0
        self._reported: set[str] = set()
        self._scaled: list[weakref.ref[torch.Tensor]] = []
        self._looked_for_half = False  # whether the first backward without a scaler was searched for FP16
        self._checked = 0  # backward passes whose loss's dtype was checked
        self._searched = 0  # backward passes whose roots no scaler multiplied
        self._unscaled: set[int] = set()  # optimizers whose gradients are no longer scaled in this step
        self._reached: set[int] = set()  # optimizers that backward reached from scaled losses alone
        self._by_scaler: set[int] = set()  # optimizers that the scaler steps
        self._followed = 0  # backward passes that were followed to the optimizers
        self._pending: dict[int, _Unscaled] = {}  # by optimizer: what an unscaled loss left
        self._unscaled_grads: dict[int, int] = {}  # versions of scaled gradients when unscaled ones were computed
        self._calls_at_begin = 0  # calls of get_scale before the step
        self._just_found = False  # whether the scaler was found in this step, within its first call
        self._calls_before: int | None = None  # calls of get_scale when scaled gradients with a graph were made
        self._scalings: list[patched_functions.Shared] = []
        if scaling.is_active(scaler):
            self.scaler_found(scaler)
            self._just_found = False
        patched_functions.backward.listen(self._on_backward)
        patched_functions.backward.listen_after(self._after_backward)
        patched_functions.grad.listen(self._on_grad)

    def step_began(self, step: int) -> None:
        self._step = step
        self._scaled, self._unscaled_grads, self._unscaled, self._reached = [], {}, set(), set()
        self._pending = {}
        self._calls_at_begin = self._scale_calls()

    def scaler_found(self, scaler: Any) -> None:
        method = patched_functions.method_of(scaler, "scale")
        method.listen_after(self._keep, of=scaler)
        self._scalings.append(method)
        self._just_found = True

    def step_ended(self, step: int) -> None:
        self._step = step + 1
        self._calls_before = None
        self._just_found = False

    def close(self) -> None:
        patched_functions.backward.unlisten(self._on_backward, self._after_backward)
        patched_functions.grad.unlisten(self._on_grad)
        for method in self._scalings:
            method.unlisten(self._keep)

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], scaled: Any) -> None:
        for tensor in tree_leaves(scaled):
            if isinstance(tensor, torch.Tensor):
                self._scaled.append(weakref.ref(tensor))
                if tensor.grad_fn is not None:
                    _metadata(tensor.grad_fn)[_SCALED] = True

    def _on_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.at_own_work() or in_backward():  # checkpointing calls it for what it recomputes
            return
        if torch.is_autocast_enabled(self._kind):
            dtype = dtype_name(torch.get_autocast_dtype(self._kind))
            self._report("autocast in backward", name="backward", dtype=dtype)
        if torch.is_anomaly_enabled():
            self._report("anomaly mode", name="torch.autograd.set_detect_anomaly")
        roots = [t for t in tree_leaves(args[:1]) if isinstance(t, torch.Tensor)]
        if not (self._looked_for_half or self._scalings):
            self._looked_for_half = True
            if _passes_half([t.grad_fn for t in roots if t.grad_fn is not None]):
                self._report("half backward", name="backward", dtype=dtype_name(torch.float16))
        narrow = next((t.dtype for t in roots if t.dtype in NARROW), None)
        if narrow is not None:
            self._report("loss dtype", name="loss", dtype=dtype_name(narrow))
        elif self._checked < MAX_CHECKED_BACKWARDS:
            self._checked += 1
            if roots and all(map(self._is_leaf_loss, roots)):
                self._report("leaf loss", name="loss")
            if self._kind == "cpu" and (dead := next(filter(None, map(dead_operator, roots)), None)) is not None:
                self._report("dead operator", name="loss", op=dead)
            computed = next((d for t in roots if (d := loss_dtype(t)) in NARROW), None)
            if computed is not None:
                self._report("loss dtype", name="loss", dtype=dtype_name(computed), detail="computed")
            if not self._scalings and (factor := constant_factor(roots)) is not None:
                self._report("own loss scale", name="loss", value=factor)
        if self._scalings and not self._just_found and self._searched < MAX_CHECKED_BACKWARDS:
            self._search_unscaled(roots)
        if self._scalings and len(self._optimizers) > 1 and self._followed < MAX_CHECKED_BACKWARDS:
            self._follow(roots)
        if kwargs.get("create_graph") or (len(args) > 3 and args[3]):  # (tensors, grad_tensors, retain_graph, …)
            self._on_created("backward", roots)
        elif self._calls_before is not None:  # by now the loop may have called get_scale to divide by it
            self._report(
                "create_graph", name="torch.autograd.grad", value=float(self._scale_calls() == self._calls_before)
            )
            self._calls_before = None

    def _is_leaf_loss(self, root: torch.Tensor) -> bool:
        """Whether a loss was computed from one number alone that is no parameter: the loss, wrapped anew."""
        if root.grad_fn is None:
            return root.requires_grad and root.numel() == 1
        nodes = list(itertools.islice(_nodes([root.grad_fn]), MAX_LEAF_NODES + 1))
        leaves = [v for node in nodes if (v := getattr(node, "variable", None)) is not None]
        held = {id(p) for o in self._optimizers for g in o.param_groups for p in g["params"]}
        few = len(nodes) <= MAX_LEAF_NODES and len(leaves) == 1
        return few and leaves[0].dim() == 0 and id(leaves[0]) not in held

    def _search_unscaled(self, roots: list[torch.Tensor]) -> None:
        """Report the optimizer whose parameters these roots reach on a path that no scaler multiplied. A loop that asks
        for the scale multiplies by it itself."""
        nodes = [t.grad_fn for t in roots if t.grad_fn is not None and _SCALED not in _metadata(t.grad_fn)]
        if not nodes:
            return
        self._searched += 1
        if self._scale_calls() > self._calls_at_begin:
            return
        dtype = dtype_name(torch.float16) if _passes_half(nodes) else None
        held = self._held(nodes)
        for index in sorted(set(held.values())):
            smallest = min((p for p in held if held[p] == index), key=lambda p: p.numel())
            self._pending.setdefault(index, _Unscaled(smallest, dtype))

    def _after_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for unscaled in self._pending.values():
            if unscaled.grad is None:
                unscaled.grad = unscaled.parameter.grad

    def _report_pending(self, index: int) -> None:
        """Report an unscaled loss whose gradients the optimizer is about to use. A loop may read and clear them, as one
        that estimates Fisher information does."""
        unscaled = self._pending.pop(index, None)
        if unscaled is not None and unscaled.grad is not None and unscaled.parameter.grad is unscaled.grad:
            self._report_unscaled(index, "backward", unscaled.dtype)

    def _follow(self, roots: list[torch.Tensor]) -> None:
        """Note which optimizers get gradients of a scaled loss alone in this step."""
        self._followed += 1
        nodes = [t.grad_fn for t in roots if t.grad_fn is not None]
        scaled = [n for n in nodes if _SCALED in _metadata(n)]
        unscaled = [n for n in nodes if _SCALED not in _metadata(n)]
        self._reached |= set(self._held(scaled).values())
        self._reached -= set(self._held(unscaled).values())

    def _held(self, nodes: list[Any]) -> dict[torch.Tensor, int]:
        """The parameters that backward from these nodes reaches, and the optimizers that hold them."""
        held = {id(p): (p, i) for i, o in enumerate(self._optimizers) for g in o.param_groups for p in g["params"]}
        return dict(held[key] for key in _leaves(nodes) if key in held)

    def _report_unscaled(self, index: int, name: str, dtype: str | None = None) -> None:
        if (kind := f"unscaled backward of optimizer {index}") not in self._reported:
            self._reported.add(kind)
            self._writer.event("unscaled backward", name, step=self._step, optimizer=index, dtype=dtype)

    def called(self, what: str, optimizer: int | None) -> None:
        if optimizer is None:
            return
        if what == "scaler.step":
            self._by_scaler.add(optimizer)
        # A loop that asks for the scale divides by it itself.
        divided = self._scale_calls() > self._calls_at_begin
        if what == "optimizer.step" and not divided and optimizer in self._reached - self._by_scaler - self._unscaled:
            self._report("scaled step", optimizer=optimizer)
        if what in ("unscale_", "scaler.step", "optimizer.step"):
            self._report_pending(optimizer)
        if what not in ("unscale_", "scaler.step"):
            return
        if self._unscaled_grads and optimizer not in self._unscaled:
            held = {id(p): p for group in self._optimizers[optimizer].param_groups for p in group["params"]}
            for key, version in self._unscaled_grads.items():
                if key in held and (grad := held[key].grad) is not None and grad._version != version:
                    self._report_unscaled(optimizer, "torch.autograd.grad")
                    break
        self._unscaled.add(optimizer)

    def _keep_versions(self, roots: list[torch.Tensor], inputs: Any) -> None:
        """Keep the versions of gradients that exist while unscaled ones of the same parameters are computed: a loop
        that then writes to the former adds the latter."""
        nodes = [t.grad_fn for t in roots if t.grad_fn is not None and _SCALED not in _metadata(t.grad_fn)]
        if nodes and self._scalings and self._scale_calls() == self._calls_at_begin:
            given = [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.is_leaf and t.grad is not None]
            self._unscaled_grads = {id(t): t.grad._version for t in given if t.grad is not None}

    def _on_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        roots = [t for t in tree_leaves(kwargs.get("outputs", args[:1])) if isinstance(t, torch.Tensor)]
        if not self.at_own_work():
            self._keep_versions(roots, kwargs.get("inputs", args[1:2]))
        if kwargs.get("create_graph") or (len(args) > 4 and args[4]):  # outputs, inputs, grad_outputs, retain_graph
            self._on_created("torch.autograd.grad", roots)

    def _on_created(self, name: str, roots: list[torch.Tensor]) -> None:
        scaled = {id(t) for ref in self._scaled if (t := ref()) is not None}
        if any(id(t) in scaled for t in roots):
            self._calls_before = self._scale_calls()
        else:
            self._report("create_graph", name=name, value=0.0)

    def _report(self, kind: str, **what: Any) -> None:
        if (key := f"{kind} {what.get('value')}") not in self._reported:
            self._reported.add(key)
            self._writer.event(kind, step=self._step, **what)


def is_scaled(tensor: torch.Tensor) -> bool:
    """Whether a scaler multiplied this loss."""
    return tensor.grad_fn is not None and _SCALED in _metadata(tensor.grad_fn)


def constant_factor(roots: list[torch.Tensor]) -> float | None:
    """The constant by which a loss was multiplied last, if it is as large as a loss scale; else None."""
    value = factor_of(roots[0].grad_fn) if len(roots) == 1 else None
    return value if value is not None and value >= MIN_LOSS_SCALE else None


def _passes_half(begin: list[Any]) -> bool:
    """Whether backward from these operators computes a gradient in FP16."""
    return any(o.dtype == torch.float16 for node in _nodes(begin) for o in getattr(node, "_input_metadata", ()))


def _nodes(begin: list[Any]) -> Iterator[Any]:
    """The operators that backward from `begin` reaches without passing a scaled loss."""
    waiting, seen = list(begin), set(begin)
    while waiting and len(seen) < MAX_NODES:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen and _SCALED not in _metadata(following):
                seen.add(following)
                waiting.append(following)


def _metadata(node: Any) -> dict[str, Any]:
    """What is stored with a node of the graph, for as long as the node lives."""
    stored: dict[str, Any] = node.metadata
    return stored


def _leaves(nodes: list[Any]) -> Iterator[int]:
    """The ids of the leaves that backward from these nodes reaches without passing a scaled loss."""
    for node in _nodes(nodes):
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield id(variable)
