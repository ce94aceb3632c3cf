"""Sample runs: each recipe on well-known models, with a profiler window, device counters, an op trace and audits."""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amp_core import RunError, load_run
from amp_core.store.atomic import replace_file
from amp_core.train import TrainConfig, train
from tests.gpu.checks import Place, Row

MAX_BYTES = 2 * 2**20
STEPS = 96
"""Enough for several samples of the hardware counters, which are two a second."""
WATCHED: dict[str, Any] = {
    "steps": STEPS,
    "every": 16,
    "fused": True,
    "evaluate": False,
    "profile": (STEPS // 2, STEPS // 2 + 2),
    "trace_ops": 2,
    "audit_every": STEPS - 1,
}

RUNS: dict[str, dict[str, Any]] = {
    **{f"gpt2-small-{p}": {"workload": "text-gpt", "size": "small", "precision": p} for p in ("fp32", "fp16")},
    "bert-large-fp16": {"workload": "text-bert", "size": "large", "precision": "fp16", "batch_size": 16},
    **{f"gpt2-small-{p}": {"workload": "text-gpt", "size": "small", "precision": p} for p in ("tf32", "bf16")},
    "resnet50-fp16": {"workload": "image-resnet", "size": "resnet50", "precision": "fp16", "channels_last": True},
    "resnet50-fp32": {"workload": "image-resnet", "size": "resnet50", "precision": "fp32"},
}
"""Name and settings of each run, the most important first."""


def samples(place: Place) -> Iterator[Row]:
    """Train and record each run, and report its size and contents. Runs for which no time is left are named."""
    longest = 0.0
    for name, what in RUNS.items():
        if place.quick:
            what = what | {"size": "tiny", "batch_size": 4, "steps": 24, "profile": (12, 14), "audit_every": 23}
        if not place.cuda and what["precision"] != "bf16":
            continue  # one shows that it works
        if place.left_s < 1.5 * longest:
            yield Row(f"sample run {name}", "≤ 2 MB", "no time left", "skipped")
            continue
        begun = time.monotonic()
        folder = place.out / "runs" / name
        try:
            train(TrainConfig(**(WATCHED | what), device=str(place.device)), folder, stop=lambda: None)
        except RunError as error:
            yield Row(f"sample run {name}", "≤ 2 MB", str(error), "skipped")
            continue
        finally:
            place.free()
        longest = max(longest, time.monotonic() - begun)
        yield _row(name, folder, place)


def _row(name: str, folder: Path, place: Place) -> Row:
    run = load_run(folder)
    # A sample describes a training, not the process that recorded it.
    replace_file(folder / "run.json", dataclasses.replace(run.head, process={}).to_json().encode())
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    tables = ("steps", "tensors", "device", "kernels", "windows", "ops", "audits", "memory", "events")
    rows = {table: run.table(table).num_rows for table in tables}
    wanted = ("kernels", "windows", "ops", "audits", "tensors", *(("device",) if place.cuda else ()))
    missing = [table for table in wanted if not rows[table]]
    counters = run.device["tensor_active_frac"].notna().sum() if rows["device"] else 0
    held = ", ".join(f"{count} {table}" for table, count in rows.items() if count)
    return Row(
        f"sample run {name}",
        f"≤ {MAX_BYTES // 2**20} MB, with {', '.join(wanted)}",
        f"{size / 2**20:.2f} MB; {held}; {counters} samples of the tensor-core counter"
        + (f"; no {', '.join(missing)}" if missing else ""),
        "pass" if size <= MAX_BYTES and not missing else "FAIL",
        {"bytes": size, "rows": rows},
    )
