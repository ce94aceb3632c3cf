"""`measure` for CPU tensors: one pass over memory by a numba kernel on torch's threads.

>>> measure_cpu([torch.tensor([0.0, 1.5])])  # packed vectors one after another
"""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from amp_core.formats import FORMAT_OF_DTYPE
from amp_core.record.stats.layout import LEADING, Cap, in_one_row
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
_SKIP_AT = _SKIP.ctypes.data
_NO_CAP = (0, 0, 1, 0)
"""Address, channels, inner, and where the capped vector is."""


def measure_cpu(tensors: Sequence[torch.Tensor], caps: Sequence[Cap | None] = ()) -> torch.Tensor:
    """The packed vectors of CPU tensors, one after another, as `measure_together` describes them."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    capped = [i for i, cap in enumerate(caps) if cap is not None]
    rows = [t if t.is_contiguous() else in_one_row(t) for t in tensors]  # keeps copies alive until they are measured
    for i in capped:  # caps need the values in the order of their channels
        rows[i] = tensors[i].detach().contiguous()
    codes = [_CODE[t.dtype] for t in tensors]
    if not _FP8.isdisjoint(codes):  # widened here, the others in the kernel
        rows = [t.detach().to(torch.float32) if t.dtype.itemsize == 1 else t for t in rows]
    values = sum(row.numel() for row in rows)
    parts = max(1, min(torch.get_num_threads(), values // SHARE))
    starts = [0, *itertools.accumulate(_SIZE[code] for code in [*codes, *(codes[i] for i in capped)])]
    packed = torch.zeros(parts, starts.pop(), dtype=torch.float64)
    base = packed.data_ptr()
    tasks = np.empty((len(rows), COLUMNS), np.int64)
    tasks[:, WHERE] = [row.data_ptr() for row in rows]
    tasks[:, LENGTH] = [row.numel() for row in rows]
    tasks[:, CODE] = codes
    tasks[:, OUT] = [base + 8 * start for start in starts[: len(rows)]]
    tasks[:, (CAP, CHANNELS, INNER, CAPPED_OUT)] = _NO_CAP
    if capped:
        limits = [cap for cap in caps if cap is not None]
        # In the width that the kernel compares; kept alive as well.
        wide = [c.largest if c.largest.dtype in _WIDE else c.largest.to(torch.float32) for c in limits]
        tasks[capped, CAP] = [w.data_ptr() for w in wide]
        tasks[capped, CHANNELS] = [w.numel() for w in wide]
        tasks[capped, INNER] = [c.inner for c in limits]
        tasks[capped, CAPPED_OUT] = [base + 8 * start for start in starts[len(rows) :]]
    if _DOUBLE not in codes:
        _run(measure_singles, tasks, packed)
    else:
        double = tasks[:, CODE] == _DOUBLE
        _run(measure_singles, tasks[~double], packed)
        _run(measure_doubles, tasks[double], packed)
    if parts > 1:
        add_parts(packed.numpy(), np.array(starts))
    return packed[0]


class PassingTensors:
    """Measures small tensors one at a time as they pass, into one buffer. A sampled step has one for each output of
    each module, so this makes as few objects as possible."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.float64)
        self._address = self._used = self._size = 0
        self._full: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor, channels: int = 0, inner: int = 1, into: int = 0) -> bool:
        """Measure the tensor. False where that takes more than this: a copy, several threads, another kernel.

        The other arguments are as for `measure_one`.
        """
        code, values = _CODE.get(tensor.dtype, _DOUBLE), tensor.numel()
        if code >= _NARROWEST or values >= 2 * SHARE or not tensor.is_contiguous():
            return False
        size = _SIZE[code]
        used = self._used
        if used + size > self._size:
            self._extend(size)
            used = 0
        out = self._address + 8 * used
        measure_one(tensor.data_ptr(), values, code, out, size, _SKIP_AT, channels, inner, into)
        self._used = used + size
        return True

    def _extend(self, size: int) -> None:
        if self._used:
            self._full.append(self._buffer[: self._used])
        self._size = max(2 * self._size, 32 * size)
        self._begin()

    def _begin(self) -> None:
        self._buffer, self._used = torch.empty(self._size, dtype=torch.float64), 0
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
