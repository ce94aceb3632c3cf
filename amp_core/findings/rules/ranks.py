"""Rules on the processes of one training: whether one ended early, and whether they agree on the loss scale."""

import math

import numpy as np
import pandas as pd

from amp_core.analysis import rank_scales
from amp_core.analysis.ranks import rank_cause, rank_ends
from amp_core.findings.model import TRAINING_LOOP, Entry, Finding
from amp_core.findings.registry import found, rule
from amp_core.store.run import Run
from amp_core.text import formatting


@rule(
    Entry(
        code="rank-ended",
        severity="error",
        family=TRAINING_LOOP,
        order=120,
        what="One of the processes that train together ended before the others, and took them with it.",
        signal="The end that each rank wrote, or did not write.",
        threshold="A rank that failed by an error of its own, or that wrote no end, in a run of several processes.",
        advice="The others wait for it where gradients are exchanged, until they fail too or are stopped: what it "
        "says of its end is the cause. One without an end was killed, mostly for want of memory; look at the output "
        "of each rank.",
        snippet="# torchrun --standalone --nproc-per-node 4 --tee 3 train.py   "
        "# each rank's output, its number before it",
    )
)
def rank_ended(run: Run) -> list[Finding]:
    """`rank-ended`: of several processes one failed or died, which ended the training."""
    cause = rank_cause(run)
    if cause is None:
        return []
    others = sum(end.rank != cause.rank for end in rank_ends(run))
    return [
        found(
            "rank-ended",
            cause.in_words()[0].upper() + cause.in_words()[1:],
            f"rank {cause.rank}",
            steps=(cause.last_step, cause.last_step) if cause.last_step is not None else None,
            value=float(others),
            limit=0.0,
            unit="other ranks that ended with it",
        )
    ]


@rule(
    Entry(
        code="rank-scale-desync",
        severity="error",
        family=TRAINING_LOOP,
        order=130,
        what="Processes of one training have different loss scales, or some skip a step that others make.",
        signal="Loss scale and skips of the ranks, step by step.",
        threshold="One step at which they differ: replicas are then no longer the same.",
        advice="Each rank decides by the gradients that it holds, so scales drift apart and weights with them. With "
        "sharded gradients use a scaler that asks all ranks.",
        snippet="from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n"
        "\n"
        "scaler = ShardedGradScaler()",
    )
)
def rank_scale_desync(run: Run) -> list[Finding]:
    """`rank-scale-desync`: at one step, ranks have different loss scales, or one skips what another makes."""
    apart = rank_scales(run) if run.head.world_size > 1 else pd.DataFrame()
    if apart.empty:
        return []
    first, last, steps = int(apart["step"].min()), int(apart["step"].max()), apart["step"].nunique()
    at = apart[apart["step"] == first]
    scale = at["loss_scale"].astype(float)
    odd = (
        at[scale != scale.mode().iloc[0]] if scale.nunique() > 1 else at[at["skipped"] != at["skipped"].mode().iloc[0]]
    )
    rank = int(odd["rank"].iloc[0]) if len(odd) else 0
    at_end = apart[apart["step"] == last]["loss_scale"].dropna().to_numpy(dtype=float)
    return [
        found(
            "rank-scale-desync",
            f"The ranks disagree on the loss scale or on skipping at {formatting.plural(steps, 'step')}, "
            f"from {first:,} on",
            f"rank {rank}",
            steps=(first, last),
            value=_times_apart(at_end),
            limit=1.0,
            unit="times (highest over lowest loss scale)",
        )
    ]


def _times_apart(scales: np.ndarray) -> float | None:
    """The highest over the lowest; None where none was recorded."""
    if not len(scales):
        return None
    return float(scales.max() / scales.min()) if scales.min() > 0 else math.inf
