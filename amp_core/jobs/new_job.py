"""The folder and the record of a job that is to be submitted.

>>> folder = new_folder(Path("runs"), None, TrainConfig(workload="text-gpt", precision="fp16"))
>>> record = new_record(folder, config, config.to_dict(), TRAIN, "run", resources)
"""

import itertools
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amp_core.jobs import job_file
from amp_core.jobs.backends import by_name
from amp_core.schema import RunError
from amp_core.settings.resources import Resources
from amp_core.settings.training import TrainConfig

LOCAL = Resources()

TRAIN = (sys.executable, "-m", "amp_core", "train")
"""The command of a training."""


def new_folder(runs_dir: Path, name: str | None, config: TrainConfig) -> Path:
    """Make the folder of a new run; see `start` for its name. Raises `RunError` if it cannot be made."""
    given = folder_name(name) if name is not None else ""
    base = given or folder_name(f"{config.task}-{config.precision}")
    numbers = itertools.count(2 if given else 1)
    folder = runs_dir / (given or f"{base}-{next(numbers)}")
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                folder.mkdir()
                return folder
            except FileExistsError:  # it exists; another session may just have created it
                folder = runs_dir / f"{base}-{next(numbers)}"
    except OSError as error:
        raise RunError(f"runs_dir={str(runs_dir)!r} cannot be written: {error.strerror or error}") from error


def folder_name(name: str) -> str:
    """`name` as `start` uses it: letters, digits, dot, dash and underscore, not beginning with a dot or dash."""
    return re.sub(r"[^\w.]+", "-", name).strip(".-_")[:60].rstrip(".-_")


def new_record(
    folder: Path,
    config: TrainConfig,
    values: Mapping[str, Any],
    command: Sequence[str],
    makes: str,
    resources: Resources,
) -> job_file.Record:
    """The record of a job that is to be submitted. Writes `values`, the settings of its command, into the folder."""
    config_file = folder / job_file.CONFIG_FILE
    config_file.write_text(json.dumps(values, indent=1), encoding="utf-8")
    return job_file.Record(
        argv=(*command, "--config", str(config_file), "--out", str(folder)),
        device=by_name(resources.on).device_of(config, resources),
        created_ns=time.time_ns(),
        config=config.to_dict(),
        makes=makes,
        backend=resources.on,
        resources={} if resources == LOCAL else resources.to_dict(),
    )
