"""Turn the form's fields into settings of trainings, and start them.

The only check here is whether the device can hold the model: `TrainConfig` refuses all else, with the sentence that the
command line prints.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amp_core import RunError, jobs
from amp_core.cli.placement import flags_of
from amp_core.cli.settings import SETTINGS, flags
from amp_core.hardware.device_types import is_accelerator, type_of
from amp_core.library.labels import Label, write_label
from amp_core.library.permissions import current
from amp_core.settings.combinations import TAKEN_BY, taken
from amp_core.settings.training import WORKLOADS, Size, TrainConfig
from pages.parts import callbacks, picker, words
from pages.parts.library import run_list
from pages.parts.start import comparisons, devices, fields, places


def configs(state: Mapping[str, Any]) -> list[TrainConfig]:
    """The settings of each run that the form describes. Raises `RunError` as `TrainConfig` does."""
    where = places.resources(state)
    workload, size = state["what"]
    settings = {name: fields.from_field(name, state[name]) for name in fields.FORMS}
    if own := fields.own_workload():  # a path relative to the folder that the owner allowed
        workload, size = str(Path(current().scripts[0]) / own), None
        settings["batch_size"] = None
    elif where.on == "local":
        _check_fits(WORKLOADS[workload].sizes[size], state["device"])
    if settings["nproc"] != 1 and is_accelerator(state["device"]):
        settings["device"] = type_of(state["device"])  # each process takes the GPU of its own number
    settings = places.adapted(settings, where)
    fixed = state["scaling"] == "static"
    settings |= {"loss_scale" if fixed else "init_scale": state["scale"]}
    chosen = state["precisions"] or [""]  # "" is refused by TrainConfig, which lists the choices
    names = []
    for precision in chosen:
        names.append(TrainConfig(workload=workload, size=size, precision=precision, **taken(settings, precision)))
        if state["profile"] != fields.initial("profile"):  # a training that ends sooner is not profiled
            names[-1].check_profile()
    return names


@callbacks.uninterrupted
def begin(in_turns: bool = False) -> None:
    """Callback of the form: start a job for each precision, on Slurm as the tasks of an array, or one job that
    interleaves them, or keep the refusal."""
    state = callbacks.do(fields.state)
    fields.accept()
    started: list[str] = []
    try:
        wanted, where = callbacks.do(configs, state), places.resources(state)
        if in_turns:
            name = comparisons.begin(wanted, state["name"] or None, where)
            callbacks.put("start.comparison", name)
            for config in wanted:
                label(run_list.runs_dir() / name / config.precision, state)
            callbacks.toast(f"{words.escape(name)} is in the queue below.", ":material/compare_arrows:")
        elif where.on == "slurm" and len(wanted) > 1:  # all or none of them are submitted
            for job in jobs.start_array(wanted, run_list.runs_dir(), state["name"] or None, resources=where):
                label(job.folder, state)
                started.append(f"run/{job.name}")
        else:
            for config in wanted:
                job = jobs.start(config, run_list.runs_dir(), state["name"] or None, resources=where)
                label(job.folder, state)
                started.append(f"run/{job.name}")  # one by one: jobs started before a failure are shown
    except RunError as error:
        fields.refuse(error)
    if started:
        callbacks.put("start.followed", started)
        picker.choose(started[0])


def label(folder: Path, state: Mapping[str, Any]) -> None:
    """Store the tags and the note that were typed for a run, which may not have begun."""
    if state.get("tags") or state.get("note"):
        write_label(folder, Label(tags=tuple(state["tags"].split(",")), note=state["note"]))


def commands(state: Mapping[str, Any]) -> str:
    """The same trainings as commands, one per line; empty if they would be refused."""
    try:
        wanted, where = configs(state), places.resources(state)
    except RunError:  # shown on Start
        return ""
    name, elsewhere = jobs.folder_name(state.get("name") or ""), flags_of(where)
    each = []
    for config in wanted:
        base = name or f"{config.task}-{config.precision}"
        out = Path(run_list.runs_dir(), base if not name or len(wanted) == 1 else f"{name}-{config.precision}")
        each.append(shlex.join(["ampscope", "train", *flags(config), *elsewhere, "--out", str(out)]))
    if len(wanted) == 1 or wanted[0].nproc != 1:
        return "\n".join(each)
    which = ["--precisions", ",".join(config.precision for config in wanted)]
    given = flags(wanted[0], [name for name in SETTINGS if name not in ("precision", *TAKEN_BY)])
    given += comparisons.flags_of_some(wanted)
    out = Path(run_list.runs_dir(), name or f"compare-{wanted[0].task}")
    together = ["ampscope", "compare", *which, *given, *elsewhere, "--out", str(out)]
    if where.on == "slurm":
        each = ["# one array:", shlex.join([*together, "--array"])]
    # Only single trainings and the tasks of an array take these.
    alone = where.requeue or where.nodes > 1
    return "\n".join(each if alone else [*each, "# or interleaved:", shlex.join(together)])


def _check_fits(size: Size, device: str) -> None:
    """Raises `RunError` if the device cannot hold what no smaller batch would shrink."""
    memory = devices.memory_bytes(device)
    if memory is not None and size.state_bytes > memory:
        raise RunError(
            f"size={size.name!r} cannot be trained on {device}: weights, gradients and Adam take "
            f"{words.size(size.state_bytes)}, and it has {words.size(memory)}; choose a smaller size"
        )
