"""One profiled step as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

>>> Path("step.json").write_bytes(step_trace(load_run("runs/profiled")))
"""

import json
from typing import Any

from amp_core.schema import RunError
from amp_core.store.run import Run

_ARGUMENTS = ("category", "tensor_core", "precision", "phase", "module", "op", "queue_us", "occupancy_frac")


def step_trace(run: Run) -> bytes:
    """The rows of `timeline` as JSON in Chrome's trace format: a process per rank and device, and a thread per
    stream. Phases are arguments of the kernels. Raises `RunError` if the run has no timeline."""
    rows = run.table("timeline").to_pylist()
    if not rows:
        raise RunError(f"run={run.name!r} has no timeline: no profiled step has kernel times")
    events: list[dict[str, Any]] = []
    places: dict[tuple[Any, Any], int] = {}
    for row in rows:
        place = (row["rank"], row["device"])
        if place not in places:
            number = places[place] = len(places)
            label = f"rank {place[0]} {place[1]}"
            events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": label}})
        stream = row["stream"] if row["stream"] is not None else 0
        told = {name: row[name] for name in (*_ARGUMENTS, "blocks_per_sm") if row[name] is not None}
        events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": row["name"],
                "pid": places[place],
                "tid": stream,
                "ts": row["start_us"],
                "dur": row["total_us"],
                "args": told,
            }
        )
    step = rows[0]["step"]
    head = {"displayTimeUnit": "ms", "otherData": {"run": run.name, "step": step}}
    return json.dumps(head | {"traceEvents": events}, allow_nan=False, default=str).encode()
