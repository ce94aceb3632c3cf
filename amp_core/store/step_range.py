"""Part of a run: the steps from one to another.

    >>> part = within_steps(run, 100, 200)
    >>> part.steps["step"].min(), part.whole is run
    (100, True)

A part is a `Run`, so every analysis accepts it. Its tables over time hold these steps alone; recordings of single steps
(kernels, operators, memory by category) stay, because each stands for the run as a whole.
"""

import functools
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from amp_core.store.run import Run

BY_STEP = frozenset({"steps", "tensors", "audits", "updates", "averages"})
"""Tables of which a part holds only its own steps."""
ABOUT_THE_RUN = ("started", "resumed", "warning", "failed in", "ended")
"""Kinds of events that a part keeps, whatever their step."""


def within_steps(run: Run, first: int, last: int) -> "StepRange":
    """The steps of `run` from `first` to `last`, both included."""
    return StepRange(run, first, last)


def whole(run: Run) -> Run:
    """The run that `run` is part of, or `run` itself."""
    return run.whole if isinstance(run, StepRange) else run


class StepRange(Run):
    """Some steps of a run. It shows the rows that `whole` had read when the part was made."""

    def __init__(self, whole: Run, first: int, last: int) -> None:
        self._source = whole._source
        self._segments = {}
        self._tables = {}
        self._frames = {}
        self._selective_reads = 0
        self._made = {}
        self._damaged = None
        self.head = whole.head
        self.called = whole.called
        self.whole = whole
        self.first, self.last = first, last
        self.sampled_steps: int | None = getattr(whole, "sampled_steps", None)
        """As of an `Extract`: the number of sampled steps in the whole run, if only some of them are read."""

    def table(self, name: str) -> pa.Table:
        if name not in self._tables:
            rows = self.whole.table(name)
            if name in BY_STEP:
                rows = rows.filter(self._inside())
            elif name == "events":
                about_the_run = pc.is_in(pc.field("kind"), pa.array(ABOUT_THE_RUN))
                rows = rows.filter(self._inside() | pc.field("step").is_null() | about_the_run)
            elif name == "device":
                rows = self._meanwhile(rows)
            self._tables[name] = rows
        return self._tables[name]

    def salvaged(self) -> "StepRange":
        """See `Run.salvaged`."""
        salvaged = self.whole.salvaged()
        return self if salvaged is self.whole else StepRange(salvaged, self.first, self.last)

    def damaged(self, name: str) -> str:
        """See `Run.damaged`."""
        return self.whole.damaged(name)

    def of_tensor(self, kind: str, name: str, columns: Sequence[str]) -> pa.Table:
        rows = self.whole.of_tensor(kind, name, list(dict.fromkeys(["step", *columns])))
        return rows.filter(self._inside()).select(columns)

    def _matching(self, name: str, where: pc.Expression) -> pa.Table:
        return self.table(name).filter(where)

    def refresh(self) -> bool:
        """See `Run.refresh`."""
        changed = self.whole.refresh()
        self.head = self.whole.head
        if changed:
            self._tables, self._frames = {}, {}
        return changed

    def fingerprint(self) -> tuple[tuple[str, int, int], ...]:
        return (*self.whole.fingerprint(), ("steps", self.first, self.last))

    def _inside(self) -> pc.Expression:
        return (pc.field("step") >= self.first) & (pc.field("step") <= self.last)

    def _meanwhile(self, samples: pa.Table) -> pa.Table:
        """Device samples from the end of the step before the first to the end of the last."""
        steps = self.whole.table("steps").select(["step", "time_s"])
        ends = steps.filter(self._inside())["time_s"]
        before = steps.filter(pc.field("step") < self.first)["time_s"]
        begin, end = pc.max(before).as_py(), pc.max(ends).as_py()
        conditions = [pc.field("time_s") <= end] if end is not None else []
        conditions += [pc.field("time_s") >= begin] if begin is not None else []
        return samples.filter(functools.reduce(pc.Expression.__and__, conditions)) if conditions else samples
