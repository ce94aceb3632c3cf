"""Can this recipe be shipped? Train FP32 and the recipe over seeds until that is decided.

    confirmation = Confirmation(search, plain)
    result = confirmation.confirm(bf16, raced=(run_fp32, run_bf16))
    result.row.out, result.needs_s                # "" if it can be shipped

A recipe can be shipped if two things are certain:

1. *It is faster than FP32*: the interval of its speed lies above 1, and the speed above 1 by a margin (`evidence`).
   The race counts, and each seed in which it was interleaved with FP32.
2. *It keeps parity*: its final loss, and its held-out loss if there is one, are better than FP32's or at most two
   standard deviations between seeds worse (`amp_core.analysis.comparison.parity`). Shipping a recipe claims
   equivalence, so equivalence is what two one-sided tests must show (Schuirmann, "A comparison of the two one-sided
   tests procedure", 1987). With few seeds, the absence of a significant difference shows nothing. The margin is
   derived from FP32's own spread, as for drugs whose reference varies (Haidar et al., "Bioequivalence approaches for
   highly variable drugs and drug products", 2008): training in FP32 accepts the same spread.

From the third seed on, both are tested after each number of seeds in `INTERIM_SEEDS`, with stricter thresholds because
the tests are repeated, until both are decided. All recipes share FP32's seeds. Before the third seed only non-finite
numbers count. Both trainings of a seed have the same weights, data and order. Their difference is therefore far
smaller than that between seeds, and three seeds decide most searches.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from amp_core.analysis.comparison.parity import MIN_SEEDS, REPEATED_WITHIN, REPEATED_WORSE, t_quantile
from amp_core.store.run import Run
from amp_core.train.turns.interleave import default_block
from amp_core.train.turns.member import Member
from amp_core.tune.evidence import measured_row, unmeasured_row
from amp_core.tune.options import Candidate
from amp_core.tune.race import RACE_FRAC, Race, failure_reason
from amp_core.tune.result import Tried
from amp_core.tune.state import FIRST_STEP_ONLY, Search

INTERIM_SEEDS = (3, 4, 5, 6, 8, 10, 12)
"""Numbers of seeds after which speed and parity are tested."""
MIN_STEPS = 40
"""Fewer steps show nothing about learning."""
SEED_FRAC = 1 / INTERIM_SEEDS[-1]
"""Share of the remaining budget planned for one seed, so that there is time for all of them."""


@dataclass(frozen=True)
class ConfirmResult:
    """The result for one recipe."""

    candidate: Candidate
    row: Tried
    """`out` is empty if the recipe can be shipped."""
    decided: bool
    """Whether speed and parity are both decided."""
    seeds: int
    more_s: float = 0.0
    """Further seconds that the seeds to decide both are expected to take; 0 if the budget was enough."""
    needs_s: float = 0.0
    """The budget with which a new search is expected to decide both; 0 if this one was enough."""

    @property
    def ships(self) -> bool:
        """Whether the recipe can be shipped."""
        return self.decided and not self.row.out


class Confirmation:
    """Decides for one recipe after another whether it can be shipped; FP32's runs are kept for all of them."""

    def __init__(self, search: Search, plain: Candidate) -> None:
        self._search, self._plain = search, plain
        self._first: dict[int, Run] = {}  # FP32's runs by seed
        self._seed_s = 0.0  # seconds that the last seed of FP32 and a recipe took
        self.steps = 0
        """Steps of each training; set for the first recipe."""
        self._began = search.budget.used

    def confirm(self, candidate: Candidate, raced: tuple[Run, Run] | None, *, fresh: bool = False) -> ConfirmResult:
        """Train `candidate` over seeds until both speed and parity are decided, or the budget is used up.

        `raced` is the pair of runs of FP32 and the candidate from a race, if there was one. FP32's earlier runs serve
        as the baseline, unless `fresh`: the race did not decide the speed, so the candidate is interleaved with FP32
        over seeds new to both.
        """
        names = [self._plain.name, candidate.name]
        budget, settings = self._search.budget, self._search.config
        least = min(MIN_STEPS, settings.steps)
        self.steps = self.steps or budget.steps(names, SEED_FRAC, least, settings.steps)
        runs: dict[int, Run] = {}
        pairs = [raced] if raced is not None else []
        row, decided, short = (
            unmeasured_row(candidate, "confirm", self._plain.name, [], self._search.into),
            False,
            False,
        )
        for seed in self._seeds(fresh):
            going = [self._plain, candidate] if seed not in self._first else [candidate]
            if short := budget.left < self._takes(going, max(1, MIN_SEEDS - len(runs))):
                break
            before = budget.used
            ends = self._train(going, seed)
            if short := ends is None:
                break
            if self._first and len(going) == 2:  # the first seed includes starting the processes
                self._seed_s = budget.used - before
            reference = self._first.get(seed) if len(going) == 1 else ends[0]
            run, why = ends[-1], _why_broken(ends[-1])
            if reference is None or failure_reason(reference):  # FP32 itself does not train under this seed
                continue
            self._first[seed] = reference
            if why:
                decided = True
                row = self._row(candidate, runs, pairs, why)
                break
            assert run is not None  # otherwise `why` is set
            runs[seed] = run
            if len(going) == 2:
                pairs.append((reference, run))
            if len(runs) in INTERIM_SEEDS:
                row = _judged(self._row(candidate, runs, pairs))
                decided = not row.out.startswith("cannot tell")
                if decided:
                    break
        if not row.runs and runs:
            row = self._row(candidate, runs, pairs, "cannot tell: too few seeds")
        if decided or not short:
            return ConfirmResult(candidate, row, decided, len(runs))
        needed = max(seeds_to_decide(row, len(runs)), len(runs) + 1)
        both = [self._plain, candidate]
        more_s = self._takes(both, needed - len(runs))
        needs_s = self._began + self._takes(both, needed) / (1 - RACE_FRAC)
        return ConfirmResult(candidate, row, decided, len(runs), more_s, needs_s)

    def has_time_for(self, candidate: Candidate) -> bool:
        """Whether the budget suffices for the fewest seeds that can decide."""
        least = min(MIN_STEPS, self._search.config.steps)
        names = [self._plain.name, candidate.name]
        return self._search.budget.left >= self._search.budget.takes(names, self.steps or least, MIN_SEEDS)

    def reference(self) -> Tried:
        """FP32's own row."""
        return unmeasured_row(self._plain, "confirm", self._plain.name, list(self._first.values()), self._search.into)

    def _seeds(self, fresh: bool) -> Iterator[int]:
        begin = self._search.config.seed
        if fresh and self._first:
            begin = max(self._first) + 1
        yield from range(begin, begin + INTERIM_SEEDS[-1])

    def _train(self, going: list[Candidate], seed: int) -> list[Run | None] | None:
        """The runs of all candidates; None if the budget was used up before they were complete."""
        search = self._search
        search.on_progress(f"{', '.join(c.name for c in going)}: {self.steps} steps, seed {seed}")
        configs = [
            dataclasses.replace(c.config, steps=self.steps, seed=seed, every=FIRST_STEP_ONLY, profile=None)
            for c in going
        ]
        folders = [search.into / "confirm" / f"{c.name}-seed{seed}" for c in going]
        members = [(c.name, Member(s, f)) for c, s, f in zip(going, configs, folders, strict=True)]
        race = Race([c.name for c in going], folders, over=lambda: search.budget.left <= 0)
        search.train(members, default_block(self.steps), race.unbroken)
        runs = [race.run(place) for place in range(len(going))]
        for candidate, run in zip(going, runs, strict=True):
            if run is not None:
                search.budget.took(candidate.name, run)
        cut = any(run is not None and len(run.steps) < self.steps and not failure_reason(run) for run in runs)
        return None if cut else runs

    def _row(self, candidate: Candidate, runs: dict[int, Run], pairs: list[tuple[Run, Run]], out: str = "") -> Tried:
        first = [self._first[seed] for seed in sorted(self._first)]
        into = self._search.into
        in_seed_order = [runs[seed] for seed in sorted(runs)]
        return measured_row(candidate, "confirm", self._plain.name, first, in_seed_order, into, pairs=pairs, out=out)

    def _takes(self, going: list[Candidate], seeds: int) -> float:
        """Seconds to train these candidates over `seeds` seeds."""
        if self._seed_s and len(going) == 2:
            return seeds * self._seed_s
        return self._search.budget.takes([c.name for c in going], self.steps, seeds)


def seeds_to_decide(row: Tried, seeds: int) -> int:
    """Seeds, one of `INTERIM_SEEDS`, that decide parity if deviation and spread stay as they are after `seeds`."""
    deviation, noise = abs(row.loss_change_frac), row.noise_frac
    half_width_now = row.loss_change_high - row.loss_change_frac
    if seeds < MIN_SEEDS or not half_width_now >= 0 or not noise > 0:
        return MIN_SEEDS
    spread = half_width_now / t_quantile(seeds - 1, 0.975) * seeds**0.5
    for count in INTERIM_SEEDS:
        within, worse = (t_quantile(count - 1, q) * spread / count**0.5 for q in (REPEATED_WITHIN, REPEATED_WORSE))
        if count > seeds and (deviation + within <= 2 * noise or deviation > max(worse, noise)):
            return count
    return INTERIM_SEEDS[-1]


def _why_broken(run: Run | None) -> str:
    return failure_reason(run) if run is not None else "failed before its first step"


def _judged(row: Tried) -> Tried:
    """`row` with `out` set to why the recipe cannot be shipped (yet), if it cannot."""
    if not row.parity.startswith(("within noise", "better")):
        return dataclasses.replace(row, out=row.parity)
    if row.speed_verdict != "faster":
        sure = not row.speed_verdict.startswith("cannot tell")
        out = f"not faster than {row.against}: {row.speed_verdict}" if sure else row.speed_verdict
        return dataclasses.replace(row, out=out)
    return row
