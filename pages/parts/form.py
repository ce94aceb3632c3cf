"""The form that starts training: its fields, and what happens when it is sent.

Nothing is checked here. The values go into a `TrainConfig`, whose sentence, the one that the command line prints, is
shown beside the field that it names.
"""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from amp_core import RunError, jobs
from amp_core.train.config import OPTIMIZERS, RECIPES, WORKLOADS, TrainConfig
from pages.parts import devices, library, picker, words

ADVANCED = (
    "lr",
    "optimizer",
    "accumulate",
    "clip_norm",
    "growth_interval",
    "growth_factor",
    "backoff_factor",
    "every",
    "compile",
    "deterministic",
    "fused",
)
PLAIN = ("steps", "batch_size", "seed", "device")
WHAT = [(workload.name, size) for workload in WORKLOADS.values() for size in workload.sizes]
DEFAULTS = TrainConfig()
BY_SIZE = "Empty: what suits the size of the workload."
SCALE_HELP = "Dynamic: where it starts; 65536 is 2¹⁶. Static: where it stays."


def show() -> None:
    """Draw the form, with the sentence of a refusal beside its field."""
    refused: tuple[str, str] | None = st.session_state.get("start.refused")
    with st.form("start.form"):
        left, right = st.columns([2, 3])
        with left:
            st.selectbox("Workload and size", WHAT, WHAT.index(("text-gpt", "tiny")), _what, **_keep("what"))
            _refusal(refused, "workload", "size")
        with right:
            st.pills(
                "Precision: one run for each, in this order",
                list(RECIPES),
                selection_mode="multi",
                wrap=True,
                default=["fp16"],
                format_func=lambda name: RECIPES[name].label,
                help="\n".join(f"- **{r.label}** ({r.name}): {r.description}" for r in RECIPES.values()),
                **_keep("precisions"),
            )
            _refusal(refused, "precision")
        _sizes_and_scale(refused)
        with st.expander("More settings", expanded=refused is not None and refused[0] in ADVANCED):
            _advanced(refused)
        _refusal(refused, "", "name", "runs_dir")
        with st.container(horizontal=True, vertical_alignment="center"):
            st.form_submit_button("Start", key="start.go", on_click=begin, type="primary", icon=":material/play_arrow:")
            st.caption("Trains in a process of its own; closing the browser does not stop it.", width="content")


def begin() -> None:
    """The form was sent: start a job for each precision and choose the first, or keep the refusal."""
    state = {k.removeprefix("start."): v for k, v in st.session_state.items() if str(k).startswith("start.")}
    st.session_state["start.refused"] = None
    try:
        started = [jobs.start(config, library.runs_dir(), state.get("name") or None) for config in configs(state)]
    except RunError as error:
        argument = str(error).split("=", 1)[0]
        known = argument in (*PLAIN, *ADVANCED, "workload", "size", "precision", "loss_scale", "init_scale")
        st.session_state["start.refused"] = (argument if known else "", words.sentence(error))
        return
    st.session_state["start.followed"] = [f"run/{job.name}" for job in started]
    picker.choose(f"run/{started[0].name}")


def configs(state: Mapping[str, Any]) -> list[TrainConfig]:
    """The settings of each run that the form asks for. Raises `RunError` as `TrainConfig` does."""
    workload, size = state["what"]
    settings = {name: state[name] for name in (*PLAIN, *ADVANCED)}
    fixed = state["scaling"] == "static"
    settings |= {} if fixed else {"init_scale": state["scale"]}
    chosen = state["precisions"] or [""]  # refused by TrainConfig, which says what there is to choose
    with_scaler = [name for name in chosen if name in RECIPES and RECIPES[name].scaler]
    found = []
    for precision in chosen:
        # One form serves several recipes: a fixed scale is for those that have a scaler, if any of them has.
        takes_scale = fixed and (precision in with_scaler or not with_scaler)
        loss_scale = state["scale"] if takes_scale else "dynamic"
        found.append(TrainConfig(workload=workload, size=size, precision=precision, loss_scale=loss_scale, **settings))
    return found


def _sizes_and_scale(refused: tuple[str, str] | None) -> None:
    steps, batch, seed, device, scaling, scale = st.columns([2, 2, 2, 3, 3, 2])
    with steps:
        st.number_input("Steps", value=DEFAULTS.steps, step=50, help="Optimizer steps to attempt.", **_keep("steps"))
        _refusal(refused, "steps")
    with batch:
        st.number_input(
            "Batch size",
            value=None,
            step=1,
            placeholder="default",
            help="Samples of one micro-batch; by default what suits the size.",
            **_keep("batch_size"),
        )
        _refusal(refused, "batch_size")
    with seed:
        st.number_input("Seed", value=DEFAULTS.seed, step=1, **_keep("seed"))
        _refusal(refused, "seed")
    with device:
        found, why_no_gpu = devices.available()
        names = dict(found)
        st.selectbox("Device", list(names), format_func=names.__getitem__, **_keep("device"))
        if why_no_gpu:
            st.caption(f"No CUDA: {words.escape(why_no_gpu)}.")
        _refusal(refused, "device")
    with scaling:
        st.segmented_control(
            "Loss scale",
            ["dynamic", "static"],
            default="dynamic",
            required=True,
            format_func=str.capitalize,
            help="Dynamic: halved at each overflow, doubled after many clean steps. For recipes with a scaler.",
            **_keep("scaling"),
        )
    with scale:
        st.number_input(
            "Its value",
            value=DEFAULTS.init_scale,
            format="%.6g",
            help="Dynamic: where it starts, 65536 is 2¹⁶. Static: where it stays.",
            **_keep("scale"),
        )
        _refusal(refused, "loss_scale", "init_scale")


def _advanced(refused: tuple[str, str] | None) -> None:
    columns = st.columns(4)
    fields = (
        (
            "lr",
            lambda **k: st.number_input(
                "Learning rate",
                value=None,
                format="%.3g",
                placeholder="default",
                help="By default what suits the size.",
                **k,
            ),
        ),
        ("optimizer", lambda **k: st.selectbox("Optimizer", OPTIMIZERS, **k)),
        ("accumulate", lambda **k: st.number_input("Micro-batches per step", value=DEFAULTS.accumulate, **k)),
        ("clip_norm", lambda **k: st.number_input("Clip gradient norm at", value=None, placeholder="off", **k)),
        (
            "growth_interval",
            lambda **k: st.number_input("Growth interval (steps)", value=DEFAULTS.growth_interval, **k),
        ),
        ("growth_factor", lambda **k: st.number_input("Growth factor", value=DEFAULTS.growth_factor, **k)),
        ("backoff_factor", lambda **k: st.number_input("Backoff factor", value=DEFAULTS.backoff_factor, **k)),
        ("every", lambda **k: st.number_input("Sample ranges every (steps)", value=DEFAULTS.every, **k)),
        ("compile", lambda **k: st.toggle("torch.compile", **k)),
        ("deterministic", lambda **k: st.toggle("Deterministic algorithms", **k)),
        ("fused", lambda **k: st.toggle("Fused optimizer", **k)),
    )
    for place, (name, field) in enumerate(fields):
        with columns[place % 4]:
            field(**_keep(name))
            _refusal(refused, name)
    st.text_input("Name", placeholder="made from workload, size and precision", **_keep("name"))


def _keep(name: str) -> dict[str, Any]:
    """Key of a field, whose value outlives a visit to another page."""
    return {"key": f"start.{name}", "persist_state": "session"}


def _refusal(refused: tuple[str, str] | None, *names: str) -> None:
    if refused is not None and refused[0] in names:
        st.error(words.escape(refused[1]))


def _what(choice: tuple[str, str]) -> str:
    workload, size = WORKLOADS[choice[0]], WORKLOADS[choice[0]].sizes[choice[1]]
    return f"{workload.label} · {size.name} ({words.compact(size.parameters)} parameters)"
