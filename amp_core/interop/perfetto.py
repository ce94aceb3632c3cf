"""One profiled step as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

>>> Path("step.json").write_bytes(step_trace(load_run("runs/profiled")))
"""

import json
from itertools import groupby
from operator import itemgetter
from typing import Any

from amp_core.schema import RunError
from amp_core.store.run import Run

PHASE_THREAD = "phases"
_ARGUMENTS = ("category", "tensor_core", "precision", "phase", "module", "op", "queue_us", "occupancy_frac")


def step_trace(run: Run) -> bytes:
    """The rows of `timeline` as JSON in Chrome's trace format: a process per rank and device, with a thread for its
    phases and one for each stream. Raises `RunError` if the run has no timeline."""
    rows = run.table("timeline").to_pylist()
    if not rows:
        raise RunError(f"run={run.name!r} has no timeline: no profiled step has kernel times")
    events: list[dict[str, Any]] = []
    places: dict[tuple[Any, Any], int] = {}
    streams: set[tuple[int, int]] = set()
    above = 1 + max((row["stream"] for row in rows if row["stream"] is not None), default=0)
    for row in rows:
        place = (row["rank"], row["device"])
        if place not in places:
            number = places[place] = len(places)
            label = f"rank {place[0]} {place[1]}"
            events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": label}})
            events += _named_thread(number, above, PHASE_THREAD, -1)
            events += _phases([r for r in rows if (r["rank"], r["device"]) == place], number, above)
        stream = row["stream"] if row["stream"] is not None else 0
        if (places[place], stream) not in streams:
            streams.add((places[place], stream))
            events += _named_thread(places[place], stream, f"stream {stream}", stream)
        arguments = {name: row[name] for name in (*_ARGUMENTS, "blocks_per_sm") if row[name] is not None}
        events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": row["name"],
                "pid": places[place],
                "tid": stream,
                "ts": row["start_us"],
                "dur": row["total_us"],
                "args": arguments,
            }
        )
    step = rows[0]["step"]
    head = {"displayTimeUnit": "ms", "otherData": {"run": run.name, "step": step}}
    return json.dumps(head | {"traceEvents": events}, allow_nan=False, default=str).encode()


def _named_thread(process: int, thread: int, name: str, place: int) -> list[dict[str, Any]]:
    """Name and place of a thread among those of its process."""
    common = {"ph": "M", "pid": process, "tid": thread}
    return [
        common | {"name": "thread_name", "args": {"name": name}},
        common | {"name": "thread_sort_index", "args": {"sort_index": place}},
    ]


def _phases(rows: list[dict[str, Any]], process: int, thread: int) -> list[dict[str, Any]]:
    """Each phase from its first kernel to its last, or to the first kernel of the next phase."""
    known = sorted((row for row in rows if row["phase"]), key=itemgetter("start_us"))
    spans = []
    for phase, group in groupby(known, itemgetter("phase")):
        kernels = list(group)
        spans.append((phase, kernels[0]["start_us"], max(k["start_us"] + k["total_us"] for k in kernels)))
    followed_by = [start for _, start, _ in spans[1:]] + [float("inf")]
    return [
        {
            "ph": "X", "cat": "phase", "name": phase, "pid": process, "tid": thread,
            "ts": start, "dur": round(min(end, following) - start, 3),
        }
        for (phase, start, end), following in zip(spans, followed_by, strict=True)
    ]  # fmt: skip
