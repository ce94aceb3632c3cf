"""Rules on the GPU, its kernels and memory: what keeps mixed precision from being faster or smaller."""

import numpy as np
import pandas as pd

from amp_core.analysis._gpus import profiled_gpu
from amp_core.analysis._kernels import is_matrix, kernel_rows, on_cpu, window_rows
from amp_core.analysis._steps import attempts, recipe, scaler_enabled, warmup_steps
from amp_core.analysis.eligible import matrix_ops
from amp_core.findings._found import found
from amp_core.findings._signals import LOWERED, autocast_dtype, facts, on_gpu, orders
from amp_core.findings.model import Finding, Severity
from amp_core.run import Run

IDLE = 0.5
"""A GPU that waits for longer than it works is bound by something else than its arithmetic."""
LAUNCH_US = 10.0
"""About what launching a kernel costs the CPU, microseconds: shorter ones cannot keep a GPU busy."""
OFF = 0.1
"""Share of matrix time off tensor cores from which on something is to be won: at most so much of it (Amdahl)."""
SHARE = 0.05
"""Share of time or of weights below which nothing is said: less than runs of one program differ by."""
ALIGNED = 8
"""Elements of 16 bits in 16 bytes (NVIDIA, "Matrix Multiplication Background User's Guide", table 1)."""
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::_local_scalar_dense", "aten::item")


def tf32_baseline(run: Run) -> list[Finding]:
    """`tf32-baseline`: an FP32 run whose matrix products used TF32, or could."""
    if recipe(run) not in ("fp32", None) or autocast_dtype(run) is not None:
        return []
    rows = kernel_rows(run)
    tf32 = rows[rows["precision"] == "tf32"]
    if len(tf32):
        longest = tf32.iloc[int(tf32["total_us"].to_numpy().argmax())]
        share = float(tf32["total_us"].sum() / rows["total_us"].sum())
        where = str(longest["module"]) or str(longest["name"])
        title = f"{100 * share:.0f} % of the kernel time of this FP32 run is in TF32 kernels"
        severity: Severity = "warning"
        if recipe(run) is None:  # a trace does not say what was meant: TF32 may have been the purpose
            title, severity = (
                f"{100 * share:.0f} % of the kernel time is in TF32 kernels: this is no FP32 baseline",
                "info",
            )
        unit = "share of kernel time"
        return [found("tf32-baseline", title, where, value=share, limit=0.0, unit=unit, severity=severity)]
    flags = facts(run.head.environment, "flags")
    gpu = profiled_gpu(run, "cuda:0")
    if len(rows) or not on_gpu(run) or recipe(run) is None or not gpu.takes("tf32"):
        return []
    convolves = any("Conv" in str(kind) for kind in facts(run.head.model, "layers").values())
    if flags.get("tf32_matmul") is True:
        switch = "torch.backends.cuda.matmul.allow_tf32"
    elif flags.get("tf32_cudnn") is True and convolves:
        switch = "torch.backends.cudnn.allow_tf32"
    else:
        return []
    return [
        found("tf32-baseline", "This FP32 run allows TF32", switch, value=1.0, limit=0.0, unit="switches that are on")
    ]


def no_tensor_cores_on_device(run: Run) -> list[Finding]:
    """`no-tensor-cores-on-device`: 16-bit autocast on a GPU without tensor cores."""
    if autocast_dtype(run) is None or not (on_gpu(run) or len(run.kernels)):
        return []
    rows = kernel_rows(run)
    if on_cpu(rows):
        return []
    gpu = profiled_gpu(run, str(rows["device"].iloc[0]) if len(rows) else "cuda:0")
    if gpu.has_tensor_cores is not False:
        return []
    major, minor = gpu.capability or (0, 0)
    return [
        found(
            "no-tensor-cores-on-device",
            f"{gpu.name} has no tensor cores (compute capability {major}.{minor})",
            gpu.name,
            value=major + minor / 10,
            limit=7.0,
            unit="compute capability",
        )
    ]


def launch_bound(run: Run) -> list[Finding]:
    """`launch-bound`: the GPU is idle for most of the time, data apart, and its kernels are short."""
    rows = kernel_rows(run, everything=True)
    rows = rows[rows["phase"] != "watch"]
    count = float(rows["count"].sum())
    if not count or on_cpu(rows):
        return []
    mean_us = float(rows["total_us"].sum()) / count
    idle = _idle_share(run, rows)
    if idle is None or idle <= IDLE or mean_us >= LAUNCH_US:
        return []
    by_phase = rows[rows["phase"] != ""].groupby("phase")["count"].sum()
    where = str(by_phase.idxmax()) if len(by_phase) else "kernels"
    first = rows["step"].min()
    return [
        found(
            "launch-bound",
            f"The GPU is idle for {100 * idle:.0f} % of the step between kernels of {mean_us:.1f} µs on average",
            where,
            steps=(int(first), int(rows["step"].max())) if np.isfinite(first) else None,
            value=idle,
            limit=IDLE,
            unit="share of the step",
        )
    ]


def _idle_share(run: Run, rows: pd.DataFrame) -> float | None:
    """Share of wall time in which the GPU had nothing to do though data was there; None where not known."""
    windows = window_rows(run)
    windows = windows[(windows["wall_us"] > 0) & windows["idle_us"].notna()]
    if len(windows):
        idle = windows["idle_us"] - windows["idle_data_us"].fillna(0.0)
        return float(idle.sum() / windows["wall_us"].sum())
    steps = attempts(run)
    wall = 0.0
    for first, number in rows[["step", "steps"]].drop_duplicates().to_numpy():
        if np.isfinite(first):
            number = number if np.isfinite(number) else 1
            wall += float(steps[steps["step"].between(first, first + number - 1)]["step_ms"].sum()) * 1000
    return max(0.0, 1 - float(rows["total_us"].sum()) / wall) if wall > 0 else None


def kernels_off_tensor_cores(run: Run) -> list[Finding]:
    """`kernels-off-tensor-cores`: matrix kernels with 16-bit input that do not use tensor cores, on a GPU with them."""
    rows = kernel_rows(run)
    if on_cpu(rows) or no_tensor_cores_on_device(run):
        return []
    matrix = rows[is_matrix(rows)]
    total = float(matrix["total_us"].sum())
    ops = matrix_ops(run)
    never = ops[ops["reason"].isin(["vector", "depthwise"])]
    off = matrix[(matrix["tensor_core"] == "no") & ~matrix["precision"].isin(["fp32", "tf32", "fp64"])]
    off = off[~off["name"].isin(never["kernel"])]
    if autocast_dtype(run) is None and not off["precision"].isin(["fp16", "bf16"]).any():
        return []
    share = float(off["total_us"].sum()) / total if total > 0 else 0.0
    if share < OFF:
        return []
    longest = off.iloc[int(off["total_us"].to_numpy().argmax())]
    where = str(longest["module"]) or str(longest["op"]) or str(longest["name"])
    return [
        found(
            "kernels-off-tensor-cores",
            f"{100 * share:.0f} % of the time of 16-bit matrix work runs off tensor cores, most of it in "
            f"{longest['name']}",
            where,
            steps=steps_of(off),
            value=share,
            limit=OFF,
            unit="share of matrix time",
        )
    ]


def unaligned_dims(run: Run) -> list[Finding]:
    """`unaligned-dims`: dimensions of large weights that are no multiples of 8. A remark on a CPU, where none of it
    matters until the model moves to a GPU."""
    if autocast_dtype(run) is None:
        return []
    ops = matrix_ops(run) if len(run.kernels) else pd.DataFrame()
    if len(ops) and not (ops["tensor_core"] == "").all():
        bad = ops[ops["unaligned"].astype(str).ne("") & ops["unaligned"].notna() & ~ops["reason"].eq("vector")]
        share = float(bad["time_frac"].sum())
        if share < SHARE:
            return []
        worst = bad.iloc[0]
        where, said = str(worst["module"]) or str(worst["op"]), f"{worst['unaligned']} of {worst['op']}"
        return [_unaligned(run, where, said, share, "share of kernel time")]
    model = run.head.model
    layers = facts(model, "layers")
    weights: dict[str, tuple[int, list[int]]] = {}
    for name, shape in facts(model, "shapes").items():
        kind = str(layers.get(name.rpartition(".")[0], ""))
        if isinstance(shape, list) and len(shape) > 1 and any(k in kind for k in LOWERED):
            odd = [int(n) for n in shape[:2] if n % ALIGNED]
            weights[name] = (int(np.prod(shape)), odd)
    total = sum(size for size, _ in weights.values())
    odd_ones = {n: (size, odd) for n, (size, odd) in weights.items() if odd}
    share = sum(size for size, _ in odd_ones.values()) / total if total else 0.0
    if share < SHARE:
        return []
    where = max(odd_ones, key=lambda n: odd_ones[n][0])
    return [_unaligned(run, where, f"{odd_ones[where][1][0]} in {where}", share, "share of matrix weights")]


def _unaligned(run: Run, where: str, said: str, share: float, unit: str) -> Finding:
    return found(
        "unaligned-dims",
        f"Sizes are no multiples of {ALIGNED}: {said}",
        where,
        severity=None if on_gpu(run) or len(run.kernels) else "info",
        value=share,
        limit=SHARE,
        unit=unit,
    )


def layout_transposes(run: Run) -> list[Finding]:
    """`layout-transposes`: kernels that turn NCHW to NHWC and back take a noticeable part of the time."""
    rows = kernel_rows(run)
    if on_cpu(rows) or rows.empty:
        return []
    turned = rows[rows["name"].str.contains("nchwToNhwc|nhwcToNchw", regex=True) | (rows["category"] == "layout")]
    share = float(turned["total_us"].sum() / rows["total_us"].sum())
    if share < SHARE:
        return []
    longest = turned.iloc[int(turned["total_us"].to_numpy().argmax())]
    return [
        found(
            "layout-transposes",
            f"{100 * share:.0f} % of the kernel time goes into turning the layout of convolutions",
            str(longest["module"]) or str(longest["op"]) or str(longest["name"]),
            steps=steps_of(turned),
            value=share,
            limit=SHARE,
            unit="share of kernel time",
        )
    ]


def host_syncs(run: Run) -> list[Finding]:
    """`host-syncs`: the CPU waits for the GPU more than once per step and optimizer."""
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
        op = longest["op"]  # NaN where the wait was no operator's
        where = op if isinstance(op, str) and op else str(longest["name"])
    asked = _asked_for_scale(run) if on_gpu(run) and scaler_enabled(run) else 0
    if per_step <= allowed and not asked:
        return []
    if asked and per_step <= allowed:
        per_step, where, allowed = float(asked), "scaler.get_scale", 0.0
    return [
        found(
            "host-syncs",
            f"The CPU waits for the GPU {per_step:.3g} times per step ({where})",
            where,
            value=per_step,
            limit=allowed,
            unit="waits per step",
        )
    ]


def _asked_for_scale(run: Run) -> int:
    """How often per step the loop asks for the loss scale, in most steps."""
    every = orders(run)
    times = {calls.count("get_scale"): 0 for _, _, calls in every}
    for first, last, calls in every:
        times[calls.count("get_scale")] += last - first + 1
    return max(times, key=times.__getitem__) if times else 0


def watch_overhead(run: Run) -> list[Finding]:
    """`watch-overhead`: watching takes a noticeable part of the time."""
    steps = attempts(run)
    steps = steps.iloc[warmup_steps(len(steps)) :]
    steps = steps[~steps["step"].isin(_looked_at_closely(run))]
    known = steps[np.isfinite(steps["watch_ms"]) & np.isfinite(steps["step_ms"])]
    total = float((known["step_ms"] * known["stands_for"]).sum())
    share = float((known["watch_ms"] * known["stands_for"]).sum()) / total if total > 0 else 0.0
    if share <= SHARE:
        return []
    return [
        found(
            "watch-overhead",
            f"Watching takes {100 * share:.0f} % of the time of a step",
            "watch",
            steps=(int(known["step"].iloc[0]), int(known["step"].iloc[-1])),
            value=share,
            limit=SHARE,
            unit="share of time",
        )
    ]


def _looked_at_closely(run: Run) -> set[int]:
    """Steps that were audited, traced or profiled, and the one after each: their cost was asked for, and comes once."""
    steps = {*run.audits["step"].dropna(), *run.ops["step"].dropna()}
    stop = int(run.steps["step"].max()) + 1 if len(run.steps) else 0
    windows = run.windows[["step", "steps"]].dropna().to_numpy(np.int64)  # a trace may mark no steps
    for first, many in windows:
        steps.update(range(first, min(stop, first + many)))
    return {int(step) + after for step in steps for after in (0, 1)}


def steps_of(rows: pd.DataFrame) -> tuple[int, int] | None:
    """First and last step of these rows; None where none has one."""
    known = rows["step"].dropna()
    return (int(known.min()), int(known.max())) if len(known) else None
