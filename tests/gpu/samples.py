"""Sample runs: each recipe on well-known models, with a profiler window, device counters, an op trace and audits."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from amp_core import Run, RunError, load_run
from amp_core.analysis import compare
from amp_core.store.atomic import replace_file
from amp_core.train import TrainConfig, train
from tests.gpu.checks import Place, Row

MAX_BYTES = 2 * 2**20
STEPS = 128
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
QUICK: dict[str, Any] = {"size": "tiny", "batch_size": 4, "steps": 24, "profile": (12, 14), "audit_every": 23}

RECIPES = {f"gpt2-small-{p}": {"workload": "text-gpt", "size": "small", "precision": p} for p in
           ("fp32", "fp16", "bf16", "tf32")}  # fmt: skip
"""Name and settings of each run of one model, which are compared with the first."""
OTHERS: dict[str, dict[str, Any]] = {
    "bert-large-fp16": {"workload": "text-bert", "size": "large", "precision": "fp16", "batch_size": 16},
    "resnet50-fp16": {"workload": "image-resnet", "size": "resnet50", "precision": "fp16", "channels_last": True},
    "resnet50-fp32": {"workload": "image-resnet", "size": "resnet50", "precision": "fp32"},
}


def samples(place: Place) -> Iterator[Row]:
    """Train and record GPT-2 small in four recipes, and compare them: what a comparison of a GPU's recipes shows."""
    # On a CPU two show that it works.
    chosen = {name: what for name, what in RECIPES.items() if place.cuda or what["precision"] in ("fp32", "bf16")}
    yield from _recorded(place, chosen)
    folders = [folder for name in chosen if (folder := place.out / "runs" / name).is_dir()]
    if len(folders) == len(chosen):
        yield _compared(place, [load_run(folder) for folder in folders])


def others(place: Place) -> Iterator[Row]:
    """Train and record other models."""
    yield from _recorded(place, OTHERS if place.cuda else {})


def _recorded(place: Place, runs: Mapping[str, dict[str, Any]]) -> Iterator[Row]:
    """Train and record each run, and report its size and contents. Runs for which no time is left are named."""
    longest = 0.0
    for name, what in runs.items():
        if place.left_s < 1.5 * longest:
            yield Row(f"sample run {name}", f"≤ {MAX_BYTES // 2**20} MB", "no time left", "skipped")
            continue
        begun = time.monotonic()
        folder = place.out / "runs" / name
        try:
            settings = WATCHED | what | (QUICK if place.quick else {})
            train(TrainConfig(**settings, device=str(place.device)), folder, stop=lambda: None)
        except RunError as error:
            yield Row(f"sample run {name}", f"≤ {MAX_BYTES // 2**20} MB", str(error), "skipped")
            continue
        finally:
            place.free()
        longest = max(longest, time.monotonic() - begun)
        yield _row(name, folder, place)


def _compared(place: Place, runs: list[Run]) -> Row:
    """The recipes against the first one, as the product compares them."""
    table = compare(runs).table
    wanted = ["step_ms", "speed_ratio", "loss_ratio", *(("memory_ratio", "tensor_frac") if place.cuda else ())]
    missing = [column for column in wanted if table[column][1:].isna().any()]
    differing = set(compare(runs).differences["setting"]) - {"precision", "autocast_dtype", "scaler", "tf32"}
    told = [f"{one.precision} {one.step_ms:.1f} ms, {one.speed_ratio:.2f} ×" for one in table.itertuples()]
    measured = ", ".join(told) + (f"; not measured: {', '.join(missing)}" if missing else "")
    fastest = table.set_index("precision")["speed_ratio"].drop("fp32").max()
    slow = place.judged(bool(fastest > 1)) == "FAIL"
    return Row(
        "sample runs compared",
        "every ratio measured, and 16 bits faster than FP32",
        measured + (f"; settings that differ: {', '.join(sorted(differing))}" if differing else ""),
        "FAIL" if missing or slow else "pass",
        {"table": table.to_dict("records")},
    )


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
