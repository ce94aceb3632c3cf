"""The breakdown of a step's memory compared with the allocator, and device samples with what a GPU can report."""

import time
from collections.abc import Iterator

import torch

from amp_core import load_run
from amp_core.analysis import device_now, memory_breakdown, not_recorded_reasons
from amp_core.hardware.gpu_state import GPM_METRICS
from amp_core.record.observers.device import MIN_INTERVAL_S, DeviceSampler
from amp_core.store.writer import RunWriter
from tests.gpu.checks import Place, Row
from tests.gpu.loops import Loop, scratch

SAMPLED_STEP = 4
"""A step whose memory `MemoryWatch` samples."""
PLAIN = ("gpu_util_frac", "memory_used_bytes", "power_w", "temperature_c", "sm_clock_mhz", "throttle")
"""Columns that every NVIDIA data-center GPU reports."""


def memory_parts(place: Place) -> Iterator[Row]:
    """Compare the explained peak with that of an unwatched loop, and measure the part that belongs to no tensor."""
    size = "small" if place.cuda and not place.quick else "tiny"
    for recipe in ("fp32", "bf16"):
        with scratch() as folder:
            bare = _bare_peak(Loop(place, "text-gpt", size, recipe, batch_size=4)) if place.cuda else None
            watched = Loop(place, "text-gpt", size, recipe, batch_size=4, into=folder / "run", every=1000)
            watched.run(SAMPLED_STEP + 2)
            watched.close()
            breakdown = memory_breakdown(load_run(folder / "run"), SAMPLED_STEP)
        assert breakdown.total_bytes is not None
        sizes = dict(zip(breakdown.parts["category"], breakdown.parts["bytes"], strict=True))
        off = breakdown.total_bytes / bare - 1 if bare else None
        whole = abs(breakdown.parts["bytes"].sum() - breakdown.total_bytes) < 1
        good = whole and off is not None and abs(off) < 0.02 and sizes["other"] < 0.1 * breakdown.total_bytes
        listed = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in sizes.items() if size >= 2**20)
        against = f"{off:+.2%} of a bare loop's; " if off is not None else ""
        yield Row(
            f"memory of a step, text-gpt {size}, {recipe}",
            "adds up to a bare loop's peak within 2 %, less than 10 % of it unexplained",
            f"{breakdown.total_bytes / 2**20:,.0f} MiB {breakdown.moment}, {against}in MiB: {listed}",
            place.judged(good),
            {"bytes": sizes, "peak": breakdown.total_bytes, "bare": bare},
        )
    if place.cuda:
        yield from _device(place)


def _bare_peak(loop: Loop) -> int:
    loop.run(3)
    torch.cuda.reset_peak_memory_stats(loop.place.device)
    loop.run(2)
    peak = torch.cuda.max_memory_allocated(loop.place.device)
    loop.close()
    return peak


def _device(place: Place) -> Iterator[Row]:
    loop = Loop(place, "text-gpt", "tiny" if place.quick else "small", "bf16")
    loop.run(3)
    with scratch() as folder:
        writer = RunWriter(folder / "run")
        observer = DeviceSampler(writer, place.device, MIN_INTERVAL_S)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            loop.run(5)
        observer.close()
        writer.close()
        run = load_run(folder / "run")
        now, missing = device_now(run), not_recorded_reasons(run)
    loop.close()
    hopper = torch.cuda.get_device_capability(place.device) >= (9, 0)
    wanted = (*PLAIN, *GPM_METRICS) if hopper else PLAIN
    silent = [name for name in wanted if getattr(now, name) is None]
    listed = ", ".join(f"{n}={getattr(now, n)}" for n in (*PLAIN, *GPM_METRICS) if getattr(now, n) is not None)
    yield Row(
        "columns of device samples",
        "counters too" if hopper else "all but counters",
        f"{now.samples} samples; {listed}{'; not: ' + '; '.join(missing) if missing else ''}",
        place.judged(not silent and now.samples >= 3),
        {"samples": now.samples, "missing": missing},
    )
