"""Several trainings as the tasks of one job array: one submission, and a job for each run folder.

    >>> fp32, bf16 = start_array([TrainConfig(precision=name) for name in ("fp32", "bf16")], "runs", resources=slurm)
    >>> fp32.backend_id, bf16.backend_id
    ('123_0', '123_1')

Each task is a job like any other from then on: `listing`, `find` and `stop` know it by its run folder.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from amp_core.jobs import job_file
from amp_core.jobs.backends import by_name
from amp_core.jobs.backends.scheduler import UnconfirmedError
from amp_core.jobs.new_job import TRAIN, new_folder, new_record
from amp_core.jobs.queue import Job, find
from amp_core.library import permissions
from amp_core.schema import RunError
from amp_core.settings.resources import Resources
from amp_core.settings.training import TrainConfig


def start_array(
    configs: Sequence[TrainConfig],
    runs_dir: str | os.PathLike[str],
    name: str | None = None,
    *,
    command: Sequence[str] = TRAIN,
    resources: Resources,
) -> list[Job]:
    """Make a run folder under `runs_dir` for each of `configs`, and submit their trainings as one array.

    Names of the folders and `command` are those of `start`. Raises `RunError` as `start` does, and then nothing was
    submitted and no folder is left.
    """
    runs = Path(runs_dir).resolve()
    folders: list[Path] = []
    try:
        with job_file.lock:  # so that two sessions do not both take the last places
            alive = sum(1 for _, record in job_file.every(runs) if job_file.is_alive(record))
            for config in configs:
                permissions.current().check_start(config, runs, alive, len(configs))
            for config in configs:
                folders.append(new_folder(runs, name, config))  # noqa: PERF401 - those made before a failure count
        _submit(folders, configs, command, resources)
    except UnconfirmedError:
        raise
    except RunError:
        _remove(folders)
        raise
    return [find(folder) for folder in folders]


def submit_array_in(
    out: str | os.PathLike[str],
    configs: Mapping[str, TrainConfig],
    *,
    command: Sequence[str] = TRAIN,
    resources: Resources,
) -> list[Job]:
    """Submit the trainings of `configs` as one array, each in the subfolder of `out` that its key names.

    For the command line: `start_array` is for the app, with its permissions. `array.json` in `out` lists the
    subfolders, so that `listing` finds them below a runs folder. Raises `RunError` as `start_array` does, and if `out`
    holds other jobs already.
    """
    where = Path(out).resolve()
    for file in (job_file.JOB_FILE, job_file.ARRAY_FILE):
        if (where / file).exists():
            raise RunError(f"out={str(out)!r} holds a comparison already; give a folder that does not exist yet")
    for name in configs:
        if (where / name).exists():
            raise RunError(f"out={str(out)!r} holds {name} already; give a folder that does not exist yet")
    existed, made = where.exists(), []
    try:
        for name in configs:
            (where / name).mkdir(parents=True)
            made.append(where / name)  # ours: of two commands with one `out`, the other fails here
        job_file.write_array(where, list(configs))
        _submit(made, list(configs.values()), command, resources)
    except UnconfirmedError:
        raise
    except (RunError, OSError) as error:
        _remove(made)
        if len(made) == len(configs):
            (where / job_file.ARRAY_FILE).unlink(missing_ok=True)
        if not existed and where.exists() and not any(where.iterdir()):
            where.rmdir()
        if isinstance(error, RunError):
            raise
        raise RunError(f"out={str(out)!r} cannot hold an array: {error.strerror or error}") from error
    return [find(folder) for folder in made]


def _submit(
    folders: Sequence[Path], configs: Sequence[TrainConfig], command: Sequence[str], resources: Resources
) -> None:
    try:
        records = [
            new_record(folder, config, config.to_dict(), command, "run", resources)
            for folder, config in zip(folders, configs, strict=True)
        ]
        by_name(resources.on).submit_array(folders, records)
    except OSError as error:
        folder = str(folders[0].parent)
        raise RunError(f"folder={folder!r} cannot hold an array: {error.strerror or error}") from error


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
