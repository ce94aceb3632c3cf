"""Find the fastest recipe that keeps FP32's learning: look, race, confirm, add options.

    >>> found = tune(TrainConfig(workload="text-gpt", steps=200), Path("runs/tune-1"), budget_s=300, tell=print)
    >>> found.answer, found.config["precision"]

1. A short FP32 run is watched in full: from it follow the loss scale for FP16, its FP32 islands, and what cannot work.
2. The precisions race in turns, a block of steps each. Who breaks, or is surely slower, leaves (`tune_race`).
3. FP32 and the two fastest train over several seeds, in turns again. The fastest that is surely faster than FP32 and
   whose loss is within FP32's own noise from seed to seed, or better, is the answer; where those two fail, the next two
   are asked; where none is left, FP32 is the answer.
4. Options race that recipe; those that are surely faster are put together and confirmed as in 3.

Runs are shortened to what the budget allows. What ends a search early leaves what was found so far. No torch: the
trainings are processes of their own.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

from amp_core import words
from amp_core._machine import this_process
from amp_core.analysis import compare
from amp_core.analysis.ratios import speed_ratio
from amp_core.run import Run, load_run
from amp_core.schema import RunError
from amp_core.train.config import TrainConfig
from amp_core.train.interleave import Member, default_block, interleave
from amp_core.train.tune_options import Candidate, options, precisions, together
from amp_core.train.tune_race import Race, ranked, trouble
from amp_core.train.tune_result import Tried, Tuned

LOOK_STEPS = 30
RACE_STEPS = (60, 200)
"""Least and most steps of a race. With fewer, its blocks are too few for a claim on speed (`ratios.FEW_BLOCKS`)."""
LEAST_STEPS = 40
"""Of a training that is to say something about learning."""
SEEDS = 3
MOST_SEEDS = 6
"""Seeds up to which recipes of which nothing is sure yet are trained, as long as the budget lasts."""
RACE_SHARE = 0.3
OPTIONS_SHARE = 0.25
CONFIRM_SHARE = 0.6
"""Of what is left of the budget when a stage begins, what the stage is planned to take."""
STARTS_AT_ONCE = 0.7
"""A process that starts beside others takes this share of the time of one that starts alone, on few cores."""
AT_ONCE = 2
"""Recipes confirmed together, where the budget is enough for it."""
_SELDOM = 10**6  # every: numbers are not looked at but in step 0, so that watching costs all alike next to nothing


class Ended(Exception):  # noqa: N818 - no error: it carries the exit code of trainings that said why themselves
    """A training refused its settings (2), or the search was asked to stop (130)."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Trainer(Protocol):
    """How members are trained in turns: `interleave`, or a test's own."""

    def __call__(
        self,
        members: Sequence[Member],
        block_steps: int,
        told: Callable[[int], None],
        keep: Callable[[int], Collection[int]] | None = None,
    ) -> list[int]:
        """Train them; exit codes."""
        ...


def tune(
    config: TrainConfig,
    into: Path,
    budget_s: float,
    *,
    tell: Callable[[str], None],
    trainer: Trainer = interleave,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """Search, with the runs and `tune.json` in the folder `into`. `config` sets all but precision and options.

    Raises `RunError` for a budget that is none, a folder in use and an FP32 that does not train; `Ended` where the
    trainings were stopped or refused.
    """
    if isinstance(budget_s, bool) or not isinstance(budget_s, int | float) or not 0 < budget_s < 1e7:
        raise RunError(f"budget={budget_s!r} is not possible; give seconds above 0, e.g. 300")
    if into.exists() and any(path.name not in ("job.json", "config.json", "console.log") for path in into.iterdir()):
        raise RunError(f"out={str(into)!r} is in use; give a folder that does not exist yet")
    into.mkdir(parents=True, exist_ok=True)
    return _Search(config, into, float(budget_s), tell, trainer, clock).run()


class _Search:
    """The state of one search: what was found, what is left of the budget."""

    def __init__(
        self,
        config: TrainConfig,
        into: Path,
        budget_s: float,
        tell: Callable[[str], None],
        trainer: Trainer,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._into, self._tell, self._trainer, self._clock = config, into, tell, trainer, clock
        self._began = clock()
        self._start_s = 0.0  # of one training, before its first step
        self._step_s: dict[str, float] = {}  # by recipe
        self._unsure: list[Tried] = []  # of which nothing could be told
        self._unasked = ""  # what could not be confirmed any more
        settled = config.resolved()
        self.found = Tuned(
            "running", settled.workload, settled.size, config.device, budget_s, 0.0, process=this_process()
        )

    def run(self) -> Tuned:
        """All stages."""
        self._save()
        try:
            self._all()
        except Ended as ended:
            status = "stopped" if ended.code == 130 else "failed"
            self._save(status=status, why=self.found.why or "The search ended before it had an answer.")
            raise
        except KeyboardInterrupt:
            self._save(status="stopped", why=self.found.why or "The search was stopped before it had an answer.")
            raise
        except RunError as error:
            self._save(status="failed", why=words.sentence(error))
            raise
        self._save(status="finished")
        return self.found

    def _all(self) -> None:
        look = self._look()
        first = precisions(self._config, look)
        self._leave_out(first.left_out)
        order = self._race("race", first.candidates, RACE_SHARE)
        plain = first.candidates[0]
        base = self._confirm(plain, order[: order.index(plain)])
        extra = options(base, look, self._left(), self._start_s)
        self._leave_out(extra.left_out)
        chosen = self._options(plain, base, extra.candidates)
        if chosen:
            self._confirm(plain, [together(base, chosen)], base)

    def _look(self) -> Run:
        """A short FP32 run, watched in full."""
        self._tell(f"looking at the workload in fp32 for {LOOK_STEPS} steps")
        steps = min(LOOK_STEPS, self._config.steps)
        config = dataclasses.replace(
            self._config, precision="fp32", loss_scale="dynamic", islands=(), fp8=False, steps=steps, every=5
        )
        began = self._clock()
        member = Member(dataclasses.replace(config, evaluate=False), self._into / "look", level="full")
        self._train([member], steps, None)
        look = load_run(member.folder)
        if why := trouble(look):
            raise RunError(f"workload={self._config.workload!r} does not train in fp32: {why}; mend that first")
        self._took("fp32", look)
        self._start_s = max(0.0, self._clock() - began - float(look.steps["step_ms"].sum()) / 1e3)
        device = str(look.head.config.get("device") or self._config.device)
        self._save(device=device)
        return look

    def _race(self, stage: str, candidates: Sequence[Candidate], share: float) -> list[Candidate]:
        """Let them race, and give those that can be used, fastest first. The first is the yardstick."""
        names = [c.name for c in candidates]
        steps = self._affordable(names, share, *RACE_STEPS)
        self._tell(f"{', '.join(names)} race for {steps} steps")
        folders = [self._into / stage / name for name in names]
        configs = [dataclasses.replace(c.config, steps=steps, every=_SELDOM, evaluate=False) for c in candidates]
        race = Race(names, folders, over=lambda: self._left() <= 0)
        codes = self._train(
            [Member(c, f) for c, f in zip(configs, folders, strict=True)], default_block(steps), race.keep
        )
        race.judge()  # once more: the last round's end is seen too, and who failed has written why
        runs = [race.run(i) for i in range(len(candidates))]
        for place, (run, code) in enumerate(zip(runs, codes, strict=True)):
            if run is None:
                race.out.setdefault(place, f"failed before its first step (exit code {code})")
        yardstick = runs[0]
        if yardstick is None or 0 in race.out:
            raise RunError(f"{names[0]} itself fails: {race.out.get(0)}; mend that first")
        for place, run in enumerate(runs):
            if run is not None:
                self._took(names[place], run)
            row = self._row(
                candidates[place], stage, names[0], [yardstick], [run] if run else [], race.out.get(place, "")
            )
            self._add(row)
        usable = [i for i, run in enumerate(runs) if run is not None and not _broken(race.out.get(i, ""))]
        order = ranked([[run] for i in usable if (run := runs[i]) is not None])
        return [candidates[usable[i]] for i in order]

    def _options(self, plain: Candidate, base: Candidate, extra: Sequence[Candidate]) -> list[Candidate]:
        """Those of them that make `base` surely faster, where there is time to find that out and to confirm it."""
        if not extra:
            return []
        names = [base.name, *(c.name for c in extra)]
        confirming = SEEDS * self._takes([plain.name, base.name], min(LEAST_STEPS, self._config.steps))
        if self._left() < self._takes(names, RACE_STEPS[0]) + confirming:
            why = "too little of the budget is left to race and confirm them; give a larger one"
            self._leave_out([(", ".join(names[1:]), why)])
            return []
        named = [dataclasses.replace(c, name=f"{base.name}+{c.name}") for c in extra]
        self._race("options", [base, *named], OPTIONS_SHARE)
        rows = {row.name: row for row in self.found.tried if row.stage == "options"}
        return [
            c
            for c, n in zip(extra, named, strict=True)
            if rows[n.name].speed_verdict == "faster" and not rows[n.name].out
        ]

    def _confirm(self, plain: Candidate, contenders: Sequence[Candidate], so_far: Candidate | None = None) -> Candidate:
        """Train FP32 and contenders over seeds, two at a time, until one can be shipped, which becomes the answer.

        Where none can, `so_far` stays the answer or, without one, FP32.
        """
        left = list(contenders)
        while left:
            steps = min(LEAST_STEPS, self._config.steps)
            both_s = SEEDS * self._takes([plain.name, *(c.name for c in left[:AT_ONCE])], steps)
            count = AT_ONCE if both_s <= CONFIRM_SHARE * self._left() else 1
            now, left = left[:count], left[count:]
            if self._left() <= 0:
                names = ", ".join(c.name for c in (*now, *left))
                self._unasked = f" The budget was used up before {names} could be confirmed: a larger budget may."
                break
            rows = self._seeds(plain, now)
            sure = next((row for row in rows if not row.out), None)
            if sure is not None:
                chosen = next(c for c in now if c.name == sure.name)
                self._choose(chosen, sure)
                return chosen
            self._unsure += [row for row in rows if row.parity.startswith("cannot tell")]
        if so_far is None:
            self._choose(plain, None)
        return so_far or plain

    def _seeds(self, plain: Candidate, contenders: Sequence[Candidate]) -> list[Tried]:
        """Rows of the contenders, fastest first; those to be left behind say why in `out`."""
        members = [plain, *contenders]
        names = [c.name for c in members]
        steps = self._affordable(names, CONFIRM_SHARE / SEEDS, min(LEAST_STEPS, self._config.steps), self._config.steps)
        stage = self._into / "confirm" / contenders[0].name
        runs: list[list[Run]] = [[] for _ in members]
        out: dict[int, str] = {}
        rows: dict[int, Tried] = {}
        for extra in range(MOST_SEEDS):
            going = [i for i in range(len(members)) if i not in out]
            seed, before = self._config.seed + extra, self._clock()
            self._tell(f"{', '.join(names[i] for i in going)}: {steps} steps, seed {seed}")
            made = [
                Member(
                    dataclasses.replace(members[i].config, steps=steps, seed=seed, every=_SELDOM),
                    stage / f"{names[i]}-seed{seed}",
                )
                for i in going
            ]
            race = Race([names[i] for i in going], [m.folder for m in made], over=lambda: self._left() <= 0)
            self._train(made, default_block(steps), functools.partial(_unbroken, race))
            first = race.run(0)
            if extra and first is not None and len(first.steps) < steps:  # cut short: seeds must be of one length
                break
            for place, i in enumerate(going):
                run = race.run(place)
                why = trouble(run) if run is not None else "failed before its first step"
                if run is not None and (i == 0 or not why):
                    runs[i].append(run)
                else:
                    out[i] = why
            rows = {
                i: self._row(members[i], "confirm", plain.name, runs[0], runs[i], "")
                for i in going
                if i and i not in out
            }
            out |= {i: f"slower than {plain.name}" for i, row in rows.items() if row.speed_verdict == "slower"}
            undecided = any(row.parity.startswith("cannot tell: run more") for i, row in rows.items() if i not in out)
            room = self._left() > self._clock() - before
            if not room or not set(rows) - set(out) or (extra + 1 >= SEEDS and not undecided):
                break
        whole = [i for i in rows if i not in out]
        judged = {i: self._verdict(rows[i]) for i in whole}
        order = [whole[i - 1] for i in ranked([runs[0], *(runs[i] for i in whole)]) if i > 0]
        failed = [self._row(members[i], "confirm", plain.name, runs[0], runs[i], why) for i, why in out.items() if i]
        reference = self._row(plain, "confirm", plain.name, runs[0], runs[0], "")
        for row in [reference, *(judged[i] for i in order), *failed]:
            self._add(row)
        return [judged[i] for i in order] + failed

    def _verdict(self, row: Tried) -> Tried:
        """The row, with the reason why it cannot be shipped, where there is one."""
        if not row.parity.startswith(("within noise", "better")):
            return dataclasses.replace(row, out=row.parity)
        if row.speed_verdict != "faster":
            return dataclasses.replace(row, out=f"not faster than {row.against}: {row.speed_verdict}")
        return row

    def _row(
        self, candidate: Candidate, stage: str, against: str, first: Sequence[Run], runs: Sequence[Run], out: str
    ) -> Tried:
        """What was measured of a recipe against the runs of another."""
        folders = tuple(Path(str(run.path)).relative_to(self._into).as_posix() for run in runs)
        row = Tried(candidate.name, stage, against, folders, min((len(run.steps) for run in runs), default=0))
        row = dataclasses.replace(row, out=out, note=candidate.note)
        if not runs or not first:
            return row
        if candidate.name == against:
            return dataclasses.replace(
                row,
                speed_ratio=1.0,
                speed_ratio_low=1.0,
                speed_ratio_high=1.0,
                speed_verdict="reference",
                memory_ratio=1.0,
            )
        ratio = speed_ratio(list(zip(first, runs, strict=False)))
        comparison = compare([*first, *runs])
        found = comparison.recipes.iloc[1]
        row = dataclasses.replace(
            row,
            speed_ratio=ratio.value,
            speed_ratio_low=ratio.low,
            speed_ratio_high=ratio.high,
            speed_verdict=ratio.verdict,
            memory_ratio=float(found["memory_ratio"]),
        )
        if stage != "confirm":
            return row
        answer = next(iter(comparison.answers.values())).partition(": ")[2]
        return dataclasses.replace(row, parity=str(found["parity"]), answer=answer)

    def _choose(self, chosen: Candidate, row: Tried | None) -> None:
        """The answer, in words."""
        undecided = "".join(
            f" {one.name} may be {words.number(one.speed_ratio)} × as fast, but whether it learns the same cannot be "
            "told from so few steps and seeds: a larger budget may."
            for one in self._unsure
            if one.speed_verdict == "faster"
        )
        config = dataclasses.replace(chosen.config, steps=self._config.steps, every=self._config.every).to_dict()
        if row is None:
            answer = f"{chosen.name.upper()}: stay with it"
            why = "No recipe that was tried is surely faster and learns the same." + undecided + self._unasked
        else:
            name = chosen.name.upper() if chosen.name.isalnum() else chosen.name
            answer = f"{name}: {row.answer}"
            why = f"The fastest of those that keep parity: {row.parity}.{undecided}"
        self._tell(answer)
        self._save(chosen=chosen.name, config=config, answer=answer, why=why)

    def _train(self, members: list[Member], block: int, keep: Callable[[int], Collection[int]] | None) -> list[int]:
        codes = self._trainer(members, block, lambda _done: None, keep)
        asked = len(codes) < len(members) or (keep is None and 130 in codes)  # else 130 are those that left
        if asked or 2 in codes:
            raise Ended(2 if 2 in codes else codes[0])
        return codes

    def _took(self, name: str, run: Run) -> None:
        times = run.steps["step_ms"].dropna()
        if len(times):
            self._step_s[name] = float(times.median()) / 1e3

    def _affordable(self, names: Sequence[str], share: float, least: int, most: int) -> int:
        """Steps for which all of these can train within a share of what is left. A recipe not seen yet: as fp32."""
        step_s = sum(self._step_s.get(name, self._step_s["fp32"]) for name in names)
        seconds = share * self._left() - self._starting(len(names))
        return max(least, min(most, int(seconds / max(step_s, 1e-6))))

    def _starting(self, members: int) -> float:
        """Seconds before the first step of so many: the first starts alone, then the others at once."""
        return self._start_s * (1 + STARTS_AT_ONCE * (members - 1))

    def _takes(self, names: Sequence[str], steps: int) -> float:
        """Seconds that these take for so many steps."""
        return self._starting(len(names)) + steps * sum(self._step_s.get(name, self._step_s["fp32"]) for name in names)

    def _left(self) -> float:
        return self.found.budget_s - (self._clock() - self._began)

    def _leave_out(self, what: Sequence[tuple[str, str]]) -> None:
        self._save(left_out=(*self.found.left_out, *what))

    def _add(self, row: Tried) -> None:
        self._tell(in_words(row))
        self._save(tried=(*self.found.tried, row))

    def _save(self, **changes: object) -> None:
        self.found = dataclasses.replace(self.found, seconds=self._clock() - self._began, **changes)  # type: ignore[arg-type]
        self.found.save(self._into)


def in_words(row: Tried) -> str:
    """A row as a line."""
    if row.speed_verdict == "reference":
        return f"  {row.name}: what the others are held against"
    parts = [
        f"{words.number(row.speed_ratio)} × ({words.number(row.speed_ratio_low)}–{words.number(row.speed_ratio_high)})"
    ]
    if row.parity:
        parts.append(row.parity)
    if row.out and row.out != row.parity:
        parts.append(f"out: {row.out}")
    return f"  {row.name}: {'; '.join(parts)}"


def _broken(out: str) -> bool:
    """Whether a recipe left for another reason than being slow: a slow one may still be the fastest that trains."""
    return bool(out) and not out.startswith("slower")


def _unbroken(race: Race, _done: int) -> set[int]:
    """Who goes on in a training that is not about speed: all whose numbers are not broken."""
    runs = {i: race.run(i) for i in range(race.count)}
    return set() if race.over() else {i for i, run in runs.items() if run is not None and not trouble(run)}
