"""TensorBoard's event files as plain data.

>>> log = read_log(Path("logs/a"))
>>> log.scalars["train/loss"][:2]
[Point(step=0, wall_s=1795241234.5, value=2.5), Point(step=1, wall_s=1795241235.0, value=2.25)]

A log folder may hold several files, of a restarted run, and subfolders, whose names prefix their tags. If a step was
logged twice, the later value counts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from amp_core.schema import RunError
from amp_core.store.urls import with_extra

MAX_FILES = 10_000


class Point(NamedTuple):
    """One number of a log."""

    step: int
    wall_s: float
    value: float


@dataclass(frozen=True)
class Histogram:
    """A TensorBoard histogram of a tensor; None for values that its kind of file lacks."""

    step: int
    wall_s: float
    edges: "np.ndarray[Any, np.dtype[np.float64]]"
    """Left and right edge of each bucket; shape (buckets, 2)."""
    counts: "np.ndarray[Any, np.dtype[np.float64]]"
    numel: int
    rms: float | None
    lowest: float
    highest: float


@dataclass
class Log:
    """All scalars and histograms below a folder, by tag, each in the order of steps; and tags of other plugins."""

    scalars: dict[str, list[Point]] = field(default_factory=dict)
    histograms: dict[str, list[Histogram]] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)


def read_log(folder: Path) -> Log:
    """Read every event file below `folder`. Raises `RunError` if there is none, or without tensorboard."""
    if not folder.exists():
        raise RunError(f"logdir={str(folder)!r} does not exist; give TensorBoard's log folder")
    files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*tfevents*") if p.is_file())
    if not files:
        raise RunError(f"logdir={str(folder)!r} holds no event files (*tfevents*); give a TensorBoard log folder")
    if len(files) > MAX_FILES:
        raise RunError(f"logdir={str(folder)!r} holds {len(files)} event files; at most {MAX_FILES} are read at once")
    scalars: dict[str, dict[int, Point]] = {}
    histograms: dict[str, dict[int, Histogram]] = {}
    log = Log()
    for file in files:
        place = file.parent.relative_to(folder).as_posix() if folder.is_dir() else "."
        for tag, value in _values(file):
            full = tag if place == "." else f"{place}/{tag}"
            if isinstance(value, Point):
                scalars.setdefault(full, {})[value.step] = value
            elif isinstance(value, Histogram):
                histograms.setdefault(full, {})[value.step] = value
            else:
                log.others.add(full)
    log.scalars = {tag: [points[step] for step in sorted(points)] for tag, points in sorted(scalars.items())}
    log.histograms = {tag: [drawn[step] for step in sorted(drawn)] for tag, drawn in sorted(histograms.items())}
    return log


def _values(file: Path) -> Iterator[tuple[str, Point | Histogram | None]]:
    try:
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.util import tensor_util
    except ImportError:
        raise RunError(f"reading TensorBoard's files needs its package; {with_extra('tensorboard')}") from None
    plugins: dict[str, str] = {}  # only the first value of a tag has its metadata
    try:
        for data in RawEventFileLoader(str(file)).Load():
            event = Event.FromString(data)
            for value in event.summary.value:
                plugin = plugins.setdefault(value.tag, value.metadata.plugin_data.plugin_name)
                kind = value.WhichOneof("value")
                if kind == "simple_value":
                    yield value.tag, Point(event.step, event.wall_time, float(value.simple_value))
                elif kind == "histo":
                    yield value.tag, _from_proto(value.histo, event.step, event.wall_time)
                elif kind == "tensor" and plugin in ("scalars", "histograms"):
                    array = np.asarray(tensor_util.make_ndarray(value.tensor), dtype=np.float64)
                    if plugin == "scalars" and array.size == 1:
                        yield value.tag, Point(event.step, event.wall_time, float(array.reshape(-1)[0]))
                    elif plugin == "histograms" and array.ndim == 2 and array.shape[1] == 3:
                        yield value.tag, _from_buckets(array, event.step, event.wall_time)
                else:
                    yield value.tag, None
    except MemoryError:
        raise
    except RunError:
        raise
    except Exception as error:  # protobuf, the record reader and numpy each raise their own errors
        raise RunError(f"{file} is damaged: {' '.join(str(error).split())[:200]}") from None


def _from_proto(histo: Any, step: int, wall_s: float) -> Histogram:
    """The older format, which torch writes, with the extremes and the sum of squares."""
    right = np.array(histo.bucket_limit, dtype=np.float64)
    left = np.concatenate([[histo.min], right[:-1]]) if len(right) else right
    numel = round(histo.num) if math.isfinite(histo.num) and histo.num > 0 else 0
    mean_square = histo.sum_squares / numel if numel else math.nan
    rms = math.sqrt(mean_square) if math.isfinite(mean_square) and mean_square >= 0 else None
    edges = np.stack([left, right], axis=1) if len(right) else np.empty((0, 2))
    return Histogram(step, wall_s, edges, np.array(histo.bucket), numel, rms, histo.min, histo.max)


def _from_buckets(array: Any, step: int, wall_s: float) -> Histogram:
    """The newer format, of TensorFlow 2: only buckets, the outermost of which end at the extremes."""
    counts = array[:, 2]
    lowest, highest = (float(array[0, 0]), float(array[-1, 1])) if len(array) else (math.nan, math.nan)
    numel = round(float(counts.sum())) if np.isfinite(counts).all() else 0
    return Histogram(step, wall_s, array[:, :2], counts, numel, None, lowest, highest)
