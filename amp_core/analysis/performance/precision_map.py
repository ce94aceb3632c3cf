"""The precision map: the format in which each operator of each module ran, the reason, and its casts.

    >>> view = precision_map(run)
    >>> view.matrix_frac["fp16"], len(view.stayed)
    (0.92, 3)
    >>> precision_cells(run)            # module, op, ran, …: the cells of the figure

From the table `ops`: one traced step. Profiler traces have no policies, so results that need them are empty.
FP32 is the stored format: dtypes do not show whether TF32 rounded the factors of a product.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.performance.kernels import kernel_rows
from amp_core.analysis.performance.matrix_kinds import is_matrix
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
"""Most operators in the map: those with the most FLOPs, those in autocast's lists, those with the most calls."""
MIN_FOLDED_MODULES = 30
"""Number of modules from which those that differ only in an index are folded into one: `h.*.attn`."""

_WHY = {
    "disabled": "inside autocast(enabled=False)",
    "outside": "called outside of the autocast region",
    "attention": "attention without a fused kernel, which torch computes in FP32",
    "not applied": "called in a way that autocast does not intercept, such as from inside another operator",
    "no autocast": "no autocast in this step",
    "unknown": "this trace does not record autocast",
}
"""Why an operator ran in FP32 although autocast lists it in 16 bits."""

_PRODUCTS = ("bmm", "baddbmm", "matmul", "mm")


@dataclass(frozen=True)
class PrecisionMap:
    """The precision of one traced step."""

    step: int | None
    """None if nothing was traced, or the trace has no step markers."""
    traced: bool
    """Whether there is a trace at all."""
    has_policies: bool
    """Whether it records autocast's decisions."""
    device: str
    """Device type of the matrix products: `cuda`, `cpu`; empty if neither the trace nor the run records it."""
    autocast: str | None
    """Format of the autocast region, None without one."""
    calls: int
    """Number of operators that ran."""
    weighed_by: str
    """What `matrix_frac` counts: `operations`, or `calls` if the operations of some are unknown."""
    unknown_calls: int
    """Calls of operators that multiply matrices with unknown dtypes."""
    matrix_frac: dict[str, float]
    """Share of the matrix products in each format (0–1), the largest first; empty without any."""
    tf32_frac: float
    """Share of the kernel time of GEMM/conv in TF32 kernels (0–1): their operators run in FP32, their products on
    tensor cores. 0 without profiled kernels."""
    cache_hits: int
    """Number of hits in autocast's cache of 16-bit weights."""
    ops: pd.DataFrame
    """op, phase, policy, in_dtypes, out_dtype, ran, count, flops, casts, cast_bytes, modules (number), on_cuda
    (policy on CUDA's list): operators with a floating-point tensor."""
    modules: pd.DataFrame
    """The tree: module, depth, layer_class, count, flops, narrow_frac (share of the FLOPs in 16 bits or fewer,
    NaN without any), casts, cast_bytes; each module includes its submodules."""
    casts: pd.DataFrame
    """cast_by, cast_of, from_format, to_format, phase, count, bytes, repeated, undone."""
    islands: pd.DataFrame
    """module, modules, why, ops, count, cast_bytes: operators in FP32 inside an autocast region, or where it is
    switched off. Modules that differ only in a number are one row (`h.*.norm`); `modules` is their number."""
    stayed: pd.DataFrame
    """module, modules, op, why, count, flops, flops_frac (of the step's FLOPs): forward operators that ran in
    FP32 although autocast lists them in 16 bits. Modules as in `islands`."""
    elsewhere: pd.DataFrame
    """op, here, on_cuda, ran, would_run, count: operators of a CPU trace that CUDA's lists treat differently."""


def precision_map(run: Run, step: int | None = None) -> PrecisionMap:
    """The map of one traced step, by default the first."""
    rows = traced_rows(run, step)
    has_autocast = has_policies(run)
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
        has_policies=has_autocast,
        device=_device(run, devices),
        autocast=(format_name(region[0]) or region[0]) if region else None,
        calls=int(rows["count"].sum()),
        weighed_by="operations" if by_flops else "calls",
        unknown_calls=int(work.loc[work["matrix"] & work["in_dtypes"].isna(), "count"].sum()),
        matrix_frac={str(k): float(v / shares.sum()) for k, v in shares.items()} if shares.sum() > 0 else {},
        tf32_frac=_tf32_frac(run),
        cache_hits=int(work["cache_hits"].sum()),
        ops=_by_op(work[work["ran"].notna() | work["matrix"]]),
        modules=_tree(run, work),
        casts=_casts(rows[rows["is_cast"]]),
        islands=_islands(work),
        stayed=_stayed(work, has_autocast, bool(region), float(weight.sum()) if by_flops else 0.0),
        elsewhere=_elsewhere(work),
    )


def _tf32_frac(run: Run) -> float:
    rows = kernel_rows(run)
    rows = rows[is_matrix(rows)]
    total = float(rows["total_us"].sum())
    return float(rows.loc[rows["precision"] == "tf32", "total_us"].sum()) / total if total > 0 else 0.0


def precision_cells(
    run: Run, step: int | None = None, phase: str = "forward", folded: bool | None = None
) -> pd.DataFrame:
    """The cells of the map: one row per module × operator of one phase, in the order of the first call.

    Columns: module, op, ran (format, `mixed` if calls differ), count, flops, policy, stayed (some calls in FP32
    although autocast lists it in 16 bits), members (modules in the row). `folded` merges modules that differ
    only in a number, by default from `MIN_FOLDED_MODULES` modules on. At most `MAX_COLUMNS` operators.
    """
    rows = traced_rows(run, step)
    rows = rows[~rows["is_cast"] & rows["ran"].notna() & (rows["phase"].isna() | (rows["phase"] == phase))]
    if folded is None:
        folded = rows["module"].nunique() >= MIN_FOLDED_MODULES
    rows = rows.assign(
        shown=[fold(m) if folded else m for m in rows["module"]],
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
    """`h.3.attn` as `h.*.attn`: the common name of modules that differ only in a number."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def _device(run: Run, devices: "pd.Series[str]") -> str:
    """The device type of the rows, else that of the run."""
    named = devices.iloc[0] if len(devices) else run.head.config.get("device") or ""
    return str(named).partition(":")[0]


def _by_op(work: pd.DataFrame) -> pd.DataFrame:
    keys = ["op", "phase", "policy", "in_dtypes", "out_dtype", "ran"]
    table = work.groupby(keys, dropna=False, sort=False).agg(
        count=("count", "sum"),
        flops=("flops", _sum),
        casts=("casts", _sum),
        cast_bytes=("cast_bytes", _sum),
        modules=("module", "nunique"),
    )
    table = table.reset_index()
    table["in_dtypes"] = [", ".join(formats_of(text)) for text in table["in_dtypes"].astype(object).fillna("")]
    table["out_dtype"] = [format_name(str(name)) or str(name) for name in table["out_dtype"].astype(object).fillna("")]
    table["on_cuda"] = [autocast.policy(op, "cuda") for op in table["op"]]
    return table.sort_values(["flops", "count"], ascending=False, kind="stable").reset_index(drop=True)


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
    summed = table.groupby(keys, sort=False).agg(
        count=("count", "sum"), bytes=("out_bytes", _sum), repeated=("repeated", "sum"), undone=("undone", "sum")
    )
    summed = summed.reset_index().astype({"repeated": int, "undone": int})
    return summed.sort_values("bytes", ascending=False, kind="stable").reset_index(drop=True)


def _islands(work: pd.DataFrame) -> pd.DataFrame:
    """FP32 inside autocast, because of its lists or of a region that is switched off."""
    policy = work["policy"].fillna("")
    off = work["autocast"] == "disabled"
    listed = policy.isin(autocast.FP32_POLICIES) & work["autocast"].notna()
    islands = work[(off | listed) & work["ran"].isin(("fp32", "fp64"))]
    why = np.where(islands["autocast"] == "disabled", _WHY["disabled"], "autocast's list keeps it in FP32")
    islands = islands.assign(why=why.astype(object), casts=islands["cast_bytes"])
    islands["alike"] = [fold(module) for module in islands["module"]]
    table = islands.groupby(["alike", "why"], sort=False).agg(
        modules=("module", "nunique"),
        ops=("op", lambda ops: ", ".join(dict.fromkeys(ops))),
        count=("count", "sum"),
        cast_bytes=("casts", _sum),
    )
    return table.reset_index().rename(columns={"alike": "module"})


def _stayed(work: pd.DataFrame, has_autocast: bool, autocast_seen: bool, whole: float) -> pd.DataFrame:
    forward = work["phase"].isna() | (work["phase"] == "forward")
    rows = work[forward & work["has_16_bit"] & (work["ran"] == "fp32")]
    unfused = set(work.loc[work["op"] == "_safe_softmax", "module"])
    why = [
        _reason(module, op, region, policy, has_autocast, autocast_seen, unfused)
        for module, op, region, policy in rows[["module", "op", "autocast", "policy"]].itertuples(
            index=False, name=None
        )
    ]
    folded = [fold(module) for module in rows["module"]]
    rows = rows.assign(why=np.array(why, dtype=object), alike=np.array(folded, dtype=object))
    table = rows.groupby(["alike", "op", "why"], sort=False).agg(
        modules=("module", "nunique"), count=("count", "sum"), flops=("flops", _sum)
    )
    table = table.reset_index().rename(columns={"alike": "module"})
    table["flops_frac"] = table["flops"] / whole if whole else np.nan
    return table.sort_values("flops", ascending=False, kind="stable").reset_index(drop=True)


def _reason(
    module: str,
    op: str,
    region: str | None,
    policy: str | None,
    has_autocast: bool,
    autocast_seen: bool,
    unfused: set[str],
) -> str:
    if not has_autocast:
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
            # Inside cross_entropy, which is in the CPU's list but not in CUDA's: there it calls log_softmax with
            # the dtype of its logits, and a policy does not override an explicit dtype.
            on_cuda, would = None, format_name(region)
        if would is not None and would != ran:
            parts.append((op, policy, on_cuda, ran, would, count))
    table = pd.DataFrame(parts, columns=columns)
    summed: pd.DataFrame = table.groupby(columns[:5], sort=False, dropna=False)[["count"]].sum().reset_index()
    return summed.sort_values("count", ascending=False, kind="stable").reset_index(drop=True)


def _would_run(policy: str | None, region: str, inputs: Sequence[str]) -> str | None:
    """The format that results from a policy; None if it depends on inputs that may differ there too."""
    if policy == "lower_precision_fp":
        return format_name(region)
    if policy in autocast.FP32_POLICIES:
        return "fp64" if "fp64" in inputs else "fp32"
    return max(inputs, key=width, default=None) if policy == "promote" else None


def _one_or_mixed(ran: "pd.Series[str]") -> str:
    formats = ran.unique()
    return str(formats[0]) if len(formats) == 1 else "mixed"


def _sum(values: "pd.Series[float]") -> float:
    """The sum of the known values; NaN if none is known."""
    return float(values.sum(min_count=1))
