"""Parts of a step that no saving tells and that may come before the largest saving, each as a sentence.

>>> first, then = parts_beside(run, savings, largest)
>>> first[0].sentence, first[0].it
('GEMM/conv takes 71 % of the step, on tensor cores.', 'it')
"""

import numpy as np

from amp_core.analysis.performance.kernels import kernel_rows, window_rows
from amp_core.analysis.performance.matrix_kinds import is_matrix
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, Saving, longest_name
from amp_core.analysis.performance.savings import Savings
from amp_core.findings.adapters import adapters
from amp_core.findings.few_rows import few_rows
from amp_core.findings.gathered_matrices import gathered_matrices
from amp_core.findings.matrix_sentences import matrix_work
from amp_core.findings.no_saving_sentences import few_blocks, own_profiler, padding
from amp_core.findings.part import Part
from amp_core.findings.scattered_writes import scattered
from amp_core.findings.small_matrices import small_matrices
from amp_core.store.run import Run
from amp_core.text.formatting import kernel_in_words, percent


def own_parts(run: Run, savings: Savings) -> list[Part]:
    """Operators whose time is decided by the places that they read or write, those of many small matrices, and
    adapters, the longest first."""
    sources = (scattered, gathered_matrices, small_matrices, adapters)
    found = (source(run, savings) for source in sources)
    return sorted((part for part in found if part is not None), key=lambda part: part.frac, reverse=True)


def parts_beside(run: Run, savings: Savings, largest: Saving) -> tuple[list[Part], list[Part]]:
    """The parts that come before the largest saving, and those after it."""
    places = own_parts(run, savings)
    leads = bool(places) and places[0].frac > max(largest.share, places[0].least)
    first, then = (places[:1], places[1:]) if leads else ([], places)
    candidates = (
        _unknown_kernel(run, savings, largest),
        _own_kernel(run, savings, largest),
        _copies(savings, largest),
        _products(run, savings, largest),
    )
    return [*first, *[part for part in candidates if part is not None][:1]], then


def without_saving(run: Run, savings: Savings) -> str:
    """That nothing beside the operators of `own_parts` saves much, as sentences, where these come first; else empty."""
    places = own_parts(run, savings)
    if not places or places[0].frac <= places[0].least:
        return ""
    them = places[0].it.replace("it", "that") if len(places) == 1 else "these"
    told = " ".join(part.sentence for part in places)
    return f"{told} Beside {them}, nothing would save {percent(MIN_SAVED_FRAC)} or more of the {savings.unit}."


def _unknown_kernel(run: Run, savings: Savings, largest: Saving) -> Part | None:
    """The longest unclassified kernel."""
    if savings.unknown_kernel_frac <= max(largest.share, MAIN_KERNEL_FRAC):
        return None
    return Part(
        f"One kernel takes {percent(savings.unknown_kernel_frac)} of the {savings.unit} and "
        f"{_unknown(run, savings)}. Profile it alone{own_profiler(run)}.{few_blocks(run, savings.unknown_kernel)}",
        savings.unknown_kernel_frac,
    )


def _own_kernel(run: Run, savings: Savings, largest: Saving) -> Part | None:
    """The longest kernel that is neither torch's nor a product, in steps of which less would be saved."""
    rows = kernel_rows(run)
    rows = rows[(rows["category"] == "other") & ~rows["op"].str.startswith("aten::")]
    us = rows.groupby("name")["total_us"].sum()
    frac = float(us.max()) / float(window_rows(run)["wall_us"].sum()) if len(us) else 0.0
    if frac <= MIN_OWN_FRAC or largest.share >= MAX_SMALL_FRAC:
        return None
    kernel = str(us.idxmax())
    return Part(
        f"One kernel takes {percent(frac)} of the {savings.unit}: {kernel_in_words(kernel)}. It is the program's own "
        f"or a library's, and nothing that is looked for shortens it: profile it alone{own_profiler(run)}.",
        frac,
    )


MIN_OWN_FRAC = 0.4
"""A kernel of the program's own with more of the step than this comes before savings below `MAX_SMALL_FRAC`."""


def _unknown(run: Run, savings: Savings) -> str:
    """What is not known of that kernel, and its name."""
    kernel, rows = kernel_in_words(savings.unknown_kernel), kernel_rows(run)
    rows = rows[(rows["name"] == savings.unknown_kernel) & is_matrix(rows)]
    if rows.empty:
        return f"cannot be classified by name: {kernel}"
    precision = longest_name(rows, "precision").upper()
    if not precision:
        return f"multiplies matrices, in which precision and whether on matrix cores is unknown: {kernel}"
    return f"multiplies matrices in {precision}, whether on matrix cores is unknown: {kernel}"


MAIN_KERNEL_FRAC = 0.2
"""An unclassified kernel with more of the step than this, and than the largest saving, is named first."""


def _copies(savings: Savings, largest: Saving) -> Part | None:
    """Copies, where they are most of a step of which less would be saved."""
    copies, frac = savings.of("copies", Saving), float(np.nan_to_num(savings.cost.us("copy"))) / savings.cost.step_us
    if copies is None or copies is largest or frac <= MIN_MAIN_FRAC or largest.share >= MAX_SMALL_FRAC:
        return None
    return Part(f"{copies.what}.", frac, it="that", is_saving=True)


def _products(run: Run, savings: Savings, largest: Saving) -> Part | None:
    """Products, where they are most of a step of which less would be saved, by something else."""
    work = matrix_work(run, savings)
    is_unsure = savings.peak_frac is None and work.frac > UNSURE_RATIO * largest.share
    is_small = largest.share < MAX_SMALL_FRAC or is_unsure
    is_told = largest.code in _OF_PRODUCTS or bool(few_rows(run, savings))
    if work.frac <= MIN_MAIN_FRAC or not is_small or is_told:
        return None
    told = (
        f"{work.kinds.subject} {work.kinds.verb} {work.shares} of the {savings.unit}{work.where}.{work.could_be_faster}"
    )
    if work.kernel_frac > MIN_MAIN_FRAC and (sizes := padding(run, work.kernel, "The sizes of its longest kernel")):
        told += f" {sizes}"
    return Part(told, work.frac, it="it" if len(work.kinds.fracs) == 1 else "them")


MAX_SMALL_FRAC, MIN_MAIN_FRAC = 0.2, 0.5
"""Where less than the first of the step can be saved, products or copies that take more than the second are told before
that."""
UNSURE_RATIO = 3.0
"""How many times the largest saving products of unknown efficiency take from which they may have more to win."""
_OF_PRODUCTS = ("fp32-products", "slow-products")
"""Savings whose sentence tells what products take."""
