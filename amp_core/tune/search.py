"""Find the fastest recipe that keeps FP32's learning: look, race, confirm, add options.

    >>> found = tune(TrainConfig(workload="text-gpt", steps=200), Path("runs/tune-1"), budget_s=300, on_progress=print)
    >>> found.answer, found.config["precision"]

1. A short FP32 run is watched in full: from it follow the loss scale for FP16, its FP32 islands, and what cannot work.
2. The precisions race in turns, a block of steps each. Who breaks, or is surely slower, leaves (`tune_race`).
3. The fastest trains over several seeds beside FP32, until it is told whether it can be shipped (`tune_confirm`). If it
   cannot, the next fastest is asked, and so on; where none is left, FP32 is the answer.
4. Options race that recipe; those that are surely faster are put together and confirmed as in 3.

Runs are shortened to what the budget allows. Where it does not allow enough to tell, the answer is what looks best so
far, says so, and names the budget that would tell (`tune_answer`). What ends a search early leaves what was found so
far. No torch: the trainings are processes of their own, one for each recipe (`crew`).
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig
from amp_core.store.atomic import check_holds_runs
from amp_core.store.run import Run, load_run
from amp_core.text import formatting
from amp_core.train.turns.interleave import interleave
from amp_core.train.turns.member import Member
from amp_core.train.turns.worker_pool import WorkerPool
from amp_core.tune.answer import confirmed, stay, unconfirmed, unsure
from amp_core.tune.budget import Budget
from amp_core.tune.confirm import MIN_STEPS, Asking, Shown
from amp_core.tune.options import Candidate, options, precisions, together
from amp_core.tune.race import RACE_SHARE, RACE_STEPS, Raced, race, trouble
from amp_core.tune.result import Tuned
from amp_core.tune.state import Ended, Search, Trainer

__all__ = ["Ended", "Trainer", "tune"]

LOOK_STEPS = 30
OPTIONS_SHARE = 0.25
"""Of what is left of the budget, what the race of options is planned to take."""
OPTIONS_SEEDS = 3
"""Seeds for which there must be time beside it."""


def tune(
    config: TrainConfig,
    into: Path,
    budget_s: float,
    *,
    on_progress: Callable[[str], None],
    trainer: Trainer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """Search, with the runs and `tune.json` in the folder `into`. `config` sets all but precision and options.

    Raises `RunError` for a budget that is none, a folder in use and an FP32 that does not train; `Ended` where the
    trainings were stopped or refused.
    """
    if isinstance(budget_s, bool) or not isinstance(budget_s, int | float) or not 0 < budget_s < 1e7:
        raise RunError(f"budget={budget_s!r} is not possible; give seconds above 0, e.g. 300")
    check_holds_runs(into)
    if into.exists() and any(path.name not in ("job.json", "config.json", "console.log") for path in into.iterdir()):
        raise RunError(f"out={str(into)!r} is in use; give a folder that does not exist yet")
    config.check_file()
    into.mkdir(parents=True, exist_ok=True)
    with WorkerPool() as crew:
        search = Search(
            config, into, Budget(float(budget_s), clock), on_progress, trainer or partial(interleave, crew=crew)
        )
        return _run(search)


def _run(search: Search) -> Tuned:
    """All stages; however they end, it stands in `tune.json`."""
    search.save()
    try:
        _stages(search)
    except Ended as ended:
        status = "stopped" if ended.code == 130 else "failed"
        search.save(status=status, why=search.found.why or "The search ended before it had an answer.")
        raise
    except KeyboardInterrupt:
        search.save(status="stopped", why=search.found.why or "The search was stopped before it had an answer.")
        raise
    except RunError as error:
        search.save(status="failed", why=formatting.sentence(error))
        raise
    search.save(status="finished")
    return search.found


def _stages(search: Search) -> None:
    probe_run = _look(search)
    first = precisions(search.config, probe_run)
    search.leave_out(first.left_out)
    plain = first.candidates[0]
    raced = race(search, "race", first.candidates, RACE_SHARE)
    asking = Asking(search, plain)
    shown = _ask_in_order(search, asking, plain, raced)
    answer = next((one for one in shown if one.ships), None)
    undecided = [one for one in shown if not one.decided]
    if answer is not None:
        confirmed(search, answer, undecided)
    elif undecided:
        unconfirmed(search, undecided[0])
        return
    else:
        stay(search, plain, raced)
    base = answer.candidate if answer is not None else plain
    extra = options(base, probe_run, search.budget.left, search.budget.start_s)
    search.leave_out(extra.left_out)
    chosen = _options(search, plain, base, extra.candidates)
    if chosen:
        both = asking.ask(together(base, chosen), raced=None)
        if both.row.runs:
            search.add(both.row)
        if both.ships:
            confirmed(search, both, undecided)
        elif not both.decided:
            search.save(why=f"{search.found.why} {unsure(both)}")


def _look(search: Search) -> Run:
    """A short FP32 run, watched in full."""
    search.on_progress(f"looking at the workload in fp32 for {LOOK_STEPS} steps")
    steps = min(LOOK_STEPS, search.config.steps)
    config = dataclasses.replace(
        search.config,
        precision="fp32",
        loss_scale="dynamic",
        islands=(),
        fp8=False,
        steps=steps,
        every=5,
        profile=None,
        evaluate=False,
    )
    began = search.budget.used
    member = Member(config, search.into / "look", level="full")
    search.train([("look", member)], steps)
    probe_run = load_run(member.folder)
    if why := trouble(probe_run):
        raise RunError(f"workload={search.config.workload!r} does not train in fp32: {why}; mend that first")
    search.budget.took("fp32", probe_run)
    search.budget.start_s = max(0.0, search.budget.used - began - float(probe_run.steps["step_ms"].sum()) / 1e3)
    search.budget.look_s = search.budget.used
    search.save(device=str(probe_run.head.config.get("device") or search.config.device))
    return probe_run


def _ask_in_order(search: Search, asking: Asking, plain: Candidate, raced: Raced) -> list[Shown]:
    """What was found of those that are surely faster than FP32, fastest first, up to one that can be shipped.

    One of which nothing is told because the budget was used up is the last: those after it are slower.
    """
    results: list[Shown] = []
    for candidate in raced.order[: raced.order.index(plain)]:
        shown = asking.ask(candidate, (raced.runs[plain.name], raced.runs[candidate.name]))
        results.append(shown)
        if shown.ships or shown.needs_s:
            break
    rows = [one.row for one in results if one.row.runs]
    for row in [asking.reference(), *rows] if rows else []:
        search.add(row)
    return results


def _options(search: Search, plain: Candidate, base: Candidate, extra: Sequence[Candidate]) -> list[Candidate]:
    """Those of them that make `base` surely faster, where there is time to find that out and to confirm it."""
    if not extra:
        return []
    names = [base.name, *(c.name for c in extra)]
    budget, least = search.budget, min(MIN_STEPS, search.config.steps)
    confirming = budget.takes([plain.name, base.name], least, OPTIONS_SEEDS)
    if budget.left < budget.takes(names, RACE_STEPS[0]) + confirming:
        why = "too little of the budget is left to race and confirm them; give a larger one"
        search.leave_out([(", ".join(names[1:]), why)])
        return []
    named = [dataclasses.replace(c, name=f"{base.name}+{c.name}") for c in extra]
    race(search, "options", [base, *named], OPTIONS_SHARE)
    rows = {row.name: row for row in search.found.tried if row.stage == "options"}
    return [
        c for c, n in zip(extra, named, strict=True) if rows[n.name].speed_verdict == "faster" and not rows[n.name].out
    ]
