"""The parts of a step's memory, at its peak and at each moment, and how a recipe changes them.

>>> breakdown = memory_breakdown(run)
>>> breakdown.parts[["category", "bytes", "frac"]]
>>> memory_difference([run_fp32, run_bf16])

The categories add up to the peak. Six are sums over the storages of tensors. On CUDA the peak is that of torch's
allocator. `temporary` is the memory that was freed again before the next recorded moment, and what is in none of those
tensors but was not there before the step: gradients on their way through backward, outputs that nothing saves. `other`
is the rest: inputs, workspaces of libraries, rounding. On a CPU the peak is the moment with the most memory in tensors,
the total is the resident set of the process at that moment, and `other` is the rest of the process: Python, libraries,
data, freed memory that the allocator keeps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from amp_core.analysis.performance.memory import TENSOR_CATEGORIES, memory_description
from amp_core.analysis.run_labels import unique_labels
from amp_core.analysis.steps import recipe
from amp_core.schema import RunError
from amp_core.store.run import Run
from amp_core.text.formatting import join_words

CATEGORIES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "autocast": "autocast's copies of weights",
    "buffers": "buffers",
    "temporary": "temporary",
    "other": "other",
}
"""Labels of the categories, in stacking order."""

_ABOUT = {
    "parameters": "the weights, in the dtype in which they are stored",
    "gradients": "in .grad, in the dtype of the weights",
    "optimizer": "what optimizers keep for each weight: Adam's moments",
    "activations": "what forward saves for backward; grows with the batch",
    "autocast": "16-bit casts of weights, kept for backward; independent of the batch",
    "buffers": "such as BatchNorm's running statistics",
    "temporary": "temporary: gradients of activations, outputs that nothing saves, workspaces",
    "other": "in none of the tensors above: inputs, workspaces, rounding",
}
_OTHER_ON_CPU = "Python, libraries, data, freed memory that is not returned"
_SAME_FRAC = 0.02  # relative differences below it count as none


@dataclass(frozen=True)
class MemoryBreakdown:
    """The peak of one sampled step. None and an empty frame if no step was sampled."""

    step: int | None
    moment: str
    """The moment of the peak, in words."""
    phase: str | None
    """forward, backward or optimizer."""
    what: str
    """What the total measures, in words."""
    total_bytes: int | None
    reserved_bytes: int | None
    """Memory that torch's allocator reserved at that moment; None on a CPU."""
    parts: pd.DataFrame
    """One row per category: category, label, bytes (NaN if not measured), frac (of the total), about."""
    notes: tuple[str, ...]
    """Conclusions, in sentences."""

    @property
    def on_cpu(self) -> bool:
        """Whether the total is that of the process and not of torch's allocator."""
        return self.reserved_bytes is None

    @property
    def categories_known(self) -> bool:
        """Whether the memory breakdown was recorded; a trace records totals only."""
        return bool(self.parts.loc[self.parts["category"].isin(TENSOR_CATEGORIES), "bytes"].notna().any())

    @property
    def named(self) -> pd.DataFrame:
        """`parts` without `other`."""
        return self.parts[self.parts["category"] != "other"]


def memory_parts(breakdowns: Sequence[MemoryBreakdown], names: Sequence[str]) -> pd.DataFrame:
    """`parts` of one or more runs for a chart, with a column `run` that holds their `names`.

    If one of them is of a CPU, `other` is left out of all: there it is most of the process and hides the tensors.
    """
    on_cpu = any(one.on_cpu for one in breakdowns)
    frames = [
        (one.named if on_cpu else one.parts).assign(run=name) for one, name in zip(breakdowns, names, strict=True)
    ]
    columns = ["category", "label", "bytes", "frac", "about", "run"]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=columns)


def memory_steps(run: Run) -> list[int]:
    """Steps at which the parts of memory were recorded."""
    return sorted(int(step) for step in run.table("memory").column("step").unique().to_pylist())


def memory_moments(run: Run, step: int | None = None) -> pd.DataFrame:
    """One row per moment of a step (by default the last sampled one), in order.

    Columns: number, moment, name, phase, allocated_bytes, peak_bytes (highest since the previous moment; on a CPU the
    same as allocated), and a column for each of `CATEGORIES`, in bytes; they add up to peak_bytes. NaN if not
    measured. With several ranks, the one with the highest peak. Raises `RunError` for a step that was not sampled.
    """
    frame = run.memory
    known = memory_steps(run)
    if step is not None and step not in known:
        raise RunError(f"step={step!r} was not sampled; memory was at {', '.join(map(str, known)) or 'no step'}")
    frame = frame[frame["step"] == (step if step is not None else known[-1])] if known else frame
    numbers = ["allocated_bytes", "peak_bytes", "reserved_bytes", *(f"{c}_bytes" for c in TENSOR_CATEGORIES)]
    frame = frame.astype(dict.fromkeys(numbers, float))
    tensors = frame[[f"{c}_bytes" for c in TENSOR_CATEGORIES]].sum(axis=1)
    frame["allocated_bytes"] = frame["allocated_bytes"].fillna(tensors)  # other programs may record only tensors
    frame["peak_bytes"] = frame["peak_bytes"].fillna(frame["allocated_bytes"])
    if frame["rank"].nunique() > 1:
        top_rank = frame.groupby("rank")["peak_bytes"].max().idxmax()
        frame = frame[frame["rank"] == top_rank]
    moments = frame[["number", "moment", "name", "phase", "allocated_bytes", "peak_bytes", "reserved_bytes"]].copy()
    for category in TENSOR_CATEGORIES:
        moments[category] = frame[f"{category}_bytes"]
    moments["temporary"] = moments["peak_bytes"] - moments["allocated_bytes"]
    moments["other"] = moments["allocated_bytes"] - moments[list(TENSOR_CATEGORIES)].sum(axis=1)
    before = moments.loc[moments["moment"] == "step begins", "other"]
    if len(before) and moments["reserved_bytes"].notna().any():
        new = (moments["other"] - before.iloc[0]).clip(lower=0.0)
        moments["temporary"] += new
        moments["other"] -= new
    return moments.reset_index(drop=True)


def memory_breakdown(run: Run, step: int | None = None) -> MemoryBreakdown:
    """The peak of a step and its parts. Raises `RunError` for a step that was not sampled."""
    moments = memory_moments(run, step)
    columns = ["category", "label", "bytes", "frac", "about"]
    if not moments["peak_bytes"].max() > 0:
        none = pd.DataFrame(
            {c: pd.Series(dtype=object if c in ("category", "label", "about") else float) for c in columns}
        )
        return MemoryBreakdown(None, "", None, memory_description(run), None, None, none, ())
    on_cpu = bool(moments["reserved_bytes"].isna().all())
    height = moments[list(TENSOR_CATEGORIES)].sum(axis=1) if on_cpu else moments["peak_bytes"]
    top = moments.iloc[int(height.fillna(0.0).to_numpy().argmax())]
    total = float(top["peak_bytes"]) or np.nan
    about = _ABOUT | ({"other": _OTHER_ON_CPU} if on_cpu else {})
    rows = [
        (category, label, float(top[category]), float(top[category]) / total, about[category])
        for category, label in CATEGORIES.items()
        if not (on_cpu and category == "temporary")  # not measured on a CPU
    ]
    parts = pd.DataFrame(rows, columns=columns)
    return MemoryBreakdown(
        step=step if step is not None else memory_steps(run)[-1],
        moment=_in_words(str(top["moment"]), str(top["name"])),
        phase=top["phase"],
        what=memory_description(run),
        total_bytes=int(total),
        reserved_bytes=None if on_cpu or np.isnan(top["reserved_bytes"]) else int(top["reserved_bytes"]),
        parts=parts,
        notes=_notes(parts, recipe(run)),
    )


def memory_phases(run: Run, step: int | None = None) -> pd.DataFrame:
    """Peak of each phase of a step: phase, peak_bytes, tensors_bytes (most held in tensors at a moment of it)."""
    moments = memory_moments(run, step)
    moments["tensors_bytes"] = moments[list(TENSOR_CATEGORIES)].sum(axis=1)
    peaks = moments.groupby("phase", sort=False)[["peak_bytes", "tensors_bytes"]].max()
    return peaks.reset_index()


def memory_modules(run: Run, step: int | None = None) -> pd.DataFrame:
    """What the moments of a step in each module, or operator outside of modules, did to its memory: name, phase, count
    (of moments), kept_bytes (allocated there and not freed there; below 0: freed), peak_bytes (highest total there),
    the highest first."""
    moments = memory_moments(run, step)
    moments["kept_bytes"] = moments["allocated_bytes"].diff()
    by = moments.groupby(["name", "phase"], dropna=False, sort=False)
    table = by.agg(count=("number", "size"), kept_bytes=("kept_bytes", "sum"), peak_bytes=("peak_bytes", "max"))
    return table.reset_index().sort_values("peak_bytes", ascending=False, kind="stable", ignore_index=True)


def memory_difference(runs: Sequence[Run]) -> pd.DataFrame:
    """The peak of each run compared with the first one's, by category.

    One row per further run and category: run, category, label, first_bytes, bytes, difference_bytes (NaN if either
    was not measured) and why, in words. Empty if fewer than two runs recorded their memory.
    """
    columns = ["run", "category", "label", "first_bytes", "bytes", "difference_bytes", "why"]
    breakdowns = [memory_breakdown(run) for run in runs]
    rows = []
    before = dict(zip(breakdowns[0].parts["category"], breakdowns[0].parts["bytes"], strict=True)) if breakdowns else {}
    for label, run, breakdown in list(zip(unique_labels(runs), runs, breakdowns, strict=True))[1:]:
        after = dict(zip(breakdown.parts["category"], breakdown.parts["bytes"], strict=True))
        for category in [c for c in CATEGORIES if c in before and c in after]:
            first, now = float(before[category]), float(after[category])
            why = _why(category, first, now, recipe(runs[0]), recipe(run))
            rows.append((label, category, CATEGORIES[category], first, now, now - first, why))
    frame = pd.DataFrame(rows, columns=columns)
    numbers = ["first_bytes", "bytes", "difference_bytes"]
    return frame.astype(dict.fromkeys(numbers, float))


def _in_words(moment: str, name: str) -> str:
    if moment == "module":
        return f"in the forward of {name}"
    if moment == "gradient":
        return f"in backward, when the gradient of {name} was computed"
    if moment == "operator":
        return f"in {name}"
    words = {
        "allocation": "between operators",
        "step begins": "before the forward",
        "forward ends": "at the end of the forward",
        "loss computed": "when the loss was computed",
        "backward begins": "at the start of backward",
        "backward ends": "at the end of backward",
        "optimizer begins": "before the optimizer's step",
        "step ends": "in the optimizer's step",
    }
    return words.get(moment, moment)


def _notes(parts: pd.DataFrame, precision: str | None) -> tuple[str, ...]:
    """What dominates, and what would reduce it."""
    size = parts.set_index("category")["bytes"].fillna(0.0)
    tensors = float(size[list(TENSOR_CATEGORIES)].sum())
    if tensors <= 0:
        return ()
    fixed = float(size[["parameters", "gradients", "optimizer"]].sum()) / tensors
    kept = float(size["activations"]) / tensors
    notes = []
    if kept >= 0.5:
        wide = precision in ("fp32", "tf32")
        ways = ("A smaller batch", "activation checkpointing", *(("16 bits",) if wide else ()))
        smaller = f"{join_words(ways, 'or')} makes"
        notes.append(f"{100 * kept:.0f} % of tensor memory is activations. {smaller} them smaller.")
    elif fixed >= 0.5:
        notes.append(
            f"{100 * fixed:.0f} % of tensor memory is weights, gradients and optimizer state, which autocast leaves "
            "in FP32, so autocast saves little memory here. A larger batch costs almost none."
        )
    if size["autocast"] > 0.02 * tensors:
        notes.append(
            f"Autocast's 16-bit copies of weights take {100 * float(size['autocast']) / tensors:.0f} % of "
            "tensor memory, on top of the FP32 weights."
        )
    if precision in ("fp32", "tf32") and kept >= 0.5:
        notes.append("Autocast would halve the activations saved by GEMM/conv.")
    return tuple(notes)


def _why(category: str, first: float, now: float, before: str | None, recipe_now: str | None) -> str:
    """Why a category differs or not, short enough for a table."""
    if np.isnan(first) or np.isnan(now):
        return "not measured in both"
    same = abs(now - first) <= _SAME_FRAC * max(first, now, 1.0)
    pure = (recipe_now or "").endswith("-pure") != (before or "").endswith("-pure")
    if category in ("parameters", "gradients", "optimizer") and same:
        return "the same: autocast leaves them in FP32"
    if category in ("parameters", "gradients", "optimizer") and pure:
        return "half as wide: weights are stored in 16 bits"
    if same:
        return "the same" if first == now else f"the same within {100 * _SAME_FRAC:.0f} %"
    if category == "activations" and now < first:
        return f"{now / first:.2f} ×: GEMM/conv saves inputs in 16 bits, norms and loss in FP32"
    if category == "activations":
        return "more: casts keep copies in both widths, or the batch is larger"
    if category == "autocast" and now > first:
        return "16-bit copies of weights, which FP32 does not need"
    if category == "temporary":
        return "what the largest operation at the peak needs"
    if category == "other":
        return "inputs, workspaces; on a CPU the rest of the process"
    return "another model, batch or optimizer"
