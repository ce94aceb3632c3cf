"""The rows that an attempted step becomes in the tables `steps`, `tensors` and `events`."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from amp_core.phases import PHASES
from amp_core.record.loop.attempt import Attempt
from amp_core.record.stats.layout import Column, Histograms, Key, joined, merged, packed_length, unpack_together

_NAMED = 8
"""Non-finite gradients named in one event; the others are only counted."""


def step_row(attempt: Attempt, times: Mapping[str, float]) -> dict[str, list[Any]]:
    """The row of `steps`. `times` are the milliseconds of each phase."""
    loss, norm, rate, samples = (attempt.given(k) for k in ("loss", "grad_norm", "lr", "samples"))
    tracker = attempt.transfer.value("growth_tracker")
    missed = {"backward"} - attempt.seen
    missed |= set() if "forward" in attempt.seen else {"data", "forward"}
    return {
        "step": [attempt.step],
        "time_s": [attempt.time_s],
        "loss": [loss if loss is not None else attempt.transfer.value("loss")],
        "loss_scale": [attempt.loss_scale],
        "skipped": [attempt.skipped],
        "growth_tracker": [int(tracker) if tracker is not None else None],
        "grad_norm": [norm if norm is not None else attempt.grad_norm],
        "lr": [rate if rate is not None else attempt.lr],
        "samples": [int(samples) if samples is not None and math.isfinite(samples) else attempt.samples or None],
        "step_ms": [sum(times.values())],
        **{phase.column: [times[name] if name not in missed else None] for name, phase in PHASES.items()},
        "memory_allocated_bytes": [attempt.memory[0]],
        "memory_peak_bytes": [attempt.memory[1]],
        "optimizer": [attempt.optimizer],
    }


def tensor_rows(attempt: Attempt) -> dict[str, Any]:
    """The rows of `tensors`, one per tensor and kind; measurements of one tensor in the same step are merged."""
    keys, (columns, histograms) = _unpacked(attempt)
    named = _named(tuple(keys), tuple(name for name, _ in attempt.capped))
    rows: dict[str, Any] = {
        "step": np.full(len(keys), attempt.step),
        "name": named.names,
        "kind": named.kinds,
        "dtype": named.dtypes,
        "loss_scale": np.array([attempt.multiplied_by(kind) for kind in named.distinct_kinds])[named.kind_of],
        "exp_counts": _lists(histograms),
    }
    if attempt.capped:
        capped, histograms = unpack_together(attempt.packed("capped"), [dtype for _, dtype in attempt.capped])
        at = named.capped_at
        lowest = np.ascontiguousarray(capped["exp_min"][at], np.int64)
        rows["capped_min"] = pa.Array.from_buffers(pa.int64(), len(at), [_validity(at >= 0), pa.py_buffer(lowest)])
        rows["capped_counts"] = _lists(histograms.take(at[at >= 0]), at >= 0)
    same = ("numel", "zero", "subnormal", "normal", "inf", "nan", "absmax", "rms", "exp_min", "absmin", "abs_sum")
    return rows | {column: columns[column] for column in same}


def vanished_gradients(rows: Mapping[str, Any]) -> list[str]:
    """Names of the float16 output gradients that are all zeros, in such rows; none where all of them are."""
    zeros = rows["zero"] == rows["numel"]
    if not zeros.any():
        return []

    def in_fp16(place: int) -> bool:
        return (rows["kind"][place].as_py(), rows["dtype"][place].as_py()) == ("output_grad", "float16")

    gone = list(filter(in_fp16, np.flatnonzero(zeros).tolist()))
    others = gone and any(map(in_fp16, np.flatnonzero(~zeros).tolist()))
    return [rows["name"][place].as_py() for place in gone] if others else []


def _unpacked(attempt: Attempt) -> tuple[list[Key], tuple[dict[str, Column], Histograms]]:
    """One measurement for each name, kind and dtype, in the order of first occurrence."""
    if len(set(attempt.measured)) == len(attempt.measured):
        parts = attempt.measured_by_part()
        return attempt.measured, joined(
            [unpack_together(packed, [dtype for _, _, dtype in keys]) for keys, packed in parts]
        )
    vectors: dict[Key, npt.NDArray[np.float64]] = {}
    packed, end = attempt.packed("measured"), 0
    for key in attempt.measured:
        start, end = end, end + packed_length(key[2])
        before = vectors.get(key)
        vectors[key] = packed[start:end] if before is None else merged(before, packed[start:end])
    return list(vectors), unpack_together(np.concatenate(list(vectors.values())), [dtype for _, _, dtype in vectors])


class _Named(NamedTuple):
    """What keys alone say of their rows."""

    names: pa.Array
    kinds: pa.Array
    dtypes: pa.Array
    distinct_kinds: list[str]
    kind_of: npt.NDArray[np.int64]
    """Index of each row's kind among them."""
    capped_at: npt.NDArray[np.int64]
    """Index of each row among the capped measurements; -1 for one without."""


@functools.lru_cache(maxsize=16)
def _named(keys: tuple[Key, ...], capped: tuple[str, ...]) -> _Named:
    """The same at every sampled step, so it is cached. `capped` are names of weights."""
    names, kinds, dtypes = zip(*keys, strict=True)
    distinct = sorted(set(kinds))
    places = {name: i for i, name in enumerate(capped)}
    return _Named(
        _texts(names),
        _texts(kinds),
        _texts(dtypes),
        distinct,
        np.array([distinct.index(kind) for kind in kinds]),
        np.array([places.get(name, -1) if kind == "weight_grad" else -1 for name, kind, _ in keys]),
    )


def _texts(values: Sequence[str]) -> pa.Array:
    """A column of strings."""
    encoded = [value.encode("utf-8", "replace") for value in values]
    offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded)))


def _lists(histograms: Histograms, there: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """A column of exponent counts, null if `there` is False; without `there` nowhere."""
    lengths, valid = histograms.lengths, None
    if there is not None:
        lengths = np.zeros(len(there), np.int64)
        lengths[there] = histograms.lengths
        valid = _validity(there)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    items = pa.Array.from_buffers(pa.int64(), len(histograms.counts), [None, pa.py_buffer(histograms.counts)])
    return pa.Array.from_buffers(pa.list_(pa.int64()), len(lengths), [valid, pa.py_buffer(offsets)], children=[items])


def _validity(there: npt.NDArray[np.bool_]) -> pa.Buffer:
    """One bit per row, set where it has a value. With `pa.array`, the training process would import pandas."""
    return pa.py_buffer(np.packbits(there, bitorder="little"))


def event_rows(attempt: Attempt) -> dict[str, list[Any]]:
    """An event for a skipped step, or for a step with non-finite gradients without a scaler; mostly none."""
    bad = _nonfinite(attempt)
    scaled = list(_logged_scaled(attempt))
    if not (bad or scaled or attempt.skipped):
        return {}
    rows: dict[str, list[Any]] = {
        column: [] for column in ("step", "time_s", "kind", "name", "detail", "value", "limit")
    }
    for name, ratio in scaled:
        rows["step"].append(attempt.step)
        rows["time_s"].append(attempt.time_s)
        rows["kind"].append("logged scaled")
        rows["name"].append(name)
        rows["detail"].append("")
        rows["value"].append(ratio)
        rows["limit"].append(attempt.loss_scale)
    if attempt.skipped or bad:
        # Backward goes from the last layer to the first: the last non-finite gradient in the model's order came first.
        first = bad[-1] if bad else ""
        named = ", ".join(reversed(bad[-_NAMED:])) + (", …" if len(bad) > _NAMED else "")
        rows["step"].append(attempt.step)
        rows["time_s"].append(attempt.time_s)
        rows["kind"].append("skipped" if attempt.skipped else "non-finite")
        rows["name"].append(first)
        rows["detail"].append(f"{len(bad)} of {len(attempt.gradients)} gradients non-finite: {named}" if bad else "")
        rows["value"].append(None)
        rows["limit"].append(None)
    return rows


def _logged_scaled(attempt: Attempt) -> Iterator[tuple[str, float]]:
    """Logged values that are the true value times the loss scale, within 1 %: name, and logged over true value."""
    if attempt.loss_scale < 2 or attempt.skipped:
        return
    for name, true in (("loss", attempt.transfer.value("loss")), ("grad_norm", attempt.grad_norm)):
        logged = attempt.given(name)
        if logged is None or not true or not math.isfinite(ratio := logged / true):
            continue
        if abs(ratio / attempt.loss_scale - 1) < 0.01:
            yield name, ratio


def _nonfinite(attempt: Attempt) -> list[str]:
    """Names of gradients that hold an infinity or a NaN, in the model's order."""
    if attempt.grad_norm is not None and math.isfinite(attempt.grad_norm):
        return []
    order, norms = attempt.norms
    return [
        attempt.gradients[i] for i in sorted(i for i, norm in zip(order, norms, strict=True) if not np.isfinite(norm))
    ]
