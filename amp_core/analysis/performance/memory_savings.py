"""What kernels that memory bounds could save per step of a trace: fused, in the layout that is read, or left out.

    >>> [saving.code for saving in memory_savings(rows, basis)]
    ['memory-bound-kernels', 'unfused-optimizer', 'layout-transposes', 'layout-copies', 'part-gradients']

Kernels of one operator each are assumed to fuse to half their time (`FUSED_FRAC`), for each value is then read and
written once instead of twice, and those that follow one another to the time of the longest of them
(`amp_core.traces.chains`).
"""

import numpy as np
import pandas as pd

from amp_core.analysis.performance.attention import SOFTMAX, has_attention_in_steps
from amp_core.analysis.performance.few_blocks import FewBlocks, few_blocks_us
from amp_core.analysis.performance.fused_attention import AttentionProducts
from amp_core.analysis.performance.growing_joins import growing_joins
from amp_core.analysis.performance.layouts import layout_copies, layout_rows
from amp_core.analysis.performance.memory_rate import far_below_memory, moves_hardly_anything
from amp_core.analysis.performance.part_gradients import part_gradients, part_rows
from amp_core.analysis.performance.saving import Basis, MemorySaving, Saving, longest_name, others, step_share
from amp_core.analysis.performance.shortest_kernels import is_shortest
from amp_core.analysis.performance.training_part import ZEROING
from amp_core.traces.chains import ACCUMULATES, ADDS, BIASED, SORT_KERNELS, is_library

FUSED_FRAC = 0.5
"""Share of their time that fusing takes away at least: a value is read and written once instead of twice."""
MIN_OF_SCORES_FRAC = 0.1
"""Share of other kernels in those on the scores of attention from which they are told beside the softmax."""
MIN_LONE_FRAC = 0.02
"""Share of the step from which casts that nothing is fused with are told."""
_IN_CHAINS = "fused, each chain of them takes as long as its longest kernel"
_JOINS = ("aten::cat", "aten::stack")
"""Operators that put tensors together, which compilers fuse with what comes before and after."""
MIN_OF_JOINS_FRAC = 0.05
"""Share of these from which they are named."""
MIN_FUSED_KERNELS = 1.5
"""Kernels per step below which there is no other to fuse one with."""
MAX_FLOOR_US, FUSED_KERNELS = 3.0, 2
"""Kernels of that mean length take no longer than one that does nothing, and kernels of a fused optimizer's step."""
_PLAIN_SGD = "BinaryOpListAlphaFunctor"
"""In the name of the kernel that adds each gradient, times the rate, to its parameter: that alone is a fused step."""
_POOLS = r"(?i)pool"
"""In the names of kernels and operators that pool: none of the kinds that the sentence names."""
SCATTERS = r"::_?index_(?:put|add|copy)|(?<!reduce_)scatter|embedding_dense_backward"
"""In the names of operators that write to places that a tensor gives: random access bounds them, and no pass over
memory is saved."""
_AT_RANDOM = r"::(?:normal|uniform|random|exponential|cauchy|log_normal|geometric)_?$"
"""Operators that fill tensors at random: their time goes to computing, and what reads them comes later."""
_GENERATORS = "distribution_(?:elementwise|nullary)"
"""In the names of the kernels that do so."""
_SORTS = r"::(?:topk|kthvalue|(?:arg|m)?sort|(?:nan)?median|mode|_?unique\w*|nonzero|masked_select)$"
"""Operators that sort or choose values: compilers leave them as they are."""
_ONE_OPERATOR = "at::native|at6native|cudnn|iopen"
"""In the names of kernels that torch launches for one operator; captured graphs record no operator."""


def memory_savings(
    rows: pd.DataFrame, basis: Basis, few: FewBlocks | None = None, attention: AttentionProducts | None = None
) -> list[Saving]:
    """The savings of kernels that memory bounds. `rows` of `kernels` count work that runs beside other work once.
    `few`: kernels with fewer blocks than the GPU has multiprocessors. `attention`: the products of attention in steps
    that one kernel computes with its softmax."""
    # Other libraries' kernels already do several operators' work.
    by_torch = rows["op"].str.startswith("aten::") | rows["name"].str.contains(_ONE_OPERATOR)
    by_torch &= ~rows["name"].str.contains("triton", regex=False)
    is_slow = far_below_memory(rows, basis.rates.gb_per_s if basis.rates else None)
    of_parts = _part_gradients(rows, basis)
    if basis.is_long(of_parts.saved_us):  # one change ends them, with those that fusing would shorten
        is_slow |= part_rows(rows)
    return [
        of_parts,
        _unfused(rows, by_torch & ~is_slow, basis, few or {}, attention),
        _optimizer(rows[by_torch], basis),
        _layouts(rows, basis),
        _layout_copies(rows, basis),
    ]


def unfused_optimizer_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Kernels of an optimizer among rows of `kernels`, without those of fused ones."""
    stepping = (rows["phase"] == "optimizer") | (rows["category"] == "optimizer")
    stepping &= ~rows["top_op"].isin(ZEROING)
    fused = rows["op"].str.contains("_fused_", regex=False) | rows["name"].str.contains("triton", regex=False)
    return rows[stepping & ~fused]


def is_accumulating(rows: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows of `kernels` a gradient's arrival launches, as adding it to one that exists already: the engine of
    autograd does so, outside of a compiled model."""
    return rows["top_op"].str.endswith(f"::{ACCUMULATES}")


def _without_twins(ops: "pd.Series[str]") -> "pd.Series[str]":
    """The operators, with those in place named as the others: `aten::add_` as `aten::add`, where both occur."""
    plain = ops.str.removesuffix("_")
    return ops.where(~plain.isin(set(ops)), plain)


def _fusible(rows: pd.DataFrame, by_torch: "pd.Series[bool]") -> pd.DataFrame:
    """The rows that compilers fuse, of those that torch launches operator by operator, without the optimizer."""
    joins = (rows["category"] == "layout") & rows["op"].isin(_JOINS)
    bound = rows[(rows["category"].isin(["norm", "elementwise", "reduction", "cast"]) | joins) & by_torch]
    of_bias = bound["op"].isin(ADDS) & bound["top_op"].str.contains(BIASED)
    in_library = bound["top_op"].map(is_library).astype(bool) & ~of_bias
    if _is_one_call(rows, bound):
        return bound[:0]
    bound = bound[(bound["phase"] != "optimizer") & ~in_library]
    others_work = bound["name"].str.contains(f"{_POOLS}|{_GENERATORS}|{SORT_KERNELS}")
    others_work |= bound["op"].str.contains(f"{_POOLS}|{SCATTERS}|{_AT_RANDOM}|{_SORTS}")
    return bound[~others_work & ~growing_joins(bound)]


def _is_one_call(rows: pd.DataFrame, bound: pd.DataFrame) -> bool:
    """Whether a program does nothing but call one operator on tensors of one size again, as to measure it: then there
    is nothing to fuse it with."""
    us = float(bound["total_us"].sum())
    calls = bound[["op", "in_shapes"]].drop_duplicates()
    is_all = us >= MIN_ONE_CALL_FRAC * float(rows["total_us"].sum()) > 0
    return is_all and len(calls) == 1 and bool((calls["in_shapes"] != "").all())


MIN_ONE_CALL_FRAC = 0.95
"""Share of the kernel time in such calls from which a program does nothing else."""


def _unfused(
    rows: pd.DataFrame,
    by_torch: "pd.Series[bool]",
    basis: Basis,
    few: FewBlocks,
    attention: AttentionProducts | None,
) -> MemorySaving:
    """What fusing saves of such rows."""
    bound = _fusible(rows, by_torch) if float(rows["count"].sum()) >= MIN_FUSED_KERNELS * basis.steps else rows[:0]
    in_place = set(bound["op"]) - set(_without_twins(bound["op"]))
    bound = bound.assign(op=_without_twins(bound["op"]), away_frac=_away_frac(bound))
    apart = ""
    if basis.is_long(np.nan_to_num(basis.cost.us("communication"))):
        # Where communication takes long alone, it outlasts what runs beside it.
        bound = bound.assign(total_us=bound["total_us"] - bound["beside_us"].fillna(0.0))
        apart = " beside no collective" if float(bound["beside_us"].fillna(0.0).sum()) else ""
    us = basis.each_us(bound["total_us"])
    lone_us = basis.each_us(bound["lone_us"].fillna(0.0)[bound["category"] == "cast"])
    lone_us = lone_us if lone_us >= MIN_LONE_FRAC * basis.cost.step_us else 0.0
    # Fused attention keeps the scores on the chip: neither its softmax nor what scales, masks or casts them remains.
    softmax_us = bound["total_us"].where(bound["op"] == SOFTMAX, 0.0)
    in_steps_us = softmax_us.clip(lower=bound["total_us"].clip(upper=bound["scores_us"].fillna(0.0)))
    is_in_steps = has_attention_in_steps(rows)
    in_steps = basis.each_us(in_steps_us) if is_in_steps else 0.0
    beside_us = in_steps - basis.each_us(softmax_us)
    longest = longest_name(bound, "op")
    its_us = basis.each_us(bound["total_us"][bound["op"] == longest])
    both = f"{longest} with {longest}_" if f"{longest}_" in in_place else longest
    alone = f", {both} alone {step_share(its_us, basis.cost)}" if longest and others(bound, "op") else ""
    norms_us = basis.each_us(bound["total_us"][bound["name"].str.contains(_BATCH_NORM)])
    if us / 2 < norms_us < us and not longest:
        alone = f", batch norm alone {step_share(norms_us, basis.cost)}"
    # Of what neither vanishes with the scores nor with the types of tensors.
    rest_us = bound["total_us"] - (in_steps_us if is_in_steps else 0.0)
    if lone_us:
        rest_us -= bound["lone_us"].fillna(0.0).where(bound["category"] == "cast", 0.0).clip(upper=rest_us)
    rest_us = rest_us.clip(lower=0.0)
    halves_us, chains_us = FUSED_FRAC * basis.each_us(rest_us), basis.each_us(rest_us * bound["away_frac"])
    is_chained = chains_us > halves_us
    why = _IN_CHAINS if is_chained else "fusing them halves their memory traffic"
    starts = is_shortest(rows) | far_below_memory(rows, basis.rates.gb_per_s if basis.rates else None, short=True)
    whole_us = float(bound["total_us"].sum())
    are_shortest = 2 * float(bound["total_us"][starts[bound.index]].sum()) > whole_us
    are_small = False
    if not are_shortest and basis.rates is None:
        small = moves_hardly_anything(bound) | starts[bound.index]
        are_small = 2 * float(bound["total_us"][small].sum()) > whole_us
    few_us = few_blocks_us(bound, few)
    few_frac = float(few_us.sum()) / whole_us if whole_us and not are_shortest else 0.0
    if are_shortest and not is_chained:
        why = "most are so short that starting them takes their time, so fewer, fused ones take less"
    elif are_small and not is_chained:
        why = "most move so little that starting them, or their few blocks, takes their time, so fewer ones take less"
    elif few_frac > MIN_MOST_FRAC and not is_chained:
        why = "most have fewer blocks than the GPU has multiprocessors, so ones that split their sums take less"
    if lone_us:
        why += f", and casts between products, {basis.taken(lone_us)}, vanish where tensors have their type"
    without = ", and fused attention needs no softmax" if in_steps else ""
    if beside_us >= MIN_OF_SCORES_FRAC * in_steps > 0:
        without += ", nor the other kernels on its scores"
    fused_us = max(halves_us, chains_us) + in_steps
    attention_us = in_steps
    if attention is not None:
        attention_us += attention.saved_us
        fused_us += attention.saved_us
    joins_us = float(bound["total_us"][bound["category"] == "layout"].sum())
    joins = ", concatenations" if joins_us >= MIN_OF_JOINS_FRAC * us * basis.steps > 0 else ""
    are_elsewhere = (rows["category"] == "cast").any() and not (bound["category"] == "cast").any()
    kinds = f"norms, elementwise kernels{joins}{'' if are_elsewhere else ', casts'} and reductions"
    what = f"Unfused {kinds} take {basis.taken(us)}{apart}{alone}; {why}"
    is_attention = in_steps > us / 2
    if attention is None or not basis.is_long(attention_us):
        what += without
    else:
        is_attention = attention_us > fused_us / 2
        in_one = attention.in_words(in_steps, basis.each_us(softmax_us), basis)
        rest = f"other unfused {kinds} take {basis.taken(us - in_steps)}{apart}; {why}"
        told = [in_one, rest] if basis.is_long(us - in_steps) or lone_us else [in_one]
        what = "; ".join(told if is_attention else [what, f"{in_one[0].lower()}{in_one[1:]}"])
    return MemorySaving(
        "memory-bound-kernels",
        fused_us + lone_us,
        basis.cost.step_us,
        what,
        SOFTMAX if is_attention else longest or longest_name(bound, "name"),
        others=others(bound, "op" if longest else "name"),
        fused_us=fused_us,
        are_shortest=are_shortest,
        are_small=are_small,
        few_blocks_frac=few_frac,
        few_blocks_of=_longest_of(bound, few_us),
        lone_us=lone_us,
        attention_us=attention_us,
    )


MIN_MOST_FRAC = 0.5
_BATCH_NORM = r"(?i)batch_?norm|\bbn_(?:fw|bw)"
"""In the names of kernels of batch norm."""


def _longest_of(rows: pd.DataFrame, us: "pd.Series[float]") -> tuple[str, str]:
    """The names of the kernel and the operator of the row with most of that time; empty where none has any."""
    if float(us.sum()) <= 0:
        return "", ""
    longest = rows.iloc[int(us.to_numpy().argmax())]
    return str(longest["name"]), str(longest["op"])


def _away_frac(rows: pd.DataFrame) -> "pd.Series[float]":
    """The share of each row's time that fusing its chains takes away; 0 in runs that older versions imported."""
    return (rows["fused_away_us"] / rows["total_us"]).where(rows["total_us"] > 0).fillna(0.0)


def _addcdiv_us(stepping: pd.DataFrame, basis: Basis) -> float:
    """What memory bounds of an optimizer's `addcdiv`, the last operation of Adam and its kind, microseconds per step;
    infinite where it has none, or short ones."""
    last = stepping[stepping["op"].str.contains("addcdiv", regex=False)]
    is_long = len(last) and last["total_us"].sum() >= MIN_BOUND_US * last["count"].sum()
    return basis.each_us(last["total_us"]) if is_long else np.inf


ADAM_ACCESSES, ADDCDIV_ACCESSES = 7, 4
"""Accesses to each element: Adam's fused step reads parameter, gradient and two moments and writes three of them, and
addcdiv reads three tensors and writes one (`aten/src/ATen/native/cuda/fused_adam_impl.cu`, `ForeachPointwiseOp.cu`)."""
MIN_BOUND_US = 20.0
"""Shorter kernels take their time to start, too."""


def _layouts(rows: pd.DataFrame, basis: Basis) -> Saving:
    """What convolutions save whose inputs have the layout that their kernels compute in."""
    turned = layout_rows(rows)
    us = basis.each_us(turned["total_us"])
    return Saving(
        "layout-transposes",
        us,
        basis.cost.step_us,
        f"Layout conversions for convolutions take {basis.taken(us)}",
        longest_name(turned, "op") or "convolutions",
        others=others(turned, "op"),
    )


def _layout_copies(rows: pd.DataFrame, basis: Basis) -> Saving:
    """What tensors save that have the layout in which they are read."""
    copies = layout_copies(rows)
    us = basis.each_us(copies["total_us"])
    op = longest_name(copies, "top_op")
    what = f"Copies into another layout take {basis.taken(us)}, most in {op}"
    return Saving("layout-copies", us, basis.cost.step_us, what, op or "aten::contiguous")


def _part_gradients(rows: pd.DataFrame, basis: Basis) -> Saving:
    """What joining the gradients of all parts of a tensor saves."""
    found = part_gradients(rows)
    if found is None:
        return Saving("part-gradients", 0.0, basis.cost.step_us, "", "")
    what = found.in_words(basis.taken(found.us / basis.steps), max(1.0, found.parts / basis.steps))
    saved_us = found.saved_us / basis.steps
    return Saving("part-gradients", saved_us, basis.cost.step_us, f"{what[0].upper()}{what[1:]}", found.op)


def _optimizer(rows: pd.DataFrame, basis: Basis) -> Saving:
    """What fusing saves of the optimizer's rows."""
    stepping = unfused_optimizer_rows(rows)
    us, each = (basis.each_us(stepping[name]) for name in ("total_us", "count"))
    if stepping["name"].str.contains(_PLAIN_SGD, regex=False).all():
        us = 0.0
    saved_us = max(FUSED_FRAC * us, us - ADAM_ACCESSES / ADDCDIV_ACCESSES * _addcdiv_us(stepping, basis))
    if each > FUSED_KERNELS and us <= MAX_FLOOR_US * each:  # as long as any kernel: fewer are shorter by their number
        saved_us = us * (1 - FUSED_KERNELS / each)
    return Saving(
        "unfused-optimizer",
        saved_us,
        basis.cost.step_us,
        f"The optimizer takes {basis.taken(us)} in {each:,.0f} kernels",
        longest_name(stepping, "op") or "optimizer",
        others=others(stepping, "op"),
    )
