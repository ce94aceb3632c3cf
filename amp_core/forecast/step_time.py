"""`forecast`: step time and memory by GPU and recipe, from the two traces of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pandas as pd

from amp_core.analysis import speed_summary
from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.steps import recipe as recipe_of
from amp_core.forecast.efficiency import OLD_SOFTWARE, OLD_SOFTWARE_YEAR, efficiency_of
from amp_core.forecast.low_bits import BITS, quantized_work
from amp_core.forecast.measured_steps import step_range, step_spread
from amp_core.forecast.memory import largest_batch, memory_needed
from amp_core.forecast.roofline import LAUNCH_US, DeviceTime, Range, Speeds, Work, device_time, why_not
from amp_core.forecast.traced_work import StepTrace, traces_of_run
from amp_core.hardware.data_sheets import NAMES, Rates, dense_rates, named_part
from amp_core.hardware.device_types import is_accelerator
from amp_core.schema import RunError
from amp_core.store.run import Run

RECIPES = ("fp32", "tf32", "bf16", "fp16")
UNMODELLED_FRAC = 0.1
"""Error of a ratio between different kernels beyond the range: fusion, layouts, the host's cost of casts."""
DISCLAIMER = "Forecast, not measured."
"""Shown with every forecast."""


@dataclass(frozen=True)
class Forecast:
    """Result of `forecast`. Nothing in it was measured."""

    table: pd.DataFrame
    """One row per part and recipe; see `forecast`."""
    notes: tuple[str, ...]
    """Caveats, the first of which is that this is not a measurement."""


def forecast(
    traces: tuple[StepTrace, StepTrace],
    gpus: Sequence[str],
    *,
    factor: float | None = None,
    calibrated: str = "",
    efficiency: Range | None = None,
    fp8_frac: float | None = None,
    fp4_frac: float | None = None,
    software_year: int | None = None,
) -> Forecast:
    """Time, speed-up and memory on each of `gpus` (names of `data_sheets.NAMES`) in FP32, TF32, BF16 and FP16; and in
    FP8 and NVFP4, where the shares (0–1) of the operations of matrix products that may take 8 and 4 bits are given.

    `traces` are of the same step in FP32 and under autocast. `factor` is measured over forecast time of a run recorded
    on a listed GPU (`measured_factor`), and `calibrated` the note on where another one comes from (`calibrate`).
    Columns, NaN if not known: gpu, recipe, why_not (why it cannot run there),
    step_ms, step_ms_low, step_ms_high, optimizer_ms (the optimizer's part of it), samples_per_s, speedup, speedup_low,
    speedup_high (over FP32 with TF32 off),
    over_tf32, over_tf32_low, over_tf32_high (over FP32 with TF32 on), over_bf16, over_bf16_low, over_bf16_high (of FP8
    and NVFP4), bound_by, matrix_frac, traffic_frac (shares of the time on the device), tensor_peak_bytes (parameters,
    gradients, optimizer, activations and temporaries of the traced batch), memory_bytes_low, memory_bytes_high,
    batch_low, batch_high (largest that fits), source (of the part's figures).

    `software_year` is that of PyTorch and CUDA's libraries; without it, and where `factor` says how long steps take,
    that of recent ones is taken. A range spans every combination of slow and fast in `efficiency`, by default that of
    each GPU and step (`step_range`). Raises `RunError` for an unknown part, for none, and for a share beyond 0 to 1.
    """
    if not gpus:
        raise RunError("gpus=[] is empty; name at least one, such as A100")
    wide, narrow = traces
    shares = {"fp8": _share("fp8_frac", fp8_frac), "nvfp4": _share("fp4_frac", fp4_frac)}
    low = {
        recipe: replace(narrow, work=quantized_work(narrow.work, recipe, frac))
        for recipe, frac in shares.items()
        if frac is not None
    }
    by_recipe = dict(zip(RECIPES, (wide, wide, narrow, narrow), strict=True)) | low
    old = software_year is not None and software_year <= OLD_SOFTWARE_YEAR and factor is None
    works = {recipe: Work.of(trace.work) for recipe, trace in by_recipe.items()}
    rows = []
    for gpu in dict.fromkeys(gpus):
        name, rates = named_part(gpu)
        of = efficiency_of(NAMES[name])
        time = cache(lambda recipe, speeds, rates=rates: device_time(works[recipe], rates, recipe, speeds))
        for recipe, trace in by_recipe.items():
            speeds = efficiency or step_range(trace.work, rates, recipe, of)
            rows.append(_row(name, rates, recipe, trace, time, factor or (OLD_SOFTWARE if old else 1.0), speeds))
    given = {recipe: frac for recipe, frac in shares.items() if frac is not None}
    notes = _notes(wide, narrow, calibrated or _own_calibration(factor), list(dict.fromkeys(gpus)), given)
    if old:
        notes += (
            f"With software of {software_year} times are {OLD_SOFTWARE:g} times those with later, which is in them.",
        )
    return Forecast(pd.DataFrame(rows), notes)


def _own_calibration(factor: float | None) -> str:
    if factor is None:
        return "Not calibrated with a measurement: no run on a listed GPU was given."
    return f"Calibrated with a run recorded on a GPU, which took {factor:.2f} times its own forecast."


def _share(name: str, frac: object) -> float | None:
    if frac is None:
        return None
    if isinstance(frac, bool) or not isinstance(frac, int | float) or not 0 <= frac <= 1:
        raise RunError(f"{name}={frac!r} is not a share; give a number from 0 to 1")
    return float(frac)


def gpu_names() -> list[str]:
    """Names of the GPUs that `forecast` accepts."""
    return list(NAMES)


def measured_factor(run: Run, traces: tuple[StepTrace, StepTrace] | None = None) -> tuple[str, float] | None:
    """The listed GPU that a run was recorded on, and the ratio of its median step time to its forecast.

    None for a run on another device or without step times. `traces` are of the run's step, by default its own.
    """
    measured = measured_step(run, traces or traces_of_run(run))
    return (measured.gpu, measured.ratio) if measured is not None else None


@dataclass(frozen=True)
class MeasuredStep:
    """A run's median step against its own forecast."""

    gpu: str
    recipe: str
    ratio: float
    """Measured over forecast time."""


def measured_step(run: Run, traces: tuple[StepTrace, StepTrace]) -> MeasuredStep | None:
    """The step of a run on a listed GPU, whose operators are `traces`; None on another device or without times."""
    device = run.head.config.get("device")
    gpu = profiled_gpu(run, str(device)) if is_accelerator(device) else None
    rates = dense_rates(gpu.name) if gpu is not None else None
    took = speed_summary(run).step_ms
    if gpu is None or rates is None or not took:
        return None
    wide, narrow = traces
    recipe = recipe_of(run) or "fp32"
    work = wide if recipe in ("fp32", "tf32") else narrow
    expected = device_time(Work.of(work.work), rates, recipe, efficiency_of(gpu.name).range().likely).total_us / 1e3
    return MeasuredStep(gpu.name, recipe, took / expected)


def _row(
    name: str,
    rates: Rates,
    recipe: str,
    trace: StepTrace,
    time: Callable[[str, Speeds], DeviceTime],
    factor: float,
    efficiency: Range,
) -> dict[str, object]:
    """A row of `forecast`; `time` gives that of a recipe with given speeds."""
    row: dict[str, object] = {"gpu": name, "recipe": recipe, "why_not": why_not(rates, recipe), "source": rates.source}
    if row["why_not"]:
        return row
    likely = time(recipe, efficiency.likely)
    step_us = likely.total_us * factor
    reference, tf32 = (time(r, efficiency.likely).total_us for r in ("fp32", "tf32"))
    totals, ratios, over_tf32, over_bf16 = [], [], [], []
    for speeds in efficiency.corners():
        took = time(recipe, speeds).total_us
        totals.append(took)
        ratios.append(time("fp32", speeds).total_us / took)
        over_bf16.append(time("bf16", speeds).total_us / took)
        for end in (efficiency.slow, efficiency.fast):  # TF32 and 16 bits have different kernels
            other = replace(speeds, tensor_cores=end.tensor_cores, tf32=end.tf32)
            tf32_speeds = speeds if recipe == "tf32" else other
            over_tf32.append(time("tf32", tf32_speeds).total_us / took)
    if rates.tf32 is None:
        over_tf32 = [float("nan")]
    unmodelled = 0.0 if recipe in ("fp32", "tf32") else UNMODELLED_FRAC
    times = [us * factor / 1e3 for us in totals]
    optimizer = Work.of(trace.work[trace.work["phase"] == "optimizer"])
    row |= {
        "step_ms": step_us / 1e3,
        "step_ms_low": min(times),
        "step_ms_high": max(times),
        "optimizer_ms": device_time(optimizer, rates, recipe, efficiency.likely).device_us * factor / 1e3,
        "samples_per_s": trace.samples / step_us * 1e6 if trace.samples else None,
        "speedup": reference / likely.total_us,
        "speedup_low": min(ratios) * (1 - unmodelled),
        "speedup_high": max(ratios) * (1 + unmodelled),
        "over_tf32": tf32 / likely.total_us if rates.tf32 is not None else None,
        "over_tf32_low": min(over_tf32) * (1 - unmodelled),
        "over_tf32_high": max(over_tf32) * (1 + unmodelled),
        "bound_by": likely.bound_by,
        "matrix_frac": likely.by_term["GEMM/conv"] / likely.device_us if likely.device_us else None,
        "traffic_frac": likely.by_term["memory bandwidth"] / likely.device_us if likely.device_us else None,
    }
    if recipe in BITS:
        row |= {"over_bf16": time("bf16", efficiency.likely).total_us / likely.total_us}
        row |= {"over_bf16_low": min(over_bf16) * (1 - unmodelled), "over_bf16_high": max(over_bf16) * (1 + unmodelled)}
    row["tensor_peak_bytes"] = trace.memory.peak
    needed, batch = memory_needed(trace), largest_batch(trace, rates)
    row["memory_bytes_low"], row["memory_bytes_high"] = needed if needed else (None, None)
    row["batch_low"], row["batch_high"] = batch if batch else (None, None)
    return row


def _speeds_note(gpu: str) -> str:
    """What the forecast assumes of a GPU, and from where."""
    name, rates = named_part(gpu)
    of = efficiency_of(NAMES[name])
    tf32 = f"TF32 {100 * of.tf32:.0f} %, " if rates.tf32 is not None else ""
    convolutions = f" (convolutions {100 * of.half * of.conv:.0f} %)" if of.conv < 1 else ""
    return (
        f"{name} reaches of its data sheet: FP32 {100 * of.fp32:.0f} %, {tf32}FP16 {100 * of.half:.0f} %"
        f"{convolutions}, bandwidth "
        f"{100 * of.bandwidth:.0f} %, each ± {100 * of.spread:.0f} % ({of.source}); and takes {LAUNCH_US:g} µs of the "
        "host's time per operator."
    )


def _unlike_note(gpu: str, wide: StepTrace) -> str:
    """What the forecast says of a model unlike those measured; empty for others."""
    name, rates = named_part(gpu)
    return step_spread(wide.work, rates, "fp32", efficiency_of(NAMES[name])).note


def _notes(
    wide: StepTrace, narrow: StepTrace, calibrated: str, gpus: list[str], shares: dict[str, float]
) -> tuple[str, ...]:
    notes = [
        f"{DISCLAIMER} A roofline over the operators of one traced step of {wide.name}, in eager mode: it does not "
        "know data loading, communication, compiled code or other programs.",
        *(_speeds_note(gpu) for gpu in gpus),
    ]
    unlike = [note for gpu in gpus if (note := _unlike_note(gpu, wide))]
    notes += unlike[:1]
    if shares:
        which = " and ".join(f"{100 * frac:.0f} % in {recipe.upper()}" for recipe, frac in shares.items())
        notes.append(
            f"Of the GEMM FLOPs, {which}, the rest in BF16. Inputs are quantized by separate operators, as in eager "
            "PyTorch; torch.compile fuses them. Memory is that of BF16: weights stay in FP32."
        )
    notes.append(calibrated)
    if narrow.derived:
        notes.append(
            "The step was traced in FP32, so which operators autocast would run in 16 bits is estimated; a trace under "
            "autocast gives a more accurate forecast."
        )
    elif wide.derived:
        notes.append("The step was traced under autocast; its FP32 form is derived from it.")
    if "transposed" in narrow.work and narrow.work["transposed"].sum() > 0:
        notes.append(
            "The convolutions are not channels last: in 16 bits cuDNN transposes their inputs and outputs, which is in "
            "these times. model.to(memory_format=torch.channels_last) saves it."
        )
    if wide.memory.activations is None:
        notes.append("Memory is not forecast: the run has no memory breakdown.")
    if refused := wide.memory.refused or narrow.memory.refused:
        notes.append(
            "The largest batch assumes that memory grows as the tensors saved for backward do: the model refused a "
            f"batch of twice the size ({' '.join(refused.split())[:120]})."
        )
    return tuple(notes)
