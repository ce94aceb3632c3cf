"""Myths about mixed precision, corrected, each with what the chosen run shows.

myths.show()
"""

import streamlit as st

from amp_core import Run, RunError
from amp_core.analysis import (
    amdahl,
    memory_breakdown,
    precision_map,
    safe_window,
    safe_window_over_time,
    scale_summary,
    step_cost,
    traced_steps,
)
from amp_core.analysis.numerics.myths_in_run import MYTHS, VANISHING_BAND, gradients_in_band
from amp_core.hardware.gpus import gpu_of
from pages.parts import glossary, loaders, picker, words
from pages.parts.hardware import precision
from pages.parts.numbers import formats
from pages.parts.overview import findings


def show() -> None:
    """A card for each myth: its rating, the correction, what the chosen run shows, and the page with its chart."""
    run = _chosen()
    with st.container(horizontal=True):
        for myth in MYTHS:
            with st.container(border=True, width=glossary.WIDTH, height="stretch"):
                st.markdown(f"{formats.VERDICTS[myth.rating]} “{myth.claim}”")
                st.markdown(myth.correction)
                seen = _SEEN[myth.key](run) if run is not None and myth.key in _SEEN else ""
                if seen and run is not None:
                    st.markdown(f"**{words.escape(run.name)}:** {seen}")
                file, page = findings.PAGES[myth.page]
                query = {"run": st.session_state["run"]} if st.session_state.get("run") else None
                st.page_link(file, label=f"See it on {page}", icon=":material/query_stats:", query_params=query)


def _chosen() -> Run | None:
    """The chosen run if it can be read."""
    entry = picker.chosen()
    if entry is None or not entry.readable:
        return None
    try:
        return loaders.open_run(entry)
    except RunError:  # its own pages show the error
        return None


def _weights(run: Run) -> str:
    parts = loaders.analysed(memory_breakdown, run).parts
    held = parts.set_index("category")["bytes"].dropna().to_dict() if len(parts) else {}
    if not held.get("parameters"):
        return ""
    copies = held.get("autocast", 0.0)
    return (
        f"{words.size(held['parameters'])} of parameters, {words.size(copies)} of casts that autocast kept at the peak."
    )


def _operators(run: Run) -> str:
    if not loaders.analysed(traced_steps, run):
        return ""
    return precision.headline(loaders.analysed(precision_map, run, None))


def _scaling(run: Run) -> str:
    window = loaders.analysed(safe_window_over_time, run)
    if window.empty:
        return ""
    first, last = window.iloc[0], window.iloc[-1]
    needs = f"FP16 needed at least {words.scale(first['lowest'])} at step {first['step']:,}"
    if len(window) > 1:
        needs += f" and {words.scale(last['lowest'])} at step {last['step']:,}"
    needs += ", predicted"
    if loaders.analysed(safe_window, run).caveat:
        needs = "the loss scale that FP16 needed is unknown"
    about = loaders.analysed(scale_summary, run)
    own = f"; its own scale ended at {words.scale(about.last)}" if about.has_scaler else ""
    return f"{needs}{own}."


def _loop(run: Run) -> str:
    about = loaders.analysed(scale_summary, run)
    if not about.has_scaler or not about.skips_recorded:
        return ""
    skipped = f"{words.plural(about.skips, 'step')} skipped" if about.skips else "no step skipped"
    return f"{skipped}, its scale grew {about.growths} × and backed off {about.backoffs} ×."


def _frameworks(run: Run) -> str:
    config = run.head.config
    dtype = config.get("autocast_dtype")
    cast = f"autocast in {words.escape(dtype)}" if isinstance(dtype, str) else "no autocast"
    scaler = "a scaler" if loaders.analysed(scale_summary, run).has_scaler else "no scaler"
    return f"{cast}, {scaler}."


def _flags(run: Run) -> str:
    recorded = run.head.environment.get("flags")
    names = {"matmul_precision": "FP32 products", "tf32_matmul": "TF32 in products", "tf32_cudnn": "TF32 in cuDNN"}
    names |= {"cudnn_benchmark": "cuDNN's benchmark"}
    flags = recorded if isinstance(recorded, dict) else {}  # another program may have written the head
    meanings = {True: "on", False: "off", "highest": "in full", "high": "TF32 allowed", "medium": "BF16 allowed"}
    known = [(label, flags[name]) for name, label in names.items() if isinstance(flags.get(name), bool | str)]
    return ", ".join(f"{label} {words.escape(meanings.get(value, value))}" for label, value in known) + "." * bool(
        known
    )


def _band(run: Run) -> str:
    answer = loaders.analysed(gradients_in_band, run)
    if answer is None:
        return ""
    low, high = (words.raised(f"2^{end}") for end in VANISHING_BAND)
    return (
        f"{words.percent(answer.elements_frac)} of its {words.KIND_LABELS[answer.kind].lower()} lie between {low} and "
        f"{high} and carry {words.percent(answer.mass_frac)} of the mass."
    )


def _speed(run: Run) -> str:
    bound = amdahl(loaders.analysed(step_cost, run, None))
    return bound.sentence if bound is not None else ""


def _memory(run: Run) -> str:
    answer = loaders.analysed(memory_breakdown, run)
    held = answer.named
    total = held["bytes"].sum()
    if not total:
        return ""
    activations = held.loc[held["category"] == "activations", "bytes"].sum()
    return f"at the peak {words.percent(activations / total)} of what its tensors held were activations."


def _always(run: Run) -> str:
    cost = loaders.analysed(step_cost, run, None)
    if cost.source != "profile" or cost.on_cpu or cost.step_us <= 0:
        return ""
    return f"its GPU was idle for {words.percent(cost.us('data', 'gaps') / cost.step_us)} of a step."


def _hardware(run: Run) -> str:
    recorded = run.head.environment.get("gpus")
    gpus = [
        gpu_of(gpu.get("name"), gpu.get("capability"))
        for gpu in (recorded if isinstance(recorded, list) else [])
        if isinstance(gpu, dict)
    ]
    if not gpus:
        return (
            f"it ran on {words.escape(run.head.environment['cpu'])}, a CPU." if run.head.environment.get("cpu") else ""
        )
    return f"{words.escape(gpus[0].name)}. {words.escape(gpus[0].in_words())}"


_SEEN = {
    "weights": _weights,
    "operators": _operators,
    "scaling": _scaling,
    "loop": _loop,
    "frameworks": _frameworks,
    "flags": _flags,
    "band": _band,
    "speed": _speed,
    "memory": _memory,
    "hardware": _hardware,
    "always": _always,
}
