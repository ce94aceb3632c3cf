"""Rules on distributed training: whether a rank ended early, and whether ranks agree on loss scale and dtypes."""

import math

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from amp_core.analysis import rank_scales
from amp_core.analysis.ranks import rank_cause, rank_ends
from amp_core.findings.model import TRAINING_LOOP, Entry, Finding
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.rules.errors import (
    bce_banned,
    fp16_parameters,
    mask_constant_overflow,
    no_gradients,
    update_without_step,
)
from amp_core.findings.rules.loops import missing_scaler_update
from amp_core.findings.rules.mixed_dtypes import checkpoint_dtype_mismatch, custom_function_dtype
from amp_core.findings.rules.scaler import anomaly_mode_with_scaler
from amp_core.store.run import Run
from amp_core.text import formatting

_OF_EXCEPTIONS = (fp16_parameters, no_gradients, update_without_step, mask_constant_overflow, bce_banned,
                  missing_scaler_update, custom_function_dtype, checkpoint_dtype_mismatch,
                  anomaly_mode_with_scaler)  # fmt: skip
"""Rules that explain an exception."""


@rule(
    Entry(
        code="rank-ended",
        severity="error",
        family=TRAINING_LOOP,
        order=120,
        what="One process of a distributed training ended before the others and took them down.",
        signal="How each rank's recording ended, or that it never recorded an end.",
        threshold="A rank that failed with its own error, or that recorded no end, in a run of several processes. "
        "Informational where another finding explains the error.",
        advice="The other ranks wait for it in a collective until they fail too or are stopped, so its own error is "
        "the cause. A rank without a recorded end was killed, usually for lack of memory; look at the output of "
        "each rank.",
        snippet="# torchrun --standalone --nproc-per-node 4 --tee 3 train.py   # prefixes each rank's output with "
        "its number",
    )
)
def rank_ended(run: Run) -> list[Finding]:
    """`rank-ended`: of several processes one failed or died, which ended the training."""
    cause = rank_cause(run)
    if cause is None:
        return []
    others = sum(end.rank != cause.rank for end in rank_ends(run))
    explained = cause.reason and any(f.severity == "error" for rule in _OF_EXCEPTIONS for f in rule(run))
    return [
        make_finding(
            "rank-ended",
            cause.in_words()[0].upper() + cause.in_words()[1:],
            f"rank {cause.rank}",
            severity="info" if explained else None,
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
        what="Ranks of one training have different loss scales, or some skip a step that others make.",
        signal="Loss scale and skipped steps of each rank, step by step.",
        threshold="One step at which they differ: the replicas are no longer identical.",
        advice="Each rank decides by its own gradients, so scales and then weights drift apart. With sharded "
        "gradients, use a scaler that synchronizes found_inf across ranks.",
        snippet="from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n"
        "\n"
        "scaler = ShardedGradScaler()",
    )
)
def rank_scale_desync(run: Run) -> list[Finding]:
    """`rank-scale-desync`: at one step, ranks have different loss scales, or one skips what another makes."""
    differing = rank_scales(run) if run.head.world_size > 1 else pd.DataFrame()
    if differing.empty:
        return []
    first, last, steps = int(differing["step"].min()), int(differing["step"].max()), differing["step"].nunique()
    at = differing[differing["step"] == first]
    scale = at["loss_scale"].astype(float)
    odd = (
        at[scale != scale.mode().iloc[0]] if scale.nunique() > 1 else at[at["skipped"] != at["skipped"].mode().iloc[0]]
    )
    rank = int(odd["rank"].iloc[0]) if len(odd) else 0
    at_end = differing[differing["step"] == last]["loss_scale"].dropna().to_numpy(dtype=float)
    return [
        make_finding(
            "rank-scale-desync",
            f"The ranks disagree on the loss scale or on skipping at {formatting.plural(steps, 'step')}, from step "
            f"{first:,} on",
            f"rank {rank}",
            steps=(first, last),
            value=_scale_ratio(at_end),
            limit=1.0,
            unit="times (highest over lowest loss scale)",
        )
    ]


def _scale_ratio(scales: np.ndarray) -> float | None:
    """The ratio of the highest to the lowest; None if none was recorded."""
    if not len(scales):
        return None
    return float(scales.max() / scales.min()) if scales.min() > 0 else math.inf


@rule(
    Entry(
        code="rank-dtype-mismatch",
        severity="error",
        family=TRAINING_LOOP,
        order=132,
        what="Ranks of one training compute or store the same tensor in different dtypes.",
        signal="dtypes of gradients by rank, at the first sampled step.",
        threshold="One tensor with two dtypes (verl issue 2953: trainer and rollout in different formats).",
        advice="Replicas then compute different gradients from the same weights, and collectives may fail or mix "
        "formats. Use the same autocast dtype on every rank, and cast the model before it is wrapped.",
        snippet="dtypes = [None] * torch.distributed.get_world_size()\n"
        "torch.distributed.all_gather_object(dtypes, str(next(model.parameters()).dtype))\n"
        "assert len(set(dtypes)) == 1, dtypes",
        page="precision-map",
    )
)
def rank_dtype_mismatch(run: Run) -> list[Finding]:
    """`rank-dtype-mismatch`: a gradient has another dtype on one rank than on the others."""
    if run.head.world_size < 2:
        return []
    table = run.table("tensors").select(["step", "rank", "name", "kind", "dtype"])
    table = table.filter(pc.equal(table.column("step"), pc.min(table.column("step"))))
    frame = table.to_pandas()
    kinds = frame.groupby(["name", "kind"])["dtype"].nunique()
    ranks = frame.groupby(["name", "kind", "dtype"])["rank"].agg(set)
    for (name, kind), count in kinds.items():
        by_dtype = ranks[name, kind]
        if count < 2 or set.intersection(*by_dtype):  # a module that ran twice on one rank
            continue
        fewest = min(by_dtype.index, key=lambda dtype: (len(by_dtype[dtype]), 0 in by_dtype[dtype]))
        others = ", ".join(sorted(set(by_dtype.index) - {fewest}))
        rank = min(by_dtype[fewest])
        return [
            make_finding(
                "rank-dtype-mismatch",
                f"Rank {rank} has the gradient of {name} in {fewest}, others in {others}",
                f"rank {rank}",
                steps=(int(frame["step"].iloc[0]), int(frame["step"].iloc[0])),
                value=float((kinds > 1).sum()),
                limit=0.0,
                unit="tensors with several dtypes",
            )
        ]
    return []
