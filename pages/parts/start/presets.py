"""Common tasks as buttons above the form: some fill it, some queue runs at once."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import streamlit as st

from amp_core import RunError
from amp_core.library.permissions import current
from pages.parts import callbacks, words
from pages.parts.start import ablation, asked, batch, fields, places

FILLED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "against": (
        "FP32 against AMP",
        "Fills the form: the same training in FP32, BF16 and FP16, one after another, audited. Compare then shows "
        "the benefit of each.",
        {"precisions": ["fp32", "bf16", "fp16"], "steps": 200, "audit_every": 100, "scaling": "dynamic"},
    ),
}
"""By name: the label of the button, its purpose, and the fields that it fills."""
OWN_SCRIPT = """\
def build():
    def loss(model, batch):
        x, y = batch
        return loss_fn(model(x), y)

    return model, loader, loss"""
OWN_COMMAND = "ampscope train --workload my_task.py:build \\\n    --precision bf16 --steps 500 --out runs/mine"
OWN_HERE = "Type its name into **Or your own** in the form below."
OWN_NOT_HERE = "This form can start it if the server has a folder for scripts: `ampscope serve --scripts FOLDER`."
BATCH = (
    "Trains a few steps of the workload and size below in the first precision below, with batches doubled until one "
    "does not fit, then narrows down. Each trial is a process of its own: running out of memory ends only that one. On "
    f"a CPU no trial takes more than 80 % of what is free. One that takes more than {batch.TRIAL_S} s ends the search."
)


def show() -> None:
    """The buttons, and which run's settings fill the form."""
    with st.container(horizontal=True, vertical_alignment="center"):
        for name, (label, why, filled) in FILLED.items():
            icon = ":material/balance:"
            st.button(label, key=f"preset.{name}", help=why, icon=icon, on_click=_fill, args=(label, filled))
        with st.popover("Loss-scale ablation", icon=":material/stacked_line_chart:"):
            ablation.show()
        with st.popover("Largest batch", icon=":material/expand:"):
            st.markdown(BATCH)
            st.button("Search the largest batch", key="batch.go", icon=":material/search:", on_click=_find_batch)
        with st.popover("My own script", icon=":material/code:"):
            st.markdown("A function in a file of yours that returns model, batches and loss:")
            st.code(OWN_SCRIPT, language="python")
            st.code(OWN_COMMAND, language="bash")
            st.markdown(OWN_HERE if current().scripts else OWN_NOT_HERE)
        st.page_link("pages/tune_recipe.py", label="Find the fastest recipe", icon=":material/tune:")
    if again := st.session_state.pop("start.again", None):
        name, left_out = again
        missing = f" The form has no {', '.join(left_out)}: the run's are left out." if left_out else ""
        note = f"Filled with the settings of {name}: change what you like.{missing}"
        st.info(words.escape(note), icon=":material/replay:")


@callbacks.uninterrupted
def _fill(label: str, filled: Mapping[str, Any]) -> None:
    for name, value in filled.items():
        callbacks.put(f"start.{name}", value)
    callbacks.toast(f"{label}: filled in. Check the settings and press Start.", ":material/check:")


@callbacks.uninterrupted
def _find_batch() -> None:
    """Callback: queue the search, or keep the refusal."""
    fields.accept()
    try:
        state = callbacks.do(fields.state)
        config = dataclasses.replace(callbacks.do(asked.configs, state)[0], batch_size=None)
        name = batch.begin(config, places.resources(state))
        callbacks.toast(f"{words.escape(name)} is in the queue below.", ":material/expand:")
    except RunError as error:
        fields.refuse(error)
