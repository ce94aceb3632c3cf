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
from amp_core.tune.options import Candidate
from amp_core.tune.race import RACE_FRAC, RACE_STEPS, RaceResult
from amp_core.tune.result import Tried
from amp_core.tune.state import Search


def save_confirmed(search: Search, result: ConfirmResult, undecided: Sequence[ConfirmResult]) -> None:
    """Save the recipe as one that can be shipped. `undecided` are faster ones that the budget did not decide."""
    row = result.row
    why = " ".join([f"The fastest recipe with convergence parity: {row.parity}.", *map(undecided_reason, undecided)])
    _save(search, result.candidate, f"{_title(result.candidate)}: {row.answer}", why)


def save_unconfirmed(search: Search, result: ConfirmResult) -> None:
    """Save the recipe as the one that looks fastest while it is undecided whether it can be shipped."""
    speed = _speed(_race_row(search, result))
    same = result.row.parity.startswith(("within noise", "better"))
    undecided = "speed" if result.seeds and same else "convergence parity"
    summary = f"{_title(result.candidate)} looks fastest, {speed} × FP32's speed, but its {undecided} is undecided"
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


def perhaps_faster(search: Search, raced: RaceResult) -> list[Candidate]:
    """Recipes that were faster than FP32 in the race, but by too little or too unevenly to be sure; fastest first."""
    rows = {row.name: row for row in search.result.tried if row.stage == "race" and not row.out}
    perhaps = [
        candidate
        for candidate in raced.order
        if (row := rows.get(candidate.name)) is not None
        and row.speed_verdict.startswith("cannot tell")
        and row.speed_ratio > 1 + SAME_SPEED_FRAC
    ]
    return sorted(perhaps, key=lambda candidate: -rows[candidate.name].speed_ratio)


def keep_fp32(search: Search, plain: Candidate, raced: RaceResult, rejected: Collection[str]) -> None:
    """Save FP32: no recipe is surely faster and keeps parity. If one that may be faster is not among those `rejected`
    by a confirmation, the answer is unconfirmed."""
    maybe = [candidate for candidate in perhaps_faster(search, raced) if candidate.name not in rejected]
    if not maybe:
        why = "None of the recipes tried is reliably faster with convergence parity."
        _save(search, plain, f"{_title(plain)}: stay with it", why)
        return
    best = maybe[0]
    row = next(row for row in search.result.tried if row.stage == "race" and row.name == best.name)
    speed = f"{_speed(row)} × FP32's speed ({_speed(row, 'low')}–{_speed(row, 'high')})"
    after = f"after {formatting.plural(row.steps, 'step')} of the race"
    budget, steps = search.budget, min(MIN_STEPS, search.config.steps)
    racing = budget.takes([candidate.name for candidate in raced.order], RACE_STEPS[0])
    confirming = budget.takes([plain.name, best.name], steps, MIN_SEEDS)
    needs = in_round_seconds(budget.probe_s + max(racing + confirming, confirming / (1 - RACE_FRAC)))
    _save(
        search,
        best,
        f"{_title(best)} looks fastest, but its speed and convergence parity are undecided: run with --budget {needs}",
        f"The budget ended before that was decided: {best.name} reached {speed} {after}. The rest of the race and "
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
