"""Convert a TensorBoard log into a run folder; columns that a log lacks are null.

    >>> made = import_tensorboard("logs/a", "runs/a")
    >>> made.understood, made.not_understood
    ({'loss': 'train/loss'}, ['val/accuracy'])

A TensorBoard histogram has its own buckets. It gives the number of elements, the largest magnitude and, as torch writes
it, the root mean square. It gives zeros only if no bucket spans 0, and exponents only if no bucket spans a power of
two; otherwise these are null, not a guess. It contains neither dtype nor loss scale.
"""

import datetime
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from amp_core.interop.event_files import Histogram, Log, Point, read_log
from amp_core.interop.tags import column_of, rank_of, tensor_of
from amp_core.schema import RunError
from amp_core.store.atomic import new_folder
from amp_core.store.writer import RunWriter

_WHOLE = ("memory_peak_bytes",)
"""Columns of whole numbers among those that a log may hold."""


@dataclass(frozen=True)
class Imported:
    """A run converted from a log, and how the log's tags were used."""

    folder: Path
    understood: dict[str, str]
    """The imported tag of each column of `steps`."""
    points: dict[str, int] = field(default_factory=dict)
    """The number of steps with a value, by column."""
    tensors: dict[str, list[str]] = field(default_factory=dict)
    """The tags of histograms that became rows of `tensors`, by kind."""
    not_understood: list[str] = field(default_factory=list)
    """Tags that were not imported."""


def import_tensorboard(
    logdir: str | os.PathLike[str], out: str | os.PathLike[str], name: str | None = None
) -> Imported:
    """Write the run folder `out` from the log at `logdir`, and return which tags were imported.

    Step numbers are those of the log. Raises `RunError`, with nothing written, if the log cannot be read or has no tag
    to import.
    """
    log = read_log(Path(logdir))
    chosen = _chosen(log)
    drawn = {tag: place for tag in log.histograms if (place := tensor_of(tag)) is not None}
    if not chosen and not drawn:
        tags = sorted([*log.scalars, *log.histograms, *log.others])
        raise RunError(
            f"logdir={os.fspath(logdir)!r} holds nothing that a run can store: loss, loss scale, gradient norm, "
            "learning rate, or histograms of parameters and gradients; its tags are "
            f"{', '.join(tags)[:300] or 'none'}"
        )
    left = sorted(({*log.scalars} - {*chosen.values()}) | ({*log.histograms} - {*drawn}) | log.others)
    with new_folder(out) as aside:
        _write(log, chosen, drawn, left, aside, name or Path(out).name, Path(logdir).name)
    points = {column: len(log.scalars[tag]) for column, tag in chosen.items()}
    tensors: dict[str, list[str]] = {}
    for tag, (kind, _) in drawn.items():
        tensors.setdefault(kind, []).append(tag)
    return Imported(Path(out), chosen, points, tensors, left)


def _chosen(log: Log) -> dict[str, str]:
    """The best matching tag of each column; among equal matches, the one with the most values."""
    tags: dict[str, list[str]] = {}
    for tag in log.scalars:
        column = column_of(tag)
        if column is not None:
            tags.setdefault(column, []).append(tag)
    return {
        column: min(names, key=lambda tag: (rank_of(tag)[0], -len(log.scalars[tag]), rank_of(tag)))
        for column, names in sorted(tags.items())
    }


def _write(
    log: Log,
    chosen: dict[str, str],
    drawn: dict[str, tuple[str, str]],
    left: list[str],
    folder: Path,
    name: str,
    logdir: str,
) -> None:
    series = {column: log.scalars[tag] for column, tag in chosen.items()}
    histograms = [(place, h) for tag, place in drawn.items() for h in log.histograms[tag]]
    times = [p.wall_s for points in series.values() for p in points] + [h.wall_s for _, h in histograms]
    began = min((t for t in times if math.isfinite(t)), default=0.0)
    config = {"source": "import", "format": "tensorboard", "log": logdir, "tags": chosen, "tags_left_out": left[:1000]}
    with RunWriter(folder, name=name, config=config) as writer:
        if 0 < began < 1e11:  # seconds since 1970, up to the year 5138
            moment = datetime.datetime.fromtimestamp(began, datetime.UTC)
            writer.update_head(created_at=moment.isoformat(timespec="milliseconds"))
        writer.event("started", name=name, detail=_what_was_imported(chosen, drawn))
        if series:
            writer.append("steps", _step_rows(series, began))
        if histograms:
            histograms.sort(key=lambda item: (item[1].step, item[0]))
            writer.append("tensors", _tensor_rows(histograms))


def _step_rows(series: dict[str, list[Point]], began: float) -> dict[str, list[Any]]:
    steps = sorted({p.step for points in series.values() for p in points})
    rows: dict[str, list[Any]] = {"step": steps}
    wall: dict[int, float] = {}
    for column, points in series.items():
        known = {p.step: p.value for p in points}
        wall |= {p.step: p.wall_s for p in points}
        values = [known.get(step) for step in steps]
        if column == "skipped":
            rows[column] = [None if v is None or math.isnan(v) else v != 0 for v in values]
        elif column in _WHOLE:
            rows[column] = [round(v) if v is not None and math.isfinite(v) else None for v in values]
        else:
            rows[column] = values
    rows["time_s"] = [max(0.0, wall[step] - began) if math.isfinite(wall[step]) else None for step in steps]
    rows.setdefault("skipped", [None] * len(steps))  # not False: the log does not record it
    return rows


def _tensor_rows(histograms: Sequence[tuple[tuple[str, str], Histogram]]) -> dict[str, list[Any]]:
    facts_of_each = [tensor_facts(h) for _, h in histograms]
    rows: dict[str, list[Any]] = {key: [facts[key] for facts in facts_of_each] for key in facts_of_each[0]}
    rows["step"] = [h.step for _, h in histograms]
    rows["kind"] = [kind for (kind, _), _ in histograms]
    rows["name"] = [name for (_, name), _ in histograms]
    rows["loss_scale"] = [None] * len(facts_of_each)
    return rows


def tensor_facts(histogram: Histogram) -> dict[str, Any]:
    """The columns of `tensors` that a histogram determines; None for the others."""
    filled = histogram.counts > 0
    edges, counts = histogram.edges[filled], histogram.counts[filled]
    finite = math.isfinite(histogram.lowest) and math.isfinite(histogram.highest)
    facts: dict[str, Any] = {
        "numel": histogram.numel or None,
        "absmax": max(abs(histogram.lowest), abs(histogram.highest)) if finite and histogram.numel else None,
        "rms": histogram.rms,
        "inf": 0 if finite else None,  # if any value is infinite or NaN, the extremes are not finite
        "nan": 0 if finite else None,
        "zero": None,
        "exp_min": None,
        "exp_counts": None,
    }
    whole = histogram.numel and finite and round(float(counts.sum())) == histogram.numel
    if not whole:
        return facts
    low, high = np.maximum(edges[:, 0], histogram.lowest), np.minimum(edges[:, 1], histogram.highest)
    at_zero = (low == 0) & (high == 0)
    if not ((low <= 0) & (high >= 0) & ~at_zero).any():
        facts["zero"] = round(float(counts[at_zero].sum()))
        exponents = [_exponent(a, b) for a, b in zip(low[~at_zero], high[~at_zero], strict=True)]
        known = [e for e in exponents if e is not None]
        if known and len(known) == len(exponents):
            first = min(known)
            table = [0] * (max(known) - first + 1)
            for exponent, count in zip(known, counts[~at_zero], strict=True):
                table[exponent - first] += round(float(count))
            facts |= {"exp_min": first, "exp_counts": table}
    return facts


def _exponent(low: float, high: float) -> int | None:
    """The exponent of all values in [low, high), which have one sign; None if they have several exponents."""
    small, large = sorted((abs(low), abs(high)))
    exponent = math.frexp(small)[1] - 1
    inside = large < math.ldexp(1.0, exponent + 1) or (low > 0 and large == math.ldexp(1.0, exponent + 1))
    return exponent if inside else None


def _what_was_imported(chosen: dict[str, str], drawn: dict[str, tuple[str, str]]) -> str:
    columns = ", ".join(f"{column} from {tag}" for column, tag in chosen.items()) or "no scalars"
    return f"imported from a TensorBoard log: {columns}; {len(drawn)} histograms of tensors"
