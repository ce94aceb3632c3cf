"""Speedup over FP32 with TF32 off: samples per second of each recipe, each at its best batch size."""

import math
import time
from collections.abc import Iterator

import torch

from amp_core.settings.training import RECIPES, WORKLOADS, TrainConfig
from amp_core.train.workloads import Workload, build
from amp_core.tune.batch_trial import out_of_memory
from tests.gpu.checks import Place, Row
from tests.gpu.loops import Loop

RECIPES_SHOWN = ("fp32", "tf32", "bf16", "fp16")
GAIN = 1.03
"""The search ends when doubling the batch size gains less than this."""


def gpt2(place: Place) -> Iterator[Row]:
    """GPT-2 small, or its tiny size where that would take too long."""
    yield from compared(place, "text-gpt", "small", asked=4.0)


def bert(place: Place) -> Iterator[Row]:
    """BERT large, or its tiny size."""
    yield from compared(place, "text-bert", "large", asked=6.0)


def compared(place: Place, workload: str, size: str, asked: float) -> Iterator[Row]:
    """One row per recipe, and the ratio that has a limit."""
    if place.quick or not place.cuda:
        size = "tiny"
    recipes = RECIPES_SHOWN if place.cuda else ("fp32", "bf16")
    rates: dict[str, float] = {}
    made = build(TrainConfig(workload=workload, size=size).resolved())  # once: large models take seconds to initialise
    for number, recipe in enumerate(recipes):
        share = place.left_s / (len(recipes) - number) - 1
        batch, rate = best_batch(place, made, workload, size, recipe, share)
        rates[recipe] = rate
        context = WORKLOADS[workload].sizes[size].dims["context"]
        yield Row(
            f"speed, {workload} {size}, {RECIPES[recipe].label}",
            "",
            f"{rate:,.1f} samples/s, {rate * context:,.0f} tokens/s at batch {batch}; "
            f"{rate / rates['fp32']:.2f} × FP32",
            "shown",
            {"samples_per_s": rate, "batch": batch, "over_fp32": rate / rates["fp32"]},
        )
    if "fp16" in rates:
        ratio = rates["fp16"] / rates["fp32"]
        yield Row(
            f"speed, {workload} {size}, FP16 over FP32",
            f"≥ {asked:g} ×",
            f"{ratio:.2f} ×, each at its own batch",
            place.judged(ratio >= asked),
            {"ratio": ratio},
        )


def best_batch(
    place: Place, made: Workload, workload: str, size: str, recipe: str, seconds: float
) -> tuple[int, float]:
    """The power of two with the most samples per second as batch size, and that rate.

    The search ends when memory or time runs out, or when a larger batch gains nothing.
    """
    until = time.monotonic() + seconds
    best, batch = (0, 0.0), 4
    while True:
        begun = time.monotonic()
        try:
            rate = rate_of(Loop(place, workload, size, recipe, batch_size=batch, made=made))
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            rate = 0.0
        place.free()  # here, after the frames of a loop that ran out of memory are gone
        gained = rate > best[1] * GAIN
        best = (batch, rate) if rate > best[1] else best
        took = time.monotonic() - begun
        batch *= 2
        over = time.monotonic() + 1.7 * took > until or not fits(place, workload, size, batch)
        if not gained or place.quick or over:
            return best


def fits(place: Place, workload: str, size: str, batch: int) -> bool:
    """Whether a batch size may be tried: not every library raises an exception when memory runs out, and an index that
    32 bits cannot hold may end the process."""
    spec = WORKLOADS[workload].sizes[size]
    logits = batch * spec.dims["context"] * spec.dims["vocabulary"]
    needed = spec.memory_bytes(batch) if logits < 2**31 else math.inf
    return not place.cuda or needed < 0.7 * torch.cuda.get_device_properties(place.device).total_memory


def rate_of(loop: Loop) -> float:
    """Samples per second after a warm-up, over a second of steps or a few steps. Closes the loop."""
    try:
        loop.run(3)
        begun = time.perf_counter()
        loop.run(1)
        once = time.perf_counter() - begun
        steps = max(3, min(50, round((0.05 if loop.place.quick else 1.0) / once)))
        begun = time.perf_counter()
        loop.run(steps)
        return loop.config.batch_size * steps / (time.perf_counter() - begun)
    finally:
        loop.close()
