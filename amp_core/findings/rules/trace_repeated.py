"""Rules on imported traces: work that is done more than once."""

from dataclasses import replace

from amp_core.analysis.performance.kernels import numbers_of_import
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.repeated_work import growing_sentence, growing_won_us, recomputed_sentence, steps_of
from amp_core.store.run import Run
from amp_core.traces.growing_rows import MIN_PASSES
from amp_core.traces.recomputation import MIN_FRAC


@rule(
    Entry(
        code="missing-kv-cache",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=426,
        what="Every pass of an imported trace computes all tokens so far: keys and values are not cached.",
        signal="Rows of the same product in successive passes.",
        threshold=f"{MIN_PASSES} passes, each with as many rows more than the one before, and most of the time.",
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
