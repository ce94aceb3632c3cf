"""A run as a TensorBoard log.

>>> write_log(load_run("runs/a"), Path("logs/a"))

Scalars are called `amp/loss`, `amp/loss_scale`, and so on; those of further ranks and optimizers `amp/loss/rank1`,
`amp/loss/optimizer1`. Histograms, `log2_magnitude/weight_grad/NAME`, count nonzero values by floor(log2|x|), as stored
in a run: on a linear axis a gradient would be one bar at zero.
"""

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from amp_core.interop.tags import EXPONENTS, HEADLINES
from amp_core.schema import RunError
from amp_core.store.run import Run
from amp_core.store.urls import with_extra

AT_ONCE = 1000
"""Rows converted to Python objects at one time: each takes some kilobytes, ten times as much as in Arrow."""


def write_log(run: Run, folder: Path) -> None:
    """Write the log of `run` into `folder`. Raises `RunError` without tensorboard."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise RunError(f"writing TensorBoard's files needs its package; {with_extra('tensorboard')}") from None
    began = _created_s(run)
    writer = EventFileWriter(str(folder))
    try:
        times: dict[int, float] = {}
        for row in _rows(run.table("steps").select(["step", "time_s", "rank", "optimizer", *HEADLINES])):
            at = times[row["step"]] = began + (row["time_s"] or 0.0)
            beside = "".join(f"/{key}{row[key]}" for key in ("rank", "optimizer") if row[key])
            values = [
                Summary.Value(tag=f"amp/{column}{beside}", simple_value=float(row[column]))
                for column in HEADLINES
                if row[column] is not None
            ]
            writer.add_event(Event(step=row["step"], wall_time=at, summary=Summary(value=values)))
        columns = ["step", "name", "kind", "rank", "exp_min", "exp_counts"]
        for row in _rows(run.table("tensors").select(columns)):
            histogram = _histogram(row["exp_min"], row["exp_counts"])
            if histogram is not None:
                beside = f"/rank{row['rank']}" if row["rank"] else ""
                value = Summary.Value(tag=f"{EXPONENTS}/{row['kind']}/{row['name']}{beside}", histo=histogram)
                at = times.get(row["step"], began)
                writer.add_event(Event(step=row["step"], wall_time=at, summary=Summary(value=[value])))
    finally:
        writer.close()


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=AT_ONCE):
        yield from batch.to_pylist()


def _histogram(exp_min: int | None, counts: list[int] | None) -> Any:
    """Buckets [e, e + 1) of log2 magnitudes; None if the run has no histogram, or only zeros."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    filled = [i for i, count in enumerate(counts or []) if count]
    if exp_min is None or counts is None or not filled:
        return None
    first, last = filled[0], filled[-1]
    shown = counts[first : last + 1]
    limits = [float(exp_min + i + 1) for i in range(first, last + 1)]
    middles = [limit - 0.5 for limit in limits]
    return HistogramProto(
        min=limits[0] - 1,
        max=limits[-1],
        num=float(sum(shown)),
        # Computed from the middles of the buckets; TensorBoard does not draw it.
        sum=sum(c * m for c, m in zip(shown, middles, strict=True)),
        sum_squares=sum(c * m * m for c, m in zip(shown, middles, strict=True)),
        bucket_limit=limits,
        bucket=[float(count) for count in shown],
    )


def _created_s(run: Run) -> float:
    try:
        return datetime.datetime.fromisoformat(run.head.created_at).timestamp()
    except ValueError:  # null in runs of other programs
        return 0.0
