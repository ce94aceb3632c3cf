"""`measure` for CPU tensors: one pass over memory by a numba kernel on torch's threads.

>>> measure_cpu([torch.tensor([0.0, 1.5])])  # packed vectors one after another
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from amp_core.formats import FORMAT_OF_DTYPE
from amp_core.record.stats.host_buffers import host_buffer
from amp_core.record.stats.layout import LEADING, Cap, addresses_of, in_one_row
from amp_core.record.stats.numba.kernels import (
    CAP,
    CAPPED_OUT,
    CHANNELS,
    CODE,
    COLUMNS,
    INNER,
    LENGTH,
    OUT,
    WHERE,
    add_parts,
    measure_doubles,
    measure_one,
    measure_singles,
)
from amp_core.record.stats.numba.thread_team import together

SHARE = 1 << 16
"""A thread is given no fewer values than this, some 15 µs of work; torch's own operations go down to half of it."""

_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64")
_DOUBLE = _DTYPES.index("float64")
_NARROWEST = _DTYPES.index("float8_e4m3fn")
"""Dtypes before it are read by `measure_one` as they are."""
_FP8 = frozenset((_DTYPES.index("float8_e4m3fn"), _DTYPES.index("float8_e5m2")))
_CODE = {getattr(torch, name): code for code, name in enumerate(_DTYPES)}
_FORMATS = [FORMAT_OF_DTYPE[name] for name in _DTYPES]
_SIZE = [LEADING + form.powers_of_two for form in _FORMATS]
_SKIP = np.array([form.min_subnormal_exponent - (-1074 if form.name == "fp64" else -149) for form in _FORMATS])
_WIDE = (torch.float32, torch.float64)
_dtype = attrgetter("dtype")
_SKIP_AT = _SKIP.ctypes.data
_NO_CAP = (0, 0, 1, 0)
"""Address, channels, inner, and where the capped vector is."""


def measure_cpu(tensors: Sequence[torch.Tensor], caps: Sequence[Cap | None] = ()) -> torch.Tensor:
    """The packed vectors of CPU tensors, one after another, as `measure_together` describes them."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    capped = [i for i, cap in enumerate(caps) if cap is not None]
    rows = [t if t.is_contiguous() else in_one_row(t) for t in tensors]  # keeps copies alive until they are measured
    for i in capped:  # caps need the values in the order of their channels
        rows[i] = tensors[i].detach().contiguous()
    codes = list(map(_CODE.__getitem__, map(_dtype, tensors)))
    if not _FP8.isdisjoint(codes):  # widened here, the others in the kernel
        rows = [t.detach().to(torch.float32) if t.dtype.itemsize == 1 else t for t in rows]
    lengths = list(map(torch.Tensor.numel, rows))
    parts = max(1, min(torch.get_num_threads(), sum(lengths) // SHARE))
    sizes = np.array(_SIZE)[[*codes, *map(codes.__getitem__, capped)]]
    ends = np.cumsum(sizes)
    starts = ends - sizes
    packed = host_buffer(parts * int(ends[-1])).zero_().view(parts, -1)
    base = packed.data_ptr()
    tasks = np.empty((len(rows), COLUMNS), np.int64)
    tasks[:, WHERE] = addresses_of(rows)
    tasks[:, LENGTH] = lengths
    tasks[:, CODE] = codes
    tasks[:, OUT] = starts[: len(rows)] * 8 + base
    tasks[:, (CAP, CHANNELS, INNER, CAPPED_OUT)] = _NO_CAP
    if capped:
        limits = [cap for cap in caps if cap is not None]
        # In the width that the kernel compares; kept alive as well.
        wide = [c.largest if c.largest.dtype in _WIDE else c.largest.to(torch.float32) for c in limits]
        tasks[capped, CAP] = list(map(torch.Tensor.data_ptr, wide))
        tasks[capped, CHANNELS] = list(map(torch.Tensor.numel, wide))
        tasks[capped, INNER] = [c.inner for c in limits]
        tasks[capped, CAPPED_OUT] = starts[len(rows) :] * 8 + base
    if _DOUBLE not in codes:
        _run(measure_singles, tasks, packed)
    else:
        double = tasks[:, CODE] == _DOUBLE
        _run(measure_singles, tasks[~double], packed)
        _run(measure_doubles, tasks[double], packed)
    if parts > 1:
        add_parts(packed.numpy(), starts)
    return packed[0]


class PassingTensors:
    """Measures small tensors one at a time as they pass, into one buffer. A sampled step has one for each output of
    each module, so this makes as few objects as possible."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.float64, device="cpu")
        self._address = self._used = self._size = 0
        self._full: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor, channels: int = 0, inner: int = 1, into: int = 0) -> bool:
        """Measure the tensor. False where that takes more than this: a copy, several threads, another kernel.

        The other arguments are as for `measure_one`.
        """
        if _CODE.get(tensor.dtype, _DOUBLE) >= _NARROWEST or tensor.numel() >= 2 * SHARE or not tensor.is_contiguous():
            return False
        address = tensor.data_ptr()
        if not address:  # of zeros without memory, or of no values
            return False
        self.add_at(address, *self.arguments(tensor, channels, inner, into))
        return True

    @staticmethod
    def arguments(tensor: torch.Tensor, channels: int, inner: int, into: int) -> tuple[int, ...]:
        """What `add_at` is given for a tensor like this one, after its address."""
        code = _CODE[tensor.dtype]
        return tensor.numel(), code, _SIZE[code], channels, inner, into

    def add_at(self, address: int, values: int, code: int, size: int, channels: int, inner: int, into: int) -> None:
        """Measure the contiguous values at an address; the other arguments are those of `arguments`."""
        used = self._used
        if used + size > self._size:
            self._extend(size)
            used = 0
        measure_one(address, values, code, self._address + 8 * used, size, _SKIP_AT, channels, inner, into)
        self._used = used + size

    def _extend(self, size: int) -> None:
        if self._used:
            self._full.append(self._buffer[: self._used])
        self._size = max(2 * self._size, 32 * size)
        self._begin()

    def _begin(self) -> None:
        self._buffer, self._used = host_buffer(self._size), 0
        self._address = self._buffer.data_ptr()

    def take(self) -> list[torch.Tensor]:
        """The concatenated packed vectors of the tensors added since the last `take`, in one tensor or several."""
        if not self._used:
            return []
        parts = [*self._full, self._buffer[: self._used]]
        self._size = sum(map(len, parts))  # the next step has as many
        self._full = []
        self._begin()
        return parts


def _run(kernel: Any, table: npt.NDArray[np.int64], packed: torch.Tensor) -> None:
    """Run a kernel over the tasks, in as many parts as `packed` has rows; parts follow each other in memory."""
    if not len(table):
        return
    parts = len(packed)
    job = np.array([0, parts, table.ctypes.data, len(table), _SKIP.ctypes.data, 8 * packed.stride(0)], np.int64)
    if parts == 1:
        kernel(job.ctypes.data)
    else:
        together(kernel, job.ctypes.data, parts)
