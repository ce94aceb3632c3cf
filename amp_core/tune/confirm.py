"""Can this recipe be shipped? FP32 and the recipe are trained over seeds until that is told.

    asking = Asking(search, plain)
    shown = asking.ask(bf16, raced=(run_fp32, run_bf16))
    shown.row.out, shown.needs_s                # "" where it can be shipped

A recipe is shipped where two things are sure of it:

1. *It is faster than FP32*: the 95 % interval of its speed lies above 1, and the speed above 1 by a margin
   (`amp_core.analysis.comparison.ratios`). The race counts, and each seed in which it took turns with FP32.
2. *It learns the same*: it is shown to be no more than two standard deviations from seed to seed worse than FP32, in
   its final loss and in the held-out loss where there is one, or it is better (`amp_core.analysis.comparison.parity`).
   To ship is to claim equivalence, so it is the equivalence that has to be shown, by two one-sided tests (Schuirmann,
   "A comparison of the two one-sided tests procedure", 1987): that no difference was found, as it is with few seeds,
   shows nothing. The margin is made of FP32's own spread, as for medicines whose reference varies (Haidar et al.,
   "Bioequivalence approaches for highly variable drugs and drug products", 2008): who trains in FP32 takes what its
   seed gives.

From the third seed on it is judged after each of `LOOKS`, with tests that are stricter for being repeated, until both
are told; FP32's seeds are shared by all recipes that are asked about. Before the third seed only numbers that are not
finite count. Both trainings of a seed have the same weights, data and order, so their difference is far smaller than
that between seeds, and three seeds tell in most searches.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from amp_core.analysis.comparison.parity import MIN_SEEDS, t_quantile
from amp_core.store.run import Run
from amp_core.train.turns.interleave import default_block
from amp_core.train.turns.member import Member
from amp_core.tune.evidence import measured, unmeasured_row
from amp_core.tune.options import Candidate
from amp_core.tune.race import RACE_SHARE, Race, trouble
from amp_core.tune.result import Tried
from amp_core.tune.state import FIRST_STEP_ONLY, Search

LOOKS = (3, 4, 5, 6, 8, 10, 12)
"""Numbers of seeds after which a recipe is judged."""
MIN_STEPS = 40
"""Of a training that is to say something about learning."""
SHARE = 1 / LOOKS[-1]
"""Of what is left of the budget, what one seed is planned to take, so that there is time for all of them."""


@dataclass(frozen=True)
class Shown:
    """The result for one recipe."""

    candidate: Candidate
    row: Tried
    """`out` is empty where it can be shipped."""
    decided: bool
    """Whether both questions, speed and parity, are answered."""
    seeds: int
    more_s: float = 0.0
    """Seconds, beyond those used, of the seeds that are expected to answer them; 0 where the budget was enough."""
    needs_s: float = 0.0
    """The budget with which a search is expected to get so far; 0 likewise."""

    @property
    def ships(self) -> bool:
        """Whether it is the answer."""
        return self.decided and not self.row.out


class Asking:
    """Asks of one recipe after the other whether it can be shipped, and keeps FP32's seeds."""

    def __init__(self, search: Search, plain: Candidate) -> None:
        self._search, self._plain = search, plain
        self._first: dict[int, Run] = {}  # FP32's runs by seed
        self._seed_s = 0.0  # of FP32 and a recipe, the last time
        self.steps = 0
        """Of each training; decided when the first recipe is asked about."""
        self._began = search.budget.used

    def ask(self, candidate: Candidate, raced: tuple[Run, Run] | None) -> Shown:
        """Train it over seeds until it is decided whether it can be shipped, or the budget is used up.

        `raced` are FP32's run and its own of a race. With them it may be trained over seeds that FP32 has trained
        already; without, its speed is yet to be told, and it takes turns with FP32 over seeds that are new to both.
        """
        names = [self._plain.name, candidate.name]
        budget, settings = self._search.budget, self._search.config
        least = min(MIN_STEPS, settings.steps)
        self.steps = self.steps or budget.steps(names, SHARE, least, settings.steps)
        runs: dict[int, Run] = {}
        pairs = [raced] if raced is not None else []
        row, decided, short = (
            unmeasured_row(candidate, "confirm", self._plain.name, [], self._search.into),
            False,
            False,
        )
        for seed in self._seeds(fresh=raced is None):
            going = [self._plain, candidate] if seed not in self._first else [candidate]
            if short := budget.left < self._takes(going, max(1, MIN_SEEDS - len(runs))):
                break
            before = budget.used
            ends = self._train(going, seed)
            if short := ends is None:
                break
            if self._first and len(going) == 2:  # the first seed waited for processes to start
                self._seed_s = budget.used - before
            reference = self._first.get(seed) if len(going) == 1 else ends[0]
            run, why = ends[-1], _why_broken(ends[-1])
            if reference is None or trouble(reference):  # FP32 itself does not train under this seed
                continue
            self._first[seed] = reference
            if why:
                decided = True
                row = self._row(candidate, runs, pairs, why)
                break
            assert run is not None  # or there would be a reason
            runs[seed] = run
            if len(going) == 2:
                pairs.append((reference, run))
            if len(runs) in LOOKS:
                row = _judged(self._row(candidate, runs, pairs))
                decided = not row.out.startswith("cannot tell")
                if decided:
                    break
        if not row.runs and runs:
            row = self._row(candidate, runs, pairs, "cannot tell: too few seeds")
        if decided or not short:
            return Shown(candidate, row, decided, len(runs))
        needed = max(seeds_that_tell(row, len(runs)), len(runs) + 1)
        both = [self._plain, candidate]
        more_s = self._takes(both, needed - len(runs))
        needs_s = self._began + self._takes(both, needed) / (1 - RACE_SHARE)
        return Shown(candidate, row, decided, len(runs), more_s, needs_s)

    def reference(self) -> Tried:
        """FP32's own row."""
        return unmeasured_row(self._plain, "confirm", self._plain.name, list(self._first.values()), self._search.into)

    def _seeds(self, fresh: bool) -> Iterator[int]:
        begin = self._search.config.seed
        if fresh and self._first:
            begin = max(self._first) + 1
        yield from range(begin, begin + LOOKS[-1])

    def _train(self, going: list[Candidate], seed: int) -> list[Run | None] | None:
        """Runs of all of them; None where the budget was used up before they were whole."""
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
        cut = any(run is not None and len(run.steps) < self.steps and not trouble(run) for run in runs)
        return None if cut else runs

    def _row(self, candidate: Candidate, runs: dict[int, Run], pairs: list[tuple[Run, Run]], out: str = "") -> Tried:
        first = [self._first[seed] for seed in sorted(self._first)]
        into = self._search.into
        in_seed_order = [runs[seed] for seed in sorted(runs)]
        return measured(candidate, "confirm", self._plain.name, first, in_seed_order, into, pairs=pairs, out=out)

    def _takes(self, going: list[Candidate], seeds: int) -> float:
        """Seconds of so many seeds of these."""
        if self._seed_s and len(going) == 2:
            return seeds * self._seed_s
        return self._search.budget.takes([c.name for c in going], self.steps, seeds)


def seeds_that_tell(row: Tried, seeds: int) -> int:
    """Seeds, one of `LOOKS`, that decide parity if deviation and spread stay what they were after `seeds`."""
    deviation, noise = abs(row.loss_change_frac), row.noise_frac
    half_width_now = row.loss_change_high - row.loss_change_frac
    if seeds < MIN_SEEDS or not half_width_now >= 0 or not noise > 0:
        return MIN_SEEDS
    spread = half_width_now / t_quantile(seeds - 1, 0.975) * seeds**0.5
    for count in LOOKS:
        half_width = t_quantile(count - 1, 0.975) * spread / count**0.5
        if count > seeds and (deviation + half_width <= 2 * noise or deviation > max(half_width, noise)):
            return count
    return LOOKS[-1]


def _why_broken(run: Run | None) -> str:
    return trouble(run) if run is not None else "failed before its first step"


def _judged(row: Tried) -> Tried:
    """The row, with the reason why it cannot be shipped, or not yet, where there is one."""
    if not row.parity.startswith(("within noise", "better")):
        return dataclasses.replace(row, out=row.parity)
    if row.speed_verdict != "faster":
        sure = not row.speed_verdict.startswith("cannot tell")
        out = f"not faster than {row.against}: {row.speed_verdict}" if sure else row.speed_verdict
        return dataclasses.replace(row, out=out)
    return row
