"""`ampscope compare`: train the same model on the same data in several precisions, and compare the runs. Or, without
training: compare two profiler traces; with `--localise`, say where two recorded runs part; with `--out` alone, compare
the runs of an array that has ended (`compare_array`).

Each run is a separate process, so none inherits another's memory peak, cuDNN choices or warm caches. They are
interleaved, a block of steps each, so that a slowdown of the machine affects all of them; see
`amp_core.train.turns.interleave`.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from amp_core.cli.compare_array import compare_array, holds_array, train_array
from amp_core.cli.comparison_text import first_differences, show
from amp_core.cli.placement import add_placement, placement, submit
from amp_core.cli.settings import add_settings, number, settings
from amp_core.cli.untrusted import printable
from amp_core.schema import RunError
from amp_core.settings.combinations import taken
from amp_core.settings.training import RECIPES, TrainConfig, unknown
from amp_core.store.atomic import check_holds_runs
from amp_core.store.run import load_run
from amp_core.text import formatting
from amp_core.train.turns.interleave import Member, default_block, interleave

PRECISIONS = "fp32,bf16,fp16"
"""The recipes that are compared by default, the baseline first."""
PROGRESS_EVERY_S = 2.0
"""Seconds between two lines of progress."""


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "compare",
        help="train in several precisions and compare the runs",
        description="Seed, data and initial weights are the same for all; --loss-scale applies to recipes with a "
        "scaler, --stochastic-rounding and --hadamard to nvfp4. Example: ampscope compare --workload text-gpt "
        "--precisions fp32,bf16,fp16 --seeds 3 --out runs/cmp",
        allow_abbrev=False,
    )
    command.add_argument(
        "traces",
        metavar="TRACE",
        nargs="*",
        help="two torch.profiler traces, or runs with a profiled window, to compare instead of training",
    )
    command.add_argument(
        "--out",
        metavar="DIR",
        help="folder for the runs, one subfolder each; if it holds the runs of an array, those are compared",
    )
    command.add_argument(
        "--localise",
        metavar="RUN",
        nargs=2,
        default=None,
        help=(
            "without training: report the first step, phase and layer at which two recorded runs of the same seed "
            "differ"
        ),
    )
    command.add_argument(
        "--floor",
        metavar="RUN",
        default=None,
        help="with --localise: a perturbed repeat of the first run, which sets the noise floor (default: none, any "
        "difference counts)",
    )
    choices = ", ".join(RECIPES)
    command.add_argument(
        "--precisions",
        metavar="A,B,…",
        default=None,
        help=f"from {choices} (default {PRECISIONS})",
    )
    command.add_argument(
        "--seeds",
        metavar="N",
        type=number,
        default=None,
        help=(
            "train each recipe N times, from --seed on; three or more are needed to decide convergence parity "
            "(default 1)"
        ),
    )
    command.add_argument(
        "--block",
        metavar="N",
        type=number,
        default=None,
        help="steps per turn of each run; runs are interleaved (default: a twentieth of the steps, at most 10)",
    )
    command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    add_settings(command)
    add_placement(command).add_argument(
        "--array",
        action="store_true",
        help="with --on slurm: each run is a task of one job array; faster with many GPUs, but times then compare "
        "nodes too (default: one job, its runs interleaved)",
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train each precision and print the table; 1 if a run failed. With traces or `--localise`, compare those."""
    if arguments.localise is not None:
        return _localise(arguments)
    if arguments.floor is not None:
        raise RunError(f"floor={arguments.floor!r} only applies to --localise; give that, with two runs")
    if arguments.traces:
        return _traces(arguments)
    if arguments.out is None:
        raise RunError("out is missing; give --out DIR for the runs, or two traces to compare without training")
    out = Path(arguments.out)
    if holds_array(out):
        return compare_array(arguments, out)
    resources = placement(arguments)
    configs = _configs(arguments)
    seeds = _whole("seeds", arguments.seeds) if arguments.seeds is not None else 1
    block = _whole("block", arguments.block) if arguments.block is not None else default_block(configs[0].steps)
    rounds = [
        [Member(_seeded(config, extra), out / _name(config, extra)) for config in configs] for extra in range(seeds)
    ]
    check_holds_runs(out)
    configs[0].check_file()
    if hasattr(arguments, "profile"):
        configs[0].check_profile()
    folders = [member.folder for members in rounds for member in members]
    for folder in folders:
        if (folder / "run.json").exists():
            raise RunError(f"out={str(out)!r} already holds a run {folder.name}; give a folder that does not exist yet")
    if arguments.array:
        tasks = {member.folder.name: member.config for members in rounds for member in members}
        return train_array(arguments, tasks, resources)
    if resources.on != "local":
        if arguments.json:
            raise RunError(f"json applies to comparisons on this machine; remove it or --on {resources.on}")
        return submit(arguments, configs[0], resources, arguments.out, makes="runs")
    failed = False
    for number_, members in enumerate(rounds):
        seed_note = f", seed {members[0].config.seed} ({number_ + 1} of {seeds})" if seeds > 1 else ""
        names = ", ".join(config.precision for config in configs)
        print(
            f"training {names}, interleaved every {formatting.plural(block, 'step')}{seed_note}:",
            file=sys.stderr,
            flush=True,
        )
        codes = interleave(members, block, _progress(configs[0].steps))
        for code in (2, 130):  # the run printed the reason, which would stop the next one too
            if code in codes:
                return code
        failed = failed or any(codes)
    runs = [load_run(folder) for folder in folders if (folder / "run.json").exists()]
    if runs:
        show(runs, as_json=arguments.json)
    return 1 if failed else 0


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=1, allow_nan=False))


def _refuse_placement(arguments: argparse.Namespace) -> None:
    if arguments.on != "local":
        raise RunError(f"on={arguments.on!r} applies to training; recorded runs and traces are compared here")
    if arguments.array:
        raise RunError("array=True applies to training; recorded runs and traces are compared here")


def _localise(arguments: argparse.Namespace) -> int:
    """Print where two recorded runs part."""
    _refuse_placement(arguments)
    from amp_core.analysis import first_difference
    from amp_core.analysis.comparison.document import difference_document

    if arguments.traces or arguments.out is not None:
        raise RunError("localise does not train and takes two runs; remove --out and other arguments")
    first, second = map(load_run, arguments.localise)
    floor = arguments.floor
    where = first_difference(first, second, None if floor is None else load_run(floor))
    if arguments.json:
        _print_json(difference_document(where))
    else:
        print("\n".join([where.sentence, where.compared, *first_differences(where)]))
    return 0


def _traces(arguments: argparse.Namespace) -> int:
    """Compare two traces, or two runs with kernels."""
    from amp_core.analysis.comparison.document import trace_document
    from amp_core.analysis.comparison.trace_change import compare_kernels, trace_change
    from amp_core.cli.comparison_text import kernels
    from amp_core.cli.import_trace import runs_and_traces

    _refuse_placement(arguments)
    given = [name for name, value in settings(arguments).items() if value is not None]
    if given or arguments.out is not None:
        raise RunError(f"{(given or ['out'])[0]} applies to training; give two traces alone")
    if len(arguments.traces) != 2:
        count = formatting.plural(len(arguments.traces), "trace")
        raise RunError(f"traces={arguments.traces!r:.200} lists {count}; give two, the baseline first")
    with runs_and_traces(arguments.traces) as runs:
        change = trace_change(runs)
        tables = {by: compare_kernels(runs, by) for by in ("op", "kernel")}
    if arguments.json:
        _print_json(trace_document(change, {"ops": tables["op"], "kernels": tables["kernel"]}))
        return 0
    print(printable("\n".join([*change.sentences, *change.notes])))
    for by, table in tables.items():
        print(printable("\n" + "\n".join(kernels(table, by, change.unit))))
    return 0


def _progress(steps: int) -> Callable[[int], None]:
    """Print the progress of all runs: every two seconds, and at the end."""
    began = last = time.monotonic()

    def report(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == steps or now - last >= PROGRESS_EVERY_S:
            last = now
            left = (now - began) / done * (steps - done)
            print(f"step {done} of {steps} per run | {left:.0f} s left", file=sys.stderr, flush=True)

    return report


def _configs(arguments: argparse.Namespace) -> list[TrainConfig]:
    """One configuration per precision, all checked before the first run begins."""
    given = arguments.precisions if arguments.precisions is not None else PRECISIONS
    names = [name.strip() for name in given.split(",")]
    values = settings(arguments)
    # What only some precisions take is for those; what none takes is left for the first to refuse.
    taken_by_any = set().union(*(taken(values, name) for name in names))
    values_of_all = {name: value for name, value in values.items() if name not in taken_by_any}
    configs = []
    for name in names:
        if name not in RECIPES:
            raise unknown("precisions", name, RECIPES)
        if names.count(name) > 1:
            raise RunError(f"precisions={given!r} lists {name} twice; list each once")
        configs.append(TrainConfig.from_dict(values_of_all | taken(values, name) | {"precision": name}))
    return configs


def _seeded(config: TrainConfig, extra: int) -> TrainConfig:
    return dataclasses.replace(config, seed=config.seed + extra)


def _name(config: TrainConfig, extra: int) -> str:
    """The folder of a run: the recipe's name and, from the second seed on, the seed."""
    return config.precision if extra == 0 else f"{config.precision}-seed{config.seed + extra}"


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise RunError(f"{name}={value!r} is not possible; give a whole number of 1 or more")
    return value
