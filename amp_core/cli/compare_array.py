"""`ampscope compare --array`: the runs of a comparison as the tasks of a Slurm array, and their comparison afterwards.

    ampscope compare --workload text-gpt --seeds 3 --out runs/cmp --on slurm --gpus 1 --array
    ampscope compare --out runs/cmp

The second command trains nothing. It prints what `compare` prints after a training, once all tasks have ended.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from amp_core.cli.comparison_text import show
from amp_core.cli.placement import placement, submit_array
from amp_core.cli.settings import settings
from amp_core.jobs import find, job_file
from amp_core.schema import RunError
from amp_core.settings.resources import Resources
from amp_core.settings.training import TrainConfig
from amp_core.store.run import load_run

TRAINING_ONLY = ("precisions", "seeds", "block")
"""Arguments of a comparison that apply to its training, beside the settings."""


def holds_array(out: Path) -> bool:
    """Whether the subfolders of `out` are the runs of an array."""
    return bool(job_file.array_in(out))


def train_array(arguments: argparse.Namespace, configs: Mapping[str, TrainConfig], resources: Resources) -> int:
    """Submit the runs, by the names of their folders. Returns 0."""
    if resources.on != "slurm":
        raise RunError(
            f"array=True applies to on='slurm', not to on={resources.on!r}; leave it out, or give --on slurm"
        )
    if arguments.json:
        raise RunError("json=True applies to runs that have ended; leave it out, and give it with --out alone later")
    if arguments.block is not None:
        raise RunError(
            f"block={arguments.block!r} applies to interleaved runs, and the tasks of an array are not; leave it out"
        )
    return submit_array(arguments.out, configs, resources)


def compare_array(arguments: argparse.Namespace, out: Path) -> int:
    """Compare the runs of the array in `out`; 1 if one of them did not finish. Raises `RunError` if one has not ended,
    and for arguments of a training."""
    placement(arguments)
    named = {name: getattr(arguments, name) for name in TRAINING_ONLY} | settings(arguments)
    named |= {"on": arguments.on if arguments.on != "local" else None, "array": arguments.array or None}
    for name, value in named.items():
        if value is not None:
            raise RunError(
                f"{name}={value!r} applies to training, and out={str(out)!r} holds the runs of an array, which are "
                "compared; leave it out, or give a folder that does not exist yet"
            )
    names = job_file.array_in(out)
    jobs = [find(out / name) for name in names if (out / name / job_file.JOB_FILE).exists()]
    if alive := [f"{job.name} (job {job.backend_id}, {job.state})" for job in jobs if job.alive]:
        raise RunError(
            f"out={str(out)!r} holds runs that have not ended: {', '.join(alive)}; compare them when they have"
        )
    unfinished = [f"{job.name} {job.state}: {job.reason}" for job in jobs if job.state != "finished"]
    unfinished += [f"{name} was removed" for name in names if not (out / name).exists()]
    for line in unfinished:
        print(line, file=sys.stderr)
    runs = [load_run(out / name) for name in names if (out / name / "run.json").exists()]
    if runs:
        show(runs, as_json=arguments.json)
    return 1 if unfinished else 0
