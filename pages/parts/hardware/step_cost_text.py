"""The time of a step in words, cards and a table."""

import pandas as pd
import streamlit as st

from amp_core.analysis import Amdahl, StepCost
from amp_core.analysis.performance.step_cost import MATRIX_PARTS
from amp_core.hardware.gpus import core_names
from pages.parts import cards, glossary, tables, words

COLUMNS = {
    "label": st.column_config.TextColumn("Part", pinned=True),
    "frac": tables.share("Share"),
    "ms": tables.measured("Time (ms)", width=90),
}

SYNC = "A launch starts one kernel. A host sync is a call in which Python waits for the GPU, `loss.item()` for one."

GAPS = "Time between operators: Python and the profiler's own overhead. Data loading is counted separately."

MIN_US = 1e-3  # less is rounding of a subtraction
LEAST_GAIN_RATIO = 1.005  # less is no gain: the products are in 16 bits already
MIN_SHARE_FRAC = 0.01  # smaller shares of the time are not mentioned


def headline(cost: StepCost, bound: Amdahl | None) -> str:
    """The page's answer: the time of a step, its largest parts, and the bound."""
    unit = "A step takes" if cost.steps else "The profiled window takes"
    largest = cost.parts.dropna().sort_values("us", ascending=False, kind="stable").iloc[:3]
    # Without the comma of "GEMM/conv, on tensor cores", which would read as the next part of the list.
    shares = [f"{words.percent(p.frac)} {p.label.replace(',', '')}" for p in tables.rows(largest) if p.frac >= 0.01]
    sentence = f"{unit} {words.duration(cost.step_us / 1e6)}: {', '.join(shares)}."
    return f"{sentence} {bound.sentence}" if bound else sentence


def outlook(cost: StepCost, bound: Amdahl) -> str:
    """What 16-bit inputs on tensor cores could save of the step time."""
    if cost.on_cpu:
        return (
            "The bound is Amdahl's: 1 / (1 − share of GEMM/conv). 16-bit values may also speed up memory-bound "
            f"operators, up to twofold: then at most {words.number(bound.halved_bound)} ×."
        )
    cores, _ = core_names(cost.device_name)
    labels = cost.parts.set_index("part")["label"]
    off = str(labels["matrix"]).replace(",", "")
    sentence = f"{words.percent(bound.cuda_core_frac)} of the time is {off}"
    if bound.tf32_frac >= MIN_SHARE_FRAC:
        sentence += f", {words.percent(bound.tf32_frac)} is TF32 on {cores}"
    if bound.unknown_frac >= MIN_SHARE_FRAC:
        sentence += f", and {words.percent(bound.unknown_frac)} is unclassified"
    if bound.cuda_core_frac < MIN_SHARE_FRAC and bound.tf32_frac < MIN_SHARE_FRAC:
        known = bound.unknown_frac < MIN_SHARE_FRAC
        saves = "16 bits there would save hardly any of it" if known else "what 16 bits would save is unknown"
        return f"{sentence}, so {saves}. The bound counts all GEMM/conv as free."
    if bound.cuda_core_frac >= MIN_SHARE_FRAC:
        only = bound.tf32_frac < MIN_SHARE_FRAC and bound.unknown_frac < MIN_SHARE_FRAC
        removing = "Removing it" if only else f"Removing {off}"
        sentence += f". {removing} would give {words.number(bound.cuda_core_bound)} ×"
    if bound.half_expected and bound.rate_ratio and bound.half_expected >= LEAST_GAIN_RATIO:
        rates = (
            [f"{words.number(bound.rate_ratio)} × the dense rate of FP32"]
            if bound.cuda_core_frac >= MIN_SHARE_FRAC
            else []
        )
        if bound.tf32_frac >= MIN_SHARE_FRAC and bound.tf32_ratio:
            rates.append(f"{words.number(bound.tf32_ratio)} × the dense rate of TF32")
        sentence += f". With all GEMM/conv in 16 bits, at {' and '.join(rates)} by the data sheet, a step would be "
        sentence += f"{words.number(bound.half_expected)} × as fast"
    if cost.us("tensor") - cost.tf32_us > cost.us("matrix"):
        return f"{sentence}."
    return f"{sentence}. 16-bit values also halve the traffic of memory-bound kernels, which may save a little more."


def show_cards(cost: StepCost, bound: Amdahl) -> None:
    """Step time, matrix share, idle device, launches."""
    left, right = cards.pairs()
    with left:
        cards.card("Step" if cost.steps else "Window", words.duration(cost.step_us / 1e6), per(cost))
        cards.card("GEMM/conv", words.percent(bound.matrix_frac), on_cores(cost), help_=glossary.tip("tensor core"))
    with right:
        data = cost.us("data")
        if cost.on_cpu:
            waiting = f"and {words.percent(data / cost.step_us)} for data" if data == data else "data is not marked"
            share = words.percent(cost.us("gaps") / cost.step_us)
            cards.card("Python and waiting", share, waiting, help_=GAPS)
        else:
            waiting = f"{words.percent(data / cost.step_us)} for data" if data == data else "data is not marked"
            share = words.percent(cost.us("data", "gaps") / cost.step_us)
            cards.card("Device idle", share, waiting, help_=glossary.tip("launch-bound"))
        if cost.on_cpu:
            casts = words.percent(cost.us("cast") / cost.step_us)
            cards.card("Casts", casts, "between formats", help_=glossary.tip("cast"))
        else:
            label = "Launches per step" if cost.steps else "Launches"
            cards.card(label, words.count(cost.launches), syncs(cost), help_=SYNC)


def syncs(cost: StepCost) -> str:
    """How often the host waits for the device."""
    if cost.syncs is None:
        return "syncs not recorded"
    is_whole = cost.syncs == round(cost.syncs)
    return words.plural(int(cost.syncs), "host sync") if is_whole else f"{words.number(cost.syncs)} host syncs"


def on_cores(cost: StepCost) -> str:
    """How much of GEMM/conv runs on tensor cores, or that their kernels do not tell it."""
    if cost.on_cpu:
        return "of the step"
    matrix_us, unknown_us = cost.us(*MATRIX_PARTS), cost.us("matrix_unknown")
    if 2 * unknown_us > matrix_us:
        return f"{words.percent(unknown_us / matrix_us)} of it unclassified"
    on = words.percent(cost.us("tensor") / matrix_us) if matrix_us > 0 else words.NONE
    return f"{on} of it on {core_names(cost.device_name)[0]}"


def per(cost: StepCost) -> str:
    """Over what the figures are averaged."""
    if not cost.steps:
        return "no steps are marked in it"
    what = "profiled step" if cost.source == "profile" else "step"
    return f"mean of {words.plural(cost.steps, what)}"


def show_parts(parts: pd.DataFrame) -> None:
    """The parts as a table."""
    shown = parts[~(parts["us"].abs() < MIN_US)].assign(ms=parts["us"] / 1e3)
    alt = "Parts of a step with their share and time."
    tables.show(shown, column_config=COLUMNS, column_order=list(COLUMNS), height="content", alt=alt)
