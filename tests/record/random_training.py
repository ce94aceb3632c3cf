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
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.hooks import RemovableHandle

from amp_core import diagnose, load_run, watch
from tests.record.random_acts import ACTS
from tests.record.random_census import (
    archive,
    differences,
    flat,
    hook_count,
    module_hooks,
    optimizer_classes,
    owned,
    parameter_hooks,
    process_state,
    text,
)
from tests.record.random_models import PIECES, READS, WIDTH, LazyOut, Out, PlantedError, Stack

BATCH = 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}
PRECISIONS = ("fp32", "fp16", "bf16", "fp16_two_scalers", "fp16_scaler_each_step", "scaler_disabled", "fp16_unscaled")
ROOTS = ("backward", "autograd.grad", "two roots", "vector", "retain graph", "penalty")
BREAKS = ("forward", "backward", "before step", "in closure")


@dataclasses.dataclass(frozen=True)
class Model:
    """`pieces` one after another (`random_models.PIECES`), and `tiny` tensors of two elements beside them."""

    pieces: tuple[str, ...] = ("linear",)
    returns: str = "tensor"
    tiny: int = 0


@dataclasses.dataclass(frozen=True)
class Loop:
    """How it trains. `overflow` and `breaks` name the step at which an infinity or an exception comes."""

    steps: int = 5
    optimizer: str = "sgd"
    optimizers: str = "one"
    precision: str = "fp32"
    entered: str = "whole"
    root: str = "backward"
    accumulate: int = 1
    clip: str | None = None
    unscale: bool = False
    set_to_none: bool = True
    scheduler: bool = False
    evaluate: str | None = None
    overflow: int | None = None
    breaks: tuple[int, str] | None = None


@dataclasses.dataclass(frozen=True)
class Watching:
    """What `watch` is given."""

    every: int = 2
    kinds: str = "standard"
    level: str = "standard"
    budget: float | None = None
    trace_ops: int | None = None
    scaler: str = "given"


@dataclasses.dataclass(frozen=True)
class Act:
    """Before step `step`, `random_acts.ACTS[name]`."""

    step: int
    name: str


@dataclasses.dataclass(frozen=True)
class Case:
    """All of one training. Its text is what makes it again."""

    model: Model = Model()
    loop: Loop = Loop()
    acts: tuple[Act, ...] = ()
    watching: Watching = Watching()
    seed: int = 0

    def __str__(self) -> str:
        """As it is written, without what is at its default."""
        return _written(self)


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_written, value))}{',' if len(value) == 1 else ''})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    told = [(f.name, getattr(value, f.name), f.default) for f in dataclasses.fields(value)]
    inner = (f"{name}={_written(one)}" for name, one, default in told if one != default)
    return f"{type(value).__name__}({', '.join(inner)})"


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise PlantedError("planted in backward")


class Training:
    """One training; watched where `into` names a folder. `seen` is what it saw, in order, for the comparison."""

    def __init__(self, case: Case, into: Path | None) -> None:
        self.case, self.into = case, into
        torch.manual_seed(case.seed)
        random.seed(case.seed)
        np.random.seed(case.seed)
        self.numbered = 10**6
        RemovableHandle.next_id = self.numbered
        READS.clear()
        self.seen: dict[str, Any] = {}
        self.said: Counter[str] = Counter()
        self.calls: list[str] = []
        self.handles: list[Any] = []
        self.hooks: list[int] = []
        self.counted: list[float] = []
        """Losses of the steps attempted by what is watched, while it is."""
        self.recorder: Any = None
        self.attempts = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = Stack(case.model.pieces, case.model.returns, case.model.tiny)
        self.fixed = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
        parameters = list(self.model.parameters())
        parts = [parameters] if case.loop.optimizers == "one" else [parameters[::2], parameters[1::2]]
        self.optimizers = [self.make_optimizer(part) for part in parts if part]
        count = {"fp16_two_scalers": 2}.get(case.loop.precision, int("fp16" in case.loop.precision or "scaler" in case.loop.precision))
        self.scalers = [self.make_scaler(i) for i in range(count if case.loop.precision != "fp16_unscaled" else 0)]
        self.schedulers = (
            [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in self.optimizers] if case.loop.scheduler else []
        )
        self.given: list[Any] = []

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.case.loop.optimizer](parameters)

    def make_scaler(self, index: int) -> torch.amp.GradScaler:
        enabled = self.case.loop.precision != "scaler_disabled"
        return torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 - index), growth_interval=2, enabled=enabled)

    def begin_watching(self) -> None:
        """Also after a first recorder was closed; then into a folder beside."""
        asked = self.case.watching
        folder = self.into if self.recorder is None else self.into.with_name(f"{self.into.name}-again-{len(self.seen)}")
        scaler = self.scalers[0] if self.scalers and asked.scaler == "given" else None
        kinds = {} if asked.kinds == "standard" else {"kinds": ("weight_grad", "output_grad", "activation", "weight")}
        self.given = list(self.optimizers)
        self.recorder = watch(
            self.model,
            self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers,
            scaler=scaler,
            into=folder,
            every=asked.every,
            level=asked.level,
            budget=asked.budget,
            trace_ops=asked.trace_ops,
            **kinds,
        )

    # what acts use

    def note(self, label: str, value: Any) -> None:
        self.said[label] += 1
        self.seen |= flat(value, f"{label} #{self.said[label]}")

    def tried(self, label: str, act: Callable[[], Any]) -> Any:
        """The result of `act`, or None; notes what was raised, or what is plain in the result."""
        try:
            result = act()
        except Exception as error:
            self.note(label, f"{type(error).__name__}: {text(str(error))}")
            return None
        self.note(label, result if isinstance(result, torch.Tensor | float | dict | list | None) else "done")
        return result

    def result_of(self, output: Any) -> torch.Tensor:
        if isinstance(output, tuple):
            return output[0]
        if isinstance(output, dict):
            return output["x"]
        return output.x if isinstance(output, Out | LazyOut) else output

    def loss_of(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The mean squared error, and a little of every other floating tensor that the model returns."""
        if self.case.loop.entered == "parts" and hasattr(model, "through"):
            hidden, extras = model.through(x)
            output: Any = (model.head(hidden), *extras)
        else:
            output = model(x)
        result = self.result_of(output)
        loss = nn.functional.mse_loss(result.float(), y)
        more = output[1:] if isinstance(output, tuple) else [output["extra"]] if isinstance(output, dict) else []
        for extra in [*more, *([output.extra] if isinstance(output, Out) else [])]:
            loss = loss + 0.01 * extra.float().square().mean()
        return loss

    # the loop

    def run(self) -> None:
        """Train, with what is said and raised on the way noted."""
        if self.into is not None:
            self.begin_watching()
        for number in range(self.case.loop.steps):
            for act in self.case.acts:
                if act.step == number:
                    ACTS[act.name](self)
            self.step(number)
            self.hooks.append(hook_count(self.model))

    def step(self, number: int) -> None:
        loop = self.case.loop
        if loop.precision == "fp16_scaler_each_step" and number:
            self.scalers = [self.make_scaler(0)]
        if loop.evaluate and number % 2:
            self.tried("evaluation", self.evaluate)
        turn = number % len(self.optimizers) if loop.optimizers == "in turn" else None
        used = [(i, o) for i, o in enumerate(self.optimizers) if turn in (None, i)]
        try:
            if loop.optimizer == "lbfgs":
                losses = [self.step_with_closure(number, optimizer) for _, optimizer in used]
            else:
                losses = self.step_after_backward(number, used)
        except Exception as error:
            self.note(f"step {number}", f"{type(error).__name__}: {text(str(error))}")
            self.model.fails = False
        else:
            self.note(f"step {number}", losses)
            self.counted += losses if self.is_recorded() else []
        for scheduler in self.schedulers:
            scheduler.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=loop.set_to_none)

    def step_after_backward(self, number: int, used: list[tuple[int, torch.optim.Optimizer]]) -> list[float]:
        loop = self.case.loop
        scaler_of = {i: self.scalers[i % len(self.scalers)] if self.scalers else None for i, _ in used}
        losses = []
        for micro in range(loop.accumulate):
            last = micro == loop.accumulate - 1
            losses.append(self.backward(number, scaler_of[used[micro % len(used)][0]], last))
        if self.breaks_at(number, "before step"):
            raise PlantedError("planted before the step")
        for index, optimizer in used:
            if scaler_of[index] is not None and loop.unscale:
                scaler_of[index].unscale_(optimizer)
        if loop.clip == "norm":
            self.note("norm", nn.utils.clip_grad_norm_(self.model.parameters(), 0.5))
        elif loop.clip == "value":
            nn.utils.clip_grad_value_(self.model.parameters(), 0.1)
        for index, optimizer in used:
            if scaler_of[index] is None:
                optimizer.step()
            else:
                scaler_of[index].step(optimizer)
            self.attempts += self.is_recorded(optimizer)
        for scaler in {id(s): s for s in scaler_of.values() if s is not None}.values():
            scaler.update()
        return losses

    def step_with_closure(self, number: int, optimizer: torch.optim.Optimizer) -> float:
        calls = []

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            with self.autocast():
                loss = self.loss_of(self.model, *self.batch(number))
            loss.backward()
            calls.append(loss.item())
            if len(calls) == 2 and self.breaks_at(number, "in closure"):
                raise PlantedError("planted in the closure")
            return loss

        optimizer.step(closure)
        self.attempts += self.is_recorded(optimizer)
        self.note("closures", calls)
        return calls[0]

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(number)
        x, y = torch.randn(BATCH, WIDTH, generator=drawn), torch.randn(BATCH, WIDTH, generator=drawn)
        if number == self.case.loop.overflow:
            x = x * 1e30
        dtype = self.model.head.weight.dtype
        return x.to(dtype), y.to(dtype)

    def autocast(self) -> torch.autocast:
        precision = self.case.loop.precision
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        return torch.autocast("cpu", dtype=dtype, enabled=precision.startswith(("fp16", "bf16")))

    def backward(self, number: int, scaler: Any, last: bool) -> float:
        root = self.case.loop.root
        x, y = self.batch(number)
        self.model.fails = self.breaks_at(number, "forward")
        x.requires_grad_(root == "penalty")
        with self.autocast():
            loss = self.loss_of(self.model, x, y) / self.case.loop.accumulate
        told = loss.item()
        if self.breaks_at(number, "backward"):
            loss = Breaking.apply(loss)
        if root == "penalty":
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + 0.1 * grad.float().square().sum()
            told = loss.item()
        if root == "vector":
            loss = torch.stack([loss / 2, loss / 2])
        scaled = loss if scaler is None else scaler.scale(loss)
        if root == "autograd.grad":
            parameters = [p for p in self.model.parameters() if p.requires_grad]
            for parameter, grad in zip(parameters, torch.autograd.grad(scaled, parameters, allow_unused=True), strict=True):
                if grad is not None:
                    parameter.grad = grad if parameter.grad is None else parameter.grad + grad
        elif root == "two roots":
            torch.autograd.backward([scaled * 0.75, scaled * 0.25])
        elif root == "vector":
            scaled.backward(gradient=torch.ones_like(scaled))
        else:
            scaled.backward(retain_graph=root == "retain graph")
            if root == "retain graph" and last:
                (scaled * 0).backward()
        return told

    def evaluate(self) -> float:
        self.model.eval()
        try:
            with torch.inference_mode() if self.case.loop.evaluate == "inference" else torch.no_grad(), self.autocast():
                return self.loss_of(self.model, *self.batch(99)).item()
        finally:
            self.model.train()

    def breaks_at(self, number: int, where: str) -> bool:
        return self.case.loop.breaks == (number, where)

    def is_recorded(self, optimizer: Any = None) -> bool:
        if self.recorder is None or self.recorder.writer.closed:
            return False
        return any(o is (optimizer or self.optimizers[0]) for o in self.given)

    # afterwards

    def finish(self) -> dict[str, Any]:
        """Close, train one more step, and take stock of everything that can differ, by the name of the promise."""
        if self.recorder is not None:
            self.recorder.close()
        over: dict[str, Any] = {}
        over["hooks left on modules"] = module_hooks(self.model)
        over["hooks left on parameters"] = parameter_hooks(self.model)
        over["attributes left on optimizers"] = [owned(o) for o in self.optimizers]
        over["attributes left on scalers"] = [owned(s) for s in self.scalers]
        over["serialised after close"] = self.serialised()
        self.step(self.case.loop.steps)
        over["weights and buffers"] = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        over["optimizer state"] = [o.state_dict() for o in self.optimizers]
        over["scaler state"] = [s.state_dict() for s in self.scalers]
        over["reads of user code"] = dict(READS)
        over["own wrappers called"] = self.calls
        over["random generators"] = (torch.get_rng_state(), random.random(), float(np.random.random()))
        return {"what the loop saw": self.seen} | {promise: flat(value) for promise, value in over.items()}

    def serialised(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, thing in (("model", self.model), ("optimizers", self.optimizers), ("scalers", self.scalers)):
            try:
                found |= {f"{name} {member}": data for member, data in archive(thing).items()}
            except Exception as error:
                found[name] = f"{type(error).__name__}: {text(str(error))}"
        return found


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
        said += [f"{w.category.__name__}: {text(str(w.message))}" for w in caught]
    finally:
        log.removeHandler(handler)


def faults(case: Case, watched: bool = True, thorough: bool = True) -> list[str]:
    """One line for each way in which `case` is not the same watched, or its recording not true. With `watched` False
    the unwatched training is held to itself, which shows that the generator is repeatable. `thorough` also collects
    garbage and diagnoses the run, which take longer than all the rest."""
    with tempfile.TemporaryDirectory() as folder:
        bare = outcome(case, None, thorough)
        seen = outcome(case, Path(folder) / "run" if watched else None, thorough)
        found = [f"{promise}: {line}" for promise, line in _unequal(bare, seen)]
        if watched and seen.raised is None:
            found += _untrue(case, Path(folder) / "run", seen, thorough)
        return found


def _unequal(bare: Outcome, seen: Outcome) -> Iterator[tuple[str, str]]:
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
    more = [watched - own for watched, own in zip(seen.hooks, bare.hooks, strict=False)]
    if len(more) > 3 and more[-1] > max(more[: len(more) // 2 + 1]):
        yield "hooks grow", f"{more} more at the ends of the steps"


REPLACING = {"new_optimizer", "go_on_with_copies", "go_on_with_pickled", "go_on_with_saved", "watch_again"}
"""Acts after which it is not the given objects alone that train."""


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
    if case.loop.breaks is not None or REPLACING & {act.name for act in case.acts} or len(failed):
        return found
    if len(run.steps) != seen.attempts:
        found.append(f"rows: {len(run.steps)} for {seen.attempts} steps attempted")
    elif case.loop.accumulate == 1 and case.loop.optimizers == "one":
        told = run.steps.loss.astype(float).to_numpy()
        counted = np.array(seen.counted, dtype=float)
        same = (told == counted) | (np.isnan(told) & ~np.isfinite(counted))
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


# drawing


def cases(rare: bool = True) -> st.SearchStrategy[Case]:
    """Random cases; `rare` ones hold thousands of tensors and exports, which take long."""
    steps = st.integers(4, 8)
    slow = {"export", "serialise", "script", "trace"}
    acts = [name for name in ACTS for _ in range(1 if name in slow else 3) if rare or name != "export"]
    models = st.builds(
        Model,
        pieces=st.lists(st.sampled_from(sorted(PIECES)), min_size=1, max_size=4).map(tuple),
        returns=st.sampled_from(("tensor", "tensor", "tuple", "dict", "dataclass", "lazy")),
        tiny=st.sampled_from((0,) * 60 + (2000,)) if rare else st.just(0),
    )
    loops = st.builds(
        Loop,
        steps=steps,
        optimizer=st.sampled_from(list(OPTIMIZERS)),
        optimizers=st.sampled_from(("one", "one", "both", "in turn")),
        precision=st.sampled_from(PRECISIONS),
        entered=st.sampled_from(("whole", "whole", "parts")),
        root=st.sampled_from(("backward", "backward", "backward", *ROOTS)),
        accumulate=st.sampled_from((1, 1, 2, 3)),
        clip=st.sampled_from((None, "norm", "value")),
        unscale=st.booleans(),
        set_to_none=st.booleans(),
        scheduler=st.booleans(),
        evaluate=st.sampled_from((None, None, "no_grad", "inference")),
        overflow=st.none() | st.integers(0, 5),
        breaks=st.none() | st.none() | st.tuples(st.integers(0, 4), st.sampled_from(BREAKS)),
    )
    watching = st.builds(
        Watching,
        every=st.integers(1, 7),
        kinds=st.sampled_from(("standard", "all")),
        level=st.sampled_from(("standard", "standard", "full")),
        budget=st.sampled_from((None, None, 0.05)),
        trace_ops=st.none() | st.integers(0, 3),
        scaler=st.sampled_from(("given", "given", "unseen")),
    )
    act = st.builds(Act, step=st.integers(0, 5), name=st.sampled_from(acts))
    return st.builds(
        Case, model=models, loop=loops, acts=st.lists(act, max_size=4).map(tuple), watching=watching, seed=st.integers(0, 99)
    )


# many at once


MOST_SHRINKS = 60


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


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are simpler in one respect, the simplest first."""
    defaults = Case()
    for part in ("loop", "watching", "acts", "model", "seed"):
        if getattr(case, part) != getattr(defaults, part):
            yield dataclasses.replace(case, **{part: getattr(defaults, part)})
    for i in range(len(case.acts)):
        yield dataclasses.replace(case, acts=case.acts[:i] + case.acts[i + 1 :])
    for i in range(len(case.model.pieces) if len(case.model.pieces) > 1 else 0):
        pieces = case.model.pieces[:i] + case.model.pieces[i + 1 :]
        yield dataclasses.replace(case, model=dataclasses.replace(case.model, pieces=pieces))
    for part in ("model", "loop", "watching"):
        whole = getattr(case, part)
        for field in dataclasses.fields(whole):
            if getattr(whole, field.name) != field.default:
                yield dataclasses.replace(case, **{part: dataclasses.replace(whole, **{field.name: field.default})})


def smallest(case: Case, shows: Callable[[Case], bool]) -> Case:
    """The simplest case, reached by one change after another, that still `shows` it; `MOST_SHRINKS` are tried."""
    tries = 0
    refused: set[Case] = set()
    while True:
        for simpler in smaller(case):
            if simpler in refused:
                continue
            tries += 1
            if tries > MOST_SHRINKS:
                return case
            if shows(simpler):
                case = simpler
                break
            refused.add(simpler)
        else:
            return case


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
