"""The rule on the recording itself: whether it stopped, is empty, or lacks something that was requested, and why."""

from dataclasses import dataclass

import numpy as np

from amp_core.analysis.steps import attempts, scaler_enabled, whole_number
from amp_core.findings.model import TRAINING_LOOP, Entry, Finding, Remedy, Severity
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.remedies import UNSCALED_GUARD
from amp_core.findings.rules.scaler import fp16_without_scaler
from amp_core.findings.signals import ending_error, last_step, signals, split_call
from amp_core.findings.snippets import LOOP
from amp_core.schema import TABLES
from amp_core.store.run import Run
from amp_core.text import formatting

MIN_UNRECORDED_BACKWARDS = 20
"""At least this number of backward passes after the last recorded step, and four times as many as any step had, are of
steps that were not recorded."""
MIN_IDLE_S = 300.0
"""A run that lasted so long after its last step, and longer than its steps took, is reported."""
MAX_REASON_CHARS = 200
"""Characters of a reason that a title quotes."""

_EXPECTED = (
    "hooks do not reach into a compiled graph",
    "layers of Keras do not show theirs",
    "activations and autocast's casts in memory",
    "modules of kernels",
    "the run ended before",
    "device samples: ",
)
"""Reasons that are expected: such a run cannot have the data, or was too short for it."""
_OPTIMIZER = Remedy(
    "Only steps of a `torch.optim.Optimizer` that holds the model's parameters are recorded; those of other objects "
    "and manual updates are not. Give `watch` the model and the optimizers that the loop steps, and derive custom "
    "optimizers from `torch.optim.Optimizer`.",
    'optimizer = torch.optim.AdamW(model.parameters())\nwatch(model, [optimizer], scaler=scaler, into="runs/a")',
)
_MODEL = Remedy(
    "The loop does not call the module that `watch` was given, or stopped calling it: it may use a copy, a wrapper, "
    "or a module compiled later. Give `watch` the model and optimizer that the loop uses, after everything that "
    "copies or wraps them.",
    "model = torch.compile(model)\n"
    "optimizer = torch.optim.AdamW(model.parameters())\n"
    'watch(model, optimizer, scaler=scaler, into="runs/a")',
)
_LOSS = Remedy(
    "Backward was called on something other than a single loss, so these steps have no recorded loss. Log the loss "
    "in every step.",
    'rec = watch(model, optimizer, scaler=scaler, into="runs/a")\nrec.log(loss=loss)   # in each step',
)
_META = Remedy(
    "Parameters on the meta device hold no values, so neither they nor their gradients can be measured. Load the "
    "model's weights before calling `watch`.",
    'model.to_empty(device="cuda")\n'
    "model.load_state_dict(weights)\n"
    'watch(model, optimizer, scaler=scaler, into="runs/a")',
)
_SCALER = Remedy(
    "The losses scaled by that scaler do not reach any parameter of this run's optimizers, so its loss scale and "
    "skipped steps are not recorded. Give `watch` the scaler that the loop uses, and the optimizers that it steps.",
    'scaler = torch.amp.GradScaler("cuda")\nwatch(model, optimizer, scaler=scaler, into="runs/a")',
)
_CAPTURE = Remedy(
    "Replaying a CUDA graph calls no hooks, so its forward pass, backward pass and loss are not visible. Step the "
    "optimizer outside the graph, or record some steps without one.",
    "graph.replay()\noptimizer.step()   # recorded, because it is outside the graph",
)
_XLA = Remedy(
    "XLA runs the step as one program, which exposes neither the loss nor the gradients. Compile without XLA while "
    "recording.",
    'model.compile(optimizer="adam", loss="mse", jit_compile=False)',
)
_WRITING = Remedy(
    "The run folder was not writable for a while, and the rows waiting to be written did not fit into memory. Write "
    "to a local disk with free space, and copy the run once it has ended.",
    'watch(model, optimizer, into="/local/disk/runs/a")',
)
_PATTERNS = Remedy(
    "The patterns `include` and `exclude` leave no tensor to measure, so there are no histograms and no "
    "predictions. Use patterns that match names of the model's parameters or modules.",
    "print([name for name, _ in model.named_parameters()])\n"
    'watch(model, optimizer, into="runs/a", include=["blocks.*"])',
)
_FAILED = Remedy(
    "The recorder raised an exception and recorded less from then on; training continued unchanged. If memory was "
    "short, measure fewer tensors; otherwise exclude the module named above.",
    'watch(model, optimizer, into="runs/a", every=100, exclude=["blocks.3.*"])',
)
_PART = Remedy(
    "The steps are recorded, but analyses of the missing part are empty. Record some steps without the cause named "
    "above: another profiler, another mode that intercepts operators, or too little memory.",
    'watch(model, optimizer, into="runs/b")',
)
_UPDATES = Remedy(
    "The optimizer's step cannot be repeated on copies, so that what its updates lose to rounding is not known; "
    "16-bit weights that no longer change at all are reported nevertheless. An optimizer can be repeated if its step "
    "changes only parameters and state.",
    "class Own(torch.optim.Optimizer):\n"
    "    def step(self, closure=None):\n"
    "        ...   # writes to parameters in group['params'] and to self.state alone",
)
_COMPILED = Remedy(
    "What compiled code computes in 16 bits inside a graph is not visible, so that no finding about it does not mean "
    "that there is nothing to find. Audit one batch, which runs the same code in eager mode.",
    "rec.audit(lambda: loss_fn(model(x), y), forward=True)",
)
_BLOCKS = Remedy(
    "Blocks are measured of the operands of linear layers, which are what 8 and 4 bits would quantise: "
    "`torch.nn.Linear` with its subclasses, and GPT-2's `Conv1D`. Record a model without such layers without them.",
    'watch(model, optimizer, into="runs/a", blocks=False)',
)
_OWN_SCALE = Remedy(
    "The loop scales its loss itself and skips steps, or gives `watch` another optimizer than the one it steps. "
    "Gradients may be non-finite at any loss scale, or the scale does not fall after an overflow. A GradScaler halves "
    "it until gradients are finite.",
    LOOP,
)
_REASONS: tuple[tuple[str, Severity, Remedy], ...] = (
    ("watching failed", "warning", _FAILED),
    ("what was held back", "warning", _FAILED),
    ("steps: neither a forward", "warning", _MODEL),
    ("steps:", "warning", _OPTIMIZER),
    ("loss scale and skipped steps:", "warning", _SCALER),
    ("loss: none", "info", _LOSS),
    ("forward of the model:", "info", _MODEL),
    ("gradients of parameters on the meta device", "info", _META),
    ("what a CUDA graph replays", "info", _CAPTURE),
    ("loss and gradients: XLA", "info", _XLA),
    ("kernels of steps", "warning", _PART),
    ("modules of kernels", "warning", _PART),
    ("updates: the step of", "info", _UPDATES),
    ("operators within compiled graphs", "info", _COMPILED),
    ("operators:", "info", _PART),
    ("blocks: the model has no linear layer", "warning", _BLOCKS),
    ("what memory is made of", "info", _PART),
    ("device samples from now on", "info", _PART),
)
"""Prefix of a reason, its severity, and the remedy. An info is a reason for which a part of each step is missing, but
the steps are recorded."""
_NO_MORE_STEPS = " backward passes since the last step"
_NO_STEP_REASONS = ("steps: no optimizer", "steps: neither a forward", "steps: none of the model's optimizers")
"""Reasons for a run without steps, which do not apply to one that was stopped during its first step."""


@dataclass(frozen=True)
class _Gap:
    """Something that was were not recorded."""

    title: str
    """What is missing and why."""
    where: str
    severity: Severity
    since: int | None
    remedy: Remedy | None
    reason: str = ""
    """The recorder's message, if the reason is the recorder's."""


@rule(
    Entry(
        code="recording-incomplete",
        severity="warning",
        family=TRAINING_LOOP,
        order=10,
        what="Part of the run was not recorded, so neither findings nor charts can show it.",
        signal="The recorder's warnings, tables without rows, and backward passes after the last recorded step.",
        threshold="One missing part that such a run should have. An error if no step at all was recorded; "
        "informational if every step lacks a part.",
        advice="Missing data is not zero, and the absence of findings about it means nothing. Give `watch` all "
        "optimizers that the loop steps, and a folder it can write to.",
        snippet='watch(model, [optimizer_a, optimizer_b], scaler=scaler, into="runs/a")',
        page="",
    )
)
def recording_incomplete(run: Run) -> list[Finding]:
    """`recording-incomplete`: no step was recorded, recording stopped before the training did, or something that was
    requested is missing."""
    gaps = _gaps(run)
    if not gaps:
        return []
    worst = min(gaps, key=lambda gap: ("error", "warning", "info").index(gap.severity))
    more = f" (and {formatting.plural(len(gaps) - 1, 'more reason')})" if len(gaps) > 1 else ""
    last = last_step(run)
    return [
        make_finding(
            "recording-incomplete",
            worst.title + more,
            worst.where,
            severity=worst.severity,
            steps=(worst.since, max(worst.since, last or 0)) if worst.since is not None else None,
            value=float(len(gaps)),
            limit=0.0,
            unit="things not recorded",
            remedy=worst.remedy,
        )
    ]


def _gaps(run: Run) -> list[_Gap]:
    reported = _reported_gaps(run)
    if run.is_live or not _watched(run):
        return reported
    stopped = _stop_gap(run, reported)
    if stopped is not None:
        return [stopped, *(gap for gap in reported if gap.reason != stopped.reason)]
    if last_step(run) is None:  # it ended during its first step
        return [gap for gap in reported if not gap.reason.startswith(_NO_STEP_REASONS)]
    config = run.head.config
    unmeasured = not run.table("tensors").num_rows and not run.damaged("tensors")
    if config.get("kinds") and last_step(run) is not None and unmeasured and not reported:
        kinds = ", ".join(map(str, config["kinds"])) if isinstance(config["kinds"], list) else "tensors"
        title = f"No tensor was measured, though {kinds} were requested"
        return [_Gap(title, "tensors", "warning", 0, _PATTERNS)]
    return reported


def _watched(run: Run) -> bool:
    """Whether `watch` recorded the run: an imported trace has no steps and lacks nothing."""
    return bool(signals(run, "started")["detail"].str.startswith("watching").any())


def _stop_gap(run: Run, reported: list[_Gap]) -> _Gap | None:
    """The gap of a run without steps, or whose recording of steps stopped while backward was still called."""
    last = last_step(run)
    calls = signals(run, "calls")
    calls = calls[(calls["rank"] == 0) & calls["step"].notna()]
    counts = [sum(split_call(call)[0] == "backward" for call in str(name).split()) for name in calls["name"]]
    after = [n for n, step in zip(counts, calls["step"], strict=True) if last is None or step > last]
    before = [n for n, step in zip(counts, calls["step"], strict=True) if last is not None and step <= last]
    unseen = max(after, default=0)
    went_on = unseen >= max(MIN_UNRECORDED_BACKWARDS, 4 * max(before, default=0))
    though = f", though backward was called at least {unseen:,} times" if unseen > 1 else ""
    severe = sorted((gap for gap in reported if gap.severity != "info"), key=lambda gap: gap.where != "steps")
    why = next(iter(severe), None)
    remedy = why.remedy if why is not None else _OPTIMIZER
    cleared = sum(split_call(call)[0] == "zero_grad" for name in calls["name"] for call in str(name).split())
    if last is None and scaler_enabled(run) and cleared >= MIN_UNRECORDED_BACKWARDS:
        title = f"No step was recorded{though}: the loop clears the gradients of its optimizer and never steps it"
        return _Gap(title, "steps", "error", None, UNSCALED_GUARD, why.reason if why is not None else "")
    if last is None:
        if (run.status != "finished" or ending_error(run)) and not went_on:
            return None  # it ended during its first step, or its scaler raised there
        because = f": {_short(why.reason)}" if why is not None else ""
        reason = why.reason if why is not None else ""
        return _Gap(f"No step was recorded{though}{because}", "steps", "error", None, remedy, reason)
    if why is not None:
        return None  # the recorder itself reports why
    if went_on:
        return _Gap(f"No step is recorded after step {last:,}{though} since", "steps", "warning", last + 1, remedy)
    planned = whole_number(run.head.config.get("steps"))
    if run.status == "finished" and planned is not None and last + 1 < planned / 2:
        title = f"Steps are recorded up to step {last:,} of {planned:,} planned, though the run finished"
        return _Gap(title, "steps", "warning", last + 1, remedy)
    idle = _idle_s(run)
    if idle is None:
        return None
    title = f"The last step was recorded {formatting.duration(idle)} before the run ended"
    return _Gap(title, "steps", "info", last + 1, remedy)


def _idle_s(run: Run) -> float | None:
    """Seconds from the last step to the end, if they are most of the run; None if they are not, or if an evaluation
    may have filled them."""
    ended, evaluated = signals(run, "ended")["time_s"].max(), signals(run, "evaluated")["time_s"].max()
    times = attempts(run)["time_s"].dropna().to_numpy(dtype=float)
    if not len(times) or not np.isfinite(ended) or evaluated > times[-1]:
        return None
    idle = float(ended) - float(times[-1])
    return idle if idle > max(MIN_IDLE_S, float(times[-1])) else None


def _reported_gaps(run: Run) -> list[_Gap]:
    """The recorder's warnings, each reason once."""
    frame = signals(run, "warning")
    frame = frame[frame["name"].isin(["not recorded", "steps lost", "include"])]
    audited = "operators" in set(signals(run, "audited")["name"])
    gaps: dict[str, _Gap] = {}
    for name, detail, step in zip(frame["name"], frame["detail"].astype(str), frame["step"], strict=True):
        since = int(step) if step == step else None
        if detail.startswith("loss: none") and len(signals(run, "leaf loss")):  # another finding has it
            continue
        if detail in gaps or any(known in detail for known in _EXPECTED) or _is_device_reason(detail):
            continue
        if detail.startswith("operators within compiled graphs") and audited:
            continue
        if "a GradScaler is at work" in detail and fp16_without_scaler(run):
            continue  # reported by that finding
        if _NO_MORE_STEPS in detail and len(signals(run, "own loss scale")):
            count = detail.partition(":")[2].partition(_NO_MORE_STEPS)[0].strip()
            title = f"No step in the last {count} backward passes of a loop with a loss scale of its own"
            gaps[detail] = _Gap(title, "steps", "warning", since, _OWN_SCALE, detail)
            continue
        gaps[detail] = _gap_of_warning(str(name), detail, since)
    return list(gaps.values())


def _gap_of_warning(name: str, detail: str, since: int | None) -> _Gap:
    short = _short(detail)
    if name == "include":
        return _Gap(f"No tensor is measured: {short}", "include, exclude", "warning", since, _PATTERNS, detail)
    if name == "steps lost":
        return _Gap(
            f"The device failed, and rows were not written: {short}",
            "steps",
            "warning",
            since,
            _FAILED,
            detail,
        )
    stopped = " stopped at " in detail  # the reason names an observer
    unknown: tuple[Severity, Remedy | None] = ("warning", _FAILED if stopped else None)
    known = ((severity, remedy) for begin, severity, remedy in _REASONS if detail.startswith(begin))
    severity, remedy = next(known, unknown)
    if detail.startswith("watching failed"):
        begun = "Recording stopped" if "nothing is recorded" in detail else "Recording paused"
        at = f" at step {since:,}" if since is not None else ""
        return _Gap(f"{begun}{at}: {short}", "watch", severity, since, remedy, detail)
    if "rows lost" in detail:
        return _Gap(f"Rows were lost: {short}", "run folder", "warning", since, _WRITING, detail)
    if stopped or detail.startswith("what was held back"):
        return _Gap(f"A part of the recording stopped: {short}", "watch", severity, since, remedy, detail)
    return _Gap(f"Not recorded: {short}", detail.partition(":")[0][:60], severity, since, remedy, detail)


def _short(detail: str) -> str:
    return detail if len(detail) <= MAX_REASON_CHARS else detail[: MAX_REASON_CHARS - 1].rstrip() + "…"


def _is_device_reason(detail: str) -> bool:
    """Whether the reason is about empty columns of `device`, which depend on the machine."""
    columns = {column.name for column in TABLES["device"].columns}
    clauses = [clause.partition(":")[0] for clause in detail.split("; ")]
    return all(name.strip() in columns for name in clauses[0].split(","))
