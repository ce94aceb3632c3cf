"""The loss-scale ablation of Micikevicius et al. 2017 as one button: the same training four times, scaled four ways.

FP32 is the baseline; FP16 runs without a scaler, with a static scale of 128 and with a dynamic one. Everything else,
the seed included, is the same, so that the four loss curves can be laid over each other.
"""

import time
from typing import Any

import streamlit as st

from amp_core import RunError, jobs
from amp_core.settings.training import TrainConfig
from pages.parts import address, callbacks, picker
from pages.parts.library import run_list
from pages.parts.start import devices, fields, places

WORKLOAD, SIZE = "text-lstm", "logistic"
STEPS = 120
FOUR: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "fp16-unscaled": {"precision": "fp16-unscaled"},
    "fp16-static-128": {"precision": "fp16", "loss_scale": 128.0},
    "fp16-dynamic": {"precision": "fp16"},
}
"""What each run is called, and what it does differently."""
DOUBLE_CLICK_S = 2.0
"""A second click within this time after the four were queued belongs to a double click."""


def show() -> None:
    """The description of the preset, and its button."""
    st.markdown(
        f"Trains an LSTM on bytes ({WORKLOAD}, size {SIZE}) four times with one seed: in FP32, in FP16 without "
        f"scaling, with a static scale of 128, and with a dynamic one, {STEPS} steps each: a minute or two on "
        "a CPU. As in the paper (Micikevicius et al. 2017, “Mixed Precision Training”), it fails to train without "
        "scaling and follows FP32 with either scale: its loss is a mean over so many yes-or-no answers that their "
        "gradients are below FP16's smallest number. Number ranges shows them."
    )
    with st.container(horizontal=True, vertical_alignment="center"):
        st.button("Queue the four runs", key="ablation.go", icon=":material/stacked_line_chart:", on_click=begin)
        if keys := queued():
            st.page_link(
                "pages/compare_runs.py",
                label="Compare the latest four",
                icon=":material/compare_arrows:",
                query_params=picker.compare_address(keys),
            )


@callbacks.uninterrupted
def begin() -> None:
    """Callback of the button: start the four jobs and choose the first, or keep the refusal."""
    began = callbacks.get("ablation.began", -DOUBLE_CLICK_S)
    if time.monotonic() < began + DOUBLE_CLICK_S:
        return
    fields.accept()
    available, _ = callbacks.do(devices.available)
    state = callbacks.do(fields.state)
    device, seed = state.get("device", available[0][0]), state.get("seed", TrainConfig().seed)
    settings = {"steps": STEPS, "seed": seed, "device": device}
    started: list[str] = []
    try:
        where = places.resources(state)
        settings = places.adapted(settings, where)
        for name, differs in FOUR.items():
            config = TrainConfig(workload=WORKLOAD, size=SIZE, **settings, **differs)
            job = jobs.start(config, run_list.runs_dir(), f"ablation-{name}", resources=where)
            started.append(f"run/{job.name}")
    except RunError as error:
        fields.refuse(error)
    if started:
        callbacks.put("start.followed", started)
        callbacks.put("ablation.started", started)
        callbacks.put("ablation.began", time.monotonic())  # after the four have started
        picker.choose(started[0])


def queued() -> list[str]:
    """Keys of the four runs that were queued here last, or that the address names, the baseline first; empty once one
    of them is deleted."""
    address.take("ablation", "ablation.started", lambda text: text.split(","))
    keys: list[str] = st.session_state.get("ablation.started", [])
    if keys:
        address.keep("ablation", "ablation.started", ",".join(keys))
    return keys if len(keys) == len(FOUR) and all(key in st.session_state["entries"] for key in keys) else []
