"""The settings that a resumed training takes from the run: those that were not given again.

    >>> recorded_settings(Path("runs/a"))["precision"]
    'fp16'
    >>> check_same(TrainConfig(precision="bf16"), Path("runs/a"))
    Traceback (most recent call last):
    amp_core.schema.RunError: precision='bf16' is not what the run in 'runs/a' trains with, 'fp16'; leave it out

No torch, so that `ampscope train` can read them before it starts other processes.
"""

import dataclasses
from pathlib import Path
from typing import Any

from amp_core.hardware.device_types import is_accelerator, type_of
from amp_core.schema import RunError
from amp_core.settings.setting import settings_of
from amp_core.settings.training import TrainConfig
from amp_core.store.run import load_run

MAY_CHANGE = frozenset(name for name, one in settings_of(TrainConfig).items() if one.may_change)
"""Settings that do not change the training itself: how long, on what device, and what is recorded."""


def recorded_settings(folder: Path) -> dict[str, Any]:
    """The settings of the run in `folder`; empty if there is none, or `train` did not write it."""
    if not (folder / "run.json").is_file():
        return {}
    config = load_run(folder).head.config
    if config.get("source") != "train":
        return {}
    values = {field.name: config[field.name] for field in dataclasses.fields(TrainConfig) if field.name in config}
    if values.get("nproc", 1) != 1 and is_accelerator(values.get("device")):
        values["device"] = type_of(values["device"])  # the recorded device is that of the first process
    return values


def check_same(config: TrainConfig, folder: Path) -> None:
    """Raise `RunError` if a setting differs from the run in `folder` and would change the training."""
    recorded = recorded_settings(folder)
    if not recorded:
        return
    before, now = TrainConfig.from_dict(recorded).resolved(), config.resolved()
    for name in recorded:
        was, given = getattr(before, name), getattr(now, name)
        if name not in MAY_CHANGE and was != given:
            raise RunError(
                f"{name}={given!r} differs from the setting of the run in {str(folder)!r}, {was!r}; leave it out"
            )


def check_more(steps: int, made: int) -> None:
    """Raise `RunError` if a run that has made `made` steps has none left to make."""
    if steps <= made:
        raise RunError(f"steps={steps} is the total number of steps, and the run has already made {made}; give more")


def repeated(made: int, recorded: int) -> str | None:
    """A sentence on the steps recorded after the checkpoint at `made` steps; None if there are none."""
    if recorded <= made:
        return None
    return (
        f"steps {made} to {recorded - 1} were recorded after the last checkpoint, but their weights were lost with "
        f"the process: their rows stay, and the steps are trained again, from step {recorded} on"
    )
