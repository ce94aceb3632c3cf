"""`--on local|slurm|ray` of `train`, `compare` and `tune`: submit the command as a job instead of running it here.

    ampscope train --workload text-gpt --out runs/a --on slurm --partition gpu --gpus 1 --time 2:00:00
    ampscope train --resume --out runs/a --on slurm --time 8:00:00
    ampscope compare --workload text-gpt --seeds 3 --out runs/cmp --on slurm --gpus 1 --array

The job runs the same command without these flags, in the working directory of this one. With `--array` each run of a
comparison is a job of its own, which runs `ampscope train`.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence

from amp_core.cli.settings import number, settings
from amp_core.jobs import Job, submit_array_in, submit_in
from amp_core.schema import RunError
from amp_core.settings.resources import PLACES, SETUP_VARIABLE, Resources, setup_of_environment
from amp_core.settings.training import TrainConfig

_NAMES = ("partition", "gpus", "nodes", "time", "account", "setup", "requeue")


def add_placement(command: argparse.ArgumentParser) -> "argparse._ArgumentGroup":
    """Declare the flags; returns their group."""
    group = command.add_argument_group("where it runs")
    group.add_argument(
        "--on", metavar="PLACE", default="local", help=f"{', '.join(PLACES)}: here, or as a job (default %(default)s)"
    )
    group.add_argument("--partition", metavar="NAME", help="Slurm's partition (default: Slurm's own)")
    group.add_argument("--gpus", metavar="N", type=number, help="GPUs per node")
    group.add_argument(
        "--nodes", metavar="N", type=number, help="nodes; with several, torchrun starts --nproc processes on each"
    )
    group.add_argument("--time", metavar="LIMIT", help="time limit: minutes, H:MM:SS or D-HH:MM:SS")
    group.add_argument("--account", metavar="NAME", help="account that is charged")
    group.add_argument(
        "--setup",
        metavar="LINE",
        action="append",
        help=f"line of shell that prepares the job's environment; may be repeated (default: ${SETUP_VARIABLE})",
    )
    group.add_argument(
        "--requeue",
        action="store_true",
        default=None,
        help="after preemption, a node failure or near the time limit, queue the job again and resume from its "
        "checkpoint; needs --checkpoint-every",
    )
    return group


def placement(arguments: argparse.Namespace) -> Resources:
    """What the flags request. Raises `RunError` for a wrong value, and for resources of a training on this machine."""
    given = {name: getattr(arguments, name) for name in _NAMES if getattr(arguments, name) is not None}
    if "setup" in given:
        given["setup"] = tuple(given["setup"])
    elif arguments.on != "local":
        given["setup"] = setup_of_environment()
    return Resources(on=arguments.on, **given)


def flags_of(resources: Resources) -> list[str]:
    """The flags that request `resources`; without the set-up lines, which the environment has."""
    if resources.on == "local":
        return []
    line = ["--on", resources.on]
    for name in _NAMES:
        value = getattr(resources, name)
        if name != "setup" and value and value != getattr(Resources(), name):
            line += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return line


def submit(
    arguments: argparse.Namespace, config: TrainConfig, resources: Resources, out: str, *, makes: str = "run"
) -> int:
    """Submit the command with the settings of `config` in the folder `out`, and print where it is. Returns 0."""
    _check(config, resources if makes == "run" else Resources(), out)
    command = [sys.executable, "-m", "amp_core", *_command_alone(arguments.argv)]
    # A comparison and a search make several configurations of the given values; a resumed run takes those recorded.
    values = settings(arguments) if makes == "runs" else config.to_dict()
    job = submit_in(out, config, values, command, makes=makes, resources=resources)
    print(f"{out}: job {job.backend_id} on {job.device}, {_state(job)}")
    return 0


def submit_array(out: str, configs: Mapping[str, TrainConfig], resources: Resources) -> int:
    """Submit a training for each of `configs` as one array, in the subfolders of `out` that their keys name, and print
    the ids and the command that compares the runs. Returns 0."""
    for config in configs.values():
        _check(config, resources, out)
    tasks = submit_array_in(out, configs, resources=resources)
    print(f"{out}: array {str(tasks[0].backend_id).partition('_')[0]} of {len(tasks)} tasks on {tasks[0].device}")
    for job in tasks:
        print(f"  {job.name}: job {job.backend_id}, {_state(job)}")
    print(f"compare the runs when they have ended: {shlex.join(['ampscope', 'compare', '--out', out])}")
    return 0


def _check(config: TrainConfig, resources: Resources, out: str) -> None:
    """Raise `RunError` if the training cannot be requeued as requested, or its folder is not on a disk."""
    if resources.requeue and config.checkpoint_every is None:
        raise RunError("requeue=True needs checkpoints to resume from; give --checkpoint-every N too")
    if "://" in out or out.startswith("memory:"):
        raise RunError(f"out={out!r} is an address; a job needs a folder on a disk that its nodes share")


def _state(job: Job) -> str:
    return f"{job.state}: {job.reason}" if job.reason else job.state


def _command_alone(argv: Sequence[str]) -> list[str]:
    """The command line without the flags of this module, and without those that the job gets anew."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_placement(parser)
    for flag in ("--out", "--config"):
        parser.add_argument(flag)
    return parser.parse_known_args(argv)[1]
