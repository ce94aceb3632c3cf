"""The training engine: a plain AMP training loop, watched from its first step to its last.

    >>> summary = train(TrainConfig(workload="text-gpt", precision="fp16", steps=200), into="runs/a")
    >>> summary.status, summary.loss_first, summary.loss_last, summary.skipped
    ('finished', 5.56, 2.41, 3)

Initial weights, data order and dropout depend on the seed alone, so runs that differ in precision are comparable.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from amp_core.record import Recorder, watch
from amp_core.record.backends import backend_named
from amp_core.record.backends.cpu import Cpu
from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig
from amp_core.store.run import load_run
from amp_core.store.urls import Address, located
from amp_core.train.cpu_layers import prepare_layers
from amp_core.train.engine import checkpoint
from amp_core.train.engine.model_changes import changed
from amp_core.train.engine.processes import Team, joined
from amp_core.train.engine.progress import Progress
from amp_core.train.engine.recipes import Precision, backend_flags
from amp_core.train.engine.resume import check_more, check_same, repeated
from amp_core.train.engine.stopping import stop_on_signals
from amp_core.train.workloads import Workload, build

log = logging.getLogger("amp_core")


@dataclass(frozen=True)
class Summary:
    """The result of a run. Losses are None if no step was made; losses and `skipped` are None if the record is gone."""

    folder: Path | Address
    status: str
    """`finished` or `stopped`."""
    steps: int
    loss_first: float | None
    loss_last: float | None
    skipped: int | None
    """Steps that the scaler skipped."""
    loss_scale: float
    """Loss scale after the last step; 1 without a scaler."""
    results: Mapping[str, float]
    """Held-out `eval_loss` (nats) and `eval_accuracy` (0 to 1); empty if not evaluated."""
    emulated: bool = False
    """Whether products in 8 or 4 bits were emulated."""


def train(
    config: TrainConfig,
    into: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    stop: Callable[[], str | None] | None = None,
    also: Mapping[str, Any] | None = None,
    resume: bool = False,
    level: str = "standard",
) -> Summary:
    """Train as `config` says and record the run in the folder `into`.

    `stop` is called before each step and returns a reason to end early, or None. By default SIGTERM and Ctrl-C end the
    run. The time that `stop` takes counts for no step. `also` is added to the settings in the head's config; `level` is
    how much `watch` records. With `resume` the run in `into` is resumed from its checkpoint, up to `config.steps` in
    all; its settings must be the same, except those in `resume.MAY_CHANGE`. If torchrun started this process, it trains
    together with the others. Raises `RunError` for a missing device, a workload that cannot be loaded, a layer that
    this CPU cannot run in the recipe's dtype and a folder that cannot be used. An exception of the loop ends the run as
    `failed` and is raised again.
    """
    config = config.resolved()
    if resume:
        check_same(config, Path(into))
    with (
        stop_on_signals() if stop is None else nullcontext(stop) as stop_reason,
        joined(config) as team,
        backend_flags(config),
    ):
        device = choose_device(config.device)
        precision = Precision(config, device)
        workload = build(config)
        model_here = workload.model.to(device=device, dtype=precision.weights)
        prepare_layers(model_here, precision, config.islands)
        raw_model = workload.model = changed(
            model_here, config, emulated=precision.emulated, generator=precision.rounding
        )
        model: Any = team.shared(raw_model, device)
        model = torch.compile(model) if config.compile else model
        optimizer = make_optimizer(config, raw_model)
        scaler = precision.scaler
        batches = endless(workload, device, precision.input_dtype, team)
        done = 0
        state = checkpoint.read(Path(into)) if resume else None
        if state is not None:
            done = state["step"]
            check_more(config.steps, done)
            for _ in range(done * config.accumulate):  # the data that earlier steps consumed
                next(batches)
            checkpoint.restore(state, model=raw_model, optimizer=optimizer, scaler=scaler)
        if team.size > 1:  # otherwise dropout would be the same in all processes
            torch.manual_seed(config.seed + done + (team.rank + 1) * 1_000_003)

        with watch(
            model,
            optimizer,
            scaler=scaler if scaler.is_enabled() else None,
            into=into,
            every=config.every,
            level=level,
            profile=config.profile,
            trace_ops=config.trace_ops,
            blocks=config.blocks,
            updates=config.updates,
            config=config.to_dict()
            | {"source": "train", "device": str(device), "data": dict(workload.data), "emulated": precision.emulated}
            | dict(also or {}),
            resume=resume,
        ) as rec:
            if resume and team.rank == 0:
                report_resuming(rec, done)

            def due(step: int, last: str | None) -> bool:
                every = config.checkpoint_every
                return every is not None and team.rank == 0 and (last is not None or step % every == 0)

            def save(step: int) -> None:
                try:
                    checkpoint.save(rec.writer.folder, step=step, model=raw_model, optimizer=optimizer, scaler=scaler)
                except (
                    OSError,
                    RuntimeError,
                ) as error:  # torch: RuntimeError for a full disk
                    detail = f"no checkpoint after step {step}: {' '.join(str(error).split())[:200]}"
                    log.warning("AMPscope: %s; training continues", detail)
                    rec.writer.event("warning", name="checkpoint", detail=detail)

            model.train()
            ended_early = None
            for step in range(done, config.steps):
                with rec.paused():
                    ended_early = team.agreed(stop_reason())
                    if step > done and due(step, ended_early):
                        save(step)
                if ended_early:
                    break
                precision.begin_step(step, team.rank)
                audited = config.audit_every is not None and step % config.audit_every == 0
                train_step(config, precision, workload, model, optimizer, batches, rec, audited)
                if progress is not None:
                    progress.update(step + 1)

            results = {}
            if not ended_early and due(config.steps, "the end"):
                save(config.steps)
            if ended_early:
                rec.close(status="stopped", end_reason=ended_early)
            elif config.evaluate and team.rank == 0:
                results = evaluate(workload, precision)
                if results:
                    rec.writer.update_head(results=results)
                    rec.writer.event("evaluated", name="held-out", detail=in_words(results))

    known = Summary(
        folder=located(into),
        status="stopped" if ended_early else "finished",
        steps=step if ended_early else config.steps,
        loss_first=None,
        loss_last=None,
        skipped=None,
        loss_scale=scaler.get_scale(),
        results=dict(results),
        emulated=precision.emulated,
    )
    summary = with_recorded_losses(known, rec.writer.head.run_id if team.rank == 0 else None)
    if progress is not None:
        progress.update(summary.steps, last=True)
    return summary


def report_resuming(rec: Recorder, done: int) -> None:
    """Warn if there was no run to resume, or if steps after the checkpoint are trained again."""
    earlier = rec.writer.earlier
    if earlier is None:
        log.warning("AMPscope: nothing to resume in %s; starting a new run", rec.writer.into)
    elif detail := repeated(done, earlier.next_step):
        log.warning("AMPscope: %s", detail)
        rec.writer.event("warning", name="checkpoint", detail=detail, step=earlier.next_step)


def train_step(
    config: TrainConfig,
    precision: Precision,
    workload: Workload,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    rec: Recorder,
    audited: bool = False,
) -> None:
    """One optimizer step of mixed-precision training, over `config.accumulate` micro-batches.

    In a recipe without a loss scale the scaler is disabled: `scale` returns the loss, `step` calls the optimizer's.
    `audited` replays the last micro-batch in FP32 and in the recipe before the weights change.
    """
    scaler = precision.scaler
    loss = torch.zeros((), device=precision.device)
    samples = 0
    for _ in range(config.accumulate):
        batch = next(batches)
        with precision.autocast():  # forward and loss only: backward uses the dtypes of forward
            micro_loss = scalar_loss(workload.loss_fn(model, batch), config.workload) / config.accumulate
        scaler.scale(micro_loss).backward()
        loss += micro_loss.detach()
        samples += workload.samples(batch)

    if audited:
        audit(precision, workload, model, batch, rec)
    if config.clip_norm is not None:
        scaler.unscale_(optimizer)  # otherwise gradients are clipped while multiplied by the loss scale
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    rec.log(loss=loss, samples=samples)
    scaler.step(optimizer)  # skipped if a gradient is not finite
    scaler.update(precision.new_scale)
    optimizer.zero_grad(set_to_none=True)


def scalar_loss(loss: Any, workload: str) -> torch.Tensor:
    """`loss` as a scalar tensor. Raises `RunError` if the workload returned anything but a tensor of one element."""
    if not isinstance(loss, torch.Tensor):
        raise RunError(f"workload={workload!r} returned a loss of type {type(loss).__name__}; return a tensor")
    if loss.numel() != 1:
        raise RunError(f"workload={workload!r} returned a loss of shape {tuple(loss.shape)}; return one number")
    return loss.reshape(()) if loss.ndim else loss


def audit(precision: Precision, workload: Workload, model: torch.nn.Module, batch: Any, rec: Recorder) -> None:
    """Record how the recipe changes the gradients of `batch`, at the current loss scale and without one."""

    def loss() -> torch.Tensor:
        # A pure 16-bit model is replayed with FP32 weights and needs FP32 inputs.
        dtype = next(model.parameters()).dtype if precision.input_dtype is not None else None
        return workload.loss_fn(model, to_device(batch, precision.device, dtype))

    scaled = precision.scaler.is_enabled()
    rec.audit(loss, loss_scales=sorted({1.0, precision.scaler.get_scale()}) if scaled else None)


def choose_device(name: str) -> torch.device:
    """The torch device called `name`. Raises `RunError` if this machine does not have it."""
    backend = backend_named(name)
    if backend is Cpu:
        return torch.device("cpu")
    if not backend.available():
        raise RunError(f"device={name!r} is not available: {backend.why_unavailable()}; choose cpu or auto")
    number = name.partition(":")[2]
    index = int(number) if number else backend.current()
    if index >= backend.count():
        present = ", ".join(f"{backend.type}:{i}" for i in range(backend.count()))
        raise RunError(f"device={name!r} is not available; this machine has {present}")
    backend.select(index)
    return torch.device(backend.type, index)


def make_optimizer(config: TrainConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer that `config` names, over all trainable parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert config.lr is not None  # resolved
    # With fused=False torch would also leave its `foreach` kernels, and launch a dozen operators for every tensor.
    fused = config.fused or None
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(parameters, lr=config.lr, momentum=0.9, fused=fused)
        if config.fused:
            # torch's fused SGD allocates its momentum uninitialised and relies on the first step to fill it, which a
            # scaler may skip. Starting from zeros gives the same updates (torch/optim/sgd.py, _fused_sgd).
            for parameter in parameters:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return optimizer
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, lr=config.lr, fused=fused)


def endless(
    workload: Workload, device: torch.device, dtype: torch.dtype | None, team: Team | None = None
) -> Iterator[Any]:
    """The workload's batches on `device`, repeated without end; each of several processes gets its own."""
    while True:
        empty = True
        for batch in (team or Team()).part(workload.batches):
            empty = False
            yield to_device(batch, device, dtype)
        if empty:
            raise RunError("batches of the workload are empty; give at least one batch")


def to_device(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """`batch` with every tensor on `device`; floating-point ones cast to `dtype` if it is given."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, dtype if leaf.is_floating_point() else None, non_blocking=True)
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return tree_map(move, batch)


@torch.no_grad()
def evaluate(workload: Workload, precision: Precision) -> dict[str, float]:
    """Mean loss and accuracy over the held-out batches, in the recipe's precision; empty without held-out batches."""
    workload.model.eval()
    totals: dict[str, float] = {}
    count = 0
    for held_out in workload.held_out:
        batch = to_device(held_out, precision.device, precision.input_dtype)
        samples = workload.samples(batch)
        with precision.autocast():
            values = {"eval_loss": workload.loss_fn(workload.model, batch)}
            if workload.accuracy_fn is not None:
                values["eval_accuracy"] = workload.accuracy_fn(workload.model, batch)
        for name, value in values.items():
            totals[name] = totals.get(name, 0.0) + float(value) * samples
        count += samples
    workload.model.train()
    return {name: total / count for name, total in totals.items()}


def in_words(results: Mapping[str, float]) -> str:
    """Results on one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in results.items())


def with_recorded_losses(known: Summary, run_id: str | None) -> Summary:
    """`known` with the losses and skipped steps from the run's folder; if that is gone, `known` with a warning in the
    log.

    `run_id` is None in a process that does not know the id that the first process gave the run.
    """
    try:
        run = load_run(known.folder)
        steps = run.table("steps")
    except RunError:
        run = None
    if run is None or run_id not in (None, run.head.run_id):
        if run_id is not None:  # log it once, not in every process
            log.warning("AMPscope: %s is gone, and with it the recording of this run", known.folder)
        return known
    # Chosen by Python: Arrow would import pandas to compare with a number, which takes a third of a second.
    columns = (steps.column(name).to_pylist() for name in ("rank", "loss", "skipped"))
    rows = [(loss, skipped) for rank, loss, skipped in zip(*columns, strict=True) if rank == 0]
    return replace(
        known,
        loss_first=rows[0][0] if rows else None,
        loss_last=rows[-1][0] if rows else None,
        skipped=sum(skipped for _, skipped in rows),
    )
