"""Find the fastest recipe that keeps parity with FP32: probe, race, confirm, add options.

    >>> result = tune(TrainConfig(workload="text-gpt", steps=200), Path("runs/tune-1"), budget_s=300, on_progress=print)
    >>> result.answer, result.config["precision"]

1. A short FP32 run is watched in full. It gives the loss scale for FP16, its FP32 islands, and what cannot work.
2. The precisions race, interleaved in blocks of steps. A recipe that fails or is surely slower leaves (`race`).
3. The fastest trains over several seeds beside FP32 until it is decided whether it can be shipped (`confirm`). If it
   cannot, the next fastest follows. If none can, the answer is FP32.
4. The confirmed recipe races those that may be faster still. One that surely is takes its place if it can be shipped.
5. Options race the confirmed recipe. The surely faster ones are combined and confirmed as in 3.

Runs are shortened to fit the budget. If the budget is too small to decide, the answer is the recipe that looks best so
far, says so, and names a sufficient budget (`answer`). A search that ends early keeps its results so far in
`tune.json`. No torch: each recipe trains in its own process (`WorkerPool`).
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from amp_core.analysis.comparison.ratios import SAME_SPEED_FRAC
from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig
from amp_core.store.atomic import check_holds_runs
from amp_core.store.run import Run, load_run
from amp_core.text import formatting
from amp_core.train.turns.interleave import interleave
from amp_core.train.turns.member import Member
from amp_core.train.turns.worker_pool import WorkerPool
from amp_core.tune.answer import (
    keep_fp32,
    perhaps_faster,
    save_confirmed,
    save_unconfirmed,
    undecided_reason,
    undecided_rivals,
)
from amp_core.tune.budget import Budget
from amp_core.tune.confirm import MIN_STEPS, Confirmation, ConfirmResult
from amp_core.tune.evidence import speed
from amp_core.tune.options import Candidate, combined, options, precisions
from amp_core.tune.race import RACE_FRAC, RACE_STEPS, RaceResult, failure_reason, race
from amp_core.tune.result import Tuned
from amp_core.tune.state import Ended, Search, Trainer

__all__ = ["Ended", "Trainer", "tune"]

PROBE_STEPS = 30
RIVALS_FRAC = 0.6
"""Share of the remaining budget planned for the race of the confirmed recipe with those that may be faster."""
RIVALS_STEPS = 6000
"""Most steps of that race: two recipes of equal speed need some 500 pairs of blocks on a busy machine."""
OPTIONS_FRAC = 0.25
"""Share of the remaining budget planned for the race of options."""
OPTIONS_SEEDS = 3
"""Seeds to confirm the options with: the race starts only if there is time for them too."""


def tune(
    config: TrainConfig,
    into: Path,
    budget_s: float,
    *,
    on_progress: Callable[[str], None],
    trainer: Trainer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """Search; runs and `tune.json` are written into the folder `into`. `config` sets all but precision and options.

    Raises `RunError` for an impossible budget, a folder in use and an FP32 training that fails; `Ended` if the
    trainings were stopped or refused their settings.
    """
    if isinstance(budget_s, bool) or not isinstance(budget_s, int | float) or not 0 < budget_s < 1e7:
        raise RunError(f"budget={budget_s!r} is not possible; give seconds above 0, e.g. 300")
    check_holds_runs(into)
    if into.exists() and any(path.name not in ("job.json", "config.json", "console.log") for path in into.iterdir()):
        raise RunError(f"out={str(into)!r} is in use; give a folder that does not exist yet")
    config.check_file()
    into.mkdir(parents=True, exist_ok=True)
    with WorkerPool() as pool:
        search = Search(
            config, into, Budget(float(budget_s), clock), on_progress, trainer or partial(interleave, pool=pool)
        )
        return _run(search)


def _run(search: Search) -> Tuned:
    """Run all stages. `tune.json` records how they ended, also on errors."""
    search.save()
    try:
        _stages(search)
    except Ended as ended:
        status = "stopped" if ended.code == 130 else "failed"
        search.save(status=status, why=search.result.why or "The search ended before it reached an answer.")
        raise
    except KeyboardInterrupt:
        search.save(status="stopped", why=search.result.why or "The search was stopped before it reached an answer.")
        raise
    except RunError as error:
        search.save(status="failed", why=formatting.sentence(error))
        raise
    search.save(status="finished")
    return search.result


def _stages(search: Search) -> None:
    probe_run = _probe(search)
    first = precisions(search.config, probe_run)
    search.leave_out(first.left_out)
    plain = first.candidates[0]
    raced = race(search, "race", first.candidates, RACE_FRAC)
    confirmation = Confirmation(search, plain)
    results = _confirm_in_order(search, confirmation, plain, raced)
    answer = next((one for one in results if one.ships), None)
    undecided = [one for one in results if not one.decided]
    rejected = {one.candidate.name for one in results if one.decided and not one.ships}
    rivals: list[Candidate] = []
    if answer is not None:
        rivals = undecided_rivals(search, plain, answer.candidate, [raced], rejected)
        save_confirmed(search, answer, undecided, rivals)
        if rivals:
            answer, rivals = _race_rivals(search, confirmation, plain, answer, rivals, raced, rejected)
            save_confirmed(search, answer, undecided, rivals)
    elif undecided:
        save_unconfirmed(search, undecided[0])
        return
    else:
        keep_fp32(search, plain, raced, rejected)
    base = answer.candidate if answer is not None else plain
    extra = options(base, probe_run, search.budget.left, search.budget.start_s)
    search.leave_out(extra.left_out)
    chosen = _options(search, plain, base, extra.candidates)
    if chosen:
        both = confirmation.confirm(combined(base, chosen), raced=None, fresh=True)
        if both.row.runs:
            search.add(both.row)
        if both.ships:
            save_confirmed(search, both, undecided, rivals)
        elif not both.decided:
            search.save(why=f"{search.result.why} {undecided_reason(both)}")


def _probe(search: Search) -> Run:
    """A short FP32 run, watched in full."""
    search.on_progress(f"tracing the workload in fp32 for {PROBE_STEPS} steps")
    steps = min(PROBE_STEPS, search.config.steps)
    config = dataclasses.replace(
        search.config,
        precision="fp32",
        loss_scale="dynamic",
        islands=(),
        steps=steps,
        every=5,
        profile=None,
        evaluate=False,
    )
    began = search.budget.used
    member = Member(config, search.into / "look", level="full")
    search.train([("look", member)], steps)
    probe_run = load_run(member.folder)
    if why := failure_reason(probe_run):
        raise RunError(f"workload={search.config.workload!r} does not train in fp32: {why}; fix that first")
    search.budget.took("fp32", probe_run)
    search.budget.start_s = max(0.0, search.budget.used - began - float(probe_run.steps["step_ms"].sum()) / 1e3)
    search.budget.probe_s = search.budget.used
    search.save(device=str(probe_run.head.config.get("device") or search.config.device))
    return probe_run


def _confirm_in_order(
    search: Search, confirmation: Confirmation, plain: Candidate, raced: RaceResult
) -> list[ConfirmResult]:
    """Results of the recipes that are surely faster than FP32, fastest first, then of those that may be; up to the
    first that can be shipped.

    On a busy machine a race may end without a statement on speed; each seed of the confirmation adds to it. Stops as
    well at one that the budget left undecided: the recipes after it are slower.
    """
    results: list[ConfirmResult] = []
    sure = raced.order[: raced.order.index(plain)]
    perhaps = perhaps_faster(search, plain, raced)
    for candidate in [*sure, *perhaps]:
        if candidate in perhaps and not confirmation.has_time_for(candidate):
            break
        pair = raced.runs[plain.name], raced.runs[candidate.name]
        result = confirmation.confirm(candidate, pair, fresh=candidate in perhaps)
        results.append(result)
        if result.ships or result.needs_s:
            break
    rows = [one.row for one in results if one.row.runs]
    for row in [confirmation.reference(), *rows] if rows else []:
        search.add(row)
    return results


def _race_rivals(
    search: Search,
    confirmation: Confirmation,
    plain: Candidate,
    answer: ConfirmResult,
    rivals: Sequence[Candidate],
    raced: RaceResult,
    rejected: set[str],
) -> tuple[ConfirmResult, list[Candidate]]:
    """The fastest recipe that can be shipped, and those that may still be faster, after a race of the confirmed one
    with its `rivals`. A rival that is surely faster, by more than a margin in both races, is confirmed too."""
    budget, contest = search.budget, [answer.candidate, *rivals]
    if budget.left < budget.takes([one.name for one in contest], RACE_STEPS[0]):
        return answer, list(rivals)
    again = race(search, "rivals", contest, RIVALS_FRAC, RIVALS_STEPS, even=True)
    for faster in again.order[: again.order.index(answer.candidate)]:
        pairs = [(of.runs[answer.candidate.name], of.runs[faster.name]) for of in (raced, again)]
        if speed(pairs).low < 1 + SAME_SPEED_FRAC or not confirmation.has_time_for(faster):
            break  # the races disagree, or there is no time to confirm it
        result = confirmation.confirm(faster, (raced.runs[plain.name], raced.runs[faster.name]))
        if result.row.runs:
            search.add(result.row)
        if result.ships:
            answer = result
        elif result.decided:
            rejected.add(faster.name)
            continue
        break
    return answer, undecided_rivals(search, plain, answer.candidate, [raced, again], rejected)


def _options(search: Search, plain: Candidate, base: Candidate, extra: Sequence[Candidate]) -> list[Candidate]:
    """The options in `extra` that make `base` surely faster; none if there is no time to race and confirm them."""
    if not extra:
        return []
    names = [base.name, *(c.name for c in extra)]
    budget, least = search.budget, min(MIN_STEPS, search.config.steps)
    confirming = budget.takes([plain.name, base.name], least, OPTIONS_SEEDS)
    if budget.left < budget.takes(names, RACE_STEPS[0]) + confirming:
        why = "the remaining budget is too small to race and confirm them; increase it"
        search.leave_out([(", ".join(names[1:]), why)])
        return []
    named = [dataclasses.replace(c, name=f"{base.name}+{c.name}") for c in extra]
    race(search, "options", [base, *named], OPTIONS_FRAC)
    rows = {row.name: row for row in search.result.tried if row.stage == "options"}
    return [
        c for c, n in zip(extra, named, strict=True) if rows[n.name].speed_verdict == "faster" and not rows[n.name].out
    ]
