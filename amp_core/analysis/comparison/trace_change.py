"""Two profiled runs side by side: what became faster, and where the rest of the time went.

    >>> change = trace_change([run_fp32, run_amp])
    >>> print(*change.sentences, sep="\\n")
    amp takes 21.3 ms per step, fp32 33.1 ms: 1.55 × as fast.
    Faster: GEMM/conv by 11.9 ms (2.10 ×).
    Slower: casts by 1.4 ms.
    >>> compare_kernels([run_fp32, run_amp], "op")[["name", "first_us", "us", "verdict"]]

Times are per step and rank; per profiled window if a trace has no step markers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.performance.kernels import call_counts, kernel_rows, on_cpu, window_rows
from amp_core.analysis.performance.savings import MAX_UNKNOWN_FRAC
from amp_core.analysis.performance.step_cost import MATRIX_PARTS, PARTS, StepCost, step_cost
from amp_core.analysis.run_labels import unique_labels
from amp_core.schema import RunError
from amp_core.store.run import Run
from amp_core.text.formatting import number, percent

SAME_FRAC = 0.01
"""Changes below this share of the first run's step count as none."""
MAX_UNLIKE_RATIO = 1.5
"""Windows without steps whose numbers of GEMM/conv differ by more than this hardly hold the same work. Fusing attention
turns two products into one, casts add none."""
MAX_RATIO = 100.0
"""A part that gained more than this is told as nearly eliminated: so large a ratio says little."""
KEYS = {"op": "op", "kernel": "name"}
"""The groupings of `compare_kernels`."""
MATRIX = "GEMM/conv"


@dataclass(frozen=True)
class TraceChange:
    """How the step of the second run differs from that of the first."""

    first: str
    second: str
    """Labels of the runs."""
    unit: str
    """`step` or `profiled window`."""
    first_us: float
    us: float
    parts: pd.DataFrame
    """label, first_us, us, change_us of each part of the step; products on all units together. Largest gain first."""
    casts_added: float
    """Casts per step more than in the first run."""
    casts_added_us: float
    notes: tuple[str, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """What became faster, what slower, and what takes the time now."""
        a = "per" if self.unit == "step" else "in the"
        ratio = self.first_us / self.us
        verdict = f"{number(ratio)} × as fast" if ratio >= 1 else f"{number(1 / ratio)} × as long"
        if abs(self.us - self.first_us) < SAME_FRAC * self.first_us:
            verdict = f"they differ by less than {percent(SAME_FRAC)}"
        times = f"{number(self.us / 1e3, 'ms')} {a} {self.unit}, {self.first} {number(self.first_us / 1e3, 'ms')}"
        least = SAME_FRAC * self.first_us
        rows = list(zip(*(self.parts[name] for name in ("label", "first_us", "us", "change_us")), strict=True))
        gained = [_gain(label, before, us) for label, before, us, change in rows if change <= -least]
        paid = [f"{label} by {number(change / 1e3, 'ms')}" for label, _, _, change in rows[::-1] if change >= least]
        left = sorted(rows, key=lambda row: -row[2])[:3]
        now = ", ".join(f"{label} {percent(us / self.us)}" for label, _, us, _ in left if us > 0)
        casts = (
            f"Casts added: {number(self.casts_added)} per {self.unit}, taking "
            f"{number(self.casts_added_us / 1e3, 'ms')}."
        )
        lines = (
            f"{self.second} takes {times}: {verdict}.",
            f"Faster: {'; '.join(gained)}." if gained else "No part of the step became noticeably faster.",
            f"Slower: {'; '.join(paid)}." if paid else "",
            casts if self.casts_added > 0 and self.casts_added_us > 0 else "",
            f"Largest remaining parts: {now}.",
        )
        return tuple(line for line in lines if line)


def _gain(label: str, first_us: float, us: float) -> str:
    text = f"{label} by {number((first_us - us) / 1e3, 'ms')}"
    if us <= 0:
        return f"{text} (eliminated)"
    return f"{text} ({number(first_us / us)} ×)" if first_us < MAX_RATIO * us else f"{text} (nearly eliminated)"


def trace_change(runs: Sequence[Run]) -> TraceChange:
    """The step of the last run beside that of the first. Raises `RunError` if one has no profiled window."""
    first, second = _pair(runs)
    costs = [step_cost(run) for run in (first, second)]
    for run, cost in zip((first, second), costs, strict=True):
        if cost.source != "profile":
            raise RunError(f"runs={run.name!r} has no profiled window with kernels; compare needs one in each run")
    steps, notes = _steps(costs)
    windows = bool(notes) or not costs[0].steps
    notes += _unlike((first, second), costs, steps, windows=windows)
    before, after = (_parts(cost, scale) for cost, scale in zip(costs, steps, strict=True))
    parts = pd.DataFrame({"first_us": before, "us": after}).fillna(0.0)
    parts = parts[(parts > 0).any(axis=1)].rename_axis("label").reset_index()
    parts["change_us"] = parts["us"] - parts["first_us"]
    casts = [_casts(run, cost, scale) for run, cost, scale in zip((first, second), costs, steps, strict=True)]
    labels = unique_labels([first, second])
    return TraceChange(
        labels[0],
        labels[1],
        "profiled window" if windows else "step",
        costs[0].step_us * steps[0],
        costs[1].step_us * steps[1],
        parts.sort_values("change_us", kind="stable", ignore_index=True),
        casts[1][0] - casts[0][0],
        casts[1][1] - casts[0][1],
        notes,
    )


def compare_kernels(runs: Sequence[Run], by: str = "op") -> pd.DataFrame:
    """Kernel time of the last run beside that of the first, the largest change first.

    `by`: `op` (operators; work without one by its kernel) or `kernel`. Columns: name, phase (by op), category,
    first_count, count, first_us, us, change_us (per step), ratio (first_us over us), first_kernel and kernel (by op:
    the longest one in each), tensor_core and first_tensor_core (of that kernel; by kernel the same), verdict (`faster`,
    `slower`, `same`, `appeared`, `vanished`). Raises `RunError` for another `by`.
    """
    if by not in KEYS:
        raise RunError(f"by={by!r} is unknown; choose op or kernel")
    first, second = _pair(runs)
    costs = [step_cost(run) for run in (first, second)]
    scales, _ = _steps(costs)
    keys = ["name", "phase"] if by == "op" else ["name"]
    sides = []
    for run, cost, scale in zip((first, second), costs, scales, strict=True):
        rows = kernel_rows(run)
        rows = rows.assign(kernel=rows["name"])
        if by == "op":
            rows["count"] = call_counts(rows)
            rows["name"] = rows["op"].where(rows["op"] != "", rows["name"])
        per = _per(run, cost, scale)
        longest = rows.sort_values("total_us", ascending=False, kind="stable").drop_duplicates(keys).set_index(keys)
        sums = rows.groupby(keys)[["count", "total_us"]].sum() / per
        sides.append(sums.join(longest[["kernel", "category", "tensor_core"]]))
    before, after = sides
    suffixes = ("_before", "_after")
    table = before.merge(after, how="outer", left_index=True, right_index=True, suffixes=suffixes).reset_index()
    table = table.rename(
        columns={
            "count_before": "first_count", "count_after": "count", "total_us_before": "first_us",
            "total_us_after": "us", "kernel_before": "first_kernel", "kernel_after": "kernel",
            "tensor_core_before": "first_tensor_core", "tensor_core_after": "tensor_core",
        }
    )  # fmt: skip
    table["category"] = table["category_after"].where(table["category_after"].notna(), table["category_before"])
    numbers, texts = ["first_count", "count", "first_us", "us"], ["first_kernel", "kernel", "first_tensor_core"]
    table[numbers] = table[numbers].astype(float).fillna(0.0)
    table[[*texts, "tensor_core"]] = table[[*texts, "tensor_core"]].astype(object).fillna("")
    table["change_us"] = table["us"] - table["first_us"]
    with np.errstate(divide="ignore", invalid="ignore"):
        table["ratio"] = np.where(table["us"] > 0, table["first_us"] / table["us"], np.nan)
    table["verdict"] = [_verdict(*pair) for pair in zip(table["first_us"], table["us"], strict=True)]
    order = table["change_us"].abs().sort_values(ascending=False, kind="stable").index
    columns = [*keys, "category", *numbers, "change_us", "ratio", *texts, "tensor_core", "verdict"]
    return table.loc[order, columns].reset_index(drop=True)


def _verdict(first_us: float, us: float) -> str:
    if not first_us > 0:
        return "appeared"
    if not us > 0:
        return "vanished"
    return "same" if abs(us - first_us) < 0.05 * first_us else "slower" if us > first_us else "faster"


def _pair(runs: Sequence[Run]) -> tuple[Run, Run]:
    if len(runs) < 2:
        raise RunError(f"runs={[run.name for run in runs]!r:.200} are too few; give two profiled runs")
    return runs[0], runs[-1]


def _steps(costs: Sequence[StepCost]) -> tuple[list[float], tuple[str, ...]]:
    """By what the times per step of each cost are multiplied, and notes. If only one marks steps, windows are
    compared."""
    marked = [cost.steps > 0 for cost in costs]
    if all(marked) or not any(marked):
        return [1.0] * len(costs), ()
    note = (
        "Only one of the two traces marks its steps, so whole profiled windows are compared, which may contain "
        "different numbers of steps."
    )
    return [float(max(1, cost.steps)) for cost in costs], (note,)


def _unlike(
    runs: tuple[Run, Run], costs: Sequence[StepCost], scales: Sequence[float], *, windows: bool
) -> tuple[str, ...]:
    """Notes on what makes the two times hard to compare: devices, ranks, unclassified kernels; without step markers
    also the work that was profiled."""
    notes = []
    devices = ["a CPU" if cost.on_cpu else cost.device_name or "an unnamed GPU" for cost in costs]
    if devices[0] != devices[1]:
        notes.append(f"The devices differ: {devices[0]}, then {devices[1]}.")
    ranks = [run.head.world_size for run in runs]
    if ranks[0] != ranks[1]:
        notes.append(f"The numbers of ranks differ: {ranks[0]}, then {ranks[1]}.")
    rows = [kernel_rows(run) for run in runs]
    unknown = [_frac(frame, frame["tensor_core"] == "unknown") for frame in rows]
    if max(unknown) > MAX_UNKNOWN_FRAC:
        notes.append(
            f"Kernels that cannot be classified by name take {percent(unknown[0])} of the kernel time, then "
            f"{percent(unknown[1])}: they count as other kernels and may be GEMM/conv."
        )
    products = [float(window_rows(run)["products"].sum(min_count=1)) for run in runs]  # not of older imports
    known = windows and np.isfinite(products).all() and max(unknown) <= MAX_UNKNOWN_FRAC
    fewer = int(np.argmin(products)) if known else 0  # what is unclassified there may be the products that are missing
    perhaps = float(rows[fewer]["count"][rows[fewer]["tensor_core"] == "unknown"].sum())
    if known and max(products) > MAX_UNLIKE_RATIO * max(1.0, min(products) + perhaps):
        notes.append(
            f"The windows hardly hold the same work: {products[0]:,.0f} products and convolutions, then "
            f"{products[1]:,.0f}."
        )
    if windows:
        busy = [
            (cost.step_us - np.nan_to_num(cost.us("gaps", "data"))) * scale / 1e3
            for cost, scale in zip(costs, scales, strict=True)
        ]
        notes.append(f"The device is busy for {number(busy[0], 'ms')} of the window, then {number(busy[1], 'ms')}.")
    return tuple(notes)


def _frac(rows: pd.DataFrame, chosen: "pd.Series[bool]") -> float:
    whole = float(rows["total_us"].sum())
    return float(rows.loc[chosen, "total_us"].sum()) / whole if whole > 0 else 0.0


def _per(run: Run, cost: StepCost, scale: float) -> float:
    """Steps of all ranks, or windows, by which sums of kernels are divided."""
    windows = window_rows(run)
    return max(1.0, float(windows["steps"].sum()) if cost.steps else float(len(windows))) / scale


def _parts(cost: StepCost, scale: float) -> "pd.Series[float]":
    label = cost.parts["label"].where(~cost.parts["part"].isin(MATRIX_PARTS), MATRIX)
    order = {name: place for place, name in enumerate(PARTS)}
    place = cost.parts["part"].map(order)
    us: pd.Series[float] = cost.parts.assign(label=label).iloc[place.argsort()].groupby("label", sort=False)["us"].sum()
    return us * scale


def _casts(run: Run, cost: StepCost, scale: float) -> tuple[float, float]:
    rows = kernel_rows(run)
    rows, per = rows[rows["category"] == "cast"], _per(run, cost, scale)
    # On a CPU the operators are recorded, and one cast is to, _to_copy and copy_.
    counted = rows[rows["name"] == "aten::copy_"] if on_cpu(rows) else rows
    return float(counted["count"].sum()) / per, float(rows["total_us"].sum()) / per
