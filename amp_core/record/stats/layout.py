"""The measurements of a tensor and their packed layout, which all three implementations share."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from amp_core.formats import FORMAT_OF_DTYPE


class Cap(NamedTuple):
    """The value at flat index i of a tensor counts as at most `largest[i // inner % len(largest)]`, which is >= 0.

    `largest` is of the tensor's dtype, or float32 with values of that dtype. A NaN in it caps nothing, and a NaN in the
    tensor is not capped.
    """

    largest: torch.Tensor
    inner: int

    def of(self, start: int, stop: int) -> torch.Tensor:
        """The caps of the values at flat indices from `start` to `stop`."""
        indices = torch.arange(start, stop, device=self.largest.device)
        return self.largest[indices // self.inner % len(self.largest)]


LEADING = 7
"""Packed values before the exponent counts: zero, inf, nan, absmax, absmin, abs_sum, sq_sum."""


INFINITIES, NANS, SQUARES = 1, 2, 6
"""Where three of them stand."""


Key = tuple[str, str, str]
"""Name, kind and dtype of a tensor that is measured."""

Column = npt.NDArray[Any]


class Histograms(NamedTuple):
    """Exponent counts of several tensors, each from its lowest exponent to its highest."""

    counts: npt.NDArray[np.int64]
    """Those of all, one after another."""
    lengths: npt.NDArray[np.int64]
    """How many each tensor has; 0 for one that has no finite nonzero values."""

    def take(self, places: npt.NDArray[np.int64]) -> "Histograms":
        """The histograms of the tensors at `places`, in that order."""
        lengths = self.lengths[places]
        starts = (np.cumsum(self.lengths) - self.lengths)[places]
        shift = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        return Histograms(self.counts[shift + np.arange(len(shift))], lengths)

    @classmethod
    def joined(cls, parts: Sequence["Histograms"]) -> "Histograms":
        """The histograms of all parts, one part after another."""
        return cls(np.concatenate([p.counts for p in parts]), np.concatenate([p.lengths for p in parts]))


@dataclass(frozen=True)
class Measured:
    """The measurements of one tensor, named like the columns of `tensors`."""

    numel: int
    zero: int
    subnormal: int
    normal: int
    inf: int
    nan: int
    absmax: float
    absmin: float
    abs_sum: float
    sq_sum: float
    rms: float
    """Root of the mean square of the finite values; 0 where there are none."""
    exp_min: int
    exp_counts: npt.NDArray[np.int64]


@cache
def _is_known(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype_name(dtype) in FORMAT_OF_DTYPE


def measurable(tensor: torch.Tensor) -> bool:
    """Whether `measure` accepts the tensor: real, floating point, of a known format, and with values (not meta)."""
    return _is_known(tensor.dtype) and not tensor.is_meta


def unpack(packed: npt.NDArray[np.float64], dtype: str) -> Measured:
    """Decode the packed vector of a tensor of `dtype` (a name such as `float16`), once it is on the host."""
    columns, histograms = unpack_together(packed, [dtype])
    numbers = {name: values[0].item() for name, values in columns.items()}
    return Measured(**numbers, exp_counts=histograms.counts)


def unpack_together(packed: npt.NDArray[np.float64], dtypes: Sequence[str]) -> tuple[dict[str, Column], Histograms]:
    """Decode concatenated packed vectors; `dtypes` names the dtype of each.

    Returns the columns of `Measured` except the last, with a value per vector, and the histograms of all vectors.
    """
    if len(set(dtypes)) > 1:
        return _unpack_mixed(packed, dtypes)
    form = FORMAT_OF_DTYPE[dtypes[0]]
    rows = packed.reshape(len(dtypes), LEADING + form.powers_of_two)
    zero, inf, nan = rows[:, :3].T.astype(np.int64)
    absmax, absmin, abs_sum, sq_sum = rows[:, 3:LEADING].T
    # A step has some thirty of the 277 exponents of FP32: read only the columns from the lowest to the highest.
    present = np.flatnonzero(rows[:, LEADING:].max(axis=0))
    low, high = (int(present[0]), int(present[-1]) + 1) if len(present) else (0, 1)
    counts = rows[:, LEADING + low : LEADING + high].astype(np.int64)
    normal_from = form.min_normal_exponent - form.min_subnormal_exponent - low
    subnormal = counts[:, : max(0, normal_from)].sum(axis=1)
    nonzero = counts.sum(axis=1)
    used = counts != 0
    any_used = used.any(axis=1)
    first = used.argmax(axis=1)
    stop = np.where(any_used, high - low - used[:, ::-1].argmax(axis=1), 0)
    finite = zero + nonzero
    columns: dict[str, Column] = {
        "numel": finite + inf + nan,
        "zero": zero,
        "subnormal": subnormal,
        "normal": nonzero - subnormal,
        "inf": inf,
        "nan": nan,
        "absmax": absmax,
        "absmin": absmin,
        "abs_sum": abs_sum,
        "sq_sum": sq_sum,
        "rms": np.sqrt(sq_sum / np.maximum(finite, 1)),
        "exp_min": np.where(any_used, form.min_subnormal_exponent + low + first, 0),
    }
    place = np.arange(high - low)
    within = (place >= first[:, None]) & (place < stop[:, None])
    return columns, Histograms(counts[within], np.where(any_used, stop - first, 0))


def _unpack_mixed(packed: npt.NDArray[np.float64], dtypes: Sequence[str]) -> tuple[dict[str, Column], Histograms]:
    """`unpack_together`, dtype by dtype."""
    vectors = np.split(packed, np.cumsum([packed_length(dtype) for dtype in dtypes])[:-1])
    order: list[int] = []
    parts = []
    for dtype in dict.fromkeys(dtypes):
        mine = [i for i, d in enumerate(dtypes) if d == dtype]
        order += mine
        parts.append(unpack_together(np.concatenate([vectors[i] for i in mine]), [dtype] * len(mine)))
    columns, histograms = joined(parts)
    back = np.argsort(order)
    return {name: values[back] for name, values in columns.items()}, histograms.take(back)


def joined(parts: Sequence[tuple[dict[str, Column], Histograms]]) -> tuple[dict[str, Column], Histograms]:
    """Join several results of `unpack_together` as if one call had decoded all vectors."""
    if len(parts) == 1:
        return parts[0]
    columns = {name: np.concatenate([part[name] for part, _ in parts]) for name in parts[0][0]}
    return columns, Histograms.joined([histograms for _, histograms in parts])


def merged(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The packed vector of two tensors of the same dtype as if they were one."""
    both = one + other
    both[3] = max(one[3], other[3])
    both[4] = min(one[4] or np.inf, other[4] or np.inf) if one[4] or other[4] else 0.0
    return both


@cache
def packed_size(dtype: torch.dtype) -> int:
    """Length of the packed vector of a tensor of `dtype`."""
    return packed_length(dtype_name(dtype))


@cache
def packed_length(dtype: str) -> int:
    """`packed_size` by the dtype's name, such as `float16`."""
    return LEADING + FORMAT_OF_DTYPE[dtype].powers_of_two


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """`float16` for `torch.float16`."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=2**16)
def key_of(name: str, kind: str, dtype: str) -> Key:
    """The same object for the same tensor at every step: thousands of new ones would trigger Python's garbage
    collector."""
    return name, kind, dtype


def in_one_row(tensor: torch.Tensor) -> torch.Tensor:
    """The values as one row, in any order; a copy only if they have gaps in memory."""
    if tensor.is_contiguous():
        return tensor
    tensor = tensor.detach()
    return tensor.permute(by_stride(tensor)).contiguous()  # a transposed or channels-last one is contiguous that way


def by_stride(tensor: torch.Tensor) -> list[int]:
    """The dimensions of `tensor`, from the largest stride to the smallest."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where the values of each tensor are, for a kernel.

    Raises ValueError for zeros without memory, such as the gradient of `torch.sgn`: reading them would end the process.
    """
    addresses = list(map(torch.Tensor.data_ptr, tensors))
    if 0 in addresses and any(t._is_zerotensor() for t in tensors):
        raise ValueError("a tensor whose values have no memory")
    return addresses
