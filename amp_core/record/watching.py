"""`watch`: one line that records any training loop. It returns a `Recorder`, see `recorder.py`."""

import contextlib
import fnmatch
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from amp_core.record import ranks
from amp_core.record.environment import environment, model_summary, recipe_in_use
from amp_core.record.loop.sampling import Sampling
from amp_core.record.model import scaler_state as scaling
from amp_core.record.model.modules import computes
from amp_core.record.model.parameters import device_of, learning_rate, named_modules, named_parameters, unwrapped
from amp_core.record.model.unwrap import (
    fabric_precision,
    reachable_scaler,
    requested_precision,
    scaler_of,
    unwrap_optimizer,
    unwrap_scaler,
)
from amp_core.record.observer import Observer
from amp_core.record.observers import precision_asked, precision_settings
from amp_core.record.observers.blocks import BlockWatch
from amp_core.record.observers.defaults import default_signals
from amp_core.record.observers.device import DeviceSampler
from amp_core.record.observers.memory import MemoryWatch
from amp_core.record.observers.profile import ProfileWindow
from amp_core.record.observers.quantized import QuantizedWatch
from amp_core.record.observers.signals.risky_ops import LoopOperators
from amp_core.record.observers.signals.unknown_scaler import UnknownScaler
from amp_core.record.op_trace.observer import OpTrace
from amp_core.record.recorder import Recorder
from amp_core.record.updates.averages import AverageLedger
from amp_core.record.updates.by_hand import ByHand
from amp_core.record.updates.ledger import UpdateLedger
from amp_core.record.updates.overwriting import Overwriting
from amp_core.record.updates.uncopied import UncopiedMasters
from amp_core.schema import KINDS as ALL_KINDS
from amp_core.schema import RunError
from amp_core.store import shutdown
from amp_core.store.resilient_writer import TrainingWriter
from amp_core.store.writer import RunWriter

log = logging.getLogger("amp_core")

KINDS = ("weight_grad", "output_grad")
"""Kinds that are recorded by default."""
LEVELS = ("standard", "full")


def watch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    scaler: Any = None,
    into: str | os.PathLike[str],
    every: int = 10,
    kinds: Sequence[str] = KINDS,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    level: str = "standard",
    budget: float | None = None,
    profile: tuple[int, int] | None = None,
    trace_ops: int | None = None,
    updates: bool = False,
    blocks: bool = False,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> Recorder:
    """Record the training of `model` into the run folder `into`, from now until `close()`.

    Use it as a context manager, or call `close()`; without either, the run is closed when the process exits, however it
    exits.

    Args:
        model: the module that the loop calls, whether or not it is wrapped by DDP or `torch.compile`.
        optimizer: the optimizer, or a list of all of them, whose order numbers them in `steps.optimizer`. Wrappers of
            Accelerate and Lightning are unwrapped.
        scaler: the `torch.amp.GradScaler` of the loop, or an object that holds it, such as timm's `NativeScaler`. By
            default that of Accelerate or Fabric, or else one that is reachable from the caller of `watch`: a variable
            there or in its callers, or an attribute of their `self`. A scaler that is created later is detected when it
            scales a loss.
        into: folder of the run; it must not hold a run yet, unless it is resumed.
        every: measure gradients tensor by tensor at every `every`-th step, beginning with step 0. Values of the step as
            a whole are recorded at each step.
        kinds: what to measure tensor by tensor: `weight_grad` and `weight` of parameters, `output_grad` and
            `activation` of module outputs. Under autocast a weight gradient is FP32 and shows what survived; the 16-bit
            values are the output gradients.
        level: `full` adds more expensive measurements: those kinds that `kinds` leaves out.
        budget: the share of step time, e.g. 0.03, that watching may take on average. If it takes more, fewer steps are
            measured, which an event reports.
        profile: first step of a profiler window, and the step after its last: `(50, 53)` profiles steps 50, 51 and 52.
            Fills the tables `kernels` and `windows`.
        trace_ops: traces the operators of this step, with their dtypes and autocast policies, into the table `ops`.
        updates: compare the updates of all weights with the same step in float64, on each step that `every` names.
            An optimizer of your own is repeated on copies for that: its `step` runs twice. Without it, 16-bit weights
            under torch's and torchao's optimizers are compared, as often as 1 % of the time allows.
        blocks: records on sampled steps how the operands of linear layers lie in the blocks of 8- and 4-bit recipes,
            into the table `blocks`: what `what_if` needs to predict them. With `every` above 1, it takes 1 % of the
            time at most: after the first, sampled steps are left out where it is too slow, and an event says so.
        include, exclude: patterns (`*` and `?`) of tensor names to measure and to leave out; all by default. If they
            leave none, an event and the log report it.
        name: the name of the run; the folder's name by default.
        config: your own settings to store in the head of the run.
        resume: resume the run in `into`, for a training that continues from a checkpoint; step numbers continue after
            the last recorded step. If there is no run yet, a new one begins.

    Raises:
        RunError: one sentence that names the argument, its value and what would be right.
    """
    given = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    optimizers = [unwrap_optimizer(item) for item in given]
    if not isinstance(model, torch.nn.Module):
        raise RunError(f"model={type(model).__name__} is not a torch.nn.Module; give the module that the loop calls")
    for item in optimizers:
        if not isinstance(item, torch.optim.Optimizer):
            raise RunError(f"optimizer={type(item).__name__} is not a torch.optim.Optimizer; give one or a list")
    if not optimizers:
        raise RunError("optimizer=[] is empty; give the optimizer of the loop, or a list of them")
    scaler = scaler_of(given) if scaler is None else unwrap_scaler(scaler)
    if scaler is None and requested_precision(given) is None:
        scaler = reachable_scaler(sys._getframe(1))
    if scaler is not None and not all(hasattr(scaler, n) for n in ("scale", "unscale_", "step", "update")):
        raise RunError(f"scaler={type(scaler).__name__} is not a GradScaler; give the loop's scaler, or omit it")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise RunError(f"every={every!r} is not a whole number from 1; every=10 measures gradients on every tenth step")
    if not isinstance(into, str | os.PathLike):
        raise RunError(f"into={into!r:.80} is not a path; give the folder of the run, as a string or a Path")
    named = _listed("kinds", kinds)
    for kind in named:
        if kind not in ALL_KINDS:
            raise RunError(f"kinds={kind!r} cannot be recorded; choose from {', '.join(ALL_KINDS)}")
    if level not in LEVELS:
        raise RunError(f"level={level!r} is unknown; choose one of {', '.join(LEVELS)}")
    if budget is not None and not (isinstance(budget, int | float) and 0 < budget < 1):
        raise RunError(f"budget={budget!r} is not a share between 0 and 1; budget=0.03 allows 3 % of the step time")
    if not isinstance(updates, bool):
        raise RunError(f"updates={updates!r} is not True or False; updates=True compares the updates of all weights")
    window = _window(profile)
    wanted = _name_filter(_listed("include", include or ()), _listed("exclude", exclude or ()))
    if trace_ops is not None and (isinstance(trace_ops, bool) or not isinstance(trace_ops, int) or trace_ops < 0):
        raise RunError(f"trace_ops={trace_ops!r} is not the number of a step; trace_ops=2 traces the third step")
    if not isinstance(blocks, bool):
        raise RunError(f"blocks={blocks!r} is not True or False; blocks=True records what block formats need")
    chosen = list(ALL_KINDS) if level == "full" else named
    rank, world_size = ranks.place()
    if rank and not resume:
        ranks.refuse_foreign(Path(into))
    settings: dict[str, Any] = {
        "source": "watch",
        "every": every,
        "kinds": chosen,
        "level": level,
        "budget": budget,
        "profile": window,
        "trace_ops": trace_ops,
        "updates": updates,
        "blocks": blocks,
        "scaler": scaling.settings(scaler),
        "optimizers": [type(o).__name__ for o in optimizers],
        "lr": learning_rate(optimizers[0]),
        **(ranks.sharing(model) if world_size > 1 else {}),
    }
    if asked := requested_precision(given):
        settings |= {"framework": "accelerate", "requested_precision": asked}
    if asked := fabric_precision(given):
        settings |= {"framework": "fabric", "fabric_precision": asked}
    if cast := ranks.computed_in(model):
        settings["precision"] = recipe_in_use(model, optimizers, scaler, cast, torch.device("cpu"))
    writer = TrainingWriter(
        into,
        name=name,
        config=settings | dict(config or {}),
        environment=environment(),
        model=model_summary(unwrapped(model)) | {"precision_asked": precision_asked.asked(model, given)},
        rank=rank,
        world_size=world_size,
        resume=resume,
    )
    if not rank and (include or exclude) and not any(wanted(name) for name in _names_of(model, chosen)):
        detail = f"include={include!r} and exclude={exclude!r} leave no tensor to measure"
        log.warning("AMPscope: %s", detail)
        writer.event("warning", name="include", detail=detail)
    sampling = Sampling(every, budget)
    observers: list[Observer] = []
    try:
        for observer in _observers(writer, model, optimizers, scaler, level, window, trace_ops, every, updates):
            observers.append(observer)  # noqa: PERF402  # one by one, so that those before a failure are known
        observers.append(QuantizedWatch(writer, model, sampling.due, wanted, all_sampled=every == 1))
        if blocks:
            observers.append(BlockWatch(writer, model, sampling.due, wanted, all_sampled=every == 1))
        return Recorder(
            model,
            optimizers,
            scaler,
            writer,
            sampling=sampling,
            kinds=frozenset(chosen),
            wanted=wanted,
            observers=observers,
        )
    except BaseException as error:
        for observer in observers:
            with contextlib.suppress(Exception):
                observer.close()
        writer.close(*shutdown.describe(type(error), error))
        raise


def _window(profile: Sequence[int] | None) -> tuple[int, int] | None:
    if profile is None:
        return None
    whole = isinstance(profile, tuple | list) and all(isinstance(n, int) and not isinstance(n, bool) for n in profile)
    if not whole or len(profile) != 2 or not 0 <= profile[0] < profile[1]:
        raise RunError(f"profile={profile!r} is not a window of steps; profile=(50, 53) profiles steps 50, 51 and 52")
    return profile[0], profile[1]


def _observers(
    writer: RunWriter,
    model: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    scaler: Any,
    level: str,
    window: tuple[int, int] | None,
    trace_ops: int | None,
    every: int,
    updates: bool,
) -> Iterator[Observer]:
    """Yield the observers of the loop one by one: if one cannot be made, the caller can close those before it."""
    device = device_of(model)
    yield DeviceSampler(writer, device)
    yield MemoryWatch(writer, model, optimizers, device)
    yield precision_settings.PrecisionSeen(writer, model, optimizers)
    yield UpdateLedger(writer, model, optimizers, every, all_weights=updates)
    yield AverageLedger(writer, model, every)
    yield Overwriting(writer, model, optimizers)
    yield UncopiedMasters(writer, model, optimizers)
    yield ByHand(writer, model, optimizers, every, LoopOperators(writer, model))
    yield from default_signals(writer, model, optimizers, scaler, level)
    if writer.rank:
        yield ranks.HeadIfAlone(writer)
    yield UnknownScaler(writer, optimizers, scaler)
    if trace_ops is not None:
        yield OpTrace(writer, model, trace_ops)
    if window is not None:
        yield ProfileWindow(writer, model, *window)


def _listed(argument: str, names: object) -> list[str]:
    """A list of names, given as one string or several."""
    given = [names] if isinstance(names, str) else names
    if isinstance(given, Iterable):
        listed = list(given)
        if all(isinstance(name, str) for name in listed):
            return listed
    raise RunError(f"{argument}={names!r:.80} is neither a string nor a list of strings; give one of them")


def _names_of(model: torch.nn.Module, kinds: Iterable[str]) -> Iterator[str]:
    """The names of the tensors that are measured for these kinds: of parameters, and of modules for their outputs."""
    if not {"weight_grad", "weight"}.isdisjoint(kinds):
        yield from (name for name, _ in named_parameters(unwrapped(model)))
    if not {"output_grad", "activation"}.isdisjoint(kinds):
        yield from (name for name, module in named_modules(unwrapped(model)) if name and computes(module))


def _name_filter(wanted: Sequence[str], unwanted: Sequence[str]) -> Callable[[str], bool]:
    def keep(name: str) -> bool:
        if wanted and not any(fnmatch.fnmatchcase(name, p) for p in wanted):
            return False
        return not any(fnmatch.fnmatchcase(name, p) for p in unwanted)

    return keep
