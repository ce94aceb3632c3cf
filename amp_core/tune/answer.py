"""A search's answer in words: a confirmed recipe, one that looks best so far with a sufficient budget, or FP32.

>>> save_confirmed(search, result, undecided=[])
>>> search.result.answer
'BF16: 2.31 × faster, 38 % less memory, same loss within noise'
"""

import dataclasses
from collections.abc import Collection, Sequence

from amp_core.analysis.comparison.parity import MIN_SEEDS
from amp_core.analysis.comparison.ratios import SAME_SPEED_FRAC
from amp_core.text import formatting
from amp_core.tune.budget import in_round_seconds
from amp_core.tune.confirm import MIN_STEPS, ConfirmResult
from amp_core.tune.evidence import may_be_faster, speed
from amp_core.tune.options import Candidate
from amp_core.tune.race import RACE_FRAC, RACE_STEPS, RaceResult
from amp_core.tune.result import Tried
from amp_core.tune.state import Search


def save_confirmed(
    search: Search, result: ConfirmResult, undecided: Sequence[ConfirmResult], rivals: Sequence[Candidate]
) -> None:
    """Save the recipe as one that can be shipped. `undecided` are faster ones that the budget did not decide; `rivals`
    may be faster than it: with any the answer is unconfirmed."""
    row, names = result.row, ", ".join(rival.name for rival in rivals)
    why = " ".join([f"The fastest recipe with convergence parity: {row.parity}.", *map(undecided_reason, undecided)])
    answer = f"{_title(result.candidate)}: {row.answer}"
    if rivals:
        answer = f"{answer}; whether {names} is faster still is undecided: run with a larger --budget"
        why = f"The race did not decide between {result.candidate.name} and {names}. Convergence parity: {row.parity}."
    _save(search, result.candidate, answer, why, sure=not rivals)


def save_unconfirmed(search: Search, result: ConfirmResult) -> None:
    """Save the recipe as the one that looks fastest while it is undecided whether it can be shipped."""
    ratio = _speed(_race_row(search, result))
    same = result.row.parity.startswith(("within noise", "better"))
    undecided = "speed" if result.seeds and same else "convergence parity"
    summary = f"{_title(result.candidate)} looks fastest, {ratio} × FP32's speed, but its {undecided} is undecided"
    if not result.needs_s:
        _save(search, result.candidate, f"{summary}: run it with more --steps", undecided_reason(result), sure=False)
        return
    needs = in_round_seconds(result.needs_s)
    more, anew = formatting.duration(result.more_s), formatting.duration(needs)
    more = f"About {more} more training may decide: a new search of {anew}."
    _save(
        search,
        result.candidate,
        f"{summary}: run with --budget {needs}",
        f"The budget was used up. {more} {undecided_reason(result)}",
        needs_s=float(needs),
        sure=False,
    )


def perhaps_faster(search: Search, plain: Candidate, raced: RaceResult) -> list[Candidate]:
    """Recipes that the race left open whether they are faster than FP32; fastest first."""
    return _possibly_faster(search, plain, raced.order[raced.order.index(plain) + 1 :], [raced], {plain.name})


def undecided_rivals(
    search: Search, plain: Candidate, chosen: Candidate, races: Sequence[RaceResult], rejected: Collection[str]
) -> list[Candidate]:
    """Recipes of the first race that may be faster than the `chosen` one, but for those that a confirmation `rejected`.
    The last of the `races` that two recipes ran together tells their speeds."""
    if chosen not in races[0].order:
        return []
    others = [one for one in races[0].order if one.name not in (*rejected, chosen.name, plain.name)]
    return _possibly_faster(search, chosen, others, races, {plain.name, chosen.name})


def _possibly_faster(
    search: Search,
    than: Candidate,
    candidates: Sequence[Candidate],
    races: Sequence[RaceResult],
    slower: Collection[str],
) -> list[Candidate]:
    """Those of the candidates that may be faster than `than`, fastest first. Those that left a race as slower than
    one of `slower` are not."""
    left = tuple(f"slower than {name}:" for name in slower)
    out = {row.name for row in search.result.tried if row.stage in ("race", "rivals") and row.out.startswith(left)}
    ratios = {}
    for one in candidates:
        runs = next(of.runs for of in reversed(races) if than.name in of.runs and one.name in of.runs)
        if one.name not in out:
            ratios[one] = speed([(runs[than.name], runs[one.name])])
    return sorted((one for one, ratio in ratios.items() if may_be_faster(ratio)), key=lambda one: -ratios[one].value)


def keep_fp32(search: Search, plain: Candidate, raced: RaceResult, rejected: Collection[str]) -> None:
    """Save FP32: no recipe is surely faster and keeps parity. If one that may be faster is not among those `rejected`
    by a confirmation, the answer is unconfirmed."""
    maybe = [candidate for candidate in perhaps_faster(search, plain, raced) if candidate.name not in rejected]
    if not maybe:
        why = "None of the recipes tried is faster with convergence parity."
        _save(search, plain, f"Stay with {_title(plain)}", why)
        return
    best = maybe[0]
    row = next(row for row in search.result.tried if row.stage == "race" and row.name == best.name)
    ratio = f"{_speed(row)} × FP32's speed ({_speed(row, 'low')}–{_speed(row, 'high')})"
    after = f"after {formatting.plural(row.steps, 'step')} of the race"
    budget, steps = search.budget, min(MIN_STEPS, search.config.steps)
    racing = budget.takes([candidate.name for candidate in raced.order], RACE_STEPS[0])
    confirming = budget.takes([plain.name, best.name], steps, MIN_SEEDS)
    needs = in_round_seconds(budget.probe_s + max(racing + confirming, confirming / (1 - RACE_FRAC)))
    needs = max(needs, in_round_seconds(budget.seconds)) if row.steps >= RACE_STEPS[0] else needs
    faster = row.speed_ratio > 1 + SAME_SPEED_FRAC
    looks = (
        f"{_title(best)} looks fastest, but its speed and convergence parity are undecided"
        if faster
        else f"{_title(plain)} looks as fast as any, but whether {best.name} is faster is undecided"
    )
    _save(
        search,
        best if faster else plain,
        f"{looks}: run with --budget {needs}",
        f"The budget ended before that was decided: {best.name} reached {ratio} {after}. The rest of the race and "
        f"{MIN_SEEDS} seeds take about {formatting.duration(racing + confirming)}.",
        needs_s=float(needs),
        sure=False,
    )


def undecided_reason(result: ConfirmResult) -> str:
    """Why it is undecided whether the recipe can be shipped."""
    name, row = result.candidate.name, result.row
    if not result.seeds:
        return f"{name} was not trained alongside FP32 for any seed."
    reason = row.parity if row.parity.startswith("cannot tell") or not row.parity else f"{row.parity}; {row.out}"
    seeds = f"{formatting.plural(result.seeds, 'seed')} of {formatting.plural(row.steps, 'step')}"
    return f"{name} over {seeds}, at {_speed(row)} × FP32's speed: {reason or row.out}."


def _race_row(search: Search, result: ConfirmResult) -> Tried:
    """The row that holds the recipe's speed."""
    if result.seeds:
        return result.row
    return next(row for row in search.result.tried if row.stage == "race" and row.name == result.candidate.name)


def _speed(row: Tried, end: str = "") -> str:
    return formatting.number(getattr(row, f"speed_ratio_{end}" if end else "speed_ratio"))


def _title(candidate: Candidate) -> str:
    return candidate.name.upper() if candidate.name.isalnum() else candidate.name


def _save(
    search: Search, chosen: Candidate, answer: str, why: str, *, needs_s: float | None = None, sure: bool = True
) -> None:
    config = dataclasses.replace(chosen.config, steps=search.config.steps, every=search.config.every).to_dict()
    search.on_progress(answer)
    search.save(chosen=chosen.name, config=config, answer=answer, why=why, confirmed=sure, needs_s=needs_s)
