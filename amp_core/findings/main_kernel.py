"""What the first sentence says of one kernel that does most of a device's work on few of its multiprocessors.

main_kernel_sentence(run)     # "my_kernel takes 90.8 % of the GPU's busy time, in 1 block for 108 multiprocessors: …"
"""

from amp_core.analysis.performance.blocks import MAX_UNITS
from amp_core.analysis.performance.kernels import kernel_rows, window_rows
from amp_core.analysis.performance.matrix_kinds import is_matrix
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC
from amp_core.analysis.performance.timeline import timeline
from amp_core.findings.no_saving_sentences import few_blocks_of_product
from amp_core.findings.signals import mappings
from amp_core.hardware.kernel_names import COPIES
from amp_core.store.run import Run
from amp_core.text.formatting import kernel_in_words, percent

MIN_BUSY_FRAC = 0.5
"""Share of the time in which the device works from which one kernel is most of it."""
MAX_FEW_BLOCKS = 0.1
"""Blocks per multiprocessor up to which these are far fewer than the multiprocessors."""
MIN_KERNEL_US = 20.0
"""Mean time of a kernel from which it works for long: shorter ones take about as long as their start."""


def main_kernel_sentence(run: Run) -> str:
    """That one kernel takes most of the device's busy time and has far fewer blocks than the device has
    multiprocessors, as a sentence; empty where none does, or its blocks are not recorded."""
    rows, windows = kernel_rows(run), window_rows(run)
    rows = rows[~rows["category"].isin(["communication", *COPIES])]
    us = rows.groupby("name")["total_us"].sum()
    busy_us, wall_us = (float(windows[column].sum()) for column in ("busy_us", "wall_us"))
    if us.empty or us.max() < max(MIN_BUSY_FRAC * busy_us, MIN_SAVED_FRAC * wall_us):
        return ""
    name = str(us.idxmax())
    its = rows[rows["name"] == name]
    if its["total_us"].sum() < MIN_KERNEL_US * its["count"].sum():
        return ""
    recorded = timeline(run)
    recorded = recorded[(recorded["name"] == name) & recorded["blocks_per_sm"].notna() & (recorded["total_us"] > 0)]
    if recorded.empty:
        return ""
    per_unit = float((recorded["blocks_per_sm"] * recorded["total_us"]).sum() / recorded["total_us"].sum())
    if not 0 < per_unit <= MAX_FEW_BLOCKS:
        return ""
    takes = f"{kernel_in_words(name)} takes {percent(min(1.0, float(us.max()) / busy_us))} of the GPU's busy time"
    if is_matrix(its).all():
        more = few_blocks_of_product(run, name)
        return f"{takes}. {more}" if more else ""
    return f"{takes}, {_blocks(run, per_unit)}: more blocks, each with a part of the work, take less."


def _blocks(run: Run, per_unit: float) -> str:
    """How many blocks that kernel has, as part of a sentence."""
    gpus = mappings(run.head.environment, "gpus")
    units = gpus[0].get("multiprocessors") if gpus else None
    if not isinstance(units, int) or not 0 < units <= MAX_UNITS:
        return f"in blocks for {percent(per_unit)} of its multiprocessors"
    blocks = max(1, round(per_unit * units))
    return f"in {blocks} block{'s' if blocks > 1 else ''} for {units} multiprocessors"
