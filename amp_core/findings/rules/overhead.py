"""Rules on overhead: kernel launches, waits of the CPU for the GPU, and watching itself."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from amp_core.analysis.performance.host_copies import TO_HOST, tiny_copies
from amp_core.analysis.performance.kernels import is_trace, kernel_rows, on_cpu, window_rows
from amp_core.analysis.performance.saving import IdleSaving
from amp_core.analysis.steps import attempts, scaler_enabled, warmup_steps
from amp_core.findings.launch_remedies import ONE_COPY, SORTED_ANEW
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.rules.hardware import MIN_REPORTED_FRAC
from amp_core.findings.signals import call_orders, last_step, on_gpu
from amp_core.findings.snippets import FIND_WAITS, LAUNCH_BEFORE_WAITS, TIME_BY_EVENTS
from amp_core.findings.trace_findings import reported_saving, saving_finding, trains
from amp_core.findings.trace_launches import (
    COALESCE,
    find_waits,
    launch_bound_of_trace,
    waits_for_device,
    waits_for_events,
)
from amp_core.store.run import Run
from amp_core.text.formatting import mean_count, number

MAX_IDLE_FRAC = 0.5
"""A GPU that is idle for longer than it is busy is not bound by its arithmetic."""
LAUNCH_US = 10.0
"""Approximate cost of launching a kernel on the CPU, microseconds: shorter kernels cannot keep a GPU busy."""
TINY_STEP_MS, SHORT_RUN_MS = 5.0, 10_000.0
"""In a shorter run of shorter steps, a share of their time is a negligible cost."""
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::_local_scalar_dense", "aten::item")


@rule(
    Entry(
        code="launch-bound",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=450,
        what="The GPU waits for the CPU to launch small kernels; the casts of mixed precision add more of them.",
        signal="Busy and idle time of the GPU in profiled steps, and the duration of its kernels.",
        threshold="Idle more than half of the time, excluding data loading, with kernels shorter than 10 µs on "
        "average, which is about the cost of launching one.",
        advice="Faster arithmetic does not help while the GPU waits. Use larger batches, compile the model, capture "
        "CUDA graphs, and use fused optimizers.",
        snippet='model = torch.compile(model, mode="reduce-overhead")\n'
        "optimizer = type(optimizer)(model.parameters(), lr=lr, fused=True)   # Adam, AdamW, SGD, Adagrad",
        frameworks={
            "Transformers Trainer": 'args = TrainingArguments(output_dir="out", torch_compile=True, '
            'optim="adamw_torch_fused")',
        },
        page="step-cost",
    )
)
def launch_bound(run: Run) -> list[Finding]:
    """`launch-bound`: the GPU is idle for most of the time, loading of data excluded, and its kernels are short."""
    if is_trace(run):
        return launch_bound_of_trace(run)
    rows = kernel_rows(run, everything=True)
    rows = rows[rows["phase"] != "watch"]
    count = float(rows["count"].sum())
    if not count or on_cpu(rows):
        return []
    mean_us = float(rows["total_us"].sum()) / count
    idle = _idle_share(run, rows)
    if idle is None or idle <= MAX_IDLE_FRAC or mean_us >= LAUNCH_US:
        return []
    by_phase = rows[rows["phase"] != ""].groupby("phase")["count"].sum()
    where = str(by_phase.idxmax()) if len(by_phase) else "kernels"
    first = rows["step"].min()
    whole = "step" if np.isfinite(first) else "profiled window"
    return [
        make_finding(
            "launch-bound",
            f"The GPU is idle for {100 * idle:.0f} % of the {whole}, between kernels of {mean_us:.1f} µs on average",
            where,
            steps=(int(first), int(rows["step"].max())) if np.isfinite(first) else None,
            value=idle,
            limit=MAX_IDLE_FRAC,
            unit="share of the step",
        )
    ]


def _idle_share(run: Run, rows: pd.DataFrame) -> float | None:
    """Share of wall time in which the GPU was idle although data was available; None if not known."""
    windows = window_rows(run)
    windows = windows[(windows["wall_us"] > 0) & windows["idle_us"].notna()]
    if len(windows):
        idle = windows["idle_us"] - windows["idle_data_us"].fillna(0.0)
        return float(idle.sum() / windows["wall_us"].sum())
    steps = attempts(run)
    wall = 0.0
    for first, marked in rows[["step", "steps"]].drop_duplicates().to_numpy():
        if np.isfinite(first):
            marked = marked if np.isfinite(marked) else 1
            wall += float(steps[steps["step"].between(first, first + marked - 1)]["step_ms"].sum()) * 1000
    return max(0.0, 1 - float(rows["total_us"].sum()) / wall) if wall > 0 else None


@rule(
    Entry(
        code="host-syncs",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=460,
        what=(
            "The CPU synchronizes with the GPU in every step: for the scaler's found_inf flag, for `get_scale()` or "
            "for a logged loss."
        ),
        signal="Synchronizing calls per profiled step; `get_scale` in the order of calls.",
        threshold="More than the one per step and optimizer that the scaler itself needs.",
        advice="While the CPU waits it launches nothing. Use a fused optimizer, which skips on the device, and read "
        "losses and scales only occasionally.",
        snippet="optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
        "if step % 50 == 0:\n"
        "    print(loss.item(), scaler.get_scale())",
        frameworks={"Transformers Trainer": 'args = TrainingArguments(output_dir="out", optim="adamw_torch_fused")'},
        page="step-cost",
    )
)
def host_syncs(run: Run) -> list[Finding]:
    """`host-syncs`: the CPU waits for the GPU more than once per step and optimizer."""
    if is_trace(run):
        return _syncs_of_trace(run)
    optimizers = run.head.config.get("optimizers")
    allowed = float(max(1, len(optimizers)) if isinstance(optimizers, list) else 1)
    windows = window_rows(run)
    windows = windows[windows["syncs"].notna() & ~windows["device"].str.startswith("cpu")]
    rows = run.kernels
    waits = rows[rows["name"].isin(_WAITS) | rows["op"].isin(_WAITS)] if len(rows) else rows
    waits = waits[~waits["device"].fillna("").str.startswith("cpu")] if len(waits) else waits
    per_step, where = 0.0, ""
    if len(windows):
        per_step = float(windows["syncs"].sum() / windows["steps"].fillna(1.0).sum())
        where = "synchronizing calls"
    elif len(waits):
        profiled = rows[["step", "rank", "steps"]].drop_duplicates()["steps"]
        per_step = float(waits["count"].astype(float).sum() / profiled.astype(float).fillna(1.0).sum())
    if len(waits):
        longest = waits.iloc[int(waits["count"].astype(float).to_numpy().argmax())]
        op = longest["op"]  # NaN if no operator waited
        where = op if isinstance(op, str) and op else str(longest["name"])
    get_scale_calls = _get_scale_calls(run) if on_gpu(run) and scaler_enabled(run) else 0
    if per_step <= allowed and not get_scale_calls:
        return []
    per = "per step"
    if get_scale_calls and per_step <= allowed:
        per_step, where, allowed = float(get_scale_calls), "scaler.get_scale", 0.0
    elif len(windows) and windows["steps"].isna().all():
        per = "in a window without step markers"
    return [
        make_finding(
            "host-syncs",
            f"The CPU waits for the GPU {mean_count(per_step)} times {per} ({where})",
            where,
            value=per_step,
            limit=allowed,
            unit="waits per step" if per == "per step" else "waits in the window",
        )
    ]


_SYNC_REMEDIES = {
    "aten::_local_scalar_dense": Remedy(
        "A tensor's value is read on the host by `.item()`, `float()`, `if` or `print`. Read losses only occasionally, "
        "and keep on the device what only the device needs.",
        "if step % 50 == 0:\n    print(loss.item())",
    ),
    "aten::copy_": Remedy(
        "A copy from pageable memory blocks the host until it is done. Pin the memory and copy asynchronously.",
        "loader = DataLoader(data, batch_size, pin_memory=True)\nx = x.to(device, non_blocking=True)",
    ),
    "aten::nonzero": Remedy(
        "The size of the result depends on the values, so the host waits for them. Use `torch.where` or a mask "
        "where what follows may keep the size; otherwise select once for all.",
        "y = torch.where(mask, x, 0.0)   # instead of x[mask]",
    ),
}
_SYNC_REMEDIES |= {COALESCE: SORTED_ANEW}
_SYNC_REMEDIES |= {"aten::item": _SYNC_REMEDIES["aten::_local_scalar_dense"]}
_SYNC_REMEDIES |= dict.fromkeys(("aten::to", "aten::_to_copy"), _SYNC_REMEDIES["aten::copy_"])
_SYNCS_OF_INFERENCE = dict.fromkeys(
    ("aten::_local_scalar_dense", "aten::item"),
    Remedy(
        "A tensor's value is read on the host by `.item()`, `float()`, `if`, `while` or `print`. Keep it on the device "
        "and decide there, and give a loop a number of passes that the host knows.",
        "y = torch.where(condition, a, b)   # instead of a if condition.item() else b",
    ),
)
"""The same where the trace contains no training."""
_OTHER_SYNC = Remedy(
    "While the host waits it launches nothing, and afterwards the GPU waits for the host. Find the call, and wait "
    "only where a result is needed.",
    FIND_WAITS,
)


_OF_EVENTS = Remedy(
    "While the host waits for an event it launches nothing, and afterwards the GPU waits for the host. Launch the next "
    "pass before the results of this one are waited for, where it does not need them.",
    LAUNCH_BEFORE_WAITS,
)
_OF_DEVICE = Remedy(
    "The program waits for the whole device, as torch.cuda.synchronize() does, and afterwards the GPU waits for the "
    "host. Remove these calls from the loop, or time it with events.",
    TIME_BY_EVENTS,
)


def _syncs_of_trace(run: Run) -> list[Finding]:
    other = _OF_DEVICE if waits_for_device(run) else _OF_EVENTS if waits_for_events(run) else _OTHER_SYNC
    known = _SYNC_REMEDIES if trains(run) else _SYNC_REMEDIES | _SYNCS_OF_INFERENCE
    if tiny_copies(run)[0]:
        known = known | dict.fromkeys(("aten::copy_", "aten::to", "aten::_to_copy"), ONE_COPY)
    else:
        known = known | dict.fromkeys(("aten::copy_", "aten::to", "aten::_to_copy"), _copying(run))
    other = replace(other, snippet=find_waits(run))
    saving = reported_saving(run, "host-syncs", IdleSaving)
    if saving is None:
        return []
    remedy, others = known.get(saving.where, other), ""
    if saving.alone_us < MAX_ALONE_FRAC * saving.saved_us:
        alone = number(saving.alone_us / 1e3, "ms")
        others = f" The waits in other operators then last longer: without these alone it is {alone}, so remove all."
    return [saving_finding(run, saving, replace(remedy, advice=f"{remedy.advice}{others}"))]


MAX_ALONE_FRAC = 0.5
"""Share of what a step gains without any wait in what it gains without those of one operator from which others are as
much to blame."""


def _copying(run: Run) -> Remedy:
    """What to advise for copies that block the host, by their direction."""
    rows = kernel_rows(run, everything=True)
    rows = rows[rows["name"].str.contains("Pageable", regex=False)]
    to_host = float(rows["count"][rows["name"].str.contains(TO_HOST)].sum())
    if to_host >= MIN_TO_HOST_FRAC * float(rows["count"].sum()) > 0:
        return _INTO_PINNED
    remedy = _SYNC_REMEDIES["aten::copy_"]
    if not run.head.config.get("loader"):
        remedy = replace(remedy, snippet="x = x.pin_memory().to(device, non_blocking=True)   # pinned ahead of time")
    return remedy


MIN_TO_HOST_FRAC = 0.5
"""Share of copies to the host in those of pageable memory from which these are what is advised on."""
_INTO_PINNED = Remedy(
    "A copy to pageable memory blocks the host until it is done. Copy results into pinned memory, asynchronously, and "
    "wait once before they are read.",
    "out = torch.empty(y.shape, dtype=y.dtype, pin_memory=True)   # once\n"
    "out.copy_(y, non_blocking=True)\ntorch.cuda.synchronize()   # once for all of them",
)


def _get_scale_calls(run: Run) -> int:
    """Calls of `get_scale` per step, in most steps."""
    every = call_orders(run)
    times = {calls.count("get_scale"): 0 for _, _, calls in every}
    for first, last, calls in every:
        times[calls.count("get_scale")] += last - first + 1
    return max(times, key=times.__getitem__) if times else 0


@rule(
    Entry(
        code="watch-overhead",
        severity="info",
        family=SPEED_AND_MEMORY,
        order=510,
        what="Recording itself takes a noticeable share of the time.",
        signal="Recording time over the total time of all steps.",
        threshold="5 % on average, excluding the first steps; not in a run of a few seconds whose steps take less "
        "than 5 ms without recording.",
        advice="The times of this run include recording overhead. Sample less often, or set a budget.",
        snippet='watch(model, optimizer, into="runs/a", every=100, budget=0.02)',
        page="",
    )
)
def watch_overhead(run: Run) -> list[Finding]:
    """`watch-overhead`: recording takes a noticeable part of the time."""
    steps = attempts(run)
    steps = steps.iloc[warmup_steps(len(steps)) :]
    steps = steps[~steps["step"].isin(_steps_with_extra_cost(run))]
    known = steps[np.isfinite(steps["watch_ms"]) & np.isfinite(steps["step_ms"])]
    total = float(known["step_ms"].sum())
    watched = float(known["watch_ms"].sum())
    share = watched / total if total > 0 else 0.0
    if share <= MIN_REPORTED_FRAC:
        return []
    if total < SHORT_RUN_MS and total - watched < TINY_STEP_MS * len(known):
        return []
    return [
        make_finding(
            "watch-overhead",
            f"Recording overhead is {100 * share:.0f} % of the step time",
            "watch",
            steps=(int(known["step"].iloc[0]), int(known["step"].iloc[-1])),
            value=share,
            limit=MIN_REPORTED_FRAC,
            unit="share of time",
        )
    ]


def _steps_with_extra_cost(run: Run) -> set[int]:
    """Steps that were audited, traced or profiled, and the one after each: their one-time cost was requested."""
    steps = {*run.audits["step"].dropna(), *pc.unique(run.table("ops").column("step")).drop_null().to_pylist()}
    last = last_step(run)
    stop = last + 1 if last is not None else 0
    windows = run.windows[["step", "steps"]].dropna().to_numpy(np.int64)  # a trace may lack step markers
    for first, many in windows:
        steps.update(range(first, min(stop, first + many)))
    return {int(step) + after for step in steps for after in (0, 1)}
