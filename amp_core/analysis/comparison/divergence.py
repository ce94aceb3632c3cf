"""Where two runs of the same seed and data part: the first step, phase and layer that differ by more than noise.

>>> where = first_difference(run_fp32, run_bf16, floor=run_fp32_perturbed)
>>> where.sentence
'They diverge at step 40, in the forward, first in blocks.3 (activation): 2.10 % apart; the noise floor is 0.100 %.'

Compared are what both runs recorded: loss and gradient norm of each step, root mean square and mean magnitude of each
sampled tensor, loss scales taken out. Output gradients of a run on several ranks are divided by their number, because
each rank averages its loss over its own part of the batch; those that are not split over ranks are left out.

The noise floor is how far the first run and a perturbed repeat of it are apart (another order of summation, weights
moved by one rounding), as a maximum up to the step, since differences grow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from amp_core.analysis.run_labels import unique_labels
from amp_core.analysis.steps import attempts, whole_number
from amp_core.schema import RunError
from amp_core.store.run import Run
from amp_core.text import formatting

FLOOR_RATIO = 3.0
"""Runs differ by more than noise if they are this many times as far apart as the repeat."""
MIN_FLOOR = 2.0**-22
"""The least noise floor, two units in the last place of float32: a sum in another order rounds differently, even where
the repeat happens to agree exactly."""
MIN_RESHARDED = 2.0**-40
"""The same without a repeat, for tensors that two runs hold in different shards: their statistics are float64 sums over
shards, in another order."""
PHASES = {"weight": "optimizer", "activation": "forward", "loss": "forward", "output_grad": "backward"}
"""The phase that produces a tensor of each kind; of others: backward."""
SINGLE = {"loss": "loss", "grad_norm": "gradient norm"}
"""Kinds of one value per step, in words."""
ORDER = ("weight", "activation", "loss", "output_grad", "weight_grad", "grad_norm")
"""Kinds in the order in which a step produces them; weights are those from which it starts."""


@dataclass(frozen=True)
class FirstDifference:
    """Where two runs part. `step`, `phase`, `kind` and `name` are None if they do not differ by more than noise."""

    step: int | None
    phase: str | None
    kind: str | None
    """`weight_grad` and so on as in `tensors`, or `loss` or `grad_norm`, which have no name."""
    name: str | None
    difference: float
    """Relative difference there, 0–2; inf where only one of the two is finite."""
    floor: float | None
    """The noise floor there; None without a repeat."""
    sampled_before: int | None
    """The last step before `step` whose tensors were sampled: what parts in between shows only at `step`."""
    table: pd.DataFrame
    """One row per tensor and for loss and gradient norm, in the order of the first differences: kind, name, phase,
    step (the first that differs by more than noise; null: none), difference, floor there (NaN without a repeat), and
    largest_difference over all common steps."""
    compared: str = ""
    """What was compared, in a sentence."""
    forward_unseen: bool = False
    """Whether the runs differ first in the backward, with losses that are not equal and no activations in both: the
    difference may have begun in the forward."""

    dtypes: tuple[str, str] | None = None
    """The dtypes of that tensor in the two runs, where they are not the same."""
    layer: str | None = None
    """Where the difference is or may be of the forward, the first module whose output differed from eager mode in an
    audit of compiled code in either run; None without one."""
    layer_difference: float | None = None
    """Its relative difference in that audit."""

    @property
    def sentence(self) -> str:
        """The answer in a sentence."""
        if self.step is None:
            return "The runs do not differ by more than the noise floor in anything that both recorded."
        what = {"loss": "the loss", "grad_norm": "the gradient norm"}.get(str(self.kind), f"{self.name} ({self.kind})")
        apart = "only one of them is finite" if np.isinf(self.difference) else f"{_percent(self.difference)} apart"
        if self.dtypes is not None:
            apart += f", {self.dtypes[0]} in the first run and {self.dtypes[1]} in the second"
        floor = (
            f"the noise floor is {_percent(self.floor)}"
            if self.floor is not None
            else "without a perturbed repeat, any difference counts"
        )
        before = (
            f" Tensors were last sampled at step {self.sampled_before:,}: the cause may lie after it."
            if self.sampled_before is not None and self.sampled_before < self.step - 1
            else ""
        )
        if self.forward_unseen:
            before += (
                " Activations, which a compiled graph hides, were not recorded in both runs, and the losses are not "
                "equal: the cause may lie in the forward."
            )
        if self.layer is not None and self.layer_difference is not None:
            before += (
                f" In an audit of the compiled code, {self.layer} is the first module whose output differs from eager "
                f"mode, by {_percent(self.layer_difference)}."
            )
        elif self.forward_unseen or self.kind == "loss":
            before += (
                " If one of them is compiled, rec.audit(…, compiled=True) names the layer of the forward."
                if self.table["kind"].eq("activation").any()
                else ' Runs recorded with kinds=("activation", …) show the layer of the forward; where one of them is '
                "compiled, rec.audit(…, compiled=True) does."
            )
        of = f"the {self.phase}" if self.phase != "optimizer" else "the preceding optimizer step"
        return f"They diverge at step {self.step:,}, in {of}, first in {what}: {apart}; {floor}.{before}"


def first_difference(first: Run, second: Run, floor: Run | None = None) -> FirstDifference:
    """Where two runs of the same seed and data part by more than noise.

    `floor` is a perturbed repeat of the first run; without one any difference counts. Raises `RunError` if the runs
    have other seeds, or no step in common.
    """
    seeds = [run.head.config.get("seed") for run in (first, second)]
    if None not in seeds and seeds[0] != seeds[1]:
        raise RunError(
            f"{first.name} has seed {seeds[0]} and {second.name} has seed {seeds[1]}; compare runs of one seed"
        )
    places = _places(first)
    apart = _differences(_values(first), _values(second))
    if apart.empty:
        raise RunError(f"{first.name} and {second.name} have no recorded step in common")
    noise = None if floor is None else _differences(_values(first), _values(floor))
    apart["floor"] = 0.0 if noise is None else _floor(apart, noise)
    apart["phase"] = apart["kind"].map(PHASES).fillna("backward")
    order = apart["kind"].map(ORDER.index)
    position = apart["name"].map(lambda name: places.get(name, len(places)))
    apart["order"] = order
    apart["position"] = position.where(order < ORDER.index("output_grad"), -position)
    apart = apart.sort_values(["step", "order", "position"], kind="stable")
    resharded = len({_shards(run) for run in (first, second)}) > 1
    least = MIN_RESHARDED if resharded else 0.0
    limit = least if noise is None else FLOOR_RATIO * apart["floor"].clip(lower=MIN_FLOOR)
    beyond = apart[apart["difference"] > limit]
    table = _by_tensor(apart, beyond if noise is not None else beyond.assign(floor=np.nan))
    if beyond.empty:
        none = FirstDifference(None, None, None, None, float(apart["difference"].max()), None, None, table)
        return replace(none, compared=_compared(apart))
    row = beyond.iloc[0]
    unseen = _forward_unseen(apart[apart["step"] == row["step"]], str(row["phase"]))
    layer = _in_compiled_code((first, second)) if unseen or row["kind"] == "loss" else None
    sampled = apart.loc[~apart["kind"].isin(["loss", "grad_norm"]) & (apart["step"] < row["step"]), "step"]
    return FirstDifference(
        int(row["step"]),
        str(row["phase"]),
        str(row["kind"]),
        str(row["name"]) or None,
        float(row["difference"]),
        None if floor is None else float(row["floor"]),
        int(sampled.max()) if len(sampled) else None,
        table,
        _compared(apart),
        unseen,
        _dtypes(first, second, row),
        *(layer or (None, None)),
    )


def _dtypes(first: Run, second: Run, row: "pd.Series[Any]") -> tuple[str, str] | None:
    """The dtypes of a tensor in two runs if they differ."""
    kind, name, step = str(row["kind"]), str(row["name"]), int(row["step"])
    if kind in SINGLE:
        return None
    seen = [run.tensors(kind, name, steps=(step, step))["dtype"].dropna() for run in (first, second)]
    if any(dtypes.empty for dtypes in seen) or set(seen[0]) == set(seen[1]):
        return None
    return str(seen[0].iloc[0]), str(seen[1].iloc[0])


def _shards(run: Run) -> tuple[int, int]:
    """Into how many shards the parameters are split, and on how many ranks the run was."""
    return whole_number(run.head.config.get("shards")) or 1, run.head.world_size


def _in_compiled_code(runs: Sequence[Run]) -> tuple[str, float] | None:
    """The first module whose output in compiled code was more than rounding away from eager mode, and how far."""
    for run in runs:
        audits = run.compiled_audits
        last = audits[audits["step"] == audits["step"].max()]
        for row in last[last["rel_error"] > MIN_FLOOR].itertuples():
            return str(row.name), float(row.rel_error)
    return None


def _compared(apart: pd.DataFrame) -> str:
    """What both runs recorded, in a sentence."""
    steps = apart.groupby("kind")["step"].nunique()
    names = apart.groupby("kind")["name"].nunique()
    single = [f"{SINGLE[kind]} of {formatting.plural(int(steps[kind]), 'step')}" for kind in SINGLE if kind in steps]
    tensors = [
        f"{kind} of {formatting.plural(int(names[kind]), 'tensor')} at {formatting.plural(int(steps[kind]), 'step')}"
        for kind in ORDER
        if kind in steps and kind not in SINGLE
    ]
    return f"Compared: {'; '.join([*single, *tensors])}."


def _forward_unseen(at: pd.DataFrame, phase: str) -> bool:
    """Whether a difference in the backward of a step may have begun in its forward: no activations were compared, and
    the loss was not, or differs, if only by less than noise."""
    loss = at.loc[at["kind"] == "loss", "difference"]
    equal = len(loss) > 0 and not loss.any()
    return phase == "backward" and not equal and not at["kind"].eq("activation").any()


def forward_differences(runs: Sequence[Run]) -> pd.DataFrame:
    """One row per run and module of the last forward audit, in the order of the forward: run (label), step, name,
    rel_error and cosine of its output against FP32, nonfinite."""
    frames = [pd.DataFrame(columns=["run", "step", "name", "rel_error", "cosine", "nonfinite"])]
    for label, run in zip(unique_labels(runs), runs, strict=True):
        audits = run.forward_audits
        frames.append(audits[audits["step"] == audits["step"].max()].assign(run=label)[list(frames[0])])
    known = [frame for frame in frames if len(frame)]
    return pd.concat(known, ignore_index=True) if known else frames[0]


def _values(run: Run) -> pd.DataFrame:
    """Step, kind, name, numel, and what is compared of each: rms and mean magnitude without the loss scale, over all
    ranks."""
    steps = run.steps[["step", "loss", "grad_norm"]].groupby("step", as_index=False).mean()
    if _shards(run)[0] > 1:  # each rank's norm is that of its shards
        steps["grad_norm"] = steps["step"].map(attempts(run).set_index("step")["grad_norm"])
    single = steps.melt("step", var_name="kind", value_name="rms").dropna(subset="rms").assign(name="")
    single["mean"] = single["rms"]
    tensors = run.tensors()
    finite = (tensors["numel"] - tensors["inf"] - tensors["nan"]).astype(float)
    scale = tensors["loss_scale"].astype(float).fillna(1.0).where(tensors["kind"].str.endswith("_grad"), 1.0)
    scale = scale * np.where(tensors["kind"] == "output_grad", max(1, run.head.world_size), 1)
    sums = pd.DataFrame(
        {
            "step": tensors["step"],
            "kind": tensors["kind"],
            "name": tensors["name"],
            "finite": finite,
            "bad": tensors["numel"] - finite,
            "squares": (tensors["rms"].astype(float) / scale) ** 2 * finite,
            "mass": tensors["abs_sum"].astype(float) / scale,
        }
    )
    grouped = sums.groupby(["step", "kind", "name"], sort=False).sum(min_count=1).reset_index()
    grouped["rms"] = (grouped["squares"] / grouped["finite"]).where(~(grouped["bad"] > 0), np.inf) ** 0.5
    grouped["mean"] = grouped["mass"] / grouped["finite"]
    grouped["numel"] = grouped["finite"] + grouped["bad"]
    return pd.concat([single, grouped], ignore_index=True)[["step", "kind", "name", "numel", "rms", "mean"]]


def _differences(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Step, kind, name and relative difference of what both have: the larger one of rms and mean magnitude."""
    both = first.merge(second, on=["step", "kind", "name"], suffixes=("", "_second"))
    both = both[(both["kind"] != "output_grad") | (both["numel"] == both["numel_second"])]
    differences = np.zeros(len(both))
    for column in ("rms", "mean"):
        a, b = (both[name].to_numpy(dtype=np.float64) for name in (column, f"{column}_second"))
        with np.errstate(invalid="ignore", divide="ignore"):
            relative = np.where(a == b, 0.0, np.abs(a - b) / np.maximum(np.abs(a), np.abs(b)))
        one_finite = np.isfinite(a) != np.isfinite(b)
        known = ~(np.isnan(a) & np.isnan(b)) if column == "mean" else np.ones(len(both), dtype=bool)
        differences = np.fmax(differences, np.where(one_finite & known, np.inf, np.nan_to_num(relative)))
    return both[["step", "kind", "name"]].assign(difference=differences)


def _floor(apart: pd.DataFrame, noise: pd.DataFrame) -> "pd.Series[float]":
    """The noise floor of each row: the most that the repeat differed in this tensor up to this step; of a tensor that
    the repeat lacks, that of its kind."""
    noise = noise.sort_values("step", kind="stable")
    joined = apart[["step", "kind", "name"]].reset_index().sort_values("step", kind="stable")
    for by in (["kind", "name"], ["kind"]):
        so_far = noise.assign(floor=noise.groupby(by)["difference"].cummax())
        column = "floor" if "floor" not in joined else "of_kind"
        latest = so_far.drop_duplicates([*by, "step"], keep="last").rename(columns={"floor": column})
        joined = pd.merge_asof(joined, latest[["step", *by, column]], on="step", by=by)
    floor = joined["floor"].fillna(joined["of_kind"]).fillna(0.0)
    return pd.Series(floor.to_numpy(), index=joined["index"]).reindex(apart.index)


def _by_tensor(apart: pd.DataFrame, beyond: pd.DataFrame) -> pd.DataFrame:
    keys = ["kind", "name"]
    firsts = beyond.drop_duplicates(keys)[[*keys, "step", "difference", "floor"]]
    largest = apart.groupby(keys, sort=False)["difference"].max().rename("largest_difference").reset_index()
    phases = apart.drop_duplicates(keys)[[*keys, "phase", "order", "position"]]
    table = phases.merge(firsts, on=keys, how="left").merge(largest, on=keys)
    table["step"] = table["step"].astype("Int64")
    table = table.sort_values(["step", "order", "position"], na_position="last", ignore_index=True, kind="stable")
    return table[["kind", "name", "phase", "step", "difference", "floor", "largest_difference"]]


def _places(run: Run) -> dict[str, int]:
    """Places of modules and parameters in the order of the forward, where activations were recorded: rows are in the
    order of the calls, and modules may be called in another order than they were registered in. Others are in the
    order of the model."""
    called = run.tensors(kind="activation")["name"]
    modules = dict.fromkeys([*called, *(run.head.model.get("layers") or {})])
    places = {name: 2 * place for place, name in enumerate(modules)}
    for parameter in run.head.model.get("shapes") or {}:
        places[parameter] = places.get(parameter.rpartition(".")[0], 2 * len(modules)) - 1  # its gradient comes after
    return places


def _percent(fraction: float) -> str:
    return formatting.percent(fraction) if fraction >= 1e-5 else f"{fraction:.1e}"
