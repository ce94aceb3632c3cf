"""Rows of `steps` that stand for the others: a bounded number of them, from which the run's numbers still follow.

    kept, shift = thinned(rows, most=20_000)
    kept.column("stands_for")          # of how many steps a row tells, itself included; 1 for each in a whole table

Kept as they are: the first steps and the last ones; steps at which something happened (skipped, a loss or norm that is
not finite, another loss scale than before, ranks that disagree) or that other tables name, each with its neighbours;
and in each stretch of the rest the highest and lowest of `EXTREMES`. Of what is left a few steps per stretch, drawn by
lot, stand for those beside them. So counts, totals of weights and changes of the scale are exact, no spike disappears,
and quantiles and means are those of a fair sample of some thousand steps. What was thinned may be thinned again.

Drawn is systematically, each step with a chance in proportion to how many it tells already (Madow 1949, "On the theory
of systematic sampling, II"), by numbers hashed from the steps: the same steps give the same rows.
"""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.schema import RunError

STANDS_FOR = "stands_for"
EXTREMES = (
    ("loss", 1),
    ("loss", -1),
    ("grad_norm", 1),
    ("grad_norm", -1),
    ("step_ms", 1),
    ("memory_allocated_bytes", 1),
)
"""In each stretch the step with the largest (1) and the smallest (-1) finite value of these is kept."""
FIRST = 256
MAX_SHIFT = 62
DRAWN = 4
"""So many steps of a stretch stand for the rest of it, for skipped ones and others, with and without loss, each."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def thinned(
    rows: pa.Table, most: int, named: Collection[int] = (), shift: int = 0, settled: int | None = None
) -> tuple[pa.Table, int]:
    """Three quarters of `most` rows or fewer, in order of step, all rows of a step or none; all rows if they are few.

    `named` are steps that other tables speak of; after step `settled` nothing is left out. Given too is the length of a
    stretch, as a power of 2, to be handed in when these rows, and newer ones, are thinned again. Raises `RunError` for
    rows without a step.
    """
    if STANDS_FOR not in rows.column_names:
        rows = rows.append_column(STANDS_FOR, pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows))
    if rows.num_rows <= most:
        return rows, shift
    if rows.column("step").null_count:
        raise RunError("steps has rows without 'step'; every row needs it")
    order = [(key, "ascending") for key in ("step", "rank")]
    rows = rows.sort_by(order) if not _in_order(rows) else rows
    steps = _Steps(rows)
    room = most * 3 // 4 * len(steps.number) // rows.num_rows
    whole = steps.to_keep(room, np.fromiter(named, dtype=np.int64, count=len(named)), settled)
    span = int(steps.number[-1]) - int(steps.number[0])
    shift = min(MAX_SHIFT, max(shift, (span // max(1, room)).bit_length() - 1))
    while True:
        kept, weight = steps.chosen(whole, shift)
        if np.count_nonzero(kept) <= room or shift >= MAX_SHIFT:
            break
        shift += 1
    held = np.repeat(kept, steps.rows)
    place = rows.column_names.index(STANDS_FOR)
    rows = rows.set_column(place, STANDS_FOR, pa.array(np.repeat(weight, steps.rows)))
    return rows.filter(pa.array(held)).combine_chunks(), shift


class _Steps:
    """What is asked of each step, all its rows (ranks, optimizers) together."""

    def __init__(self, rows: pa.Table) -> None:
        at = rows.column("step").to_numpy()
        self._starts = np.flatnonzero(np.concatenate([[True], at[1:] != at[:-1]]))
        self.number: Ints = at[self._starts]
        self.rows = np.diff(np.append(self._starts, len(at)))
        self.weight: Ints = rows.column(STANDS_FOR).to_numpy()[self._starts]
        told, loss = _numbers(rows, "loss")
        norm_told, norm = _numbers(rows, "grad_norm")
        scale = _numbers(rows, "loss_scale")[1]
        skipped = pc.fill_null(rows.column("skipped"), False).to_numpy(zero_copy_only=False)
        self._skipped = np.logical_or.reduceat(skipped, self._starts)
        broken = told & ~np.isfinite(loss)
        self._loss = np.maximum.reduceat(told.astype(np.int64) + broken, self._starts)
        """0 where no loss was recorded, 1 where it is finite, 2 where one is not."""
        low, high = np.fmin.reduceat(scale, self._starts), np.fmax.reduceat(scale, self._starts)
        self._happened = self._skipped | (self._loss == 2) | self._moved(low) | self._moved(high)
        self._happened |= np.logical_or.reduceat(norm_told & ~np.isfinite(norm), self._starts)
        self._happened |= (low < high) | (self._skipped != np.logical_and.reduceat(skipped, self._starts))
        self._largest = []
        for column, sign in EXTREMES:
            values = sign * _numbers(rows, column)[1]
            values[~np.isfinite(values)] = -np.inf
            self._largest.append(np.maximum.reduceat(values, self._starts))
        spoken = np.flatnonzero(self._loss)
        self._ends = spoken[[0, -1]] if len(spoken) else spoken

    def to_keep(self, room: int, named: Ints, settled: int | None) -> Flags:
        """Steps that are kept as they are."""
        told = self._happened | np.isin(self.number, named)
        asked: Flags = told.copy()
        asked[1:] |= told[:-1]
        asked[:-1] |= told[1:]
        found = np.flatnonzero(asked)
        half = room // 6
        if len(found) > 2 * half:
            asked[found[half:-half]] = False
        asked[self._ends] = True
        asked[: min(FIRST, room // 8)] = True
        end = len(asked) if settled is None else int(np.searchsorted(self.number, settled, side="right"))
        asked[max(0, end - max(1, room // 6)) :] = True
        return asked

    def chosen(self, whole: Flags, shift: int) -> tuple[Flags, Ints]:
        """Of stretches of 2^shift steps those that are kept, and of how many each tells."""
        kept, weight = whole.copy(), self.weight.copy()
        rest = np.flatnonzero(~whole)
        if not len(rest):
            return kept, weight
        stretch = self.number[rest] >> shift
        starts = np.flatnonzero(np.append(True, np.diff(stretch) != 0))
        place = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(rest))))
        extreme = np.zeros(len(rest), dtype=bool)
        for values in self._largest:
            here = values[rest]
            top = np.flatnonzero((here == np.maximum.reduceat(here, starts)[place]) & np.isfinite(here))
            extreme[top[np.append(np.diff(place[top]) != 0, True)] if len(top) else top] = True
        group = (place * 2 + self._skipped[rest]) * 3 + self._loss[rest]
        others = np.flatnonzero(~extreme)
        others = others[np.argsort(group[others], kind="stable")]
        tells = _drawn(group[others], self._shares(rest, group, extreme, others), self.number[rest[others]])
        told = np.zeros(int(group.max()) + 1, dtype=bool)
        told[group[others]] = True
        spoken_for = extreme & told[group]
        weight[rest[spoken_for]] = 1
        weight[rest[others]] = tells
        kept[rest[extreme]] = True
        kept[rest[others]] = tells > 0
        return kept, weight

    def _shares(self, rest: Ints, group: Ints, extreme: Flags, others: Ints) -> Ints:
        """How many steps each of the others tells so far; what an extreme told beyond itself falls to the first."""
        shares = self.weight[rest[others]].copy()
        beyond = np.zeros(int(group.max()) + 1, dtype=np.int64)
        np.add.at(beyond, group[extreme], self.weight[rest[extreme]] - 1)
        first = np.flatnonzero(np.append(True, np.diff(group[others]) != 0)) if len(others) else others
        shares[first] += beyond[group[others[first]]]
        return shares

    @staticmethod
    def _moved(scale: Floats) -> Flags:
        """Where the scale is another than at the step before, whatever it was that is not a number."""
        before = np.append(scale[:1], scale[:-1])
        found: Flags = (scale != before) & ~(np.isnan(scale) & np.isnan(before))
        return found


def _numbers(rows: pa.Table, column: str) -> tuple[Flags, Floats]:
    """Where there is a value, and the values, NaN where there is none."""
    values = rows.column(column)
    told = pc.is_valid(values).to_numpy(zero_copy_only=False)
    return told, pc.cast(values, pa.float64(), safe=False).to_numpy(zero_copy_only=False).copy()


def _drawn(group: Ints, shares: Ints, numbers: Ints) -> Ints:
    """How many each tells once `DRAWN` of each group are drawn, 0 for those that are not; all of a group of few stay.

    Systematic: the shares of a group laid end to end, points at equal distances, of which the first lies by chance.
    """
    if not len(group):
        return shares
    first = np.flatnonzero(np.append(True, np.diff(group) != 0))
    counts = np.diff(np.append(first, len(group)))
    totals = np.add.reduceat(shares, first)
    ends = np.cumsum(shares)
    start = np.repeat(ends[first] - shares[first], counts)
    total = np.repeat(totals, counts)
    chance = np.repeat(_uniform(numbers[first], totals), counts)
    upto = np.ceil(DRAWN * (ends - start) / total - chance).astype(np.int64)  # points before its end
    before = np.ceil(DRAWN * (ends - shares - start) / total - chance).astype(np.int64)
    each, more = total // DRAWN, total % DRAWN  # the first points tell one more where it does not come out even
    told = (upto - before) * each + np.minimum(upto, more) - np.minimum(before, more)
    found: Ints = np.where(np.repeat(counts, counts) <= DRAWN, shares, told)
    return found


def _uniform(numbers: Ints, again: Ints) -> Floats:
    """A number from 0 to below 1 without pattern (the finalizer of splitmix64), the same for the same arguments."""
    with np.errstate(over="ignore"):
        z = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15) * (again.astype(np.uint64) + np.uint64(1))
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    found: Floats = (z >> np.uint64(11)).astype(np.float64) / 2.0**53
    return found


def _in_order(rows: pa.Table) -> bool:
    at = rows.column("step").to_numpy()
    return bool((at[1:] > at[:-1]).all())
