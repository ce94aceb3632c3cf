"""A random training as a value that can be generated, simplified and printed.

>>> Case(Model(("linear", "spectral_norm")), Loop(precision="fp16"), (Act(2, "copy_scaler"),))
>>> given(cases())                   # a hypothesis strategy
>>> smallest(case, shows)            # the simplest case that still `shows` what `case` does
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

from tests.record.random_acts import ACTS
from tests.record.random_loop import BREAKS, OPTIMIZERS, PRECISIONS, ROOTS
from tests.record.random_models import PIECES

MAX_SHRINKS = 60
"""Simpler cases that are tried for one fault."""


@dataclasses.dataclass(frozen=True)
class Model:
    """`pieces` one after another (`random_models.PIECES`), and `tiny` tensors of two elements beside them."""

    pieces: tuple[str, ...] = ("linear",)
    returns: str = "tensor"
    tiny: int = 0


@dataclasses.dataclass(frozen=True)
class Loop:
    """How it trains. `overflow` and `breaks` are the steps at which an infinity or an exception occurs."""

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
    """The arguments of `watch`."""

    every: int = 2
    kinds: str = "standard"
    level: str = "standard"
    budget: float | None = None
    trace_ops: int | None = None
    scaler: str = "given"


@dataclasses.dataclass(frozen=True)
class Act:
    """`random_acts.ACTS[name]` before step `step`, or `inside` of it: after backward, and before the optimizer."""

    step: int
    name: str
    inside: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """The complete description of a training. Its text is an expression that recreates it."""

    model: Model = Model()
    loop: Loop = Loop()
    acts: tuple[Act, ...] = ()
    watching: Watching = Watching()
    seed: int = 0

    def __str__(self) -> str:
        """The expression, without fields that have their default."""
        return _expression(self)


def _expression(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_expression, value))}{',' if len(value) == 1 else ''})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = [(f.name, getattr(value, f.name), f.default) for f in dataclasses.fields(value)]
    inner = (f"{name}={_expression(one)}" for name, one, default in fields if one != default)
    return f"{type(value).__name__}({', '.join(inner)})"


def cases(rare: bool = True) -> st.SearchStrategy[Case]:
    """Random cases; `rare` adds those with thousands of tensors or exports, which take long."""
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
    act = st.builds(Act, step=st.integers(0, 5), name=st.sampled_from(acts), inside=st.booleans())
    return st.builds(
        Case,
        model=models,
        loop=loops,
        acts=st.lists(act, max_size=4).map(tuple),
        watching=watching,
        seed=st.integers(0, 99),
    )


def smaller(case: Case) -> Iterator[Case]:
    """Cases that are simpler in one respect, simplest first."""
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


def smallest(case: Case, shows: Callable[[Case], bool], most: int = MAX_SHRINKS) -> Case:
    """The simplest case that still `shows` it, found by one simplification after another; tries at most `most`
    cases."""
    tries = 0
    refused: set[Case] = set()
    while True:
        for simpler in smaller(case):
            if simpler in refused:
                continue
            tries += 1
            if tries > most:
                return case
            if shows(simpler):
                case = simpler
                break
            refused.add(simpler)
        else:
            return case
