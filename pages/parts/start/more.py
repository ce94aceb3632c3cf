"""The folded settings: of the training, the loss scale, and what is recorded.

`TrainConfig` declares them, with their group and help; this module draws them.
"""

import streamlit as st

from amp_core.settings.setting import FOLDED
from pages.parts.start import devices, fields


def show() -> None:
    """The fields, and the sentence that refused one of them."""
    fixed = "A static loss scale never changes." if st.session_state.get("start.scaling") == "static" else None
    why_not = {
        "": None,
        "scaler": fields.no_scaler() or fixed,
        "gpus": devices.one_gpu(st.session_state.get("start.device")),
        "compiler": devices.no_compiler(),
        "nvfp4": None if fields.trains("nvfp4") else "Needs the precision NVFP4.",
    }
    for group in FOLDED:
        if group:
            st.markdown(f"**{group}**")
        with st.container(horizontal=True, vertical_alignment="bottom" if group else "top"):
            for name in fields.in_group(group):
                fields.draw(name, why_not[fields.FORMS[name].needs])
    fields.refusal(*fields.MORE)
