"""A comparison as text, for a terminal: what differs, the table, lost updates, verdicts, gradients, answers.

>>> show([load_run("runs/cmp/fp32"), load_run("runs/cmp/bf16")], as_json=False)
"""

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from amp_core.text import formatting

if TYPE_CHECKING:
    import pandas as pd

    from amp_core.analysis import Comparison, FirstDifference
    from amp_core.store.run import Run

MAX_VALUE_CHARS = 40
"""Longer values of settings are shortened: they would break the lines of the table."""
MAX_DIFFERENCES = 12
"""Tensors that `first_differences` lists."""
MAX_KERNEL_CHARS = 70
MAX_KERNELS = 15
"""Operators and kernels of two traces that are listed."""
MEASURED = ("J/sample", "tensor cores")
"""Columns that are omitted if no run has them."""


def show(runs: "Sequence[Run]", *, as_json: bool) -> None:
    """Compare recorded runs with the first of them, and print the comparison: in full, or as one JSON document."""
    from amp_core.analysis import compare, gradient_agreement, update_summary
    from amp_core.analysis.comparison.document import comparison_document

    result = compare(runs)
    if as_json:
        print(json.dumps(comparison_document(result), indent=1, allow_nan=False))
    else:
        print(in_full(result, gradient_agreement(runs), update_summary(runs)))


def in_full(comparison: "Comparison", agreement: "pd.DataFrame", updates: "pd.DataFrame") -> str:
    """The whole comparison. `agreement` and `updates` are the results of `gradient_agreement` and `update_summary` for
    the same runs."""
    from amp_core.analysis.comparison.answer import parity_in_words

    parity_lines = [
        f"{row['recipe']}: convergence parity {parity_in_words(str(row['parity']))}"
        for row in comparison.recipes.to_dict("records")[1:]
    ]
    parts = [
        settings(comparison),
        table(comparison),
        lost_updates(updates),
        [*parity_lines, *gradients(agreement), *comparison.notes],
        list(comparison.answers.values()),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def settings(comparison: "Comparison") -> list[str]:
    """The settings that differ between recipes, by the first run of each: lines of a table."""
    first = [str(run) for run in comparison.recipes["run"]]
    frame = comparison.differences[["setting", *first]].astype(str).itertuples(index=False)
    rows = [[_short(value) for value in row] for row in frame if len(set(row[1:])) > 1]
    return aligned([["differs", *map(str, comparison.recipes["recipe"])], *rows]) if rows else []


def table(comparison: "Comparison") -> list[str]:
    """The runs compared with the first: lines of a table."""
    frame = comparison.table
    heads = ["precision", "final loss", "held-out", "step ms", "speed", "", "peak MiB", "memory", *MEASURED]
    rows = [[*heads, "skipped", "final scale"]]
    repeated = len(frame) > len(comparison.recipes)
    rows += [
        [
            str(row["run"] if repeated else row["precision"]),
            _number(row["loss_final"], ".4g"),
            _number(row["eval_loss"], ".4g"),
            _number(row["step_ms"], ".2f"),
            _number(row["speed_ratio"], ".2f", "×"),
            _interval(row["speed_ratio_low"], row["speed_ratio_high"]),
            _number(row["memory_peak_bytes"] / 2**20, ".0f"),
            _number(row["memory_ratio"], ".2f", "×"),
            _number(row["energy_j"], ".3g"),
            _number(row["tensor_frac"], ".0%"),
            _number(row["skip_frac"] * row["steps"], ".0f"),
            _number(row["scale_last"], "g"),
        ]
        for row in frame.to_dict("records")
    ]
    unknown = {rows[0].index(name) for name in MEASURED if all(row[rows[0].index(name)] == "–" for row in rows[1:])}
    return aligned([[cell for i, cell in enumerate(row) if i not in unknown] for row in rows])


def lost_updates(updates: "pd.DataFrame") -> list[str]:
    """What is lost to rounding in the updates of each run: lines of a table, none if no run has a tensor compared."""
    if not updates["tensors"].any():
        return []
    rows = [["updates of weights", "dtype", "lost", "unchanged", "decay lost", "unchanged tensors", "remedy"]]
    rows += [
        [
            str(row["run"]),
            str(row["dtype"]),
            *(formatting.percent(row[name]) for name in ("lost_mass_frac", "unchanged_frac", "lost_decay_frac")),
            f"{row['still']} of {row['tensors']}" if row["tensors"] else "not compared",
            str(row["cure"]),
        ]
        for row in updates.to_dict("records")
    ]
    return aligned(rows)


def kernels(frame: "pd.DataFrame", by: str, unit: str) -> list[str]:
    """The largest changes of `compare_kernels`: lines of a table."""
    head = "operator" if by == "op" else "kernel"
    rows = [[head, *(["phase"] if by == "op" else []), f"ms per {unit}", "before", "change", "", "launches", "before"]]
    rows += [
        [
            _short(str(row["name"]), MAX_KERNEL_CHARS),
            *([str(row["phase"]) or "–"] if by == "op" else []),
            _number(row["us"] / 1e3, ".3f"),
            _number(row["first_us"] / 1e3, ".3f"),
            _number(row["change_us"] / 1e3, "+.3f"),
            str(row["verdict"]),
            _number(row["count"], ".4g"),
            _number(row["first_count"], ".4g"),
        ]
        for row in frame.head(MAX_KERNELS).to_dict("records")
    ]
    return aligned(rows)


def first_differences(where: "FirstDifference") -> list[str]:
    """The first tensors in which two runs differ: an empty line and the lines of a table; none if they do not."""
    shown = where.table.dropna(subset="step").head(MAX_DIFFERENCES)
    if shown.empty:
        return []
    rows = [["first at step", "phase", "tensor", "difference", "noise floor", "max difference"]]
    for row in shown.to_dict("records"):
        what = f"{row['name']} ({row['kind']})" if row["name"] else str(row["kind"])
        apart, floor, most = (_number(row[name], ".2g") for name in ("difference", "floor", "largest_difference"))
        rows.append([f"{row['step']}", str(row["phase"]), what, apart, floor, most])
    return ["", *aligned(rows)]


def gradients(agreement: "pd.DataFrame") -> list[str]:
    """How far the gradients of each audited run are from their replay in FP32: in the median layer and in the worst.
    FP32 runs, which differ in nothing, are omitted."""
    lines = []
    for run, layers in agreement.groupby("run", sort=False):
        measured = layers.dropna(subset=["rel_error"])
        if (measured["rel_error"] > 0).any():
            worst = measured.iloc[int(measured["rel_error"].argmax())]
            middle, most = (formatting.percent(float(v)) for v in (measured["rel_error"].median(), worst["rel_error"]))
            cosine = f"cosine {worst['cosine']:.6f}"
            lines.append(
                f"{run}: gradients deviate from FP32 by {middle} in the median layer, by {most} in {worst['name']} "
                f"({cosine})"
            )
    return lines


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _number(value: float, form: str, unit: str = "") -> str:
    """`value` as text; a dash if it was not measured."""
    return "–" if math.isnan(value) else f"{value:{form}}{unit}"


def _interval(low: float, high: float) -> str:
    return "" if math.isnan(low) else f"({low:.2f}–{high:.2f})"


def _short(text: str, most: int = MAX_VALUE_CHARS) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
