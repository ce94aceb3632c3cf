"""The card that says what a machine can do in 16 bits, and which recipe to try first there.

abilities.show_this_machine()     # from the driver and the kernel
abilities.show_machine_of(run)    # from the run's head

Where the library has runs of a recipe on that machine, their speed decides instead of what the machine promises.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection

import streamlit as st

from amp_core import Run, RunError
from amp_core.analysis import amdahl, step_cost
from amp_core.analysis.baseline import TASK
from amp_core.analysis.comparison.measured_recipes import after_measurement, measured_recipes
from amp_core.hardware.gpus import Advice, Gpu, cpu_abilities, first_recipe, first_recipe_on_cpu, gpu_of
from amp_core.hardware.host import cpu_flags, cpu_name
from amp_core.hardware.nvml import NvmlError
from amp_core.hardware.usable_gpus import usable_gpus
from amp_core.settings.training import RECIPES
from amp_core.text.formatting import join_words
from pages.parts import bar, loaders, picker, words
from pages.parts.library.run_list import Entry
from pages.parts.start import devices


@st.cache_data(ttl=60, show_spinner=False)
def _gpus() -> list[Gpu]:
    try:
        return [Gpu(gpu.name, gpu.capability) for gpu in usable_gpus()]
    except NvmlError:  # `devices.available` gives the reason
        return []


MAX_RUNS = 3
"""Most runs of a precision whose speeds are read."""
WORTH_RATIO = 1.1
"""A recipe is not recommended to a profiled run that it would speed up by less."""
LEAST_SHOWN_RATIO = 1.005
"""A smaller gain would be shown as 1.00 × as fast."""


def show_this_machine() -> None:
    """The card of this machine."""
    available, why_no_gpu = devices.available()
    usable = any(name != "cpu" for name, _ in available)
    with st.container(border=True):
        st.markdown("**What this machine supports**")
        if usable:
            _gpu_lines(_gpus(), None)
        else:
            st.markdown(f"No GPU to train on: {words.escape(words.sentence(why_no_gpu or 'none was found'))}")
        _cpu_lines(cpu_name(), cpu_flags(), None if usable else _chosen_here(), advise=not usable)


def show_machine_of(run: Run) -> None:
    """The card of the machine on which `run` was recorded; nothing if its head does not name one."""
    environment = run.head.environment
    recorded = environment.get("gpus")  # another program may have written the head
    dicts = [gpu for gpu in recorded if isinstance(gpu, dict)] if isinstance(recorded, list) else []
    gpus = [gpu_of(gpu.get("name"), gpu.get("capability")) for gpu in dicts]
    cpu = environment.get("cpu")
    if not gpus and not isinstance(cpu, str):
        return
    with st.container(border=True):
        st.markdown("**What this run's machine supports**")
        if gpus:
            bound = amdahl(loaders.analysed(step_cost, run, None))
            gain = bound.half_expected if bound is not None else None
            _gpu_lines(gpus, run, advise=gain is None or gain >= WORTH_RATIO)
            if gain is not None:
                hardly = "" if gain >= WORTH_RATIO else "only "
                faster = f"make this run {hardly}{words.number(gain)} × as fast"
                effect = "not make this run faster" if gain < LEAST_SHOWN_RATIO else faster
                st.markdown(f"By Step cost, 16 bits for all GEMM/conv would {effect}.")
        else:
            flags = environment.get("cpu_16bit")
            _cpu_lines(str(cpu), [str(f) for f in flags] if isinstance(flags, list) else None, run, advise=True)


def _gpu_lines(gpus: list[Gpu], run: Run | None, *, advise: bool = True) -> None:
    for gpu in dict.fromkeys(gpus):  # one line for eight equal GPUs
        count = gpus.count(gpu)
        many = f"{count} × " if count > 1 else ""
        st.markdown(f"**{many}{words.escape(gpu.name)}**: {words.escape(gpu.in_words())}")
    if gpus and advise:
        _advice(first_recipe(gpus[0]), run)


def _cpu_lines(name: str, flags: Collection[str] | None, run: Run | None, *, advise: bool) -> None:
    text = "its instructions are not known."
    if flags is not None:
        has = {p.upper(): names for p, names in cpu_abilities(flags).items() if names}
        known = join_words([f"{p} by {join_words(names)}" for p, names in has.items()]) if has else ""
        text = f"{known}." if known else "no 16-bit matrix instructions: FP16 and BF16 run, but slowly."
    st.markdown(f"**{words.escape(name)}**: {words.escape(text)}")
    if advise:
        _advice(first_recipe_on_cpu(flags), run)


def _advice(advice: Advice, run: Run | None) -> None:
    """What to try first; `run` was recorded on that machine, and others of its task may be in the library."""
    if run is not None:
        advice = after_measurement(advice, loaders.analysed(measured_recipes, [run, *_same_task(run)]))
    st.markdown(f"Try **{RECIPES[advice.recipe].label}** first. {words.escape(advice.why)}")


def _same_task(run: Run) -> list[Run]:
    """A few other runs of each precision that trained the task of `run`, the baseline of the page first."""
    entries: dict[str, Entry] = st.session_state["entries"]
    first = bar.baseline()
    config = run.head.config
    chosen: dict[object, list[Entry]] = defaultdict(list)
    for entry in (*([first] if first is not None else []), *entries.values()):
        other = entry.config or {}
        alike = entry.readable and entry.status == "finished" and all(other.get(n) == config.get(n) for n in TASK)
        if alike and other.get("precision") in RECIPES and len(chosen[other["precision"]]) < MAX_RUNS:
            chosen[other["precision"]].append(entry)
    runs = []
    for entry in itertools.chain.from_iterable(chosen.values()):
        try:
            runs.append(loaders.open_run(entry))
        except RunError:  # Library shows why
            continue
    return runs


def _chosen_here() -> Run | None:
    """The chosen run, if it was recorded on this machine's CPU."""
    entry = picker.chosen()
    if entry is None or not entry.readable:
        return None
    try:
        run = loaders.open_run(entry)
    except RunError:  # its own pages say so
        return None
    here = str(run.head.config.get("device", "")).startswith("cpu") and run.head.environment.get("cpu") == cpu_name()
    return run if here else None
