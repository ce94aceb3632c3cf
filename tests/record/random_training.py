"""Random trainings, each made twice from one seed: watched and unwatched, they must be the same.

    >>> case = Case(Model(("linear", "spectral_norm")), Loop(precision="fp16"), (Act(2, "copy_scaler"),))
    >>> faults(case)                     # one line for each way in which watching was not harmless, or recorded wrongly

Many at once, each distinct fault printed with the smallest case that still shows it:

    python -m tests.record.random_training --examples 2000 --seed 7
"""

import argparse
import contextlib
import dataclasses
import gc
import io
import logging
import random
import re
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import nn

from amp_core import diagnose, load_run
from tests.record.random_cases import Act, Case, Loop, Model, Watching, cases, smallest
from tests.record.random_census import differences, optimizer_classes, process_state, text
from tests.record.random_loop import OPTIMIZERS, Training

__all__ = ["Act", "Case", "Loop", "Model", "Watching", "cases", "faults", "signature", "smallest"]


@dataclasses.dataclass
class Outcome:
    """What came of one training: by promise, what must be equal; and what is asked of the recording."""

    promises: dict[str, dict[str, Any]]
    hooks: list[int]
    counted: list[float]
    attempts: int
    collected: bool
    raised: str | None
    said: list[str]
    before: dict[str, Any]
    after: dict[str, Any]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One thread, since sums by several come out in any order; and torch as it was, whatever is left behind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])


def outcome(case: Case, into: Path | None, collect: bool = False) -> Outcome:
    """Train `case`, watched into the folder `into` or unwatched. To see whether the model is freed, `collect`."""
    with _alone(), _listening() as said:
        for make in OPTIMIZERS.values():
            make([nn.Parameter(torch.zeros(1))])
        before = process_state() | optimizer_classes()
        raised, training = None, None
        promises: dict[str, dict[str, Any]] = {}
        try:
            training = Training(case, into)
            training.run()
            promises = training.finish()
        except Exception as error:
            raised = f"{type(error).__name__} at {_place(error)}: {text(str(error))}"
            if training is not None and training.recorder is not None:
                training.recorder.close()
        after = process_state() | optimizer_classes()
        if training is None:
            return Outcome(promises, [], [], 0, True, raised, said, before, after)
        counted, attempts, hooks = training.counted, training.attempts, training.hooks
        held = weakref.ref(training.model)
        del training
        if collect:
            gc.collect()
        freed = held() is None or not collect
        return Outcome(promises, hooks, counted, attempts, freed, raised, said, before, after)


def _place(error: BaseException) -> str:
    """The file and line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace is not None else "?"


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """Warnings and what AMPscope logs."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(f"log: {record.getMessage()}")  # type: ignore[method-assign]
    log = logging.getLogger("amp_core")
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("always")
            yield said
        said[:] = [line for line in said if " is slow; from now on" not in line]  # of the disk, not of the case
        # torch's C++ warns once in a process, of whichever twin comes first.
        ours = [w for w in caught if "Triggered internally at" not in str(w.message)]
        said += [f"{w.category.__name__}: {text(str(w.message))}" for w in ours]
    finally:
        log.removeHandler(handler)


def faults(case: Case, watched: bool = True, thorough: bool = True) -> list[str]:
    """One line for each way in which `case` is not the same watched, or its recording not true. With `watched` False
    the unwatched training is held to itself, which shows that the generator is repeatable. `thorough` also collects
    garbage and diagnoses the run, which take longer than all the rest."""
    with tempfile.TemporaryDirectory() as folder:
        bare = outcome(case, None, thorough)
        seen = outcome(case, Path(folder) / "run" if watched else None, thorough)
        found = [f"{promise}: {line}" for promise, line in _unequal(bare, seen, len(case.acts) > 0)]
        if watched and seen.raised is None:
            found += _untrue(case, Path(folder) / "run", seen, thorough)
        return found


def _unequal(bare: Outcome, seen: Outcome, acts: bool) -> Iterator[tuple[str, str]]:
    if bare.raised != seen.raised:
        yield "raised", f"{bare.raised} unwatched, {seen.raised} watched"
    else:
        for promise, values in bare.promises.items():
            for line in differences(values, seen.promises[promise])[:3]:
                yield promise, line
    for line in differences(seen.before, seen.after)[:3]:
        yield "left in the process", line
    if bare.collected and not seen.collected:
        yield "garbage", "the model is not freed after close"
    if sorted(set(bare.said)) != sorted(set(seen.said)):
        for line in sorted(set(seen.said) - set(bare.said)):
            yield "said when watched", line
        for line in sorted(set(bare.said) - set(seen.said)):
            yield "not said when watched", line
    more = [] if acts else [watched - own for watched, own in zip(seen.hooks, bare.hooks, strict=False)]
    if len(more) > 3 and more[-1] > max(more[: len(more) // 2 + 1]):
        yield "hooks grow", f"{more} more at the ends of the steps"


REPLACING = {"new_optimizer", "go_on_with_copies", "go_on_with_pickled", "go_on_with_saved", "watch_again"}
"""Acts after which it is not the given objects alone that train."""

STEPPED_COPIES = {"shallow_copy_optimizer"}
"""Acts that, after backward, step another optimizer of the same parameters: from then on it is the one recorded."""


def _untrue(case: Case, folder: Path, seen: Outcome, thorough: bool) -> list[str]:
    """What is wrong with the recording."""
    try:
        run = load_run(folder)
        findings = diagnose(run) if thorough else []
    except Exception as error:
        return [f"reading: {type(error).__name__}: {text(str(error))}"]
    found = []
    events = run.events
    failed = events[events.detail.astype(str).str.contains("watching failed|nothing is recorded")]
    found += [f"recording failed: {text(detail)}" for detail in failed.detail]
    if not all(f.code and f.title and f.severity in ("error", "warning", "info") for f in findings):
        found.append("a finding without code, title or severity")
    replaced = any(act.name in REPLACING or (act.name in STEPPED_COPIES and act.inside) for act in case.acts)
    if case.loop.breaks is not None or replaced or len(failed):
        return found
    if len(run.steps) != seen.attempts:
        found.append(f"rows: {len(run.steps)} for {seen.attempts} steps attempted")
    elif case.loop.accumulate == 1 and case.loop.optimizers == "one":
        told = run.steps.loss.astype(float).to_numpy()
        counted = np.array(seen.counted, dtype=float)
        # The parts of a loss with several roots are added up in FP64 here, and in FP32 by the loop.
        equal = np.isclose(told, counted, rtol=1e-6, atol=0.0) if case.loop.root == "two roots" else told == counted
        same = equal | (np.isnan(told) & ~np.isfinite(counted))
        plain = case.loop.root in ("backward", "retain graph")
        if not plain:
            same |= np.isnan(told)
            if thorough and len(told) and np.isnan(told).all() and not _says("loss", events, findings):
                found.append(f"loss: no step has one, and nothing says so ({case.loop.root})")
        if len(same) == len(counted) and not same.all():
            worst = int(np.argmin(same))
            found.append(f"loss: {told[worst]!r} recorded for {counted[worst]!r} at row {worst} ({case.loop.root})")
    return found


def _says(word: str, events: Any, findings: Any) -> bool:
    warned = events[events.kind == "warning"]
    said = [*warned.detail.astype(str), *warned.name.astype(str), *(f"{f.title} {f.advice}" for f in findings)]
    return any(word in one.lower() for one in said)


# many at once


def signature(fault: str) -> str:
    """What faults of one kind have in common: the promise, and what it is about without names, numbers and values."""
    promise, _, rest = fault.partition(": ")
    if promise in ("hooks grow", "raised", "garbage", "weights and buffers", "optimizer state", "rows", "loss"):
        errors = re.findall(r"\w+(?:Error|Exception)", rest)
        return " ".join([promise, *errors[:2]])
    if promise == "hooks left on parameters" or promise == "hooks left on modules":
        return f"{promise}: {rest.split(':')[-1].strip().replace('watched', '')[-40:]}"
    if promise == "what the loop saw":
        return " ".join([promise, re.split(r"[#:]", rest)[0], *re.findall(r"\w+Error", rest)[:2]])
    return f"{promise}: {re.sub(r'[0-9.]+|[a-f0-9]{32,}', '#', rest)[:50]}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Hold many random trainings to their unwatched twins.")
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--twin", action="store_true", help="hold unwatched trainings to themselves instead")
    given_ = parser.parse_args()
    found: dict[str, int] = {}
    tried = 0
    began = time.monotonic()

    @seed(given_.seed)
    @settings(
        max_examples=given_.examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def try_one(case: Case) -> None:
        nonlocal tried
        tried += 1
        thorough = tried % 5 == 0
        for fault in faults(case, not given_.twin, thorough):
            kind = signature(fault)
            found[kind] = found.get(kind, 0) + 1
            if found[kind] > 1:
                continue
            least = smallest(case, lambda c: kind in map(signature, faults(c, not given_.twin, thorough)))  # noqa: B023
            shown = next((f for f in faults(least, not given_.twin, thorough) if signature(f) == kind), fault)
            print(f"\n[{tried}] {shown}\n    faults({least})", flush=True)

    try_one()
    print(f"\n{tried} trainings in {time.monotonic() - began:.0f} s, {len(found)} kinds of faults")
    for kind, times in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{times:6}  {kind}")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
