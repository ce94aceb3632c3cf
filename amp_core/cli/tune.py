"""`ampscope tune`: search by trials for the fastest recipe (`tune_recipe`) or, in this module, the largest batch.

Each trial is a separate process, so running out of memory ends a trial and not the search.
"""

import argparse
import dataclasses
import json
import re
import signal
import tempfile
from pathlib import Path

from amp_core.cli import tune_recipe
from amp_core.cli.placement import add_placement, placement, submit
from amp_core.cli.settings import add_flag, add_settings, number, settings
from amp_core.cli.tune_recipe import free_folder, interrupt, print_progress, with_device
from amp_core.schema import RunError
from amp_core.schema.documents import versioned
from amp_core.settings.training import TrainConfig
from amp_core.text import formatting
from amp_core.tune.max_batch import (
    FILE,
    FREE_MEMORY_FRAC,
    MAX_BATCH_SIZE,
    TIMEOUT_S,
    MaxBatch,
    Trial,
    check,
    effective_limit,
    largest_batch,
)

OF_RECIPE = ("task", "budget", "code")
OF_BATCH = ("precision", "memory_limit", "most", "timeout")
"""Flags of only one of the two searches; the other refuses them instead of ignoring them."""

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000), ("", 1024))
}


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "tune",
        help="find the fastest recipe that keeps convergence, or the largest batch size",
        description="Tries precisions and options interleaved, stops slow ones early, and prints the code for the "
        "fastest whose loss is within FP32's seed-to-seed noise. With --max-batch: the largest batch size that fits.",
        allow_abbrev=False,
    )
    tune_recipe.add_flags(command)
    command.add_argument("--max-batch", action="store_true", help="find the largest batch size that fits in memory")
    batch = command.add_argument_group("with --max-batch")
    add_flag(batch, "precision")
    batch.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="memory limit of a trial, e.g. 2GiB: device memory on CUDA, the machine's memory on a CPU (default "
        f"there: {100 * FREE_MEMORY_FRAC:.0f} %% of what is free)",
    )
    batch.add_argument(
        "--most", type=number, metavar="N", help=(f"largest batch size to try (default {MAX_BATCH_SIZE})")
    )
    batch.add_argument("--timeout", type=number, metavar="S", help=f"seconds per trial (default {TIMEOUT_S:g})")
    command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    add_settings(command)
    add_placement(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Search, print each trial to standard error, and print the answer. Returns 1 if not even a batch of 1 fits."""
    for name in OF_BATCH if not arguments.max_batch else OF_RECIPE:
        if getattr(arguments, name, None) is not None:
            what = "FILE.py:FUNCTION" if name == "task" else f"--{name.replace('_', '-')}"
            raise RunError(f"max_batch={arguments.max_batch} does not use {what}; remove {what}")
    resources = placement(arguments)
    if not arguments.max_batch:
        return tune_recipe.run(arguments, resources)
    if resources.on != "local":
        config = TrainConfig.from_dict(settings(arguments))
        return submit(arguments, config, resources, arguments.out or str(free_folder()), makes="runs")
    # Which limit applies depends on the device; a trial would report an error too late.
    config = with_device(TrainConfig.from_dict(settings(arguments)))
    limit = effective_limit(config, parse_size(arguments.memory_limit) if arguments.memory_limit is not None else None)
    most: int = MAX_BATCH_SIZE if arguments.most is None else arguments.most
    timeout_s: float = TIMEOUT_S if arguments.timeout is None else arguments.timeout
    check(config, limit_bytes=limit, most=most, timeout_s=timeout_s)
    if arguments.out is not None:  # before minutes of trials
        _make(Path(arguments.out))
    bound = f"up to {formatting.size(limit)}" if limit is not None else "up to the device's memory"
    size = config.resolved().size or ""
    print_progress(f"batch sizes of {config.workload} {size} in {config.precision} on {config.device}, {bound}:")
    before = signal.signal(signal.SIGTERM, interrupt)  # like Ctrl-C: ends the running trial too
    try:
        result = largest_batch(
            config,
            limit_bytes=limit,
            most=most,
            timeout_s=timeout_s,
            on_trial=lambda trial: print_progress(in_words(trial)),
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    document = json.dumps(versioned(as_json(config, result)), indent=1, allow_nan=False)
    print(document if arguments.json else result.in_words())
    if arguments.out is not None:
        _keep(Path(arguments.out), document)
    return 0 if result.largest is not None else 1


def in_words(trial: Trial) -> str:
    """One trial as a line."""
    if not trial.fits:
        return f"  {trial.batch_size:>7,}  does not fit: {trial.why}"
    parts = [formatting.size(trial.peak_bytes) if trial.peak_bytes is not None else "memory unknown"]
    if trial.step_ms is not None and trial.samples_per_s is not None:
        parts += [
            f"{formatting.number(trial.step_ms)} ms per step",
            f"{formatting.number(trial.samples_per_s)} samples/s",
        ]
    return f"  {trial.batch_size:>7,}  fits: {', '.join(parts)}"


def as_json(config: TrainConfig, result: MaxBatch) -> dict[str, object]:
    """The answer, and the trials behind it."""
    resolved_config = config.resolved()
    return {
        "workload": resolved_config.workload,
        "size": resolved_config.size,
        "precision": resolved_config.precision,
        "accumulate": resolved_config.accumulate,
        "device": resolved_config.device,
        "memory": "resident set of the process" if result.on_cpu else "allocated by torch on the GPU",
        "memory_limit_bytes": result.limit_bytes,
        "answer": result.in_words(),
        "largest_batch": result.largest,
        "smallest_that_does_not_fit": result.next_larger,
        "trials": [dataclasses.asdict(trial) for trial in result.trials],
    }


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise RunError(f"out={str(folder)!r} cannot be written: {error.strerror or error}") from error


def _keep(folder: Path, document: str) -> None:
    try:
        (folder / FILE).write_text(document, encoding="utf-8")
    except OSError as error:
        raise RunError(f"out={str(folder)!r}: the result cannot be written ({error.strerror or error})") from error


def parse_size(text: str) -> int:
    """Bytes from `2GiB`, `800 MB` or `1073741824`. Raises `RunError` for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", text, re.IGNORECASE)
    unit = match[2].replace("b", "B").replace("I", "i") if match else ""
    unit = unit[:1].upper() + unit[1:]
    if match is None or unit not in _UNITS or float(match[1]) * _UNITS[unit] < 1:
        raise RunError(f"memory_limit={text!r} is not a size; give one such as 2GiB or 800MB")
    return int(float(match[1]) * _UNITS[unit])
