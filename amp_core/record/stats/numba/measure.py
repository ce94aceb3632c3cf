"""`measure` for CPU tensors: one pass over memory by a numba kernel, the work shared between torch's threads.

>>> measure_cpu([torch.tensor([0.0, 1.5])])  # packed vectors one after another
"""

import array
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
    ENTRIES,
    INNER,
    LENGTH,
    OUT,
    WHERE,
    add_parts,
    measure_doubles,
    measure_singles,
)
from amp_core.record.stats.numba.thread_team import together

SHARE = 1 << 16
"""A thread is given no fewer values than this, some 15 µs of work; torch's own operations go down to half of it."""

_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64")
_DOUBLE = _DTYPES.index("float64")
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
    if len(tensors) == 1 and not any(caps):
        alone = _measure_alone(tensors[0])
        if alone is not None:
            return alone
    capped = [i for i, cap in enumerate(caps) if cap is not None]
    rows = [t if t.is_contiguous() else in_one_row(t) for t in tensors]  # held until measured: some may be copies
    for i in capped:  # the order of the values is that of their channels
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
        # As wide as the kernel compares them; held likewise.
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


def _measure_alone(tensor: torch.Tensor) -> torch.Tensor | None:
    """One small tensor, of which a sampled step has one for each output of each module: with as few objects as can be.

    None where it takes more: a copy, several threads, another kernel.
    """
    code, values = _CODE[tensor.dtype], tensor.numel()
    if code == _DOUBLE or code in _FP8 or values >= 2 * SHARE or not tensor.is_contiguous():
        return None
    packed = torch.zeros(_SIZE[code], dtype=torch.float64)
    job = (0, 1, 0, 1, _SKIP_AT, 0, tensor.data_ptr(), values, code, packed.data_ptr(), *_NO_CAP)
    table = array.array("q", job)
    address = table.buffer_info()[0]
    table[2] = address + 8 * ENTRIES
    measure_singles(address)
    return packed


def _run(kernel: Any, table: npt.NDArray[np.int64], packed: torch.Tensor) -> None:
    """Run a kernel over the tasks, in as many parts as `packed` has rows, which come in the order of memory."""
    if not len(table):
        return
    parts = len(packed)
    job = np.array([0, parts, table.ctypes.data, len(table), _SKIP.ctypes.data, 8 * packed.stride(0)], np.int64)
    if parts == 1:
        kernel(job.ctypes.data)
    else:
        together(kernel, job.ctypes.data, parts)
