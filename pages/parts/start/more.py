"""The settings that are folded away at first: of the training, of the loss scale, of what is recorded besides."""

from typing import Any

import streamlit as st

from amp_core.train.config import OPTIMIZERS
from pages.parts.start import devices, fields
from pages.parts.start.fields import DEFAULTS, keep

LR_HELP = "Empty: what suits the size of the workload."
PARTS_HELP = "So many batches are run forward and backward before the optimizer steps once on their summed gradients."
PROCESSES_HELP = "So many that torchrun starts: they average their gradients (DDP), and on GPUs take one each."
CLIP_HELP = "Unscaled gradients are shrunk to this 2-norm, all together, where theirs is larger."
GROWTH_HELP = "Clean steps before a dynamic loss scale grows."
UP_HELP = "By what the loss scale is multiplied when it grows."
DOWN_HELP = "By what the loss scale is multiplied after a step that overflowed."
EVERY_HELP = "Number ranges are recorded every so many steps."
AUDIT_HELP = "Every so many steps one batch is replayed in FP32, to measure what the recipe loses of its gradients."
PROFILE_HELP = "From the first step up to, not including, the second, e.g. 20:23. Tensor cores and Step cost show them."
TRACE_HELP = "Which operator ran in which precision, and why, in the third step. Precision map shows it."
COMPILE_HELP = "The first steps take much longer: the model is compiled then."
DETERMINISTIC_HELP = "The same run again gives the same bits; some operators are slower so, and a few are refused."
FUSED_HELP = "One kernel updates all weights."
CHANNELS_HELP = "For convolutions, which tensor cores read so."
PROFILED = "20:23"
"""What is profiled unless something else is typed; of a training that ends sooner nothing is."""
WIDTH = 170
"""Of a field in pixels: four in a row on a page of usual width, two on a narrow one."""


def show() -> None:
    """The fields, and the sentence that refused one of them."""
    no_scaler, one_gpu = fields.no_scaler(), devices.one_gpu(st.session_state.get("start.device"))
    fixed = "A static loss scale never moves." if st.session_state.get("start.scaling") == "static" else None
    still = no_scaler or fixed
    moves = {"disabled": still is not None}
    with _group("Training"):
        _number("lr", "Learning rate", LR_HELP, value=None, format="%.3g", placeholder="default")
        st.selectbox("Optimizer", OPTIMIZERS, width=WIDTH, **keep("optimizer"))
        _number("accumulate", "Batches per step", PARTS_HELP)
        _number("clip_norm", "Clip gradient norm at", CLIP_HELP, value=None, placeholder="off")
        _number("nproc", "Processes", one_gpu or PROCESSES_HELP, step=1, disabled=one_gpu is not None)
    why_not = devices.no_compiler()
    with st.container(horizontal=True):
        st.toggle("torch.compile", disabled=why_not is not None, help=why_not or COMPILE_HELP, **keep("compile"))
        st.toggle("Deterministic algorithms", help=DETERMINISTIC_HELP, **keep("deterministic"))
        st.toggle("Fused optimizer", help=FUSED_HELP, **keep("fused"))
        st.toggle("Channels last", help=CHANNELS_HELP, **keep("channels_last"))
    with _group("Dynamic loss scale"):
        _number("growth_interval", "Growth interval (steps)", still or GROWTH_HELP, **moves)
        _number("growth_factor", "Growth factor", still or UP_HELP, format="%.4g", **moves)
        _number("backoff_factor", "Backoff factor", still or DOWN_HELP, format="%.4g", **moves)
    with _group("What is recorded besides"):
        _number("every", "Ranges every (steps)", EVERY_HELP)
        _number("audit_every", "Audit every (steps)", AUDIT_HELP, value=None, placeholder="off", step=50)
        st.text_input("Profile steps", PROFILED, placeholder="none", width=WIDTH, help=PROFILE_HELP, **keep("profile"))
        st.toggle("Trace operators", value=True, help=TRACE_HELP, **keep("trace_ops"))
    fields.refusal(*fields.MORE)


def _group(title: str) -> Any:
    """A heading, and the row of fields below it."""
    st.markdown(f"**{title}**")
    return st.container(horizontal=True, vertical_alignment="bottom")


def _number(name: str, label: str, help_: str | None, **options: Any) -> None:
    st.number_input(label, help=help_, **{"value": getattr(DEFAULTS, name), "width": WIDTH} | options | keep(name))
