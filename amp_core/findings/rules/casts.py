"""Rules on what casts to 8 and 4 bits lose: saturation, underflow, and scales that do not fit their tensor."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis.numerics.casts import OPERAND, cast_losses_by_operand, casts, has_casts
from amp_core.findings.model import RANGE_AND_PRECISION, TRAINING_LOOP, Entry, Finding
from amp_core.findings.registry import make_finding, rule
from amp_core.quantization import ELEMENTS, ROW, TENSOR
from amp_core.store.run import Run
from amp_core.text import formatting

MAX_SATURATED_FRAC = 1e-3
MAX_DELAYED_SATURATED_FRAC = 0.01
MAX_BLOCK_SATURATED_FRAC = 0.05
MAX_UNDERFLOW_FRAC = 0.1
MIN_ERROR_MASS_FRAC = 0.1
MAX_HEADROOM, MIN_HEADROOM = 2.0, 2.0**-6
JUMP_OCTAVES = 4
MIN_JUMPS = 3
MIN_JUMPS_FRAC = 0.1
_WHERE = {"weight": "the weight", "activation": "the input", "output_grad": "the output gradient"}


def _operand(row: "pd.Series[Any]") -> str:
    """`the input of blocks.0.fc`."""
    return f"{_WHERE.get(str(row['kind']), str(row['kind']))} of {str(row['name']).removesuffix('.weight')}"


def _steps(run: Run) -> tuple[int, int]:
    steps = run.table("quantized").column("step").to_pylist()
    return min(steps), max(steps)


def _also(count: int) -> str:
    return f", and {formatting.plural(count - 1, 'other operand')} too" if count > 1 else ""


def _worst(frame: pd.DataFrame, column: str) -> "pd.Series[Any]":
    worst: pd.Series[Any] = frame.iloc[int(frame[column].to_numpy().argmax())]
    return worst


@rule(
    Entry(
        code="quantized-saturation",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=287,
        follows_in_place=("stale-amax", "jumping-scale"),
        what="Values saturate in the cast to 8 or 4 bits: they are larger than the scale leaves room for.",
        signal="Values before and after the casts of sampled steps (table `quantized`).",
        threshold="0.1 % of the nonzero values where a tensor or row has one scale, which a current amax never "
        "saturates; 1 % under delayed scaling, where each new largest value does; 5 % in blocks, since scales of "
        "powers of two rounded down (OCP MX 1.0) saturate some by design.",
        advice="The largest values of a tensor are cut off, and they are the ones that matter. Let the scale follow "
        "the tensor's own amax (dynamic scaling), or shorten the amax history and add a margin.",
        snippet="from torchao.float8 import Float8LinearConfig, convert_to_float8_training\n\n"
        'config = Float8LinearConfig.from_recipe_name("tensorwise")   # dynamic: 448 / amax of the tensor itself\n'
        "convert_to_float8_training(model, config=config)",
        page="low-bits",
    )
)
def quantized_saturation(run: Run) -> list[Finding]:
    """`quantized-saturation`: more values than a limit lie above the largest that a scale can hold."""
    if not has_casts(run):
        return []
    frame = cast_losses_by_operand(run)
    whole = np.where(frame["scale_age"] > 0, MAX_DELAYED_SATURATED_FRAC, MAX_SATURATED_FRAC)
    limit = np.where(frame["block"].isin([TENSOR, ROW]), whole, MAX_BLOCK_SATURATED_FRAC)
    frame = frame.assign(limit=limit)[frame["saturated_frac"] > limit]
    if frame.empty:
        return []
    row = _worst(frame, "saturated_frac")
    share = float(str(row["saturated_frac"]))
    return [
        make_finding(
            "quantized-saturation",
            f"{formatting.percent(share)} of the values of {_operand(row)} saturate{_also(len(frame))}",
            str(row["name"]),
            steps=_steps(run),
            value=share,
            limit=float(str(row["limit"])),
            unit="share of nonzero values",
        )
    ]


def _underflow(run: Run, code: str, *, e4m3: bool) -> list[Finding]:
    """The finding `code` on the worst output gradient, with E4M3 and one scale per tensor or row, or with any other
    format."""
    if not has_casts(run):
        return []
    frame = cast_losses_by_operand(run)
    narrow = (frame["element"] == "fp8-e4m3") & frame["block"].isin([TENSOR, ROW])
    frame = frame[(frame["kind"] == "output_grad") & (narrow == e4m3) & (frame["underflow_frac"] > MAX_UNDERFLOW_FRAC)]
    if frame.empty:
        return []
    row = _worst(frame, "underflow_frac")
    share = float(str(row["underflow_frac"]))
    element = ELEMENTS.get(str(row["element"]))  # logs of Transformer Engine may not tell it
    label = element.label if element is not None else "their cast"
    return [
        make_finding(
            code,
            f"{formatting.percent(share)} of the values of {_operand(row)} become 0 in {label}{_also(len(frame))}",
            str(row["name"]),
            steps=_steps(run),
            value=share,
            limit=MAX_UNDERFLOW_FRAC,
            unit="share of nonzero values",
            severity="error" if float(frame["underflow_mass_frac"].max()) >= MIN_ERROR_MASS_FRAC else None,
        )
    ]


@rule(
    Entry(
        code="quantized-gradient-underflow",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=175,
        what="Output gradients become 0 in the cast to 8 or 4 bits.",
        signal="Output gradients before and after the casts of sampled steps (table `quantized`).",
        threshold="10 % of the nonzero values of a layer, on average over sampled steps. An error where these carry "
        "10 % of the gradient's mass.",
        advice="One large value sets the scale, and the others of its tensor or block lie too far below it. Use "
        "smaller blocks (MXFP8, rowwise), keep the layers before it in BF16, or find out where the outliers come from.",
        snippet="from torchao.float8 import Float8LinearConfig, convert_to_float8_training\n\n"
        'config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")   # weight gradients in high precision\n'
        "convert_to_float8_training(model, config=config)",
        page="low-bits",
    )
)
def quantized_gradient_underflow(run: Run) -> list[Finding]:
    """`quantized-gradient-underflow`: output gradients become 0 in their cast, in a format other than E4M3."""
    return _underflow(run, "quantized-gradient-underflow", e4m3=False)


@rule(
    Entry(
        code="e4m3-gradients",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=176,
        what="Output gradients become 0 in E4M3, whose range E5M2 exceeds by 14 powers of two.",
        signal="Output gradients that are cast to E4M3 with one scale per tensor or row, before and after.",
        threshold="10 % of the nonzero values of a layer (Micikevicius et al. 2022: E4M3 for weights and activations, "
        "E5M2 for gradients). An error where these carry 10 % of the gradient's mass.",
        advice="E4M3 spans 2^-9 to 448, too little for gradients that share one scale. Cast output gradients to E5M2, "
        "or give blocks of 32 a scale of their own (MXFP8), where E4M3 suffices.",
        snippet="import torch\n"
        "from torchao.float8 import CastConfig, Float8LinearConfig, convert_to_float8_training\n\n"
        "config = Float8LinearConfig(cast_config_grad_output=CastConfig(target_dtype=torch.float8_e5m2))\n"
        "convert_to_float8_training(model, config=config)",
        page="low-bits",
    )
)
def e4m3_gradients(run: Run) -> list[Finding]:
    """`e4m3-gradients`: output gradients become 0 in E4M3 where E5M2 would hold them."""
    return _underflow(run, "e4m3-gradients", e4m3=True)


def _series(run: Run) -> Iterator[pd.DataFrame]:
    """The samples of each operand with one scale, in order of steps."""
    frame = casts(run)
    frame = frame[(frame["rank"] == frame["rank"].min()) & frame["headroom"].notna() & (frame["amax"] > 0)]
    for _, part in frame.groupby(OPERAND, sort=False, dropna=False):
        yield part


@rule(
    Entry(
        code="stale-amax",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=178,
        what="The scale of an FP8 tensor follows from an amax that no longer holds.",
        signal="Scale in use and its age beside the tensor's own amax, on sampled steps (table `quantized`).",
        threshold="A scale that did not change between two samples while the weight's amax did; or one by which values "
        "exceed the format's largest by a factor of 2, or stay 2^6 below it, in half of the samples.",
        advice="Values saturate, or part of the format's range goes unused. Compute the scale anew after each "
        "optimizer step, and under delayed scaling shorten the amax history or take the most recent amax.",
        snippet="from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp\n\n"
        "optimizer.step()\n"
        "precompute_float8_dynamic_scale_for_fsdp(model)   # after each step",
        page="loss-scale",
    )
)
def stale_amax(run: Run) -> list[Finding]:
    """`stale-amax`: a scale does not follow its tensor."""
    late_scales: list[tuple[float, pd.DataFrame, bool]] = []
    for part in _series(run) if has_casts(run) else ():
        late = part[part["scale_age"] > 0]
        if late.empty:
            continue
        weights = part["kind"].iloc[0] == "weight"
        same = (part["scale"].diff() == 0) & (part["amax"].pct_change().abs() > 2.0**-10)
        off = (late["headroom"] > MAX_HEADROOM) | (late["headroom"] < MIN_HEADROOM)
        if (weights and same.any()) or off.mean() > 0.5:
            ratio = float(np.exp2(np.log2(late["headroom"]).abs().max()))
            late_scales.append((ratio, late, bool(off.mean() > 0.5)))
    if not late_scales:
        return []
    ratio, late, off_range = max(late_scales, key=lambda entry: entry[0])
    row = late.iloc[-1]
    age = int(late["scale_age"].max())
    how = f"a factor of {formatting.number(ratio)} off" if off_range else f"{formatting.plural(age, 'step')} old"
    return [
        make_finding(
            "stale-amax",
            f"The scale of {_operand(row)} is {how}{_also(len(late_scales))}",
            str(row["name"]),
            steps=(int(late["step"].min()), int(late["step"].max())),
            value=float(age),
            limit=0.0 if not off_range else None,
            unit="steps since the amax was measured",
        )
    ]


@rule(
    Entry(
        code="jumping-scale",
        severity="warning",
        family=RANGE_AND_PRECISION,
        order=288,
        what="The scale of an FP8 tensor jumps up and down between steps.",
        signal="Scales in use on sampled steps (table `quantized`).",
        threshold="Three jumps by a factor of 16 or more, in both directions, on a tenth of the samples: as much as "
        "four of the 17 powers of two that E4M3 spans.",
        advice="Single outliers set the scale of the whole tensor, so that its other values lose range in those steps. "
        "Find out where the outliers come from (data, a missing norm), or give rows or blocks their own scale.",
        snippet="from torchao.float8 import Float8LinearConfig, convert_to_float8_training\n\n"
        'convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"))',
        page="loss-scale",
    )
)
def jumping_scale(run: Run) -> list[Finding]:
    """`jumping-scale`: a tensor's scale moves up and down by powers of two."""
    jumps_by_operand: list[tuple[int, float, pd.DataFrame]] = []
    for part in _series(run) if has_casts(run) else ():
        octaves = np.log2(part["scale"].to_numpy())
        change = np.diff(octaves)
        jumps = np.abs(change) >= JUMP_OCTAVES
        both = (change[jumps] > 0).any() and (change[jumps] < 0).any()
        if both and jumps.sum() >= max(MIN_JUMPS, MIN_JUMPS_FRAC * len(change)):
            jumps_by_operand.append((int(jumps.sum()), float(np.exp2(np.abs(change).max())), part))
    if not jumps_by_operand:
        return []
    count, factor, part = max(jumps_by_operand, key=lambda entry: entry[:2])
    return [
        make_finding(
            "jumping-scale",
            f"The scale of {_operand(part.iloc[0])} jumps {count:,} times, by a factor of up to "
            f"{formatting.number(factor)}{_also(len(jumps_by_operand))}",
            str(part["name"].iloc[0]),
            steps=(int(part["step"].min()), int(part["step"].max())),
            value=float(count),
            limit=float(MIN_JUMPS - 1),
            unit="jumps",
        )
    ]


@rule(
    Entry(
        code="rank-amax-mismatch",
        severity="warning",
        family=TRAINING_LOOP,
        order=133,
        what="Ranks quantize the same weight with different scales, or keep delayed scales of their own.",
        signal="Scales of the ranks at each sampled step (table `quantized`): of weights, and of all operands whose "
        "scale follows from earlier steps.",
        threshold="One step at which they differ: replicas or shards of one weight then hold different values, and "
        "delayed scales drift apart for good.",
        advice="The amax was not reduced over the ranks. Let FSDP's float8 all-gather or Transformer Engine reduce it: "
        "precompute scales on all ranks, and pass the process group to autocast.",
        snippet="import transformer_engine.pytorch as te\n"
        "from transformer_engine.common.recipe import DelayedScaling\n\n"
        "with te.fp8_autocast(fp8_recipe=DelayedScaling(reduce_amax=True), fp8_group=data_parallel_group):\n"
        "    loss = loss_fn(model(x), y)",
        page="loss-scale",
    )
)
def rank_amax_mismatch(run: Run) -> list[Finding]:
    """`rank-amax-mismatch`: ranks scale the same tensor differently."""
    if run.head.world_size < 2 or not has_casts(run):
        return []
    frame = casts(run)
    frame = frame[frame["headroom"].notna() & ((frame["kind"] == "weight") | (frame["scale_age"] > 0))]
    scales = frame.groupby([*OPERAND, "step"], sort=False, dropna=False)["scale"]
    spread = (scales.max() / scales.min()).reset_index(name="ratio")
    spread = spread[spread["ratio"] > 1]
    if spread.empty:
        return []
    row = spread.iloc[0]
    count = len(spread.drop_duplicates(OPERAND))
    return [
        make_finding(
            "rank-amax-mismatch",
            f"The ranks scale {_operand(row)} differently{_also(count)}",
            str(row["name"]),
            steps=(int(spread["step"].min()), int(spread["step"].max())),
            value=float(spread["ratio"].max()),
            limit=1.0,
            unit="times (largest over smallest scale)",
        )
    ]
