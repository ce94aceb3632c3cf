"""The precision map: in which format each operator of each module ran, what decided it, and what it cost in casts.

    >>> view = precision_map(run)
    >>> view.matrix_frac["fp16"], len(view.stayed)
    (0.92, 3)
    >>> precision_cells(run)            # module, op, ran, …: what the figure draws

From the table `ops`: one traced step. Traces that a profiler wrote have no policies; what rests on them is empty then.
FP32 is said of what is stored: whether TF32 rounded the factors of a product inside, no dtype tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.performance.traced_ops import (
    OUTSIDE,
    ROOT,
    UNKNOWN,
    format_name,
    formats_of,
    has_policies,
    traced_rows,
    traced_steps,
    width,
)
from amp_core.formats import FORMATS
from amp_core.hardware import autocast_ops as autocast
from amp_core.store.run import Run

MAX_COLUMNS = 16
"""So many operators the map shows: those with the most matrix work, those autocast lists, those with the most calls."""
FOLD_FROM = 30
"""From so many modules on those that differ in a number alone are shown as one: `h.*.attn`."""

_WHY = {
    "disabled": "inside autocast(enabled=False)",
    "outside": "called outside of the autocast region",
    "attention": "attention without a fused kernel, which torch computes in FP32",
    "not applied": "called in a way that autocast does not reach, such as from inside another operator",
    "no autocast": "no autocast in this step",
    "unknown": "this trace does not tell of autocast",
}
"""Why an operator ran in FP32 though autocast's list has it in 16 bits."""

_PRODUCTS = ("bmm", "baddbmm", "matmul", "mm")


@dataclass(frozen=True)
class PrecisionMap:
    """What one traced step tells of its precision."""

    step: int | None
    """None where nothing was traced, or the trace marks no steps."""
    traced: bool
    """Whether there is a trace at all."""
    has_policies: bool
    """Whether it tells what autocast decided."""
    device: str
    """Device type of the matrix work: `cuda`, `cpu`; empty where neither the trace nor the run says."""
    autocast: str | None
    """Format of the autocast region, None where there was none."""
    calls: int
    """Operators that ran."""
    weighed_by: str
    """What `matrix_frac` counts: `operations`, or `calls` where the operations of some are not known."""
    unknown_calls: int
    """Calls of operators that multiply matrices whose dtypes the trace does not tell."""
    matrix_frac: dict[str, float]
    """Share of the matrix work in each format (0–1), the largest first; empty where there was none."""
    cache_hits: int
    """Times that a weight's 16-bit copy was taken from autocast's cache."""
    ops: pd.DataFrame
    """op, phase, policy, in_dtypes, out_dtype, ran, count, flops, casts, cast_bytes, modules (how many), on_cuda
    (policy on CUDA's list): operators with a floating-point tensor."""
    modules: pd.DataFrame
    """The tree: module, depth, layer_class, count, flops, narrow_frac (share of the matrix work in 16 bits or fewer,
    NaN without any), casts, cast_bytes; each module with all that is in it."""
    casts: pd.DataFrame
    """cast_by, cast_of, from_format, to_format, phase, count, bytes, repeated, undone."""
    islands: pd.DataFrame
    """module, modules, why, ops, count, cast_bytes: what ran in FP32 inside an autocast region that is on, or switched
    off in it. Modules that differ in a number alone are one row (`h.*.norm`); `modules` says how many they are."""
    stayed: pd.DataFrame
    """module, modules, op, why, count, flops, flops_frac (of the step's matrix work): forward operators that ran in
    FP32 though autocast has them in 16 bits. Modules as in `islands`."""
    elsewhere: pd.DataFrame
    """op, here, on_cuda, ran, would_run, count: of a trace of a CPU, what CUDA's list would decide otherwise."""


def precision_map(run: Run, step: int | None = None) -> PrecisionMap:
    """The map of one traced step, by default the first."""
    rows = traced_rows(run, step)
    told = has_policies(run)
    work = rows[~rows["is_cast"]]
    matrix = work[work["matrix"] & work["ran"].notna()]
    by_flops = bool(len(matrix) and matrix["flops"].notna().all())
    weight = matrix["flops"] if by_flops else matrix["count"].astype(float)
    shares = weight.groupby(matrix["ran"]).sum().sort_values(ascending=False, kind="stable")
    steps = traced_steps(run)
    region = [r for r in rows["autocast"].dropna().unique() if r != "disabled"]
    devices = work.loc[matrix.index if len(matrix) else work.index, "device"].dropna()
    return PrecisionMap(
        step=(steps[0] if step is None else step) if steps else None,
        traced=bool(len(rows)),
        has_policies=told,
        device=_device(run, devices),
        autocast=(format_name(region[0]) or region[0]) if region else None,
        calls=int(rows["count"].sum()),
        weighed_by="operations" if by_flops else "calls",
        unknown_calls=int(work.loc[work["matrix"] & work["in_dtypes"].isna(), "count"].sum()),
        matrix_frac={str(k): float(v / shares.sum()) for k, v in shares.items()} if shares.sum() > 0 else {},
        cache_hits=int(work["cache_hits"].sum()),
        ops=_by_op(work[work["ran"].notna() | work["matrix"]]),
        modules=_tree(run, work),
        casts=_casts(rows[rows["is_cast"]]),
        islands=_islands(work),
        stayed=_stayed(work, told, bool(region), float(weight.sum()) if by_flops else 0.0),
        elsewhere=_elsewhere(work),
    )


def precision_cells(
    run: Run, step: int | None = None, phase: str = "forward", together: bool | None = None
) -> pd.DataFrame:
    """What the map draws: one row per module × operator of one phase, in the order of the first call.

    Columns: module, op, ran (format, `mixed` where calls differ), count, flops, policy, stayed (some of it in FP32
    though autocast has it in 16 bits), members (modules that are shown as one). `together` shows modules as one that
    differ in a number alone, by default from `FOLD_FROM` modules on. At most `MAX_COLUMNS` operators.
    """
    rows = traced_rows(run, step)
    rows = rows[~rows["is_cast"] & rows["ran"].notna() & (rows["phase"].isna() | (rows["phase"] == phase))]
    if together is None:
        together = rows["module"].nunique() >= FOLD_FROM
    rows = rows.assign(
        shown=[fold(m) if together else m for m in rows["module"]],
        stayed=rows["has_16_bit"] & (rows["ran"] == "fp32"),
        policy=rows["policy"].fillna(""),
    )
    kept = rows.groupby("op").agg(flops=("flops", "sum"), count=("count", "sum"))
    kept["listed"] = [any(autocast.policy(op, kind) for kind in autocast.LISTS) for op in kept.index]
    kept = kept.sort_values(["flops", "listed", "count"], ascending=False, kind="stable").head(MAX_COLUMNS)
    rows = rows[rows["op"].isin(kept.index)]
    cells = rows.groupby(["shown", "op"], sort=False).agg(
        ran=("ran", _one_or_mixed),
        count=("count", "sum"),
        flops=("flops", _sum),
        policy=("policy", lambda p: ", ".join(sorted(set(p) - {""}))),
        stayed=("stayed", "any"),
        members=("module", "nunique"),
    )
    return cells.reset_index().rename(columns={"shown": "module"})


def fold(module: str) -> str:
    """`h.3.attn` as `h.*.attn`: the name that modules share which differ in a number alone."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _device(run: Run, devices: "pd.Series[str]") -> str:
    """The device type that the rows name, else the one that the run as a whole does."""
    named = devices.iloc[0] if len(devices) else run.head.config.get("device") or ""
    return str(named).partition(":")[0]


def _by_op(work: pd.DataFrame) -> pd.DataFrame:
    keys = ["op", "phase", "policy", "in_dtypes", "out_dtype", "ran"]
    found = work.groupby(keys, dropna=False, sort=False).agg(
        count=("count", "sum"),
        flops=("flops", _sum),
        casts=("casts", _sum),
        cast_bytes=("cast_bytes", _sum),
        modules=("module", "nunique"),
    )
    found = found.reset_index()
    found["in_dtypes"] = [", ".join(formats_of(text)) for text in found["in_dtypes"].astype(object).fillna("")]
    found["out_dtype"] = [format_name(str(name)) or str(name) for name in found["out_dtype"].astype(object).fillna("")]
    found["on_cuda"] = [autocast.policy(op, "cuda") for op in found["op"]]
    return found.sort_values(["flops", "count"], ascending=False, kind="stable").reset_index(drop=True)


def _tree(run: Run, work: pd.DataFrame) -> pd.DataFrame:
    classes = run.head.model.get("layers")
    classes = classes if isinstance(classes, dict) else {}
    inside = work[~work["module"].isin((OUTSIDE, UNKNOWN))]
    narrow = inside["flops"].where(inside["ran"].isin([f.name for f in FORMATS.values() if f.narrow]), 0.0)
    table = inside.assign(narrow=narrow.where(inside["flops"].notna()))[
        ["module", "count", "flops", "narrow", "casts", "cast_bytes"]
    ]
    parts = []
    for name, one in table.groupby("module", sort=False):
        path = [] if name == ROOT else str(name).split(".")
        sums = one[["count", "flops", "narrow", "casts", "cast_bytes"]].sum(min_count=1)
        parts += [(ROOT if not d else ".".join(path[:d]), d, *sums) for d in range(len(path) + 1)]
    columns = ["module", "depth", "count", "flops", "narrow", "casts", "cast_bytes"]
    tree = pd.DataFrame(parts, columns=columns).astype(dict.fromkeys(columns[2:], float))
    tree = tree.groupby(["module", "depth"], sort=False)[columns[2:]].sum(min_count=1).reset_index()
    tree["narrow_frac"] = tree["narrow"] / tree["flops"].where(tree["flops"] > 0)
    tree["layer_class"] = [str(classes.get(name, "")) for name in tree["module"]]
    return tree[["module", "depth", "layer_class", "count", "flops", "narrow_frac", "casts", "cast_bytes"]]


def _casts(casts: pd.DataFrame) -> pd.DataFrame:
    table = casts.assign(
        from_format=[(formats_of(text) or [""])[0] for text in casts["in_dtypes"]],
        to_format=[format_name(str(name)) or str(name) for name in casts["out_dtype"]],
        phase=casts["phase"].fillna(""),
        cast_of=casts["cast_of"].fillna(""),
    )
    keys = ["cast_by", "cast_of", "from_format", "to_format", "phase"]
    found = table.groupby(keys, sort=False).agg(
        count=("count", "sum"), bytes=("out_bytes", _sum), repeated=("repeated", "sum"), undone=("undone", "sum")
    )
    found = found.reset_index().astype({"repeated": int, "undone": int})
    return found.sort_values("bytes", ascending=False, kind="stable").reset_index(drop=True)


def _islands(work: pd.DataFrame) -> pd.DataFrame:
    """FP32 inside autocast, by the operators' list or by a region that is switched off."""
    policy = work["policy"].fillna("")
    off = work["autocast"] == "disabled"
    listed = policy.str.startswith("fp32") & work["autocast"].notna()
    found = work[(off | listed) & work["ran"].isin(("fp32", "fp64"))]
    why = np.where(found["autocast"] == "disabled", _WHY["disabled"], "autocast's list has it in FP32")
    found = found.assign(why=why.astype(object), casts=found["cast_bytes"])
    found["alike"] = [fold(module) for module in found["module"]]
    table = found.groupby(["alike", "why"], sort=False).agg(
        modules=("module", "nunique"),
        ops=("op", lambda ops: ", ".join(dict.fromkeys(ops))),
        count=("count", "sum"),
        cast_bytes=("casts", _sum),
    )
    return table.reset_index().rename(columns={"alike": "module"})


def _stayed(work: pd.DataFrame, told: bool, autocast_seen: bool, whole: float) -> pd.DataFrame:
    forward = work["phase"].isna() | (work["phase"] == "forward")
    found = work[forward & work["has_16_bit"] & (work["ran"] == "fp32")]
    unfused = set(work.loc[work["op"] == "_safe_softmax", "module"])
    why = [
        _reason(module, op, region, policy, told, autocast_seen, unfused)
        for module, op, region, policy in found[["module", "op", "autocast", "policy"]].itertuples(
            index=False, name=None
        )
    ]
    alike = [fold(module) for module in found["module"]]
    found = found.assign(why=np.array(why, dtype=object), alike=np.array(alike, dtype=object))
    table = found.groupby(["alike", "op", "why"], sort=False).agg(
        modules=("module", "nunique"), count=("count", "sum"), flops=("flops", _sum)
    )
    table = table.reset_index().rename(columns={"alike": "module"})
    table["flops_frac"] = table["flops"] / whole if whole else np.nan
    return table.sort_values("flops", ascending=False, kind="stable").reset_index(drop=True)


def _reason(
    module: str, op: str, region: str | None, policy: str | None, told: bool, autocast_seen: bool, unfused: set[str]
) -> str:
    if not told:
        return _WHY["unknown"]
    if region == "disabled":
        return _WHY["disabled"]
    if policy == "not applied":
        return _WHY["attention" if op in _PRODUCTS and module in unfused else "not applied"]
    return _WHY["outside" if autocast_seen else "no autocast"]


def _elsewhere(work: pd.DataFrame) -> pd.DataFrame:
    columns = ["op", "here", "on_cuda", "ran", "would_run", "count"]
    decided = work["policy"].notna() & (work["policy"] != "not applied")
    here = work[(work["kind"] == "cpu") & decided & (work["autocast"] != "disabled")]
    parts = []
    taken = ["op", "policy", "autocast", "in_dtypes", "ran", "count", "casts"]
    for op, policy, region, inputs, ran, count, casts in here[taken].itertuples(index=False, name=None):
        on_cuda = autocast.policy(op, "cuda")
        would = _would_run(on_cuda, region, formats_of(inputs))
        if op == "_log_softmax" and policy == "fp32" and casts > 0:
            # Within cross_entropy, which the CPU's list has as a whole and CUDA's has not: there it asks log_softmax
            # for the dtype of its logits, and a policy only sets what a call leaves open.
            on_cuda, would = None, format_name(region)
        if would is not None and would != ran:
            parts.append((op, policy, on_cuda, ran, would, count))
    table = pd.DataFrame(parts, columns=columns)
    summed: pd.DataFrame = table.groupby(columns[:5], sort=False, dropna=False)[["count"]].sum().reset_index()
    return summed.sort_values("count", ascending=False, kind="stable").reset_index(drop=True)


def _would_run(policy: str | None, region: str, inputs: Sequence[str]) -> str | None:
    """The format that a policy leads to; None where it leaves the choice to inputs that may differ there, too."""
    if policy == "lower_precision_fp":
        return format_name(region)
    if policy is not None and policy.startswith("fp32"):
        return "fp64" if "fp64" in inputs else "fp32"
    return max(inputs, key=width, default=None) if policy == "promote" else None


def _one_or_mixed(ran: "pd.Series[str]") -> str:
    found = ran.unique()
    return str(found[0]) if len(found) == 1 else "mixed"


def _sum(values: "pd.Series[float]") -> float:
    """The sum of what is known; NaN where nothing is."""
    return float(values.sum(min_count=1))
