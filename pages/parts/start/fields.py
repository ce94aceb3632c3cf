"""What the form of Start a run consists of, by the name of each field: `start.<name>` in the session's state.

fields.state()["steps"]                         # what stands in a field
st.number_input("Steps", **fields.keep("steps"))
fields.refusal("steps", "seed")                 # the sentence that refused one of them
"""

from typing import Any

import streamlit as st

from amp_core import RunError
from amp_core.serving import current
from amp_core.train.config import RECIPES, TrainConfig
from pages.parts import words

PLAIN = ("steps", "batch_size", "seed", "device")
SCALE = ("loss_scale", "init_scale")
MORE = (
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
"""Those that are folded away at first."""
DEFAULTS = TrainConfig()


def keep(name: str) -> dict[str, Any]:
    """Key of a field, whose value outlives a visit to another page."""
    return {"key": f"start.{name}", "persist_state": "session"}


def state() -> dict[str, Any]:
    """What stands in the form's fields."""
    return {k.removeprefix("start."): v for k, v in st.session_state.items() if str(k).startswith("start.")}


def own() -> str:
    """The workload of one's own that was typed, where the server allows any."""
    return str(st.session_state.get("start.own") or "").strip() if current().scripts else ""


def no_scaler() -> str | None:
    """Why the loss scale's settings have no effect with the precisions that are chosen; None where they have."""
    if any(RECIPES[name].scaler for name in st.session_state.get("start.precisions") or ()):
        return None
    return f"No precision chosen has a scaler: {', '.join(r.label for r in RECIPES.values() if r.scaler)} have."


def refuse(error: RunError) -> None:
    """Keep the sentence of a refusal, with the field that it names."""
    argument = str(error).split("=", 1)[0]
    known = argument in (*PLAIN, *SCALE, *MORE, "workload", "size", "precision")
    st.session_state["start.refused"] = (argument if known else "", words.sentence(error))


def accept() -> None:
    """Nothing is refused, for now."""
    st.session_state["start.refused"] = None


def refused(*names: str) -> bool:
    """Whether one of those fields was refused."""
    told: tuple[str, str] | None = st.session_state.get("start.refused")
    return told is not None and told[0] in names


def refusal(*names: str) -> None:
    """The sentence that refused one of those fields; an empty name stands for none of them."""
    if refused(*names):
        st.error(words.escape(st.session_state["start.refused"][1]))
