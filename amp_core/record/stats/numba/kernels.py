# mypy: disable-error-code="attr-defined,call-arg,unreachable,no-any-return,import-untyped"
"""The numba kernel of `measure` for CPU tensors, without its Python side: what is done with each block of values.

A block of some thousand values at a time comes into the first-level cache and is read there by short loops that LLVM
turns into vector instructions: sums; the largest and smallest magnitude and every value's exponent field; and how many
fields equal each exponent between the two. Comparing 64 fields at a time with some twenty exponents is several times
faster than a histogram, which no processor can do on vectors. Values of 16 bits are widened into a buffer of one block.
"""

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from amp_core.record.stats.layout import LEADING
from amp_core.record.stats.numba.channels import largest_of_halves, largest_of_singles
from amp_core.record.stats.numba.compiled import kept, pointer, taken

BLOCK = 2048
"""Values a block: few enough for the cache, with what is derived from them. At most 255 × LANES."""
LANES = 128
"""Fields compared at a time; LLVM cuts such a vector into as many as the processor needs."""
HALF, BFLOAT = 1, 2
"""Codes of the dtypes that are widened here; the others come as wide as they are compared."""

DTYPES = 6
"""How many there are."""

WHERE, LENGTH, CODE, OUT = range(4)
"""Columns of a task, which is one tensor: its address, how many values, which dtype, where its packed vector is."""
CAP, CHANNELS, INNER, CAPPED_OUT, COLUMNS = range(4, 9)
"""Further ones: address (0: none) and length of the largest magnitudes to count, how many values in a row share one of
them (see `channels.Cap`), and where the packed vector of the capped values is, whose exponents alone are counted; and
how many columns there are."""

NEXT, PARTS, TASKS, COUNT, SKIPPED, APART, ENTRIES = range(7)
"""Entries of a job: the next part to be taken, of how many; address and number of the tasks; address of `skip` (see
`_measure_some`); by how many bytes the packed vectors of one part lie after those of the one before."""


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
        counts = cgutils.alloca_once_value(builder, ir.Constant(vector, [0] * LANES))
        base = builder.inttoptr(start, lane.as_pointer())
        begin, step = ir.Constant(int64, 0), ir.Constant(int64, LANES)
        with cgutils.for_range_slice(builder, begin, length, step, intp=int64) as (i, _):
            fields = builder.load(builder.bitcast(builder.gep(base, [i]), vector.as_pointer()), align=1)
            equal = builder.icmp_unsigned("==", fields, everywhere)  # a lane of ones is -1
            builder.store(builder.sub(builder.load(counts), builder.sext(equal, vector)), counts)
        lanes = builder.load(counts)
        if lane.width < 16:
            lanes = builder.zext(lanes, wide)
        add = ir.FunctionType(ir.IntType(16), [wide])
        add_up = cgutils.get_or_insert_function(builder.module, add, f"llvm.vector.reduce.add.v{LANES}i16")
        return builder.zext(builder.call(add_up, [lanes]), int64)

    return types.int64(types.int64, types.int64, value), codegen


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
def _count(scratch: Any, n: int, highest: Any, lowest: Any, into: Any) -> int:
    """Add the number of the n fields that equal f to `into[f]`, for each f of a range; returns how many are left."""
    field = scratch.dtype.type
    rest = n
    f = highest
    while rest > 0 and f >= lowest:
        number: Any = _count_equal(scratch.ctypes.data, _padded(n), field(f))
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
    """Subnormal values as multiples of the smallest subnormal, everything else as zero."""
    uint, real = bits.dtype.type, into.dtype.type
    magnitude = uint(_ones(uint) >> uint(1))
    for i in range(bits.size):
        a = uint(bits[i] & magnitude)
        into[i] = real(a if a < first_normal else uint(0))


@numba.njit(nogil=True, forceinline=True)
def _loaded(task: Any, start: int, n: int, wide: Any, wide_bits: Any) -> Any:
    """The bits of n values of a task, from number `start` on: those in memory, or widened into the buffer."""
    uint = wide_bits.dtype.type
    code = task[CODE]
    size = 2 if code in (HALF, BFLOAT) else wide_bits.itemsize
    address = task[WHERE] + start * size
    if code == HALF:
        _widen_half(numba.carray(pointer(address), (n,), np.uint16), wide_bits, wide)
        address = wide.ctypes.data
    elif code == BFLOAT:
        _widen_bfloat(numba.carray(pointer(address), (n,), np.uint16), wide_bits)
        address = wide.ctypes.data
    return numba.carray(pointer(address), (n,), uint)


@numba.njit(nogil=True)
def _histograms(out: int, skip: int, mantissa: int, fields: int) -> Any:
    """The exponent counts of the packed vector at `out`, by exponent field: of normal values, and of subnormal ones as
    `_lift_subnormals` leaves them. An exponent field f >= 1 stands `mantissa - 1 + f` above the lowest exponent."""
    lowest = out + 8 * (LEADING - skip)  # where field 0 would be counted
    return (
        numba.carray(pointer(lowest + 8 * (mantissa - 1)), (fields,), np.float64),
        numba.carray(pointer(lowest - 8 * (fields // 2)), (fields,), np.float64),
    )


@numba.njit(nogil=True, forceinline=True)
def _count_exponents(
    bits: Any, largest: Any, less: Any, normals: Any, subnormals: Any, wide: Any, wide_bits: Any, scratch: Any
) -> Any:
    """Count the exponents of finite values, of which `_fields_of` has just filled `scratch` and returned the extremes.

    Returns how many are zero, and the smallest magnitude's bits less 1. Where values are subnormal, `wide` is lost.
    """
    uint = wide_bits.dtype.type
    one, down = uint(1), uint(_mantissa(uint))
    first_normal = uint(one << down)
    n = bits.size
    rest = _count(scratch, n, np.int64(largest >> down), max(1, np.int64(uint(less + one) >> down)), normals)
    if less < first_normal - one:
        _lift_subnormals(bits, first_normal, wide)
        most_units, less_units = _fields_of(wide_bits[:n], scratch)
        lowest = np.int64(uint(less_units + one) >> down)
        rest -= n - _count(scratch, n, np.int64(most_units >> down), lowest, subnormals)
    return rest


@numba.njit(nogil=True)
def _cap_fields(scratch: Any, n: int, cap: Any, inner: int, begin: int) -> Any:
    """Lower the exponent fields of n values to those of their caps.

    Returns the largest field, the smallest but 0 less 1, and whether a cap is subnormal: its field does not give its
    exponent then. The field of a NaN is the largest there is, so it caps nothing.
    """
    uint, field = cap.dtype.type, scratch.dtype.type
    one, down = uint(1), uint(_mantissa(uint))
    normal = uint(uint(one << down) - one)
    step = field(1)
    top, bottom = field(0), field(field(0) - step)
    subnormal = False
    i = 0
    while i < n:
        channel = (begin + i) // inner % cap.size
        if inner == 1:
            span = min(n - i, cap.size - channel)
            caps = cap[channel : channel + span]
            some = scratch[i : i + span]
            for j in range(span):
                c = caps[j]
                subnormal |= uint(c - one) < normal
                limit = field(c >> down)
                f = limit if limit < some[j] else some[j]
                some[j] = f
                less = field(f - step)
                top = f if f > top else top
                bottom = less if less < bottom else bottom
        else:
            span = min(n - i, inner - (begin + i) % inner)
            c = cap[channel]
            subnormal |= uint(c - one) < normal
            limit = field(c >> down)
            some = scratch[i : i + span]
            for j in range(span):
                f = limit if limit < some[j] else some[j]
                some[j] = f
                less = field(f - step)
                top = f if f > top else top
                bottom = less if less < bottom else bottom
        i += span
    return top, bottom, subnormal


@numba.njit(nogil=True)
def _measure_some(
    task: Any, low: int, high: int, apart: int, skip: Any, wide: Any, wide_bits: Any, scratch: Any
) -> None:
    """Measure the values of a task from number `low` to before `high`, into packed vectors `apart` bytes further on.

    `skip` holds for each dtype by how many exponents its packed vector begins above the lowest of this width. Then come
    three buffers of one block: real numbers, the same as bits, and integers that an exponent field fits in.
    """
    # Views that own nothing: otherwise each block pays for atomic counts of references, a fifth of its time.
    wide = numba.carray(pointer(wide.ctypes.data), (BLOCK,), wide.dtype.type)
    wide_bits = numba.carray(pointer(wide_bits.ctypes.data), (BLOCK,), wide_bits.dtype.type)
    scratch = numba.carray(pointer(scratch.ctypes.data), (BLOCK,), scratch.dtype.type)
    uint = wide_bits.dtype.type
    ones, one, down = _ones(uint), uint(1), uint(_mantissa(uint))
    first_normal = uint(one << down)
    special = uint((ones >> one) >> down << down)  # the bits of infinity; everything above is NaN
    fields = np.int64(special >> down)
    out = task[OUT] + apart
    row = numba.carray(pointer(out), (LEADING,), np.float64)
    normals, subnormals = _histograms(out, skip[task[CODE]], _mantissa(uint), fields)
    capped, capped_subnormals = _histograms(task[CAPPED_OUT] + apart, skip[task[CODE]], _mantissa(uint), fields)
    cap = numba.carray(pointer(task[CAP]), (task[CHANNELS],), uint)
    top, bottom = uint(0), ones
    for start in range(low, high, BLOCK):
        n = min(BLOCK, high - start)
        bits = _loaded(task, start, n, wide, wide_bits)
        largest, less = _fields_of(bits, scratch)
        unfit = 0
        if largest >= special:
            infinite, nan = _without_special(bits, special, wide_bits)
            row[1] += infinite
            row[2] += nan
            unfit = infinite + nan
            bits = wide_bits[:n]
            largest, less = _fields_of(bits, scratch)
        total, squares = _sums_of(numba.carray(pointer(bits.ctypes.data), (n,), wide.dtype.type))
        row[5] += total
        row[6] += squares
        row[0] += _count_exponents(bits, largest, less, normals, subnormals, wide, wide_bits, scratch) - unfit
        top = largest if largest > top else top
        bottom = less if less < bottom else bottom
        if task[CAP]:
            unusual = unfit > 0 or less < first_normal - one
            if not unusual:
                most, least, unusual = _cap_fields(scratch, n, cap, task[INNER], start)
                if not unusual:
                    _count(scratch, n, np.int64(most), np.int64(least) + 1, capped)
            if unusual:  # fields alone do not decide
                _capped(_loaded(task, start, n, wide, wide_bits), cap, task[INNER], start, special, wide_bits)
                bits = wide_bits[:n]
                _without_special(bits, special, wide_bits)
                most_bits, less_bits = _fields_of(bits, scratch)
                _count_exponents(bits, most_bits, less_bits, capped, capped_subnormals, wide, wide_bits, scratch)
    wide_bits[0], wide_bits[1] = top, uint(bottom + one)  # 0 where nothing was nonzero
    row[3], row[4] = wide[0], wide[1]


@numba.njit(nogil=True)
def _measure_parts(address: int, wide: Any, wide_bits: Any, scratch: Any) -> None:
    """Take parts of the job at `address` until none is left, and measure each."""
    job = numba.carray(pointer(address), (ENTRIES,), np.int64)
    tasks = numba.carray(pointer(job[TASKS]), (job[COUNT], COLUMNS), np.int64)
    skip = numba.carray(pointer(job[SKIPPED]), (DTYPES,), np.int64)
    total = 0
    for k in range(job[COUNT]):
        total += tasks[k, LENGTH]
    while True:
        part = taken(address)
        if part >= job[PARTS]:
            return
        begin = total * part // job[PARTS] // BLOCK * BLOCK
        end = total if part == job[PARTS] - 1 else total * (part + 1) // job[PARTS] // BLOCK * BLOCK
        first = 0
        for k in range(job[COUNT]):
            low, high = max(begin - first, 0), min(end - first, tasks[k, LENGTH])
            first += tasks[k, LENGTH]
            if low < high:
                _measure_some(tasks[k], low, high, part * job[APART], skip, wide, wide_bits, scratch)


@kept
def measure_singles(address: Any) -> None:
    """Take part in the job at `address`, whose values are of 32 bits or fewer: any number of threads may."""
    wide = np.empty(BLOCK, np.float32)
    _measure_parts(address, wide, wide.view(np.uint32), np.empty(BLOCK, np.uint8))


@kept
def measure_one(
    address: Any, length: Any, code: Any, out: Any, size: Any, skipped: Any, channels: Any, inner: Any, into: Any
) -> None:
    """Measure one tensor of 32 bits or fewer, into the packed vector of `size` numbers at `out`, alone.

    Where there are `channels`, raise the largest magnitudes at `into` to those of each channel too: see `channels_cpu`.
    """
    numba.carray(pointer(out), (size,), np.float64)[:] = 0.0
    task = np.zeros(COLUMNS, np.int64)
    task[WHERE], task[LENGTH], task[CODE], task[OUT] = address, length, code, out
    task[CHANNELS] = 1
    wide = np.empty(BLOCK, np.float32)
    skip = numba.carray(pointer(skipped), (DTYPES,), np.int64)
    if length:
        _measure_some(task, 0, length, 0, skip, wide, wide.view(np.uint32), np.empty(BLOCK, np.uint8))
    if channels and length:
        outer = length // (channels * inner)
        if code in (HALF, BFLOAT):
            largest_of_halves(address, outer, channels, inner, into)
        else:
            largest_of_singles(address, outer, channels, inner, into)


@kept
def measure_doubles(address: Any) -> None:
    """The same for FP64."""
    wide = np.empty(BLOCK, np.float64)
    _measure_parts(address, wide, wide.view(np.uint64), np.empty(BLOCK, np.uint16))


@kept
def add_parts(vectors: Any, starts: Any) -> None:
    """Add the packed vectors of all parts, a row each, to those of the first; each begins where `starts` says."""
    for part in range(1, vectors.shape[0]):
        for k in range(starts.size):
            end = starts[k + 1] if k + 1 < starts.size else vectors.shape[1]
            one, other = vectors[0, starts[k] : end], vectors[part, starts[k] : end]
            largest, smallest = max(one[3], other[3]), min(one[4] or np.inf, other[4] or np.inf)
            for i in range(one.size):
                one[i] += other[i]
            one[3], one[4] = largest, 0.0 if smallest == np.inf else smallest
