"""The form that starts training: its fields, and what happens when it is sent.

Nothing is checked here but that the device can hold the model. The values go into a `TrainConfig`, whose sentence, the
one that the command line prints, is shown beside the field that it names.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from amp_core import RunError, jobs
from amp_core.labels import Label, write_label
from amp_core.serving import current
from amp_core.train.config import OPTIMIZERS, RECIPES, WORKLOADS, Size, TrainConfig
from pages.parts import picker, words
from pages.parts.shelf import library
from pages.parts.start import ablation, batch, comparisons, devices, estimate

ADVANCED = (
    "lr",
    "optimizer",
    "accumulate",
    "nproc",
    "clip_norm",
    "growth_interval",
    "growth_factor",
    "backoff_factor",
    "every",
    "audit_every",
    "profile",
    "trace_ops",
    "compile",
    "deterministic",
    "fused",
    "channels_last",
)
PRESETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "against": (
        "FP32 against AMP",
        "The same training in FP32, BF16 and FP16, one after another, audited: Compare then says what each buys.",
        {"precisions": ["fp32", "bf16", "fp16"], "steps": 200, "audit_every": 100, "scaling": "dynamic"},
    ),
}
"""By name: what the button says, why one would press it, and the fields that it fills."""
OWN_SCRIPT = "def build():\n    return model, loader, lambda model, batch: loss_fn(model(batch[0]), batch[1])"
PLAIN = ("steps", "batch_size", "seed", "device")
WHAT = [(workload.name, size) for workload in WORKLOADS.values() for size in workload.sizes]
DEFAULTS = TrainConfig()
TURNS_HELP = (
    "A fair comparison, as ampscope compare makes it: the precisions train a block of steps each by turns, so that "
    "what slows the machine down slows all of them alike. Takes two or more."
)
STEPS_HELP = "Optimizer steps to attempt, skipped ones included."
PROCESSES_HELP = "So many that torchrun starts: they average their gradients (DDP), and on GPUs take one each."
OWN_BATCH = "Your own workload makes its batches itself."
BY_SIZE = "Empty: what suits the size of the workload."
FITS = "\n\nA size in GiB is about what FP32 with Adam takes at the default batch size; 16-bit autocast takes less."
PROFILE_HELP = "From the first step up to, not including, the second, e.g. 20:23. Tensor cores and Step cost show them."
AUDIT_HELP = "Every so many steps one batch is replayed in FP32, to measure what the recipe loses of its gradients."
TRACED_STEP = 2
"""The third: the first ones make what later ones find."""
TRACE_HELP = "Which operator ran in which precision, and why, in the third step. Precision map shows it."
BATCH = (
    "Trains a few steps of the workload and size below in the first precision below, with batches doubled until one "
    "does not fit, then narrows down. Each trial is a process of its own: what runs out of memory ends alone. On a CPU "
    "no trial takes more than 80 % of what is free."
)
OWN_HELP = "A function that returns model, batches and loss, in a folder that `ampscope serve --scripts` allows."
WORTH_SAYING = 2**30
"""Bytes of memory from which a size says what it needs."""
GROWTH_HELP = "Clean steps before a dynamic loss scale grows."
SCALE_HELP = "Dynamic: where it starts; 65536 is 2¹⁶. Static: where it stays."


def show() -> None:
    """Draw the form, with the sentence of a refusal beside its field."""
    refused: tuple[str, str] | None = st.session_state.get("start.refused")
    _presets()
    with st.container(border=True, key="start.form"):
        left, right = st.columns([2, 3])
        with left:
            st.selectbox(
                "Workload and size",
                WHAT,
                WHAT.index(("text-gpt", "tiny")),
                _what,
                help="\n".join(f"- **{w.label}** ({w.name}): {w.description}" for w in WORKLOADS.values()) + FITS,
                **_keep("what"),
            )
            if current().scripts:
                st.text_input("Or your own", placeholder="FILE.py:FUNCTION", help=OWN_HELP, **_keep("own"))
            _refusal(refused, "workload", "size")
        with right:
            no_tf32 = devices.no_tf32(st.session_state.get("start.device"))
            offered = [name for name in RECIPES if name != "tf32" or no_tf32 is None]
            if kept := st.session_state.get("start.precisions"):
                st.session_state["start.precisions"] = [name for name in kept if name in offered]
            st.pills(
                "Precision: one run for each, in this order",
                offered,
                selection_mode="multi",
                wrap=True,
                default=["fp16"],
                format_func=lambda name: RECIPES[name].label,
                help="\n".join(f"- **{r.label}** ({r.name}): {r.description}" for r in RECIPES.values()),
                **_keep("precisions"),
            )
            if no_tf32 is not None:
                st.caption(no_tf32)
            _refusal(refused, "precision")
        _sizes_and_scale(refused)
        with st.expander("More settings", expanded=refused is not None and refused[0] in ADVANCED, key="form.more"):
            _advanced(refused)
        _refusal(refused, "")
        if _own():
            st.caption("Estimate: what a workload of your own takes is not known before it has run.")
        else:
            estimate.show({k: st.session_state[f"start.{k}"] for k in ("what", "precisions", "device", *PLAIN)})
        with st.container(horizontal=True, vertical_alignment="center"):
            st.button("Start", key="start.go", on_click=begin, type="primary", icon=":material/play_arrow:")
            st.button(
                "Start in turns",
                key="start.turns",
                on_click=begin,
                args=(True,),
                icon=":material/compare_arrows:",
                disabled=len(st.session_state["start.precisions"]) < 2,
                help=TURNS_HELP,
            )
            st.caption("Trains in a process of its own; closing the browser does not stop it.", width="content")


def _presets() -> None:
    """Buttons that fill the form with a question people ask; the fields then say what was filled in."""
    with st.container(horizontal=True, vertical_alignment="center"):
        for name, (label, why, fields) in PRESETS.items():
            st.button(label, key=f"preset.{name}", help=why, on_click=_fill, args=(fields,))
        with st.popover("Loss-scale ablation", icon=":material/stacked_line_chart:"):
            ablation.show()
        with st.popover("Find my batch", icon=":material/expand:"):
            st.markdown(BATCH)
            st.button("Search the largest batch", key="batch.go", icon=":material/search:", on_click=_find_batch)
        st.page_link("pages/tune_recipe.py", label="Find the fastest recipe", icon=":material/tune:")
        with st.popover("My own script", icon=":material/code:"):
            st.markdown("A function that returns model, batches and loss, in a file of yours:")
            st.code(OWN_SCRIPT, language="python")
            st.code("ampscope train --workload my_task.py:build --precision bf16 --steps 500 --out runs/mine")
    if again := st.session_state.pop("start.again", None):
        st.info(f"Filled with the settings of {words.escape(again)}: change what you like.", icon=":material/replay:")


def _find_batch() -> None:
    """The search was asked for: queue it, or keep the refusal."""
    st.session_state["start.refused"] = None
    try:
        batch.begin(dataclasses.replace(configs(_state())[0], batch_size=None))
    except RunError as error:
        _refuse(error)


def _fill(fields: Mapping[str, Any]) -> None:
    st.session_state.update({f"start.{name}": value for name, value in fields.items()})


def begin(in_turns: bool = False) -> None:
    """The form was sent: start a job for each precision, or one in which they take turns, or keep the refusal."""
    state = _state()
    st.session_state["start.refused"] = None
    started: list[str] = []
    try:
        wanted = configs(state)
        if in_turns:
            st.session_state["start.comparison"] = comparisons.begin(wanted, state["name"] or None)
        for config in () if in_turns else wanted:
            job = jobs.start(config, library.runs_dir(), state["name"] or None)
            if state.get("tags") or state.get("note"):
                write_label(job.folder, Label(tags=tuple(state["tags"].split(",")), note=state["note"]))
            started.append(f"run/{job.name}")  # one by one: what was started before a failure has to be shown
    except RunError as error:
        _refuse(error)
    if started:
        st.session_state["start.followed"] = started
        picker.choose(started[0])


def _own() -> str:
    """The workload of one's own that was typed, where the server allows any."""
    return str(st.session_state.get("start.own") or "").strip() if current().scripts else ""


def _state() -> dict[str, Any]:
    """What stands in the form's fields."""
    return {k.removeprefix("start."): v for k, v in st.session_state.items() if str(k).startswith("start.")}


def _refuse(error: RunError) -> None:
    """Keep the sentence of a refusal, with the field that it names."""
    argument = str(error).split("=", 1)[0]
    known = argument in (*PLAIN, *ADVANCED, "workload", "size", "precision", "loss_scale", "init_scale")
    st.session_state["start.refused"] = (argument if known else "", words.sentence(error))


def configs(state: Mapping[str, Any]) -> list[TrainConfig]:
    """The settings of each run that the form asks for. Raises `RunError` as `TrainConfig` does."""
    workload, size = state["what"]
    own = _own()
    settings = {name: state[name] for name in (*PLAIN, *ADVANCED)}
    settings |= {"profile": state["profile"] or None, "trace_ops": TRACED_STEP if state["trace_ops"] else None}
    if own:  # a relative path is meant from the folder that the owner allowed
        workload, size = str(Path(current().scripts[0]) / own), None
        settings["batch_size"] = None
    else:
        _check_fits(WORKLOADS[workload].sizes[size], state["device"])
    if settings["nproc"] != 1 and str(state["device"]).startswith("cuda"):
        settings["device"] = "cuda"  # each process takes the GPU of its own number
    fixed = state["scaling"] == "static"
    settings |= {} if fixed else {"init_scale": state["scale"]}
    chosen = state["precisions"] or [""]  # refused by TrainConfig, which says what there is to choose
    found = []
    for precision in chosen:
        # One form serves several recipes: a fixed scale is for those that have a scaler.
        loss_scale = state["scale"] if fixed and precision in RECIPES and RECIPES[precision].scaler else "dynamic"
        found.append(TrainConfig(workload=workload, size=size, precision=precision, loss_scale=loss_scale, **settings))
    return found


def _scaled() -> str | None:
    """Why the loss scale's settings have no effect with the precisions that are chosen; None where they have."""
    if any(RECIPES[name].scaler for name in st.session_state.get("start.precisions") or ()):
        return None
    return f"No precision chosen has a scaler: {', '.join(r.label for r in RECIPES.values() if r.scaler)} have."


def _check_fits(size: Size, device: str) -> None:
    """Raises `RunError` where the device cannot even hold what no choice of batch makes smaller."""
    memory = devices.memory_bytes(device)
    if memory is not None and size.state_bytes > memory:
        raise RunError(
            f"size={size.name!r} cannot be trained on {device}: weights, gradients and Adam take "
            f"{words.size(size.state_bytes)}, and it has {words.size(memory)}; choose a smaller size"
        )


def _sizes_and_scale(refused: tuple[str, str] | None) -> None:
    found, why_no_gpu = devices.available()
    names = dict(found)
    own, no_scaler = _own(), _scaled()
    with st.container(horizontal=True):  # wraps on a narrow page
        st.number_input("Steps", value=DEFAULTS.steps, step=50, help=STEPS_HELP, width=130, **_keep("steps"))
        st.number_input(
            "Batch size",
            value=None,
            step=1,
            placeholder="default",
            disabled=bool(own),
            help=OWN_BATCH if own else BY_SIZE,
            width=130,
            **_keep("batch_size"),
        )
        st.number_input("Seed", value=DEFAULTS.seed, step=1, width=100, **_keep("seed"))
        st.selectbox("Device", list(names), format_func=names.__getitem__, width=180, **_keep("device"))
        st.segmented_control(
            "Loss scale",
            ["dynamic", "static"],
            default="dynamic",
            required=True,
            format_func=str.capitalize,
            disabled=no_scaler is not None,
            help=no_scaler or "Dynamic: halved at each overflow, doubled after many clean steps.",
            **_keep("scaling"),
        )
        st.number_input(
            "Its value",
            value=DEFAULTS.init_scale,
            format="%.6g",
            disabled=no_scaler is not None,
            help=no_scaler or SCALE_HELP,
            width=130,
            **_keep("scale"),
        )
    _refusal(refused, *PLAIN, "loss_scale", "init_scale")
    if why_no_gpu:
        st.caption(f"No CUDA: {words.escape(why_no_gpu)}.")


def _advanced(refused: tuple[str, str] | None) -> None:
    no_scaler, one_gpu = _scaled(), devices.one_gpu(st.session_state.get("start.device"))
    fixed = "A static loss scale never moves." if st.session_state.get("start.scaling") == "static" else None
    still = no_scaler or fixed
    moves = {"disabled": still is not None}
    numbers = (
        ("lr", "Learning rate", {"value": None, "format": "%.3g", "placeholder": "default", "help": BY_SIZE}),
        ("accumulate", "Micro-batches per step", {}),
        ("nproc", "Processes", {"step": 1, "disabled": one_gpu is not None, "help": one_gpu or PROCESSES_HELP}),
        ("clip_norm", "Clip gradient norm at", {"value": None, "placeholder": "off"}),
        ("growth_interval", "Growth interval, steps", moves | {"help": still or GROWTH_HELP}),
        ("growth_factor", "Growth factor", moves | {"help": still}),
        ("backoff_factor", "Backoff factor", moves | {"help": still}),
        ("every", "Sample ranges every", {"help": "Number ranges are recorded every so many steps."}),
        ("audit_every", "Audit every", {"value": None, "placeholder": "off", "step": 50, "help": AUDIT_HELP}),
    )
    with st.container(horizontal=True, vertical_alignment="bottom"):
        for name, label, options in numbers:
            st.number_input(label, **{"value": getattr(DEFAULTS, name), "width": 190} | options | _keep(name))
        st.text_input("Profile steps", "20:23", placeholder="none", width=190, help=PROFILE_HELP, **_keep("profile"))
        st.selectbox("Optimizer", OPTIMIZERS, width=190, **_keep("optimizer"))
        st.text_input("Name", placeholder="made from the settings", width=190, **_keep("name"))
        st.text_input("Tags", placeholder="with commas between", width=190, **_keep("tags"))
        st.text_input("Note", placeholder="what this run is for", width=390, max_chars=2000, **_keep("note"))
    with st.container(horizontal=True):
        st.toggle("Trace operators", value=True, help=TRACE_HELP, **_keep("trace_ops"))
        why_not = devices.no_compiler()
        st.toggle("torch.compile", disabled=why_not is not None, help=why_not, **_keep("compile"))
        st.toggle("Deterministic algorithms", **_keep("deterministic"))
        st.toggle("Fused optimizer", **_keep("fused"))
        st.toggle("Channels last", help="For convolutions, which tensor cores read so.", **_keep("channels_last"))
    _refusal(refused, *ADVANCED)


def _keep(name: str) -> dict[str, Any]:
    """Key of a field, whose value outlives a visit to another page."""
    return {"key": f"start.{name}", "persist_state": "session"}


def _refusal(refused: tuple[str, str] | None, *names: str) -> None:
    if refused is not None and refused[0] in names:
        st.error(words.escape(refused[1]))


def _what(choice: tuple[str, str]) -> str:
    workload, size = WORKLOADS[choice[0]], WORKLOADS[choice[0]].sizes[choice[1]]
    facts = f"{words.compact(size.parameters)} parameters"
    needed = size.memory_bytes()
    if needed >= WORTH_SAYING:
        most = max((devices.memory_bytes(name) or 0 for name, _ in devices.available()[0]), default=0)
        if 0 < most < needed:
            facts = f"{words.compact(size.parameters)}; needs {words.size(needed)} of {words.size(most)}"
        else:
            facts += f", {words.size(needed)}"
    return f"{workload.label} · {size.name} ({facts})"
