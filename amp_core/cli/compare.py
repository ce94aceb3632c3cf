"""`ampscope compare`: train the same model on the same data in several precisions, and set the runs side by side.

Each run is a process of its own, so none inherits another's memory peak, cuDNN choices or warm caches.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from amp_core.cli.settings import add_settings, settings
from amp_core.run import Run, load_run
from amp_core.schema import RunError
from amp_core.train.config import RECIPES, TrainConfig, unknown

WARM_UP_STEPS = 5
"""Steps left out of the median time: they allocate memory, choose kernels and compile."""


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
    print(table([load_run(folder) for folder in folders if (folder / "run.json").exists()]))
    return 1 if failed else 0


def table(runs: Sequence[Run]) -> str:
    """The runs as lines of text; times and memory with their ratio to the first run's."""
    header = ("precision", "final loss", "held-out loss", "step ms", "", "peak MiB", "", "skipped", "final scale")
    rows = [header]
    first_ms = first_bytes = None
    for run in runs:
        steps = run.steps
        step_ms = steps["step_ms"].iloc[WARM_UP_STEPS:].median()
        peak_bytes = steps["memory_peak_bytes"].max()
        first_ms, first_bytes = first_ms or step_ms, first_bytes or peak_bytes
        last = steps.iloc[-1] if len(steps) else None
        rows.append(
            (
                str(run.head.config.get("precision", run.name)),
                _number(None if last is None else last["loss"], ".4g"),
                _number(run.head.results.get("eval_loss"), ".4g"),
                _number(step_ms, ".2f"),
                _number(step_ms / first_ms, ".2f×"),
                _number(peak_bytes / 2**20, ".0f"),
                _number(peak_bytes / first_bytes, ".2f×"),
                str(int(steps["skipped"].sum())),
                _number(None if last is None else last["loss_scale"], "g"),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _number(value: float | str | None, form: str) -> str:
    """`value` as text; a dash where it was not measured."""
    if value is None or isinstance(value, str):
        return value or "–"
    suffix = "×" if form.endswith("×") else ""
    return f"{value:{form.removesuffix('×')}}{suffix}"


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
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True) as child,
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
