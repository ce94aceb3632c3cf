"""Where a training runs: this machine, or a scheduler's nodes. The fields of Start a run and of Tune.

places.show("start")                    # the fields, with the sentence of a refusal
places.resources(state)                 # what they request; raises RunError
"""

from collections.abc import Callable, Mapping
from typing import Any

import streamlit as st

from amp_core import RunError
from amp_core.jobs.backends import BACKENDS, Devices
from amp_core.settings.resources import SETUP_VARIABLE, Resources, setup_of_environment, takes
from pages.parts import words

FIELDS = ("on", "partition", "gpus", "nodes", "time", "account", "requeue")
"""Fields, named as those of `Resources`."""
SLURM_ONLY = "For Slurm only."
TIME_HELP = "Minutes, H:MM:SS or D-HH:MM:SS. Empty: that of the partition; with Ray, none."
REQUEUE_HELP = (
    "After preemption, a node failure or near its time limit, the job is queued again and resumes from its checkpoint. "
    "The training then saves one in every 5 % of its steps."
)


@st.cache_data(ttl=60, show_spinner=False)
def available() -> dict[str, str | None]:
    """By place, why no job can be submitted to it from here; None if one can."""
    reasons: dict[str, str | None] = {}
    for name, backend in BACKENDS.items():
        try:
            backend.check_available()
        except RunError as error:
            reasons[name] = str(error)
        else:
            reasons[name] = None
    return reasons


@st.cache_data(ttl=60, show_spinner=False)
def _devices(name: str) -> tuple[Devices | None, str]:
    """What a place offers; None, and why, if it does not answer."""
    try:
        return BACKENDS[name].devices(), ""
    except RunError as error:
        return None, str(error)


def show(prefix: str, refused: tuple[str, str] | None, **keep: Any) -> None:
    """The fields, keyed `<prefix>.<name>`; `refused` is the argument and the sentence of a refusal."""
    reasons = available()
    offered = [name for name, why in reasons.items() if why is None]
    refused_field = refused if refused is not None and refused[0] in FIELDS else None
    with st.expander("Where it runs", expanded=refused_field is not None, key=f"{prefix}.where"):
        if len(offered) == 1:
            missing = "; ".join(words.sentence(why).rstrip(".") for name, why in reasons.items() if why is not None)
            st.caption(f"On this machine. {words.escape(missing)}.")
        else:
            _fields(prefix, offered, keep)
        if refused_field is not None:
            st.error(words.escape(refused_field[1]))


def _fields(prefix: str, offered: list[str], keep: Mapping[str, Any]) -> None:
    def key(name: str) -> dict[str, Any]:
        return {"key": f"{prefix}.{name}", **keep}

    in_form = not keep  # a form tells `on` with its submission alone, so it shows the fields of every place

    with st.container(horizontal=True, vertical_alignment="bottom"):
        on = st.selectbox("Runs on", offered, format_func=lambda name: BACKENDS[name].label, width=170, **key("on"))
        if in_form or on != "local":
            st.number_input("GPUs per node", 0, value=None, placeholder="default", width=130, **key("gpus"))
            st.text_input("Time limit", placeholder="default", width=130, help=TIME_HELP, **key("time"))
        if on == "slurm" or (in_form and "slurm" in offered):
            _slurm_fields(key)
    if not in_form and on == "local":
        return
    lines = words.plural(len(setup_of_environment()), "set-up line")
    st.caption(
        f"The runs folder must be on a disk that all nodes share; the node decides on the device. {lines} from "
        f"${SETUP_VARIABLE}."
    )


def _slurm_fields(key: Callable[[str], dict[str, Any]]) -> None:
    devices, why = _devices("slurm")
    partitions = dict(devices.offered) if devices is not None else {}
    st.selectbox(
        "Partition",
        [None, *partitions],
        format_func=lambda name: partitions.get(name, "Slurm's default"),
        width=260,
        help=SLURM_ONLY,
        **key("partition"),
    )
    st.number_input("Nodes", 1, value=1, width=110, help=SLURM_ONLY, **key("nodes"))
    st.text_input("Account", placeholder="default", width=150, help=SLURM_ONLY, **key("account"))
    st.toggle("Requeue", help=REQUEUE_HELP, **key("requeue"))
    if why:
        st.caption(words.escape(words.sentence(why)))


def resources(state: Mapping[str, Any]) -> Resources:
    """What the fields request; `state` holds their values by name. Raises `RunError` as `Resources` does."""
    on = state.get("on") or "local"
    if on == "local":
        return Resources()
    taken = takes(on)
    given = {name: state[name] for name in FIELDS[1:] if name in taken and state.get(name) not in (None, "", False)}
    return Resources(on=on, setup=setup_of_environment(), **given)


def adapted(settings: dict[str, Any], where: Resources) -> dict[str, Any]:
    """The settings of a training elsewhere: its device is not one of this machine, and requeueing needs checkpoints."""
    if where.on == "local":
        return settings
    every = {"checkpoint_every": max(1, int(settings["steps"]) // 20)} if where.requeue else {}
    return settings | {"device": "auto"} | every
