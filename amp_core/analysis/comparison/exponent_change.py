"""The values of each tensor by exponent, against those of a baseline, with the baseline's noise.

>>> exponent_changes([fp32, fp16], "output_grad")  # name, exponent, baseline, value, change, noise, outside
>>> changed_tensors(exponent_changes([fp32, fp16], "output_grad"))  # name, moved_frac, nonzero_change, exponent, …

The loss scale is taken out of both runs: an FP32 baseline has none. Shares are of all elements of a tensor, so values
that underflow are missing at their exponents and raise no other share.
"""

from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.analysis.comparison.mean_change import mean_changes
from amp_core.analysis.comparison.parity import MIN_SEEDS
from amp_core.analysis.numerics.module_tree import folded_name
from amp_core.analysis.numerics.ranges import (
    coded_names,
    filled_bins,
    float_column,
    histogram_bounds,
    rows_of_kind,
    sampled_steps,
)
from amp_core.analysis.steps import attempts
from amp_core.store.run import Run

MAX_STEPS = 32
"""Sampled steps that are compared, evenly spread: enough for their spread, and little memory for a long run."""
COLUMNS = ("name", "exponent", "baseline", "value", "change", "noise", "outside")


def exponent_changes(
    runs: Sequence[Run], kind: str, depth: int = 99, names: Collection[str] | None = None
) -> pd.DataFrame:
    """How the last of `runs` differs from the baseline, by tensor and exponent: the first run, and its repeats with
    other seeds between them.

    Compares the steps that both sampled and neither skipped, at most `MAX_STEPS` of them. Columns: name, exponent;
    baseline, value, change (shares 0–1 of all elements of the tensor, mean over those steps; `change` is value -
    baseline); noise and outside as in `mean_changes`. Tensors that the baseline did not sample have no rows.

    Args:
        depth: tensors below each module at this depth of the tree are summed in one row.
        names: only these tensors.

    Raises `RunError` for an unknown kind.
    """
    run, bases = runs[-1], list(runs[:-1])
    steps = _common_steps([bases[0], run], kind)
    own = _Shares.of(run, kind, steps, depth, names)
    base = _Shares.of(bases[0], kind, steps, depth, names)
    shared = [name for name in own.names if name in set(base.names)]
    if not steps or not shared:
        return pd.DataFrame({column: pd.Series(dtype=object if column == "name" else float) for column in COLUMNS})
    low, high = min(own.lowest, base.lowest), max(own.highest, base.highest)
    value, before = own.aligned(shared, low, high), base.aligned(shared, low, high)
    bases_values = [before]
    if len(bases) >= MIN_SEEDS:
        others = (_Shares.of(one, kind, _common_steps([one, run], kind), depth, names) for one in bases[1:])
        bases_values += [other.aligned(shared, low, high) for other in others]
    changed = mean_changes(value, bases_values, axis=1)
    row, column = np.nonzero((changed["value"] > 0) | (changed["baseline"] > 0))
    return pd.DataFrame(
        {"name": pd.Series(np.asarray(shared, dtype=object)[row], dtype="str"), "exponent": column + low}
        | {name: grid[row, column] for name, grid in changed.items()}
    )


def changed_tensors(changes: pd.DataFrame) -> pd.DataFrame:
    """The tensors that differ from the baseline by more than its noise, the most changed first.

    From `exponent_changes`, of the exponents outside the noise alone. Columns: name; moved_frac (share of elements that
    have another exponent or became zero or non-finite); nonzero_change (change in the share of elements that are finite
    and nonzero); exponent, change and noise where the share changed the most.
    """
    beyond = changes[changes["outside"].astype(bool)]
    rows = []
    for name, cells in beyond.groupby("name", sort=False):
        change = cells["change"].to_numpy(dtype=float)
        most = cells.iloc[int(np.abs(change).argmax())]
        moved = max(change[change > 0].sum(), -change[change < 0].sum())
        rows.append((str(name), moved, change.sum(), int(most["exponent"]), most["change"], most["noise"]))
    columns = ["name", "moved_frac", "nonzero_change", "exponent", "change", "noise"]
    return pd.DataFrame(rows, columns=columns).sort_values("moved_frac", ascending=False, ignore_index=True)


def _common_steps(pair: Sequence[Run], kind: str) -> list[int]:
    """Steps that both runs sampled and neither skipped, evenly spread."""
    common = set.intersection(*(set(sampled_steps(run, kind)) for run in pair))
    for run in pair:
        frame = attempts(run)
        common -= set(frame.loc[frame["skipped"], "step"].tolist())
    steps = sorted(common)
    places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MAX_STEPS)).round().astype(int))
    return [steps[i] for i in places] if steps else []


class _Shares:
    """Shares by tensor, step and exponent."""

    def __init__(self, names: list[str], lowest: int, shares: np.ndarray) -> None:
        self.names = names
        self.lowest = lowest
        self._shares = shares

    @classmethod
    def of(cls, run: Run, kind: str, steps: Sequence[int], depth: int, names: Collection[str] | None) -> "_Shares":
        table = rows_of_kind(run.thinned(steps), kind, None)
        if names is not None:
            table = table.filter(pc.is_in(table.column("name"), pa.array(sorted(names), pa.string())))
        every, codes = coded_names(table)
        folded = [folded_name(name, depth) for name in every]
        rows = list(dict.fromkeys(folded))
        cell = pd.Index(rows).get_indexer(pd.Index(folded))[codes] * len(steps)
        cell = cell + np.searchsorted(steps, table.column("step").to_numpy())
        first, bins = histogram_bounds(table, true_exponents=True)
        filled = bins > 0
        low = int(first[filled].min()) if filled.any() else 0
        width = int((first + bins)[filled].max()) - low if filled.any() else 1
        size = len(rows) * len(steps)
        counts = np.zeros(size * width)
        for row, place, count in filled_bins(table):
            counts += np.bincount(cell[row] * width + first[row] + place - low, weights=count, minlength=counts.size)
        numel = np.bincount(cell, weights=np.nan_to_num(float_column(table, "numel")), minlength=size)
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = counts.reshape(size, width) / np.where(numel > 0, numel, np.nan)[:, None]
        return cls(rows, low, np.nan_to_num(shares).reshape(len(rows), len(steps), width))

    @property
    def highest(self) -> int:
        """One more than the highest exponent."""
        return self.lowest + int(self._shares.shape[2])

    def aligned(self, names: Sequence[str], low: int, high: int) -> np.ndarray:
        """[tensor, step, exponent] for these tensors and the exponents from `low` to below `high`."""
        grid = np.zeros((len(names), self._shares.shape[1], high - low))
        first = self.lowest - low
        row = pd.Index(self.names).get_indexer(pd.Index(names))
        grid[row >= 0, :, first : first + self._shares.shape[2]] = self._shares[row[row >= 0]]
        return grid
