"""`ampscope compare`: train the same model on the same data in several precisions, and set the runs side by side.

Each run is a process of its own, so none inherits another's memory peak, cuDNN choices or warm caches.
"""

import argparse
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from amp_core.cli.settings import add_settings, settings
from amp_core.run import load_run
from amp_core.schema import RunError
from amp_core.train.config import RECIPES, TrainConfig, unknown

if TYPE_CHECKING:
    from amp_core.analysis import Comparison


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "compare",
        help="train in several precisions and set them side by side",
        description="Seed, data and initial weights are the same for all; --loss-scale is for those with a scaler.",
        allow_abbrev=False,
    )
    command.add_argument("--out", metavar="DIR", required=True, help="folder for the runs, one subfolder each")
    choices = ", ".join(RECIPES)
    command.add_argument(
        "--precisions",
        metavar="A,B,…",
        default="fp32,bf16,fp16",
        help=f"from {choices} (default %(default)s)",
    )
    add_settings(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train each precision and print the table; 1 where a run failed."""
    configs = _configs(arguments)
    out = Path(arguments.out)
    folders = [out / config.precision for config in configs]
    for folder in folders:
        if (folder / "run.json").exists():
            raise RunError(f"out={str(out)!r} already holds a run {folder.name}; give a folder that does not exist yet")
    failed = False
    for config, folder in zip(configs, folders, strict=True):
        print(f"{config.precision}:", file=sys.stderr, flush=True)
        code = _train(config, folder)
        if code in (2, 130):  # it has said why, and the next would meet the same
            return code
        failed = failed or code != 0
    runs = [load_run(folder) for folder in folders if (folder / "run.json").exists()]
    if runs:
        from amp_core.analysis import compare

        print(table(compare(runs)))
    return 1 if failed else 0


def table(comparison: "Comparison") -> str:
    """The runs as lines of text, set against the first; then, for each other one, whether it learned the same."""
    found = comparison.table
    rows = [
        ("precision", "final loss", "held-out", "step ms", "speed", "", "peak MiB", "memory", "skipped", "final scale")
    ]
    rows += [
        (
            str(row["precision"]),
            _number(row["loss_final"], ".4g"),
            _number(row["eval_loss"], ".4g"),
            _number(row["step_ms"], ".2f"),
            _number(row["speed_ratio"], ".2f", "×"),
            f"({_number(row['speed_ratio_low'], '.2f')}–{_number(row['speed_ratio_high'], '.2f')})",
            _number(row["memory_peak_bytes"] / 2**20, ".0f"),
            _number(row["memory_ratio"], ".2f", "×"),
            _number(row["skip_frac"] * row["steps"], ".0f"),
            _number(row["scale_last"], "g"),
        )
        for row in found.to_dict("records")
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    verdicts = [f"{row['precision']}: {row['parity']}" for row in found.to_dict("records")[1:]]
    return "\n".join([*lines, "", *verdicts, *comparison.notes])


def _number(value: float, form: str, unit: str = "") -> str:
    """`value` as text; a dash where it was not measured."""
    return "–" if math.isnan(value) else f"{value:{form}}{unit}"


def _configs(arguments: argparse.Namespace) -> list[TrainConfig]:
    """One configuration per precision, all checked before the first run begins."""
    names = [name.strip() for name in arguments.precisions.split(",")]
    given = settings(arguments)
    configs = []
    for name in names:
        if name not in RECIPES:
            raise unknown("precisions", name, RECIPES)
        if names.count(name) > 1:
            raise RunError(f"precisions={arguments.precisions!r} names {name} twice; name each once")
        scale = {} if RECIPES[name].scaler else {"loss_scale": "dynamic"}
        configs.append(TrainConfig.from_dict(given | scale | {"precision": name}))
    return configs


def _train(config: TrainConfig, folder: Path) -> int:
    """Train in a process of its own; its exit code, 130 where it was stopped."""
    command = [sys.executable, "-m", "amp_core", "train", "--config", "-", "--out", os.fspath(folder)]
    # A session of its own: Ctrl-C then reaches it once, through us, and not a second time from the terminal.
    # What it says goes to standard error, where its progress goes: standard output is for the table.
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, text=True, start_new_session=True) as child,
        _passing_on(child),
    ):
        child.communicate(json.dumps(dataclasses.asdict(config)))
        return child.returncode


@contextmanager
def _passing_on(child: "subprocess.Popen[str]") -> Iterator[None]:
    """Within it SIGTERM and Ctrl-C go to `child`, which ends its run in order."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
