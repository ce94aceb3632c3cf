"""Run a training again: its settings become those of the form on Start a run, where they can be changed.

if again.possible(entry):
    again.fill(entry)
    st.switch_page("pages/start_run.py")
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from amp_core.library.permissions import current
from amp_core.settings.training import RECIPES, WORKLOADS, TrainConfig
from pages.parts.library.run_list import Entry
from pages.parts.start import devices, fields


def possible(entry: Entry) -> bool:
    """Whether the form has the run's recipe, and its workload is built in or a script that the form could start."""
    config = entry.config or {}
    workload = WORKLOADS.get(str(config.get("workload")))
    known = config.get("size") in workload.sizes if workload is not None else bool(own_script(config))
    return known and config.get("precision") in RECIPES


def own_script(config: Mapping[str, Any]) -> str:
    """The script of a recorded configuration, as typed into the form; empty for a built-in workload, and if the server
    does not allow the script."""
    file, colon, function = str(config.get("workload") or "").rpartition(":")
    folder = next(iter(current().scripts), None)
    if not colon or folder is None or not Path(file).is_relative_to(folder):
        return ""
    return f"{Path(file).relative_to(folder)}:{function}"


def fill(entry: Entry, **changes: Any) -> None:
    """Put the run's settings with `changes` into the form. Call it in a pass that does not draw the form before."""
    for name, value in settings(dict(entry.config or {}) | changes).items():
        st.session_state[f"start.{name}"] = value
    st.session_state["start.again"] = (entry.name, left_out(entry.config or {}))


def left_out(config: Mapping[str, Any]) -> list[str]:
    """Names of the recorded settings that are not the default and have no field in the form."""
    default, elsewhere = TrainConfig().to_dict(), {"workload", "size", "precision", *fields.SCALE, *fields.FORMS}
    other = {name: value for name, value in default.items() if name not in elsewhere}
    return [name for name, value in other.items() if name in config and (config[name] or None) != (value or None)]


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The form's fields for a recorded configuration; settings that it lacks keep the form's defaults."""
    default = TrainConfig()
    values = {name: fields.to_field(name, config.get(name, getattr(default, name))) for name in fields.FORMS}
    device = str(config.get("device") or "")
    static = isinstance(config.get("loss_scale"), int | float)
    script = own_script(config)
    return values | {
        "own": script,
        "what": (default.workload, default.resolved().size) if script else (config["workload"], config["size"]),
        "precisions": [config["precision"]],
        "device": device if device in dict(devices.available()[0]) else devices.available()[0][0][0],
        "scaling": "static" if static else "dynamic",
        "scale": float(config["loss_scale"] if static else config.get("init_scale") or default.init_scale),
        "name": "",
    }
