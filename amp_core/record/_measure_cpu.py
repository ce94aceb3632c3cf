# mypy: disable-error-code="attr-defined,call-arg,unreachable,no-any-return,import-untyped"
"""The numba kernel of `measure` for CPU tensors: one pass over memory, work shared between threads.

    >>> measure_cpu([torch.tensor([0.0, 1.5])])  # packed vectors one after another

A block of some thousand values at a time comes into the first-level cache and is read there by short loops that LLVM
turns into vector instructions: sums; the largest and smallest magnitude and every value's exponent field; and how many
fields equal each exponent between the two. Comparing 64 fields at a time with some twenty exponents is several times
faster than a histogram, which no processor can do on vectors. Values of 16 bits are widened into a buffer of one block.

Threads are plain Python threads over kernels that release the GIL: numba's own `parallel=True` starts an OpenMP pool
that a forked DataLoader worker cannot survive.
"""

import contextlib
import itertools
import os
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from amp_core.formats import FORMAT_OF_DTYPE
from amp_core.record.channels import Cap
from amp_core.record.measure import LEADING, in_one_row, merged

BLOCK = 2048
"""Values a block: few enough for the cache, with what is derived from them. At most 255 × LANES."""
LANES = 128
"""Fields compared at a time; LLVM cuts such a vector into as many as the processor needs."""
SHARE = 1 << 20
"""A thread is given no fewer values than this, some 0.2 ms of work. Below, waking it costs more than it saves: torch's
own threads keep the other cores busy for a while after each operation, in the hope of another."""

_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64")
_HALF, _BFLOAT, _DOUBLE = 1, 2, 5
_FP8 = frozenset((3, 4))
_CODE = {getattr(torch, name): code for code, name in enumerate(_DTYPES)}
_FORMATS = [FORMAT_OF_DTYPE[name] for name in _DTYPES]
_SIZE = [LEADING + form.powers_of_two for form in _FORMATS]
_BYTES = np.array([4, 2, 2, 4, 4, 8])  # FP8 is widened before
_SKIP = np.array([form.min_subnormal_exponent - (-1074 if form.name == "fp64" else -149) for form in _FORMATS])

_pool: tuple[int, int, ThreadPoolExecutor] | None = None  # process, threads, pool: a forked child makes its own


Tasks = npt.NDArray[np.int64]
"""Stretches of values, one a row, whose columns are these."""
WHERE, LENGTH, CODE, OUT = range(4)
"""Address, number of values, which dtype, and the address of the packed vector to add them to."""
CAP, CHANNELS, INNER, FIRST = range(4, 8)
"""Address (0: none) and length of the largest magnitudes to count, how many values in a row share one of them (see
`channels.Cap`), and how many values of the tensor come before this stretch."""


def measure_cpu(tensors: Sequence[torch.Tensor], caps: Sequence[Cap] | None = None) -> torch.Tensor:
    """The packed vectors of CPU tensors, one after another, as `amp_core.record.measure` describes them."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    if caps is None:
        rows = [t if t.is_contiguous() else in_one_row(t) for t in tensors]  # held until measured: some may be copies
        limits = [_NO_CAP] * len(rows)
    else:
        rows = [t if t.is_contiguous() else t.detach().contiguous() for t in tensors]
        # As wide as the kernel compares them; held likewise.
        wide = [c.largest.to(torch.promote_types(t.dtype, torch.float32)) for t, c in zip(tensors, caps, strict=True)]
        limits = [(w.data_ptr(), len(w), c.inner) for w, c in zip(wide, caps, strict=True)]
    codes = [_CODE[t.dtype] for t in tensors]
    if not _FP8.isdisjoint(codes):
        rows = [t.detach().to(torch.float32) if t.dtype.itemsize == 1 else t for t in rows]
    starts = [0, *itertools.accumulate(_SIZE[code] for code in codes)]
    packed = torch.zeros(starts[-1], dtype=torch.float64)
    base = packed.data_ptr()
    tasks = np.array(
        [
            (row.data_ptr(), row.numel(), code, base + 8 * start, *limit, 0)
            for row, code, start, limit in zip(rows, codes, starts, limits, strict=False)
        ],
        np.int64,
    )
    threads = min(torch.get_num_threads(), int(tasks[:, LENGTH].sum()) // SHARE)
    if threads < 2:
        _run(tasks)
    else:
        for i, part in _share(tasks, threads):
            whole = packed.numpy()[starts[i] : starts[i + 1]]
            whole[:] = merged(whole, part)
    return packed


_NO_CAP = (0, 0, 1)


def _share(tasks: Tasks, threads: int) -> list[tuple[int, npt.NDArray[np.float64]]]:
    """Run the tasks on `threads` threads, each on a stretch of memory of its own as long as the others'.

    Of a tensor that is cut, all parts but the first come back: the number of its task, and their packed vector.
    """
    lengths = tasks[:, LENGTH]
    starts = np.cumsum(lengths) - lengths
    total = int(lengths.sum())
    edges = [0]
    for k in range(1, threads):
        start = int(starts[np.searchsorted(starts, total * k // threads, side="right") - 1])
        edges.append(start + (total * k // threads - start) // BLOCK * BLOCK)
    parts, given = [], []
    for begin, end in zip(edges, [*edges[1:], total], strict=True):
        low, high = (np.clip(edge - starts, 0, lengths) for edge in (begin, end))
        mine = np.flatnonzero(high > low)
        low, high, stretch = low[mine], high[mine], tasks[mine]
        stretch[:, WHERE] += low * _BYTES[stretch[:, CODE]]
        stretch[:, LENGTH] = high - low
        stretch[:, FIRST] = low
        if len(mine) and low[0] > 0:
            part = np.zeros(_SIZE[stretch[0, CODE]])
            stretch[0, OUT] = part.ctypes.data
            parts.append((int(mine[0]), part))
        given.append(stretch)
    futures = [_threads(threads - 1).submit(_run, stretch) for stretch in given[1:]]
    _run(given[0])
    for future in futures:
        future.result()
    return parts


def _run(tasks: Tasks) -> None:
    double = tasks[:, CODE] == _DOUBLE
    if not double.all():
        real = np.empty(BLOCK, np.float32)
        _kernel(tasks[~double] if double.any() else tasks, _SKIP, real, real.view(np.uint32), np.empty(BLOCK, np.uint8))
    if double.any():
        real = np.empty(BLOCK, np.float64)
        _kernel(tasks[double], _SKIP, real, real.view(np.uint64), np.empty(BLOCK, np.uint16))


def _threads(count: int) -> ThreadPoolExecutor:
    global _pool
    if _pool is None or _pool[:2] != (os.getpid(), count):
        if _pool is not None and _pool[0] == os.getpid():
            _pool[2].shutdown(wait=False)
        _pool = (os.getpid(), count, ThreadPoolExecutor(count, thread_name_prefix="ampscope-measure"))
    return _pool[2]


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """An int64 as a pointer, so that one call can take any number of tensors."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def _count_equal(typingctx: Any, address: Any, length: Any, value: Any) -> Any:
    """How many of the `length` integers from `address` on equal `value`; `length` is a multiple of LANES, at most 255.

    Written as vectors because LLVM, given the loop, adds up in 64 bits what 8 can hold. They are LLVM's own vectors,
    of no particular processor.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start, length, value = args
        lane, int32, int64 = value.type, ir.IntType(32), ir.IntType(64)
        vector, wide = ir.VectorType(lane, LANES), ir.VectorType(ir.IntType(16), LANES)
        undefined = ir.Constant(vector, ir.Undefined)
        one = builder.insert_element(undefined, value, ir.Constant(int32, 0))
        everywhere = builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(int32, LANES), [0] * LANES))
        found = cgutils.alloca_once_value(builder, ir.Constant(vector, [0] * LANES))
        base = builder.inttoptr(start, lane.as_pointer())
        begin, step = ir.Constant(int64, 0), ir.Constant(int64, LANES)
        with cgutils.for_range_slice(builder, begin, length, step, intp=int64) as (i, _):
            fields = builder.load(builder.bitcast(builder.gep(base, [i]), vector.as_pointer()), align=1)
            equal = builder.icmp_unsigned("==", fields, everywhere)  # a lane of ones is -1
            builder.store(builder.sub(builder.load(found), builder.sext(equal, vector)), found)
        lanes = builder.load(found)
        if lane.width < 16:
            lanes = builder.zext(lanes, wide)
        add = ir.FunctionType(ir.IntType(16), [wide])
        add_up = cgutils.get_or_insert_function(builder.module, add, f"llvm.vector.reduce.add.v{LANES}i16")
        return builder.zext(builder.call(add_up, [lanes]), int64)

    return types.int64(types.int64, types.int64, value), codegen


def kept(function: Any) -> Any:
    """Compile when first called, and keep the code for other processes where a folder can be written for that."""
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither beside this file nor in the home folder
        return numba.njit(nogil=True)(function)
    compiled._cache = _BestEffort(compiled._cache)
    return compiled


class _BestEffort:
    """A cache that does without, where numba's raises: on a full disk, or over a file that a power cut left empty."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, *of: Any) -> Any:
        try:
            return self._cache.load_overload(*of)
        except Exception:  # whatever unpickling a damaged file may raise
            return None

    def save_overload(self, *of: Any) -> None:
        with contextlib.suppress(OSError, EOFError, pickle.PickleError):
            self._cache.save_overload(*of)


# Below, `bits` are unsigned integers of the width of the real numbers they are the bits of; which width that is comes
# with the arrays. These are module-level functions without closures, because numba's cache never finds closures again.


@numba.njit(nogil=True)
def _ones(uint: Any) -> Any:
    return uint(uint(0) - uint(1))


@numba.njit(nogil=True)
def _mantissa(uint: Any) -> int:
    """Stored bits of the mantissa; a constant once compiled."""
    return 23 if _ones(uint) == 0xFFFFFFFF else 52


@numba.njit(nogil=True)
def _fields_of(bits: Any, into: Any) -> Any:
    """Write each value's exponent field; returns the largest magnitude's bits, and the smallest's less 1."""
    uint, field = bits.dtype.type, into.dtype.type
    ones, one, down = _ones(uint), uint(1), uint(_mantissa(uint))
    magnitude = uint(ones >> one)
    top, bottom = uint(0), ones
    for i in range(bits.size):
        a = uint(bits[i] & magnitude)
        into[i] = field(a >> down)
        less = uint(a - one)  # zero wraps round and never is the smallest
        top = a if a > top else top
        bottom = less if less < bottom else bottom
    others = field(field(0) - field(1))  # no finite value's field
    for i in range(bits.size, _padded(bits.size)):
        into[i] = others
    return top, bottom


@numba.njit(nogil=True)
def _padded(n: int) -> int:
    return (n + LANES - 1) // LANES * LANES


@numba.njit(nogil=True, fastmath={"reassoc", "nsz"})
def _sums_of(values: Any) -> Any:
    total, squares = 0.0, 0.0
    for i in range(values.size):
        v = np.float64(values[i])
        total += abs(v)
        squares += v * v
    return total, squares


@numba.njit(nogil=True)
def _count(found: Any, n: int, highest: int, lowest: int, into: Any) -> int:
    """Add the number of the n fields that equal f to `into[f]`, for each f of a range; returns how many are left."""
    field = found.dtype.type
    rest = n
    f = highest
    while rest > 0 and f >= lowest:
        number: Any = _count_equal(found.ctypes.data, _padded(n), field(f))
        into[f] += number
        rest -= number
        f -= 1
    return rest


@numba.njit(nogil=True)
def _widen_half(bits: Any, into_bits: Any, into: Any) -> None:
    for i in range(bits.size):
        a = np.uint32(bits[i] & np.uint16(0x7FFF))
        into_bits[i] = (a << np.uint32(13)) + (np.uint32(224 if a >= 0x7C00 else 112) << np.uint32(23))
    for i in range(bits.size):  # no arithmetic on what is subnormal in either format: it may be set to flush
        steps = np.int32(bits[i] & np.uint16(0x7FFF))
        into[i] = np.float32(steps) * np.float32(2.0**-24) if steps < 0x400 else into[i]


@numba.njit(nogil=True)
def _widen_bfloat(bits: Any, into_bits: Any) -> None:
    for i in range(bits.size):
        into_bits[i] = np.uint32(bits[i]) << np.uint32(16)


@numba.njit(nogil=True)
def _capped(bits: Any, cap: Any, inner: int, begin: int, special: Any, into: Any) -> None:
    """Copy magnitudes, each at most what `cap` holds for its place; bits of magnitudes have the order of their values.

    The first value is the tensor's one numbered `begin`. NaNs, whose bits are above `special`, are neither capped nor
    caps.
    """
    uint = bits.dtype.type
    magnitude = uint(_ones(uint) >> uint(1))
    i = 0
    while i < bits.size:
        channel = (begin + i) // inner % cap.size
        if inner == 1:
            span = min(bits.size - i, cap.size - channel)
            for j in range(span):
                a, c = uint(bits[i + j] & magnitude), cap[channel + j]
                into[i + j] = c if c < a and a <= special else a
        else:
            span = min(bits.size - i, inner - (begin + i) % inner)
            c = cap[channel]
            for j in range(i, i + span):
                a = uint(bits[j] & magnitude)
                into[j] = c if c < a and a <= special else a
        i += span


@numba.njit(nogil=True)
def _without_special(bits: Any, special: Any, into: Any) -> Any:
    """Copy with zeros for infinities and NaNs; returns how many there were of each."""
    uint = bits.dtype.type
    magnitude = uint(_ones(uint) >> uint(1))
    infinite, unfit = 0, 0
    for i in range(bits.size):
        a = uint(bits[i] & magnitude)
        infinite += a == special
        unfit += a >= special
        into[i] = uint(0) if a >= special else a
    return infinite, unfit - infinite


@numba.njit(nogil=True)
def _lift_subnormals(bits: Any, first_normal: Any, into: Any) -> None:
    """Subnormal values as so many times the smallest of them, everything else as zero."""
    uint, real = bits.dtype.type, into.dtype.type
    magnitude = uint(_ones(uint) >> uint(1))
    for i in range(bits.size):
        a = uint(bits[i] & magnitude)
        into[i] = real(a if a < first_normal else uint(0))


@kept
def _kernel(tasks: Any, skip: Any, wide: Any, wide_bits: Any, found: Any) -> None:
    """Measure every task.

    The `Tasks`; for each dtype by how many exponents its packed vector begins above the lowest of this
    width; and three buffers of one block: real numbers, the same as bits, and integers that
    an exponent field fits in. An exponent field f >= 1 stands `mantissa - 1 + f` above the lowest subnormal exponent.
    """
    uint = wide_bits.dtype.type
    width = wide_bits.itemsize
    mantissa = _mantissa(uint)
    ones, one, down = _ones(uint), uint(1), uint(mantissa)
    first_normal = uint(one << down)
    special = uint((ones >> one) >> down << down)  # the bits of infinity; everything above is NaN
    fields = np.int64(special >> down)
    for k in range(tasks.shape[0]):
        where, length, code, out = tasks[k, WHERE], tasks[k, LENGTH], tasks[k, CODE], tasks[k, OUT]
        size = 2 if code in (_HALF, _BFLOAT) else width
        skipped = skip[code]
        row = numba.carray(pointer(out), (LEADING,), np.float64)
        # Where field 0 would be counted, of normal values, and of subnormals as `_lift_subnormals` leaves them.
        lowest = out + 8 * (LEADING - skipped)
        normals = numba.carray(pointer(lowest + 8 * (mantissa - 1)), (fields,), np.float64)
        subnormals = numba.carray(pointer(lowest - 8 * (fields // 2)), (fields,), np.float64)
        top, bottom = uint(0), ones
        for start in range(0, length, BLOCK):
            n = min(BLOCK, length - start)
            address = where + start * size
            if code == _HALF:
                _widen_half(numba.carray(pointer(address), (n,), np.uint16), wide_bits, wide)
                address = wide.ctypes.data
            elif code == _BFLOAT:
                _widen_bfloat(numba.carray(pointer(address), (n,), np.uint16), wide_bits)
                address = wide.ctypes.data
            if tasks[k, CAP]:
                cap = numba.carray(pointer(tasks[k, CAP]), (tasks[k, CHANNELS],), uint)
                whole = numba.carray(pointer(address), (n,), uint)
                _capped(whole, cap, tasks[k, INNER], tasks[k, FIRST] + start, special, wide_bits)
                address = wide.ctypes.data
            bits = numba.carray(pointer(address), (n,), uint)
            high, low = _fields_of(bits, found)
            unfit = 0
            if high >= special:
                infinite, nan = _without_special(bits, special, wide_bits)
                row[1] += infinite
                row[2] += nan
                unfit = infinite + nan
                address = wide.ctypes.data
                bits = numba.carray(pointer(address), (n,), uint)
                high, low = _fields_of(bits, found)
            total, squares = _sums_of(numba.carray(pointer(address), (n,), wide.dtype.type))
            row[5] += total
            row[6] += squares
            smallest = uint(low + one)
            rest = _count(found, n, np.int64(high >> down), max(1, np.int64(smallest >> down)), normals)
            if low < first_normal - one:
                _lift_subnormals(bits, first_normal, wide)
                high_units, low_units = _fields_of(wide_bits[:n], found)
                smallest = uint(low_units + one)
                rest -= n - _count(found, n, np.int64(high_units >> down), np.int64(smallest >> down), subnormals)
            row[0] += rest - unfit
            top = high if high > top else top
            bottom = low if low < bottom else bottom
        wide_bits[0], wide_bits[1] = top, uint(bottom + one)  # 0 where nothing was nonzero
        row[3], row[4] = wide[0], wide[1]
