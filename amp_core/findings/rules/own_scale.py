"""The rule on loops that scale their loss themselves, without a GradScaler."""

from typing import Any

from amp_core.analysis.steps import autocast_dtype
from amp_core.findings.model import TRAINING_LOOP, Entry, Finding
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.signals import last_step, optimizer_name, signals
from amp_core.findings.snippets import LOOP, TORCH_EXAMPLES
from amp_core.store.run import Run
from amp_core.text import formatting


@rule(
    Entry(
        code="own-loss-scale",
        severity="error",
        family=TRAINING_LOOP,
        order=112,
        what="A loop multiplies its loss by a loss scale of its own, and the optimizer steps with gradients that are "
        "still scaled, divided twice, or not finite.",
        signal="The constant by which the loss is multiplied last, and norms of gradients as backward left them and at "
        "`optimizer.step`, in the first steps and after each growth of the scale.",
        threshold="A power of two of 128 or more, in float16. The norms are the same, or differ by the square of "
        "the scale, in all of the first steps; or one step is made with gradients that were not finite although the "
        "loss was "
        f"({TORCH_EXAMPLES}: such steps are skipped).",
        advice="The size of the update depends on the loss scale, or an overflow reaches the weights. Leave scaling, "
        "the check for infinities and unscaling to a GradScaler.",
        snippet=LOOP,
    )
)
def own_loss_scale(run: Run) -> list[Finding]:
    """`own-loss-scale`: a loop with a loss scale of its own does not undo it, or steps after an overflow."""
    frame = signals(run, "scale not undone")
    in_fp16 = autocast_dtype(run) == "float16" or len(signals(run, "half backward")) > 0
    if frame.empty or not in_fp16:
        return []
    row = frame.iloc[0]
    steps = int(row["limit"])
    return [
        make_finding(
            "own-loss-scale",
            _what(row, optimizer_name(run, int(row["optimizer"])), steps),
            f"optimizer.step of {optimizer_name(run, int(row['optimizer']))}",
            steps=(int(row["step"]), max(int(row["step"]), last_step(run) or 0)),
            value=float(row["value"]),
            limit=1.0,
            unit="loss scale",
        )
    ]


def _what(row: Any, name: str, steps: int) -> str:
    scale, count, begin = formatting.scale(float(row["value"])), int(row["count"]), int(row["step"])
    of = f"the first {formatting.plural(steps, 'step')}"
    if begin:
        of = f"{formatting.plural(steps, 'step')} from step {begin} on"
    sentences = {
        "kept": f"{name} steps with gradients that are still multiplied by the loop's own loss scale of {scale}",
        "clipped": f"{name} steps with gradients that the loop clips while they are multiplied by its own loss scale "
        f"of {scale}, and never divides",
        "some": f"{name} steps with {formatting.plural(count, 'gradient')} still multiplied by the loop's own loss "
        f"scale of {scale}, and others divided by it",
        "twice": f"The loop divides the gradients of {name} by its own loss scale of {scale} twice",
        "multiplied": f"The loop multiplies the gradients of {name} by its own loss scale of {scale} once more instead "
        "of dividing them",
        "mixed": f"{name} steps with sums of gradients that have different loss scales, up to {scale}",
        "nonfinite": f"{name} steps with gradients that overflowed at the loop's own loss scale of {scale}, in {count} "
        f"of {of}",
        "replaced": f"The loop replaces gradients that overflowed at its own loss scale of {scale}, and {name} steps, "
        f"in {count} of {of}",
    }
    return sentences[str(row["detail"])]
