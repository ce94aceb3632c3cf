"""Rules on imported traces: work that is done more than once."""

from dataclasses import replace

from amp_core.analysis.performance.kernels import numbers_of_import
from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.repeated_work import (
    COMPARES,
    MOVES,
    SLICES,
    growing_sentence,
    growing_won_us,
    loop_kind,
    loop_sentence,
    recomputed_sentence,
    steps_of,
)
from amp_core.findings.signals import facts, mappings
from amp_core.store.run import Run
from amp_core.traces import growing_rows, loops
from amp_core.traces.recomputation import MIN_FRAC


@rule(
    Entry(
        code="missing-kv-cache",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=426,
        what="Every pass of an imported trace computes all tokens so far: keys and values are not cached.",
        signal="Rows of the same product in successive passes.",
        threshold=f"{growing_rows.MIN_PASSES} passes, each with as many rows more than the one before, and most of "
        "the time.",
        advice="Keep keys and values of earlier tokens, so that a pass has the new ones alone. Models of transformers "
        "do so with use_cache=True, which checkpointing and some configurations switch off.",
        snippet="model.config.use_cache = True\ntokens = model.generate(prompt, use_cache=True)",
        page="step-cost",
    )
)
def missing_kv_cache(run: Run) -> list[Finding]:
    """`missing-kv-cache`: decoding that computes all tokens so far in every pass."""
    sentence = growing_sentence(run)
    if not sentence:
        return []
    ms = growing_won_us(run) / steps_of(run)[0] / 1e3
    finding = make_finding("missing-kv-cache", sentence.rstrip("."), "attention", unit="")
    return [replace(finding, win_ms=ms)]


@rule(
    Entry(
        code="activation-recomputation",
        severity="info",
        family=SPEED_AND_MEMORY,
        order=508,
        what="Backward of an imported trace computes much of forward anew, as activation checkpointing does.",
        signal="Operators that modules call in forward, within nodes of autograd.",
        threshold=f"{100 * MIN_FRAC:.0f} % of the time of all work.",
        advice="It saves memory for activations, and takes this time. If memory is left, checkpoint fewer blocks, or "
        "only what is cheap to compute for its size.",
        snippet="from torch.utils.checkpoint import checkpoint\n\nfor n, block in enumerate(blocks):\n"
        "    x = checkpoint(block, x, use_reentrant=False) if n % 2 else block(x)   # every second one",
        page="step-cost",
    )
)
def activation_recomputation(run: Run) -> list[Finding]:
    """`activation-recomputation`: forward operators within backward."""
    sentence = recomputed_sentence(run)
    if not sentence:
        return []
    steps, unit = steps_of(run)
    (us,) = numbers_of_import(run, "recomputation", "us")
    ms = us / steps / 1e3
    finding = make_finding("activation-recomputation", sentence.rstrip("."), "backward", value=ms, unit=f"ms{unit}")
    return [replace(finding, win_ms=ms)]


@rule(
    Entry(
        code="operator-loop",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=425,
        what="A loop of Python over small operators takes much of the host's time in an imported trace.",
        signal="The same series of operators without weights, again and again in one step.",
        threshold=f"{loops.MIN_PASSES} passes of operators of {loops.MAX_MEAN_US:.0f} µs at most on average, and "
        f"{100 * loops.MIN_FRAC:.0f} % of the time.",
        advice="Each pass costs the calls of Python and of its operators, and on a device their launches, whatever "
        "they compute. Compute a pass in fewer operators, or compile the loop; where passes do not need each other's "
        "results, compute them at once, along a dimension of their own.",
        snippet="all_passes = torch.compile(all_passes)   # the function that holds the whole loop, not its body alone",
        page="step-cost",
    )
)
def operator_loop(run: Run) -> list[Finding]:
    """`operator-loop`: the same small operators, again and again."""
    sentence = loop_sentence(run)
    if not sentence:
        return []
    (us,) = numbers_of_import(run, "operator_loop", "us")
    of_loop = facts(run.head.config, "operator_loop")
    names = [*of_loop["names"], *(one.get("name") for one in mappings(of_loop, "further"))]
    where = ", ".join(dict.fromkeys(map(str, names)))
    title, remedy = sentence.rpartition(": ")[0], _LOOPS.get(loop_kind(run))
    finding = make_finding("operator-loop", title, where, value=us / 1e3, unit="ms", remedy=remedy)
    # On a device, what it makes the device wait for is a finding of its own.
    return [finding if possible_savings(run) is not None else replace(finding, win_ms=us / 1e3)]


_LOOPS = {
    COMPARES: Remedy(
        "Each pass costs the calls of Python and of its operators, and on a device their launches, whatever they "
        "compute. Make what the passes differ in a dimension of the tensors, and compute them at once; where a pass "
        "needs the result of the one before, compute it in fewer operators, or compile the loop.",
        "inside = (x >= low[:, None]) & (x < high[:, None])   # all bounds at once, not in a loop over them",
    ),
    MOVES: Remedy(
        "Each pass costs the calls of Python and of its operators, and only moves a few elements. Make tensors of all "
        "positions, and index with these once.",
        "out[:, columns] = table[0, rows]   # all positions at once, not one in each pass",
    ),
    SLICES: Remedy(
        "Each pass selects a slice and launches a kernel on it. Put that dimension into the kernel's grid: one launch "
        "then computes all slices, and its program number tells which.",
        "kernel[(batch * heads, blocks)](q, k, v, out, q.stride(1))   # tl.program_id(0) is the slice",
    ),
}
"""Advice by the kind of the loop; of others, the entry's."""
