"""`ampscope train`: train once and record the run."""

import argparse
import os
import re
import sys
from typing import TYPE_CHECKING

from amp_core.cli.settings import add_settings, settings
from amp_core.schema import RunError
from amp_core.train.config import RECIPES, TrainConfig
from amp_core.train.stopping import stop_on_signals

if TYPE_CHECKING:
    from amp_core.train import Summary


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser("train", help="train once and record the run", allow_abbrev=False)
    command.add_argument("--out", metavar="DIR", required=True, help="new folder for the run")
    command.add_argument("--precision", metavar="NAME", default=argparse.SUPPRESS, help=", ".join(RECIPES))
    add_settings(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train; 130 where it was asked to stop."""
    config = TrainConfig.from_dict(settings(arguments))
    # Read by OpenMP when torch is loaded. By default its threads spin while they wait, which on a machine that also has
    # a browser or a second job to run makes training on the CPU up to 20 times slower; sleeping costs nothing here.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with stop_on_signals() as stop:  # before torch is imported: that alone takes seconds in which Stop may be pressed
        from amp_core.train.engine import train
        from amp_core.train.progress import Progress

        with Progress(arguments.out, config.steps) as progress:
            try:
                summary = train(config, arguments.out, progress=progress, stop=stop)
            except RunError as error:  # the folder is called `into` in Python and `--out` here
                raise RunError(re.sub("^into=", "out=", str(error))) from error
    print(in_words(summary))
    sys.stdout.flush()
    return 130 if summary.status == "stopped" else 0


def in_words(summary: "Summary") -> str:
    """What came of the run, in a few lines."""
    lines = [f"{summary.folder}: {summary.status} after {summary.steps} steps"]
    if summary.loss_first is not None:
        lines.append(f"loss {summary.loss_first:.4g} → {summary.loss_last:.4g}")
    lines += [f"{name.replace('eval_', 'held-out ')} {value:.4g}" for name, value in summary.results.items()]
    lines.append(f"{summary.skipped} steps skipped, final loss scale {summary.loss_scale:g}")
    lines.append(f"open it in the app's Library, or in Python: amp_core.load_run({str(summary.folder)!r})")
    return "\n".join(lines)
