"""Counts the operators of one step, by module, dtypes and the autocast policy that applied.

    counter = OpCounter(model, ("cuda", "cpu"))
    counter.attach()
    with OpCounterMode(counter):
        …                       # a step
    counter.detach()
    counter.rows()              # columns of the table `ops`

It counts the operators that run below autocast and autograd: `addmm` after autocast has cast its inputs. Casts by
autocast come before their operator within one call of torch from Python; a call that is only a cast was written by the
user. So the operators of a call are held back until the next call begins.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from amp_core.hardware import autocast_ops
from amp_core.record.op_trace.call_sites import Modules, Regions, call_site
from amp_core.record.op_trace.flops import flops
from amp_core.record.op_trace.op_call import Call, cast_source, policy_of, shape_of, storage_of, tensors_among
from amp_core.record.stats.layout import dtype_name
from amp_core.record.torch_internals.quiet_mode import QuietMode

_NO_WORK = ("_unsafe_view", "lift_fresh", "_local_scalar_dense")
MAX_ROWS = 20_000
"""With more rows, shapes no longer distinguish them: a model whose shapes never repeat must not fill the memory."""

_COUNTED = ("count", "cast_bytes", "casts", "out_bytes", "cache_hits", "flops", "repeated", "undone")
_KEYS = (
    "module",
    "op",
    "policy",
    "in_dtypes",
    "out_dtype",
    "phase",
    "device",
    "autocast",
    "in_shapes",
    "cast_by",
    "cast_of",
)


class OpCounterMode(QuietMode):
    """Passes every operator to a counter."""

    def __init__(self, counter: "OpCounter") -> None:
        super().__init__()
        self._counter = counter

    def on_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        self._counter.on_op(func, args, kwargs, out)


class OpCounter:
    """Totals of the operators that ran so far."""

    def __init__(
        self, model: torch.nn.Module, device_types: Sequence[str], at_own_work: Callable[[], bool] = lambda: False
    ) -> None:
        self.modules = Modules(model, self._next_call)
        self._at_own_work = at_own_work
        self.regions = Regions(device_types, self._cache_cleared)
        self.phase = "forward"
        self.calls = 0
        self._closed = False
        self.error: Exception | None = None
        """An exception of the counting itself, which then stops; the training continues."""
        self._rows: dict[tuple[Any, ...], list[int | None]] = {}
        self._open: dict[int, tuple[tuple[int, int], list[Call]]] = {}
        self._copies: set[int] = set()
        self._fresh: set[int] = set()
        self._casted: dict[int, tuple[Any, int, set[torch.dtype]]] = {}
        self._results: dict[int, tuple[Any, torch.dtype]] = {}
        self._known: dict[Any, tuple[str, bool]] = {}
        self._lock = threading.RLock()  # autograd has a thread for each CUDA device

    def attach(self) -> None:
        """Follow modules and autocast regions from now on."""
        self.regions.attach()
        self.modules.attach()

    def detach(self) -> None:
        """Detach from modules and autocast, and count no more."""
        self._closed = True
        self.modules.detach()
        self.regions.detach()
        with self._lock:  # `torch.utils.swap_tensors` refuses tensors to which weak references are left
            self._casted.clear()
            self._results.clear()

    def on_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Count an operator that has run. Never raises: see `error`."""
        if self._closed or self.error is not None:
            return
        try:
            with self._lock:
                self._note(func, args, kwargs, out)
        except Exception as error:
            self.error = error

    def rows(self) -> dict[str, list[Any]]:
        """The totals, as columns of the table `ops` without `step`."""
        with self._lock:
            for thread in list(self._open):
                self._finish_call(thread)
        columns: dict[str, list[Any]] = {name: [] for name in (*_KEYS, *_COUNTED)}
        for key, counted in self._rows.items():
            for name, value in zip((*_KEYS, *_COUNTED), (*key, *counted), strict=True):
                columns[name].append(value)
        return columns

    # ---- one operator -----------------------------------------------------------------------------------------------

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        name, skipped = self._known.get(func) or self._learn(func)
        if skipped:
            return
        inputs, outputs = list(tensors_among((*args, *kwargs.values()))), list(tensors_among((out,)))
        if not inputs or not any(t.is_floating_point() for t in (*inputs, *outputs)):
            return
        if self._at_own_work():
            return
        site = call_site((__name__, QuietMode.__module__))
        self.calls += 1
        call = self._describe(name, func, args, kwargs, out, inputs, outputs)
        node = torch._C._current_autograd_node()
        in_backward = torch._C._current_graph_task_id() != -1
        call.phase = site.phase or ("backward" if in_backward else self.phase)
        call.module = self.modules.here()
        if call.module is None and call.phase == "backward" and node is not None:
            call.module = self.modules.of_node(node)
        if call.phase == "optimizer":
            call.module = call.in_shapes = None  # the same few operators for every shape of parameter
        call.function = site.function
        thread = threading.get_ident()
        key = site.key if not site.engine else (id(node), self.calls)
        if thread in self._open and self._open[thread][0] != key:
            self._finish_call(thread)
        self._open.setdefault(thread, (key, []))[1].append(call)
        call.by_engine = site.engine
        call.cut_short = in_backward and not site.engine

    def _learn(self, func: Any) -> tuple[str, bool]:
        """The operator's name, and whether it only creates a view or allocates memory."""
        name = func.name() if callable(getattr(func, "name", None)) else str(func)
        name = name.partition(".")[0]
        schema = getattr(func, "_schema", None)
        views = schema is not None and any(
            r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
        )
        bare = name.rpartition("::")[2]
        nothing = views or bare in _NO_WORK or "empty" in bare or name.startswith("prim::")
        self._known[func] = name, nothing
        return self._known[func]

    def _describe(
        self,
        name: str,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> Call:
        first = next((t for t in inputs if t.dim()), inputs[0])
        region = self.regions.now(first.device.type)
        call = Call(
            op=name,
            module=None,
            phase="",
            device=str(first.device),
            region="disabled" if region.disabled else region.dtype,
            function=None,
            in_dtypes=tuple(dict.fromkeys(dtype_name(t.dtype) for t in inputs)),
            out_dtype=dtype_name(outputs[0].dtype) if outputs else None,
            in_shapes=json.dumps([shape_of(a) for a in args]),
            out_bytes=sum(t.numel() * t.element_size() for t in outputs),
            flops=flops(func, args, kwargs, out),
        )
        source = cast_source(name, args, outputs)
        if source is not None:
            call.in_dtypes = (dtype_name(source.dtype),)
            call.cast_of = "parameter" if self.modules.is_parameter(source) else "other"
            self._remember_cast(call, source, outputs[0])
        elif region.dtype is not None:
            call.storages = tuple(s for t in inputs if (s := storage_of(t)) is not None)
        return call

    def _remember_cast(self, call: Call, source: torch.Tensor, result: torch.Tensor) -> None:
        """Determine whether the source was cast before, or is itself the result of a cast. Keeps no tensor alive."""
        version = 0 if source.is_inference() else source._version
        ref, seen_version, dtypes = self._casted.get(id(source), (None, 0, set[torch.dtype]()))
        if ref is None or ref() is not source or seen_version != version:
            ref, dtypes = TensorWeakRef(source), set()
            self._casted[id(source)] = ref, version, dtypes
        call.repeated = int(result.dtype in dtypes)
        dtypes.add(result.dtype)
        made, came_from = self._results.get(id(source), (None, None))
        call.undone = int(made is not None and made() is source and came_from == result.dtype)
        self._results[id(result)] = TensorWeakRef(result), source.dtype
        kept = source.is_leaf and source.requires_grad and source.dtype == torch.float32
        if call.cast_of == "parameter" and kept and torch.is_autocast_cache_enabled():
            call.cached = storage_of(result)

    # ---- one call of torch ------------------------------------------------------------------------------------------

    def _next_call(self) -> None:
        """The next operator on this thread belongs to another call."""
        with self._lock:
            if threading.get_ident() in self._open:
                self._finish_call(threading.get_ident())

    def _cache_cleared(self) -> None:
        self._next_call()
        with self._lock:
            self._copies.clear()
            self._fresh.clear()

    def _finish_call(self, thread: int) -> None:
        """Add the operators of one complete call, after determining what made its casts, and for which operator."""
        _, calls = self._open.pop(thread)
        operator: Call | None = None
        others = any(not call.is_cast for call in calls)
        for call in reversed(calls):
            if not call.is_cast:
                call.policy = policy_of(call)
                operator = call if call.policy in autocast_ops.POLICIES else operator
            elif operator is not None and call.out_dtype in operator.in_dtypes:
                call.cast_by = "autocast"
                operator.casts += 1
                operator.cast_bytes += call.out_bytes
            elif call.cut_short and call.cached is not None:
                call.cast_by = "autocast"
            else:
                call.cast_by = "gradient" if call.by_engine else "operator" if others else "code"
        for call in calls:
            self._count_cached(call)
            self._add(call)

    def _count_cached(self, call: Call) -> None:
        if call.cast_by == "autocast" and call.cached is not None:
            self._copies.add(call.cached)
            self._fresh.add(call.cached)
        elif call.policy == "lower_precision_fp":
            taken = self._copies.intersection(call.storages)
            call.hits = len(taken - self._fresh)
            self._fresh -= taken

    def _add(self, call: Call) -> None:
        shapes = call.in_shapes if len(self._rows) < MAX_ROWS else None
        dtypes = ", ".join(call.in_dtypes)
        key = (
            call.module, call.op, call.policy, dtypes, call.out_dtype, call.phase, call.device, call.region, shapes,
            call.cast_by, call.cast_of,
        )  # fmt: skip
        made: list[int | None]
        if call.is_cast:
            made = [1, None, None, call.out_bytes, None, None, call.repeated, call.undone]
        else:
            made = [1, call.cast_bytes, call.casts, call.out_bytes, call.hits, call.flops, None, None]
        before = self._rows.get(key)
        if before is not None:
            made = [b if m is None else m if b is None else b + m for b, m in zip(before, made, strict=True)]
        self._rows[key] = made
