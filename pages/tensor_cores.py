"""Do tensor cores do the work, and what else could run on them?"""

import pandas as pd
import streamlit as st

from amp_core import Run
from amp_core.analysis import TensorCoreUse, matrix_ops, missed_tensor_core_time, tensor_core_use
from amp_core.hardware.gpus import Gpu, core_names
from amp_core.views import KERNELS, TENSOR_CORES
from pages.parts import baseline, charts, empty, head, loaders, words
from pages.parts.hardware import abilities, kernels, profiled

MIN_STAKE_FRAC = 0.01  # of kernel time


def headline(use: TensorCoreUse, stake: pd.DataFrame) -> str:
    """The page's answer."""
    if use.on_cpu:
        return (
            "This run was profiled on a CPU, which has no tensor cores, so its operators are shown. "
            f"{words.percent(use.matrix_frac)} of their time is GEMM/conv, which tensor cores accelerate."
        )
    cores, _ = core_names(use.device_name)
    if use.has_tensor_cores is False:
        return f"{words.escape(Gpu(use.device_name, use.capability).in_words())} All GEMM/conv runs on CUDA cores."
    if not use.kernel_us:
        return f"The times of this run's kernels were not recorded, so what {cores} did is not known."
    if not use.matrix_us:
        return f"No kernel of this window is GEMM/conv, so {cores} have nothing to accelerate."
    share, unknown = use.matrix_tensor_frac or 0.0, use.matrix_unknown_frac or 0.0
    unnamed = f"; {words.percent(use.unknown_frac)} is unclassified" if use.unknown_frac else ""
    lead = f"{cores.capitalize()} run {'GEMM/conv' if share >= 0.9 else 'part of GEMM/conv'}"
    text = (
        f"{lead}: kernels that use them take {words.percent(share)} of its time and {words.percent(use.tensor_frac)} "
        f"of all kernel time{unnamed}."
    )
    if share < 0.01:
        unused = f"{cores.capitalize()} are unused"
        lead = unused if unknown < 0.5 else f"Kernel names do not show whether {cores} are used"
        text = f"{lead}: {'hardly any' if share else 'no'} kernel time is known to use them, while GEMM/conv takes "
        text += f"{words.percent(use.matrix_frac)}{unnamed}."
    if stake["time_frac"].sum() >= MIN_STAKE_FRAC:
        first = stake.iloc[0]
        text += f" {words.percent(stake['time_frac'].sum())} could run there but does not, mostly for this reason: "
        text += words.escape(words.sentence(first["why"]))
    return text


def of_baseline(base: Run) -> str:
    """The page's answer for the baseline."""
    whole = loaders.analysed(tensor_core_use, base, None)
    return headline(whole, missed_tensor_core_time(loaders.analysed(matrix_ops, base, None)))


head.title("Tensor cores")
run = head.run(table="kernels")
if run.kernels.empty:
    abilities.show_machine_of(run)
    sentence = f"This run has no profiled window, so its kernels are not known. {profiled.HOW}"
    empty.nothing(sentence, sample=True, run=run, tables=("kernels",))

step = profiled.pick(run)
use = loaders.analysed(tensor_core_use, run, step)
ops = loaders.analysed(matrix_ops, run, step)
head.headline(headline(use, missed_tensor_core_time(ops)))
baseline.answer("kernels", of_baseline)
if not use.on_cpu:
    kernels.shares(use)
    with st.container(key="wide-answers"):
        charts.view(TENSOR_CORES, run, "tensor_cores.answers", step=step)
    st.caption(f"{kernels.counter(use)} {kernels.UTILISATION}")
with st.container(key="wide-kernels"):
    charts.view(KERNELS, run, "tensor_cores.kernels", step=step)
st.caption(f"{profiled.coverage(run, step)} Copies and AMPscope's own kernels are excluded.")
kernels.matrix_work(ops, use)
kernels.added_up(run, step, use.on_cpu)
abilities.show_machine_of(run)
