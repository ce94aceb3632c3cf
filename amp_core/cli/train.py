"""`ampscope train`: train once and record the run."""

import argparse
import json
import os
import re
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from amp_core.cli.placement import add_placement, placement, submit
from amp_core.cli.settings import add_flag, add_settings, settings
from amp_core.schema import RunError
from amp_core.settings.catalog import EMULATED
from amp_core.settings.training import TrainConfig
from amp_core.store.claim import already_used
from amp_core.train.engine.importing import collecting_later
from amp_core.train.engine.resume import recorded_settings
from amp_core.train.engine.stopping import stop_on_signals

if TYPE_CHECKING:
    from amp_core.train import Summary


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "train",
        help="train once and record the run",
        description="Example: ampscope train --workload text-gpt --precision fp16 --steps 200 --out runs/a",
        allow_abbrev=False,
    )
    command.add_argument("--out", metavar="DIR", required=True, help="new folder for the run")
    add_flag(command, "precision")
    add_flag(command, "nproc")
    command.add_argument(
        "--resume",
        action="store_true",
        help="resume the run in DIR from its checkpoint, with its settings, up to --steps in total",
    )
    add_settings(command)
    add_placement(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train. Returns 130 after a stop request."""
    resources = placement(arguments)
    values = recorded_settings(Path(arguments.out)) if arguments.resume else {}
    values |= settings(arguments)
    config = TrainConfig.from_dict(values)
    if hasattr(arguments, "profile"):
        config.check_profile()
    if resources.on != "local":
        config.check_file()
        if not arguments.resume and (Path(arguments.out) / "run.json").exists():
            raise already_used(arguments.out, "out")
        return submit(arguments, config, resources, arguments.out)
    # OpenMP reads this when torch is loaded. By default its threads spin while they wait. Beside a browser or a second
    # job, that makes training on the CPU up to 20 times slower; sleeping costs nothing here.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    rank = int(os.environ.get("RANK", "0"))
    if config.nproc > 1 and "WORLD_SIZE" not in os.environ:
        if str(arguments.out).startswith("memory:"):
            out = f"out={str(arguments.out)!r}"
            raise RunError(
                f"{out} is the memory of one process, but nproc={config.nproc} starts several; give a folder"
            )
        from amp_core.train.engine.torchrun import launch

        same = ["--resume"] if arguments.resume else []
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
            json.dump(config.to_dict(), file)
            file.flush()
            command = ["train", "--config", file.name, "--out", arguments.out, *same]
            code, reason = launch(config.nproc, command, arguments.out)
        if reason:
            print(f"ampscope: {reason}", file=sys.stderr)
        return code
    with stop_on_signals() as stop:  # before torch is imported, which takes seconds
        with collecting_later():
            from amp_core.train.engine.progress import Progress
            from amp_core.train.engine.training import train

        if "TORCHELASTIC_RUN_ID" in os.environ:
            from amp_core.train.engine.torchrun import torchrun_worker

            train = torchrun_worker(train)
        with Progress(arguments.out, config.steps) if rank == 0 else nullcontext() as progress:
            try:
                summary = train(config, arguments.out, progress=progress, stop=stop, resume=arguments.resume)
            except RunError as error:  # the folder is called `into` in Python and `--out` here
                raise RunError(re.sub("^into=", "out=", str(error))) from error
    if rank == 0:
        print(in_words(summary))
    sys.stdout.flush()
    return 130 if summary.status == "stopped" else 0


def in_words(summary: "Summary") -> str:
    """A summary of the run in a few lines."""
    lines = [f"{summary.folder}: {summary.status} after {summary.steps} steps"]
    if summary.emulated:
        lines.append(f"8 and 4 bits are {EMULATED}")
    if summary.loss_first is not None:
        lines.append(f"loss {summary.loss_first:.4g} → {summary.loss_last:.4g}")
    lines += [f"{name.replace('eval_', 'held-out ')} {value:.4g}" for name, value in summary.results.items()]
    if summary.skipped is None:  # the folder was deleted; the log shows that
        return "\n".join([*lines, f"final loss scale {summary.loss_scale:g}; the recording was lost with its folder"])
    lines.append(f"{summary.skipped} steps skipped, final loss scale {summary.loss_scale:g}")
    lines.append(f"open it in the app's Library, or in Python: amp_core.load_run({str(summary.folder)!r})")
    return "\n".join(lines)
