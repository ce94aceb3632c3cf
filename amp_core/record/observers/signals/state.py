"""State after a step: running statistics, 16-bit buffers, parameters without a gradient.

The host never waits for the device: counts are copied asynchronously and read when they have arrived.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import is_lazy

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.own import attributes
from amp_core.record.model.parameters import has_values, named_buffers, named_modules, named_parameters, unwrapped
from amp_core.record.observer import Observer
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import dtype_name
from amp_core.record.stats.norms import largest
from amp_core.record.torch_internals.module_calls import before_call
from amp_core.record.updates.replay import is_own_code
from amp_core.store.writer import RunWriter

_grad = attrgetter("grad")
EVERY = 10
MIN_ROWS = 128
"""Positions that every 16-bit dtype tells apart."""
SCHEDULES = ("alphas_cumprod", "betas", "sigmas")
"""Names of noise schedules by timestep, as of DDPM: in bfloat16 the first and last of them are equal."""
AVERAGE = re.compile(r"(?:^|_)(?:running|moving|ema)(?:_|$)")
"""In names of attributes that hold an average over steps."""
MAX_TABLES, MAX_ELEMENTS = 64, 2**24
MAX_LIST = 2**15
"""Rows of a table whose first numbers are compared with each other."""
MAX_CHANCE_FRAC = 0.05
"""Share of positions whose cosine equals that of the one before in 16 bits without being rounded itself."""
MIN_COLLAPSED_FRAC, MIN_REPEATED = 0.1, 8
"""Share of neighbours in a list that are equal, and numbers that occur more than once, from which it is reported."""
MIN_REGULAR_FRAC, MAX_UNEVEN_FRAC = 0.9, 0.1
"""Share of the numbers of a rounded list that occur as often as the next, but for this share and two: ties are rounded
to even."""
FIRST_STEPS = 3
MAX_NAMED = 8
MAX_EVENTS = 2000


class RunningStatistics(Observer):
    """Checks that the running statistics of normalisation layers are finite; on a CPU each step, else in the middle of
    every `EVERY` steps: the first of them has other launches, and is mostly sampled too."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module) -> None:
        self._writer = writer
        named = ((n, b) for n, b in named_buffers(unwrapped(model)) if n.rpartition(".")[2].startswith("running_"))
        self._buffers = [(n, b) for n, b in named if b.is_floating_point()]
        self._sent: list[tuple[int, list[str], list[str], HostTransfer]] = []
        self._reported = False
        self.awake = len(self._buffers) > 0

    def step_ended(self, step: int) -> None:
        if self._reported:
            return
        if step % EVERY == EVERY // 2 or self._buffers[0][1].device.type == "cpu":
            self._send(step)
        self._read(max_pending=EVERY)

    def close(self) -> None:
        if self._buffers and not self._reported:
            self._read(max_pending=0)

    def _send(self, step: int) -> None:
        transfer = self.transfer()
        by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
        for name, buffer in self._buffers:
            if has_values(buffer) and buffer.numel():
                by_device.setdefault(buffer.device, []).append((name, buffer))
        if transfer is None or not by_device:
            return
        keys = [f"running statistics {step}:{number}" for number in range(len(by_device))]
        for key, named in zip(keys, by_device.values(), strict=True):
            # Largest magnitudes: a sum of squares of 16-bit statistics may overflow although each of them is finite.
            transfer.put(key, largest([buffer for _, buffer in named]))
        self._sent.append((step, [name for named in by_device.values() for name, _ in named], keys, transfer))

    def _read(self, max_pending: int) -> None:
        while self._sent and not self._reported and self._sent[0][-1].ready(wait=len(self._sent) > max_pending):
            step, names, keys, transfer = self._sent.pop(0)
            sizes = transfer.joined(keys)
            bad = [name for name, size in zip(names, sizes, strict=True) if not abs(size) < float("inf")]
            if bad:
                self._reported = True
                self._writer.event("statistics", bad[0], step=step, count=len(bad), phase="forward")


class HalfBuffers(Observer):
    """Reports once which 16-bit buffers, and averages that modules keep as attributes, the first steps write to."""

    def __init__(self, writer: RunWriter, model: torch.nn.Module) -> None:
        self._writer = writer
        self._model = unwrapped(model)
        # The vectors of torch's spectral norm are computed anew: nothing is added to them.
        renewed = {n for n, m in named_modules(self._model) if type(m).__module__.startswith("torch.nn.utils.")}
        narrow = ((n, b) for n, b in named_buffers(self._model) if b.dtype in NARROW)
        self._buffers = [(n, b) for n, b in narrow if n.rpartition(".")[0] not in renewed]
        self._versions = [b._version for _, b in self._buffers]
        self._averages: dict[str, tuple[torch.Tensor, int]] = {}

    def step_ended(self, step: int) -> None:
        if step == FIRST_STEPS - 2:
            self._averages = {n: (t, t._version) for n, t in self._narrow_averages()}
        if step == FIRST_STEPS - 1:
            self.awake = False
            for name, tensor in self._narrow_averages():  # the first step may create them, and each one anew
                before, version = self._averages.get(name, (tensor, tensor._version))
                if tensor is not before or tensor._version != version:
                    self._writer.event("half buffer", name, step=step, dtype=dtype_name(tensor.dtype))
            self._averages = {}
            training = {n for n, m in named_modules(self._model) if m.training}
            for (name, buffer), version in zip(self._buffers, self._versions, strict=True):
                module, _, short = name.rpartition(".")
                # Kernels of batch norm write running statistics without a new version.
                if buffer._version != version or (short.startswith("running_") and module in training):
                    self._writer.event("half buffer", name, step=step, dtype=dtype_name(buffer.dtype))

    def _narrow_averages(self) -> Iterator[tuple[str, torch.Tensor]]:
        for module, owner in named_modules(self._model):
            for key, value in attributes(owner).items():
                narrow = type(value) is torch.Tensor and value.dtype in NARROW and value.grad_fn is None
                if narrow and AVERAGE.search(key):
                    yield f"{module}.{key}".removeprefix("."), value


class PositionTables(Observer):
    """Reports once which buffers, and tensors that modules keep as attributes, hold rounded positions, sines and
    cosines of such, or frequencies in 16 bits.

    Neighbouring rows of such a table are equal where two positions became one, though not at its begin.
    """

    def __init__(self, writer: RunWriter, model: torch.nn.Module) -> None:
        self._writer = writer
        self._model = unwrapped(model)
        self._done = False
        self._sent: tuple[list[tuple[str, torch.dtype]], HostTransfer] | None = None

    def step_began(self, step: int) -> None:
        if not self._done:
            self._done = True
            self._send(step)
        self.awake = self._sent is not None

    def _send(self, step: int) -> None:
        tables = []
        for name, buffer in self._kept():
            if buffer.dtype in NARROW and name.rpartition(".")[2].endswith(("inv_freq", "freqs", "frequencies")):
                self._writer.event(
                    "rounded positions", name, step=step, op="frequencies", dtype=dtype_name(buffer.dtype)
                )
            elif buffer.dtype in NARROW and buffer.numel() >= MIN_ROWS and name.rpartition(".")[2] in SCHEDULES:
                self._writer.event("rounded positions", name, step=step, op="schedule", dtype=dtype_name(buffer.dtype))
            elif _is_position_table(buffer):
                tables.append((name, buffer))
        if tables := tables[:MAX_TABLES]:
            transfer = HostTransfer()
            transfer.put("equal", torch.stack([_equal_rows(b).to(tables[0][1].device) for _, b in tables]))
            for place, (_, buffer) in enumerate(tables):
                transfer.put(f"column {place}", _rows(buffer)[:MAX_LIST, 0].clone())
            transfer.send()
            self._sent = [(n, b.dtype) for n, b in tables], transfer

    def _kept(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers, and other tensors that modules hold, by name; complex ones as pairs of real numbers."""
        kept = [(n, b) for n, b in named_buffers(self._model) if has_values(b)]
        for module, owner in named_modules(self._model):
            for key, value in attributes(owner).items():
                if type(value) is not torch.Tensor or value.requires_grad or not has_values(value):
                    continue
                if value.numel() <= MAX_ELEMENTS:  # larger ones may be the data
                    kept.append((f"{module}.{key}".removeprefix("."), value))
        for name, tensor in kept:
            if type(tensor) is torch.Tensor and tensor.is_complex():
                yield name, torch.view_as_real(tensor.detach().resolve_conj()).flatten(-2)
            else:
                yield name, tensor

    def step_ended(self, step: int) -> None:
        self._write(wait=False)

    def close(self) -> None:
        self._write(wait=True)

    def _write(self, *, wait: bool) -> None:
        if self._sent is None or not self._sent[1].ready(wait):
            return
        (named, transfer), self._sent = self._sent, None
        pairs = transfer.values("equal").reshape(-1, 2)
        for place, ((name, dtype), (first, rest)) in enumerate(zip(named, pairs, strict=True)):
            more: dict[str, Any] = {"op": "table", "value": float(rest), "dtype": dtype_name(dtype)}
            if first or not rest:
                collapsed, rounded = collapsed_steps(transfer.values(f"column {place}"), dtype)
                more = {"op": "list", "value": float(collapsed), "dtype": dtype_name(rounded)}
            if more["value"]:
                self._writer.event("rounded positions", name, step=0, limit=0.0, **more)


def collapsed_steps(values: npt.NDArray[np.float64], dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """How many neighbours are equal in a list of steadily growing or falling numbers that was rounded to 16 bits, and
    the dtype it was rounded to; 0 for any other list.

    Such a list takes every number of the dtype, one after the other, each about as often as the next. Steps that are
    equal by intent, such as ids of segments, are farther apart; sorted data repeat irregularly.
    """
    steps = np.abs(np.diff(values))
    equal = steps == 0
    if (
        not np.isfinite(values).all()
        or equal.mean() < MIN_COLLAPSED_FRAC
        or len(np.unique(np.sign(np.diff(values))[~equal])) != 1
    ):
        return 0, dtype
    precise = torch.from_numpy(values)
    for narrow in (dtype,) if dtype in NARROW else NARROW:
        exact = bool((precise.to(narrow).to(torch.float64) == precise).all())
        if exact and _takes_every_number(values, float(torch.finfo(narrow).eps)):
            return int(equal.sum()), narrow
    return 0, dtype


def _takes_every_number(values: npt.NDArray[np.float64], eps: float) -> bool:
    """Whether a list takes one number of a dtype after the other, each about as often as the next."""
    steps = np.abs(np.diff(values))
    starts = np.flatnonzero(steps) + 1
    repeats = np.diff(starts)  # of all but the first and the last number, which may be limits
    exponents = np.frexp(np.maximum(np.abs(values[starts - 1]), np.abs(values[starts])))[1]
    heights = steps[starts - 1] / np.ldexp(eps / 2, exponents)
    repeated = repeats > 1
    close = (heights[:-1] <= 1) & (heights[1:] <= 1)
    alike = exponents[1:-1] == exponents[2:]
    differences = np.abs(np.diff(repeats)) <= 2 + MAX_UNEVEN_FRAC * np.minimum(repeats[:-1], repeats[1:])
    return bool(
        repeated.sum() >= MIN_REPEATED
        and close[repeated].mean() >= MIN_REGULAR_FRAC
        and alike.any()
        and differences[alike].mean() >= MIN_REGULAR_FRAC
    )


def _is_position_table(buffer: torch.Tensor) -> bool:
    rows = max(buffer.shape[-2:]) if buffer.dim() else 0
    if _is_slopes(buffer):
        return type(buffer) is torch.Tensor
    return (
        buffer.is_floating_point() and buffer.element_size() > 1 and rows > MIN_ROWS
        and _width(buffer) < rows and buffer.numel() == rows * _width(buffer)
        and type(buffer) is torch.Tensor
    )  # fmt: skip


def _is_slopes(table: torch.Tensor) -> bool:
    """Whether it may hold positions times a slope for each of a few heads, as ALiBi does: 16-bit rows."""
    return table.dim() > 1 and table.dtype in NARROW and table.shape[-1] > MIN_ROWS and table.shape[-2] < MIN_ROWS


def _width(table: torch.Tensor) -> int:
    """1 for a list of positions, however it is shaped; else the sines and cosines of a position."""
    return 1 if table.numel() == max(table.shape[-2:]) else table.shape[-1]


def _rows(table: torch.Tensor) -> torch.Tensor:
    """The table with one row for each position."""
    if _is_slopes(table):
        rows = table.detach().reshape(-1, table.shape[-1])[0, :, None]
        return rows * (rows[1] - rows[0]).sign()
    return table.detach().reshape(-1, _width(table))


def _equal_rows(table: torch.Tensor) -> torch.Tensor:
    """How many of the first `MIN_ROWS` rows equal the row before, and how many of the rest."""
    rows = _rows(table)
    steps = rows[1:] - rows[:-1]
    equal = (steps == 0).all(dim=1)
    first, rest = equal[: MIN_ROWS - 1].sum(), equal[MIN_ROWS - 1 :].sum()
    if rows.shape[1] > 1:
        is_table = rows.abs().amax() <= 1.0  # of sines and cosines
        # If angles were rounded, positions become equal in the first column, of the highest frequency, before others.
        fast = steps[:, 0] == 0
        early, late = fast[: MIN_ROWS - 1].sum(), fast[MIN_ROWS - 1 :].sum()
        by_chance = MAX_CHANCE_FRAC * (len(steps) - MIN_ROWS + 1)
        rest = torch.where((early <= MAX_CHANCE_FRAC * MIN_ROWS) & (late > by_chance), late, rest)
    else:  # positions at equal distances, until rounding makes some of them equal and others more distant
        unit = steps[0]
        is_table = (steps[: MIN_ROWS - 1] == unit).all() & (unit > 0).all() & (steps >= 0).all() & (steps > unit).any()
    return torch.stack([first, rest * is_table])


class Branches(Observer):
    """Records which parameters have gradients in each step, and whether expected ones are missing."""

    def __init__(
        self,
        writer: RunWriter,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
    ) -> None:
        self._writer = writer
        self._kind = device.type
        self._model = unwrapped(model)
        self._optimizers = optimizers
        self._list_parameters()
        self._known: dict[bytes, int] = {}
        self._last: bytes | None = None
        self._checked = False
        self._named: list[str] = []  # parameters that had a gradient in the last step
        self._without_grad = False
        self._step = 0
        self._written = 0
        self._handle: Any = before_call(model, self._on_forward)

    def _list_parameters(self) -> None:
        names = {id(p): n for n, p in named_parameters(self._model)}
        held = ((p, o) for o in self._optimizers for g in o.param_groups for p in g["params"] if p.requires_grad)
        # An optimizer of the program's own may give its master weights their gradients within its step.
        self._parameters = [p for p, o in held if (is_lazy(p) or p.numel()) and (id(p) in names or not is_own_code(o))]
        self._names = [names.get(id(p), f"parameter {i}") for i, p in enumerate(self._parameters)]

    def optimizer_found(self, index: int, optimizer: Any) -> None:
        self._list_parameters()
        self._known, self._last, self._named = {}, None, []

    def step_began(self, step: int) -> None:
        self._step = step
        self._checked = False

    def gradients_read(self, optimizer: int, names: list[str]) -> None:
        if self._checked:
            return
        self._checked = True
        same = len(self._optimizers) == 1 and names is self._named
        self._named = names
        if same and self._step >= FIRST_STEPS and not self._without_grad:
            return
        present = bytes(map(is_not, map(_grad, self._parameters), repeat(None)))
        if present != self._last:
            self._change(present)
        if (self._step < FIRST_STEPS or self._without_grad) and not all(present):
            missing = [n for n, there in zip(self._names, present, strict=True) if not there]
            detail = "no_grad" if self._without_grad else ""
            more: dict[str, Any] = {"count": len(missing), "limit": float(len(present))}
            self._writer.event("missing gradients", missing[0], detail, self._step, **more)
        self._without_grad = False

    def close(self) -> None:
        self._handle.remove()

    def _change(self, present: bytes) -> None:
        number = self._known.setdefault(present, len(self._known))
        before, self._last = self._last, present
        if before is None or self._written >= MAX_EVENTS:
            return
        self._written += 1
        gained = [n for n, a, b in zip(self._names, present, before, strict=True) if a and not b]
        self._writer.event(
            "branch",
            f"branch {number}",
            ", ".join(gained[:MAX_NAMED]),
            self._step,
            count=sum(present),
            phase="backward",
        )

    def _on_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() and torch.is_autocast_enabled(self._kind) and not self.at_own_work():
            self._without_grad = module.training
