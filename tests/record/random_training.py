"""Random trainings, each run twice from one seed: watched and unwatched ones must be identical.

    >>> case = Case(Model(("linear", "spectral_norm")), Loop(precision="fp16"), (Act(2, "copy_scaler"),))
    >>> faults(case)                     # one line per fault: watching changed something, or recorded it wrongly

Many trainings, printing each distinct fault with the smallest case that still shows it:

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
from tests.record.random_census import differences, optimizer_classes, process_state, stable_text
from tests.record.random_loop import OPTIMIZERS, Training

__all__ = ["Act", "Case", "Loop", "Model", "Watching", "cases", "faults", "signature", "smallest"]


@dataclasses.dataclass
class Outcome:
    """The result of one training: values that must be equal, by promise; and data to check the recording."""

    promises: dict[str, dict[str, Any]]
    hooks: list[int]
    counted: list[float]
    attempts: int
    collected: bool
    raised: str | None
    messages: list[str]
    before: dict[str, Any]
    after: dict[str, Any]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Use one thread, since several add up in any order; restore torch afterwards, whatever is left behind."""
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
    """Train `case`, watched into the folder `into` or unwatched. With `collect`, checks that the model is freed."""
    with _alone(), _listening() as messages:
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
            raised = f"{type(error).__name__} at {_location(error)}: {stable_text(str(error))}"
            if training is not None and training.recorder is not None:
                training.recorder.close()
        after = process_state() | optimizer_classes()
        if training is None:
            return Outcome(promises, [], [], 0, True, raised, messages, before, after)
        counted, attempts, hooks = training.counted, training.attempts, training.hooks
        held = weakref.ref(training.model)
        del training
        if collect:
            gc.collect()
        freed = held() is None or not collect
        return Outcome(promises, hooks, counted, attempts, freed, raised, messages, before, after)


def _location(error: BaseException) -> str:
    """The file and line that raised the error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace is not None else "?"


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """Collects warnings and AMPscope's log."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(f"log: {record.getMessage()}")  # type: ignore[method-assign]
    log = logging.getLogger("amp_core")
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("always")
            yield messages
        messages[:] = [
            line for line in messages if " is slow; from now on" not in line
        ]  # caused by the disk, not by the case
        # torch's C++ code warns once per process, so only the first twin gets the warning.
        ours = [w for w in caught if "Triggered internally at" not in str(w.message)]
        messages += [f"{w.category.__name__}: {stable_text(str(w.message))}" for w in ours]
    finally:
        log.removeHandler(handler)


def faults(case: Case, watched: bool = True, thorough: bool = True) -> list[str]:
    """One line per difference between the watched and the unwatched training of `case`, and per error of its recording.
    With `watched` False the unwatched training is compared with itself, which checks that cases are repeatable.
    `thorough` also collects garbage and diagnoses the run, which take longer than all the rest."""
    with tempfile.TemporaryDirectory() as folder:
        unwatched = outcome(case, None, thorough)
        watched_outcome = outcome(case, Path(folder) / "run" if watched else None, thorough)
        fault_lines = [
            f"{promise}: {line}" for promise, line in _differences(unwatched, watched_outcome, len(case.acts) > 0)
        ]
        if watched and watched_outcome.raised is None:
            fault_lines += _recording_errors(case, Path(folder) / "run", watched_outcome, thorough)
        return fault_lines


def _differences(unwatched: Outcome, watched_outcome: Outcome, acts: bool) -> Iterator[tuple[str, str]]:
    if unwatched.raised != watched_outcome.raised:
        yield "raised", f"{unwatched.raised} unwatched, {watched_outcome.raised} watched"
    else:
        for promise, values in unwatched.promises.items():
            for line in differences(values, watched_outcome.promises[promise])[:3]:
                yield promise, line
    for line in differences(watched_outcome.before, watched_outcome.after)[:3]:
        yield "left in the process", line
    if unwatched.collected and not watched_outcome.collected:
        yield "garbage", "the model is not freed after close"
    if sorted(set(unwatched.messages)) != sorted(set(watched_outcome.messages)):
        for line in sorted(set(watched_outcome.messages) - set(unwatched.messages)):
            yield "message when watched", line
        for line in sorted(set(unwatched.messages) - set(watched_outcome.messages)):
            yield "no message when watched", line
    more = [] if acts else [watched - own for watched, own in zip(watched_outcome.hooks, unwatched.hooks, strict=False)]
    if len(more) > 3 and more[-1] > max(more[: len(more) // 2 + 1]):
        yield "hooks grow", f"{more} more at the ends of the steps"


REPLACING = {"new_optimizer", "go_on_with_copies", "go_on_with_pickled", "go_on_with_saved", "watch_again"}
"""Acts after which it is not the given objects alone that train."""

STEPPED_COPIES = {"shallow_copy_optimizer"}
"""Acts that, after backward, step another optimizer of the same parameters: from then on it is the one recorded."""


def _recording_errors(case: Case, folder: Path, watched_outcome: Outcome, thorough: bool) -> list[str]:
    """The errors of the recording."""
    try:
        run = load_run(folder)
        findings = diagnose(run) if thorough else []
    except Exception as error:
        return [f"reading: {type(error).__name__}: {stable_text(str(error))}"]
    fault_lines = []
    events = run.events
    failed = events[events.detail.astype(str).str.contains("watching failed|nothing is recorded")]
    fault_lines += [f"recording failed: {stable_text(detail)}" for detail in failed.detail]
    if not all(f.code and f.title and f.severity in ("error", "warning", "info") for f in findings):
        fault_lines.append("a finding without code, title or severity")
    replaced = any(act.name in REPLACING or (act.name in STEPPED_COPIES and act.inside) for act in case.acts)
    if case.loop.breaks is not None or replaced or len(failed):
        return fault_lines
    if len(run.steps) != watched_outcome.attempts:
        fault_lines.append(f"rows: {len(run.steps)} for {watched_outcome.attempts} steps attempted")
    elif case.loop.accumulate == 1 and case.loop.optimizers == "one":
        recorded_losses = run.steps.loss.astype(float).to_numpy()
        counted = np.array(watched_outcome.counted, dtype=float)
        # The terms of a loss with several roots are summed in FP64 here, and in FP32 by the loop.
        equal = (
            np.isclose(recorded_losses, counted, rtol=1e-6, atol=0.0)
            if case.loop.root == "two roots"
            else recorded_losses == counted
        )
        same = equal | (np.isnan(recorded_losses) & ~np.isfinite(counted))
        plain = case.loop.root in ("backward", "retain graph")
        if not plain:
            same |= np.isnan(recorded_losses)
            if (
                thorough
                and len(recorded_losses)
                and np.isnan(recorded_losses).all()
                and not _is_reported("loss", events, findings)
            ):
                fault_lines.append(f"loss: no step has one, and nothing says so ({case.loop.root})")
        if len(same) == len(counted) and not same.all():
            worst = int(np.argmin(same))
            fault_lines.append(
                f"loss: {recorded_losses[worst]!r} recorded for {counted[worst]!r} at row {worst} ({case.loop.root})"
            )
    return fault_lines


def _is_reported(word: str, events: Any, findings: Any) -> bool:
    warned = events[events.kind == "warning"]
    messages = [*warned.detail.astype(str), *warned.name.astype(str), *(f"{f.title} {f.advice}" for f in findings)]
    return any(word in one.lower() for one in messages)


# the command


def signature(fault: str) -> str:
    """The signature of a kind of fault: the promise, and its subject without names, numbers and values."""
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
    """The command; see the module."""
    parser = argparse.ArgumentParser(description="Hold many random trainings to their unwatched twins.")
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--twin", action="store_true", help="hold unwatched trainings to themselves instead")
    given_ = parser.parse_args()
    fault_lines: dict[str, int] = {}
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
            fault_lines[kind] = fault_lines.get(kind, 0) + 1
            if fault_lines[kind] > 1:
                continue
            least = smallest(case, lambda c: kind in map(signature, faults(c, not given_.twin, thorough)))  # noqa: B023
            shown = next((f for f in faults(least, not given_.twin, thorough) if signature(f) == kind), fault)
            print(f"\n[{tried}] {shown}\n    faults({least})", flush=True)

    try_one()
    print(f"\n{tried} trainings in {time.monotonic() - began:.0f} s, {len(fault_lines)} kinds of faults")
    for kind, times in sorted(fault_lines.items(), key=lambda item: -item[1]):
        print(f"{times:6}  {kind}")
    raise SystemExit(bool(fault_lines))


if __name__ == "__main__":
    main()
