"""Observer of what a loop does by hand to 16-bit weights, gradients and averages, and rounding discards.

    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 - lr * decay)     # 1 in bfloat16 if lr * decay is below 2^-9

Between backward and the next forward, in steps of an optimizer of the program's own too, operators that write to
weights and gradients are repeated in float64 (`repeated_writes`). A write is weight decay if it multiplies all elements
by one number below 1, or adds one multiple of a weight to its gradient.
"""

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp_core.record.backends import BACKENDS
from amp_core.record.model import own
from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import (
    has_values,
    in_backward,
    named_buffers,
    named_parameters,
    optimizer_tensors,
    unwrapped,
)
from amp_core.record.observer import Observer
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import dtype_name
from amp_core.record.torch_internals import patched_functions
from amp_core.record.torch_internals.captures import capturing
from amp_core.record.torch_internals.compiling import mode_would_uncompile, within_compiled
from amp_core.record.torch_internals.module_calls import before_call
from amp_core.record.torch_internals.optimizer_steps import after_step, before_step
from amp_core.record.updates.comparison import is_master_of
from amp_core.record.updates.held import local
from amp_core.record.updates.repeated_writes import Held, Shrunk, Sum, Write, Writes, storage_of
from amp_core.record.updates.replay import is_own_code
from amp_core.store.writer import RunWriter
from amp_core.text.errors import in_one_line

MAX_ELEMENTS = 2**18
"""Elements of all weights that are compared; small matrices first."""
MIN_TENSORS = 2
MAX_ELEMENTS_OF_ONE = 2**23
"""So many weights are compared even if they have more, but none that is larger than that."""
MAX_TIME_FRAC = 0.005
MIN_STEPS = 3
"""Steps that are inspected first, even if that takes more of the time."""
SUM_STEPS = 4
"""Steps in which sums of the loop are looked for; in the first one, another inspection may come before this one."""
LOOP_STEPS = 2
"""Steps whose operators are handed to `OperatorsOfLoop`, between backward and the next forward."""
MIN_SUM_STEPS = 3
"""Steps, or micro-batches, in which a running sum is added to."""
COUNTERS = ("step", "steps", "t")
"""Names under which optimizers count their steps."""
MAX_ERROR = 1e-3
"""Relative error with which weight decay has to be the same multiple of all elements, and of all tensors."""


class OperatorsOfLoop(Protocol):
    """Inspects operators outside of forward and backward."""

    def on_op(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Called with each operator after it has run. Never raises."""

    def end(self, wait: bool = False) -> bool:
        """No more come; False while it has to be called again."""


class ByHand(Observer):
    """Inspects the first steps, and multiples of `every` as far as `MAX_TIME_FRAC` of the time allows."""

    def __init__(
        self,
        writer: RunWriter,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        every: int,
        operators: OperatorsOfLoop | None = None,
    ) -> None:
        self._writer = writer
        self._operators = operators
        self._model = unwrapped(model)
        # Listed once: to walk a large model takes milliseconds. A module keeps these tables as long as it lives.
        tables = (own.held(m, name) for m in own.modules(self._model) for name in ("_parameters", "_buffers"))
        self._tables = [table for table in tables if table is not None]
        self._optimizers = optimizers
        self._every = every
        self._handles: list[Any] = []
        self._mode: Writes | None = None
        self._writes: list[Write] = []
        self._shrunk: list[Shrunk] = []
        self._reloaded: list[tuple[Held, torch.Tensor]] = []
        self._sums: dict[int, tuple[Sum, int]] = {}  # by storage: and how often, between a backward and a forward
        self._overwritten: dict[int, StorageWeakRef] = {}
        self._reloads = 0  # steps in which masters were overwritten
        self._sent: list[tuple[int, list[Write], HostTransfer]] = []
        self._stepping = False  # within a step of torch's own optimizers
        self._failed = False
        self._step = self._inspected = 0
        self._began = time.perf_counter()
        self._spent_s = 0.0

    def step_began(self, step: int) -> None:
        self._finish()
        if step >= LOOP_STEPS:
            self._end_operators()
        self._step = step
        affordable = self._spent_s <= MAX_TIME_FRAC * (time.perf_counter() - self._began)
        first = self._inspected < SUM_STEPS
        due = step <= SUM_STEPS or (step % self._every == 0 and (affordable or first))
        if due and not self._failed and (self._has_narrow() or (first and self._computes_narrow())):
            self._inspected += 1
            self._attach()
        self.awake = bool(self._handles or self._sent or self._mode or self._operators)

    def called(self, what: str, optimizer: int | None) -> None:
        if what == "optimizer.step" and optimizer is not None and not is_own_code(self._optimizers[optimizer]):
            self._stop()

    def step_ended(self, step: int) -> None:
        self._write(wait=False)

    def close(self) -> None:
        self._finish()
        self._end_operators(wait=True)
        self._write(wait=True)

    def _end_operators(self, wait: bool = False) -> None:
        if self._operators is not None and self._operators.end(wait):
            self._operators = None

    def _has_narrow(self) -> bool:
        """Whether anything that a loop keeps is in 16 bits, as far as that is known."""
        kept = itertools.chain.from_iterable(table.values() for table in self._tables)
        given = (p for o in self._optimizers for p in _parameters(o))
        dtypes = {t.dtype for t in itertools.chain(kept, given) if t is not None}
        return any(dtype in NARROW for dtype in dtypes) or any(True for _ in self._narrow_states())

    def _computes_narrow(self) -> bool:
        """Whether the training computes in 16 bits: the loop may keep sums of what it computes."""
        return any(map(torch.is_autocast_enabled, BACKENDS)) or bool(self._writer.head.config.get("autocast_dtype"))

    def _narrow_states(self) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
        """Parameter, key and tensor of the 16-bit states of the program's own optimizers."""
        for optimizer in self._optimizers:
            if is_own_code(optimizer):
                for p, state in optimizer.state.items():
                    for key, value in state.items() if isinstance(state, dict) else ():
                        if isinstance(value, torch.Tensor) and value.dtype in NARROW:
                            yield p, str(key), value

    def _attach(self) -> None:
        patched_functions.backward.listen_after(self._after_backward)
        self._handles.append(before_call(self._model, self._on_forward))
        for optimizer in self._optimizers:
            before = functools.partial(self._before_step, is_own_code(optimizer))
            self._handles += [
                before_step(before, optimizer),
                after_step(self._after_step, optimizer),
            ]

    def _finish(self) -> None:
        """The step is over: inspect no more, report what needs no values, and start the copy of the rest."""
        if self._handles:
            patched_functions.backward.unlisten(self._after_backward)
            for handle in self._handles:
                handle.remove()
            self._handles, self._stepping = [], False
        self._stop()
        if self._step == MIN_STEPS:
            self._report_counters()
        if self._inspected == SUM_STEPS and self._sums:
            self._report_sums()
        self._report_shrunk()
        self._report_reloaded()
        if self._writes:
            transfer = HostTransfer()
            device = self._writes[0].sums.device
            transfer.put("sums", torch.stack([write.sums.to(device) for write in self._writes]))
            transfer.send()
            self._sent.append((self._step, self._writes, transfer))
            self._writes = []

    def _on_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._stop()

    def _after_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not (self._stepping or self.at_own_work() or in_backward()):
            self._start()

    def _before_step(self, own_code: bool, optimizer: Any, args: Any, kwargs: Any) -> None:
        if own_code:
            self._start()
            if self._mode is not None:
                self._mode.within_step = True
        else:
            self._stepping = True
            self._stop()

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stepping = False
        self._start()
        if self._mode is not None:
            self._mode.within_step = False

    def _start(self) -> None:
        if self._mode is not None and self._mode.paused:
            self._stop()
        # A mode of the program's own might end before this one does, and a profiler records each operator under a mode.
        apart = within_compiled() or mode_would_uncompile() or _get_current_dispatch_mode_stack() or capturing()
        apart = apart or torch._C._autograd._profiler_enabled()
        if self._mode is not None or apart or self._failed:
            return
        begun = time.perf_counter()
        with self._guarded():
            also = self._operators.on_op if self._operators is not None else None
            self._mode = Writes(list(_held(self._model, self._optimizers)), self.at_own_work, also)
            self._mode.__enter__()
        self._spent_s += time.perf_counter() - begun

    def _stop(self) -> None:
        """Leave the mode if that is safe now; otherwise at the next opportunity."""
        if self._mode is None:
            return
        self._mode.paused = True
        if not capturing() and self._mode.leave():  # a capture allows no marks on the stream
            mode, self._mode = self._mode, None
            with self._guarded():
                if mode.error is not None:
                    raise mode.error
                mode.end()
                self._writes += mode.writes
                self._shrunk += mode.shrunk
                self._reloaded += mode.reloaded
                if self._inspected <= SUM_STEPS:
                    self._overwritten |= mode.overwritten
                    for key, one in mode.sums.items():
                        self._sums[key] = one, self._sums.get(key, (one, 0))[1] + 1
            self._spent_s += mode.spent_s

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """For work within hooks and operators: an error ends the inspection, and one event reports it."""
        with self.watching(), torch.no_grad():
            try:
                yield
            except Exception as error:
                self._failed = True
                what = f"updates by hand: stopped with {in_one_line(error)}"
                self._writer.event("warning", name="not recorded", detail=what, step=self._step)

    def _report_counters(self) -> None:
        """A count of steps in 16 bits stops at 256 or 2,048, and so does the correction of the averages' bias."""
        for _, key, value in self._narrow_states():
            if key in COUNTERS and value.numel() == 1:
                name = f"{key} in the optimizer's state"
                self._writer.event("half buffer", name, step=self._step, dtype=dtype_name(value.dtype))
                return

    def _report_shrunk(self) -> None:
        """Averages whose decay rounds to 1: those in an optimizer's state, and those that the loop keeps."""
        shrunk, self._shrunk = self._shrunk, []
        if not shrunk:
            return
        names = {id(p): n for n, p in named_parameters(self._model)}
        known = {storage_of(t).cdata: (n, "") for n, t in (*named_parameters(self._model), *named_buffers(self._model))}
        known |= {storage_of(v).cdata: (names.get(id(p), ""), key) for p, key, v in self._narrow_states()}
        grads = {storage_of(p.grad).cdata for o in self._optimizers for p in _parameters(o) if p.grad is not None}
        found: dict[tuple[str, float], list[tuple[int, str, torch.dtype]]] = {}
        for item in shrunk:
            storage = storage_of(item.tensor).cdata
            if storage not in grads:
                name, key = known.get(storage, ("", ""))
                found.setdefault((key, item.rate), []).append((item.tensor.numel(), name, item.tensor.dtype))
        for (key, rate), tensors in found.items():
            _, name, dtype = max(tensors, key=lambda tensor: tensor[0])
            counts: dict[str, Any] = {"limit": rate, "count": len(tensors)}
            self._writer.event("rounded decay", name, key, self._step, dtype=dtype_name(dtype), **counts)

    def _report_sums(self) -> None:
        """What the loop adds up in 16 bits over steps or micro-batches, such as counts of a metric."""
        others = [*(p for o in self._optimizers for p in _parameters(o)), *own.parameters(self._model)]
        kept = {storage_of(t).cdata for p in others for t in (p, p.grad) if t is not None and has_values(t)}
        kept |= {storage_of(t).cdata for _, t in named_buffers(self._model)}  # `HalfBuffers` reports them
        kept |= {storage_of(t).cdata for t in optimizer_tensors(self._optimizers) if has_values(t)}
        sizes = {local(p).numel() for p in others if p.dtype in NARROW}  # what rounding lost of each weight, perhaps
        for key, (one, times) in self._sums.items():
            apart = key in kept or key in self._overwritten or one.elements in sizes
            if times >= MIN_SUM_STEPS and not apart:
                name = "a running sum of the loop"
                self._writer.event("half buffer", name, step=self._step, dtype=dtype_name(one.dtype))
                break
        self._sums, self._overwritten = {}, {}

    def _report_reloaded(self) -> None:
        """Masters in the state of the program's own optimizer that its step overwrote with the weights."""
        reloaded, self._reloaded = self._reloaded, []
        if not reloaded:
            return
        kept = {storage_of(v).cdata for v in optimizer_tensors(self._optimizers) if v.dtype is torch.float32}
        masters = [
            held
            for held, target in reloaded
            if held.weight is None and storage_of(target).cdata in kept and is_master_of(target, held.tensor)
        ]
        if masters:
            self._reloads += 1
            if self._reloads > 1:  # at first they are made so
                largest = max(masters, key=lambda held: held.values.numel())
                counts: dict[str, Any] = {"count": self._reloads, "limit": float(self._inspected)}
                self._event("overwritten weights", self._step, largest, **counts)

    def _write(self, *, wait: bool) -> None:
        """One event for each step with weight decay, and one for each with other updates, of 16-bit weights."""
        while self._sent and self._sent[0][2].ready(wait):
            step, writes, transfer = self._sent.pop(0)
            rows = transfer.values("sums").reshape(len(writes), -1).tolist()
            decays, others = [], []
            for write, (mass, rate, rest, made) in zip(writes, rows, strict=True):
                if not 0 < mass < math.inf:
                    continue
                if rest <= MAX_ERROR * mass:
                    if 0 < rate < 1:
                        decays.append((write.held, rate, mass, made))
                elif write.held.weight is None and not write.within_step:
                    others.append((write.held, mass, min(max(mass - made, 0.0), mass)))
            self._write_decay(step, decays)
            if others:
                largest = max((held for held, *_ in others), key=lambda held: held.values.numel())
                lost = sum(lost for *_, lost in others) / sum(mass for _, mass, _ in others)
                self._event("update by hand", step, largest, value=lost, count=len({held.name for held, *_ in others}))

    def _write_decay(self, step: int, decays: list[tuple[Held, float, float, float]]) -> None:
        """Write the rate that most weights have in common."""
        groups = [[d for d in decays if math.isclose(d[1], rate, rel_tol=MAX_ERROR)] for _, rate, *_ in decays]
        most = max(groups, key=lambda group: len({held.name for held, *_ in group}), default=[])
        if most:
            largest, rate, *_ = max(most, key=lambda decay: decay[0].values.numel())
            lost = 1 - sum(made for *_, made in most) / sum(mass for *_, mass, _ in most)
            count = len({held.name for held, *_ in most})
            where = "gradients" if largest.weight is not None else ""
            self._event("decay by hand", step, largest, where, value=min(max(lost, 0.0), 1.0), limit=rate, count=count)

    def _event(self, kind: str, step: int, held: Held, detail: str = "", **more: Any) -> None:
        self._writer.event(kind, held.name, detail, step, dtype=dtype_name(held.tensor.dtype), **more)


def _held(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Held]:
    """16-bit weights of the optimizers as they are now, each before its gradient: small matrices first, other tensors
    after them."""
    names = {id(p): n for n, p in named_parameters(model)}
    given = {id(p): p for o in optimizers for p in _parameters(o) if p.dtype in NARROW and has_values(p)}
    plain = [p for p in given.values() if local(p).numel() and local(p).is_contiguous()]
    taken = elements = 0
    for p in sorted(plain, key=lambda p: (p.dim() < 2, local(p).numel())):
        size = local(p).numel()
        if size <= MAX_ELEMENTS_OF_ONE and (taken < MIN_TENSORS or elements + size <= MAX_ELEMENTS):
            taken, elements = taken + 1, elements + size
            weight = _as_it_is(names.get(id(p), "parameter"), p)
            yield weight
            if p.grad is not None and p.grad.dtype in NARROW and p.grad.layout is torch.strided:
                yield _as_it_is(weight.name, p.grad, weight)


def _as_it_is(name: str, tensor: torch.Tensor, weight: Held | None = None) -> Held:
    return Held(name, tensor, storage_of(tensor), local(tensor).to(torch.float64), weight)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
