"""Watching changes nothing and never synchronizes; its cost in time and memory."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.observers.device import DeviceSampler
from amp_core.settings.training import TrainConfig
from amp_core.store.writer import RunWriter
from amp_core.train.engine.training import endless, train_step
from amp_core.train.workloads import build
from tests.gpu import precision
from tests.gpu.checks import Place, Row
from tests.gpu.loops import Loop, alternate, in_words, plain, quartiles, scratch, seconds_a_step

WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "aten::_local_scalar_dense",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
)
"""Calls that make the host wait: synchronizations, and allocations that torch's caching allocators cannot serve."""
LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)
MAX_LAUNCHES = 13
"""Launches that watching adds to a sampled step; one of them copies the loss that the loop logs."""


def model_of(place: Place) -> tuple[str, str]:
    """The model of timed loops: GPT-2 small, or the smallest one where that would take too long."""
    return ("text-gpt", "small") if place.cuda and not place.quick else ("text-gpt", "tiny")


def identical(place: Place) -> Iterator[Row]:
    """Losses with and without watching from the same seed, and the operators of a traced step."""
    steps = 6 if place.quick else 30
    size = "mini" if place.cuda and not place.quick else "tiny"
    recipes = ("fp32", "bf16") if not place.cuda else ("fp32", "bf16", "fp16")
    with sdpa_kernel(SDPBackend.MATH):  # the faster backends sum gradients in a varying order
        for recipe in recipes:
            for fused in (False, True):
                with scratch() as folder:
                    bare = _losses(Loop(place, "text-gpt", size, recipe, fused=fused), steps)
                    watched = _losses(
                        Loop(
                            *(place, "text-gpt", size, recipe),
                            fused=fused, into=folder / "run", every=2, level="full", trace_ops=2,
                        ),
                        steps,
                    )  # fmt: skip
                    operators = precision.traced(place, folder / "run", recipe)
                differ = sum(a != b for a, b in zip(bare, watched, strict=True))
                # Losses that differ between bare loops prove nothing.
                varies = bool(differ) and _losses(Loop(place, "text-gpt", size, recipe, fused=fused), steps) != bare
                yield Row(
                    f"losses with and without watching, {recipe}{', fused' if fused else ''}",
                    "equal bit for bit",
                    f"{differ} of {steps} differ{', as those of bare loops do' if varies else ''}"
                    if differ
                    else f"{steps} losses equal",
                    "shown" if varies else "FAIL" if differ else "pass",
                )
                if not fused:
                    yield operators


def _losses(loop: Loop, steps: int) -> list[float]:
    loop.run(steps)
    losses = torch.stack(loop.losses).tolist()
    loop.close()
    return losses


COSTS: dict[str, dict[str, Any]] = {
    "by default": {},
    "weight gradients, every step": {"every": 1, "kinds": ("weight_grad",)},
    "all kinds, every 10th step": {"kinds": ("weight_grad", "output_grad", "activation", "weight")},
    "level full": {"level": "full"},
}
"""Options of `watch` whose cost is measured; the last is for a search of faults and has no limit."""


def cost(place: Place) -> Iterator[Row]:
    """Time of a watched step relative to a bare one: where the host and the GPU take equally long, and where the batch
    is so large that the host waits for the GPU."""
    sizes = (8, 32) if place.cuda and not place.quick else (2,)
    with scratch() as folder:
        for recipe, batch in [(r, b) for r in (("fp16", "bf16") if place.cuda else ("bf16",)) for b in sizes]:
            bare = Loop(place, *model_of(place), recipe, batch_size=batch)
            loops = {"bare": bare}
            for number, (name, options) in enumerate(COSTS.items()):
                into = folder / f"{recipe}-{batch}-{number}"
                loops[name] = Loop(place, *model_of(place), recipe, batch_size=batch, into=into, **options)
            host, took, steps = _host_and_step(bare, 0.02 if place.quick else 0.3)
            for loop in loops.values():
                loop.run(3)
            steps = max(10, steps // 10 * 10)  # each turn has one sampled step in ten
            turns = {name: plain(partial(loop.run, steps)) for name, loop in loops.items()}
            seconds = alternate(place, turns, 2 if place.quick else 5, spare_s=15)
            for loop in loops.values():
                loop.close()
            for name in COSTS:
                ratio = quartiles(seconds[name], seconds["bare"])
                limited = name != "level full"
                yield Row(
                    f"cost of watching, {' '.join(model_of(place))}, {recipe}, batch {batch}: {name}",
                    "≤ 1.02 of the bare loop" if limited else "",
                    f"{in_words(ratio)}; a step takes {took * 1e3:.1f} ms, the host {host * 1e3:.1f} ms of it",
                    place.judged(ratio[1] <= 1.02) if limited else "shown",
                    {"ratio": ratio, "step_s": took, "host_s": host},
                )


def _host_and_step(loop: Loop, at_least_s: float) -> tuple[float, float, int]:
    """Seconds that the host takes for a step that it need not wait for, those of a step, and as many steps as take
    about `at_least_s`."""
    took, steps = seconds_a_step(loop, at_least_s)
    settle = loop.place.settle
    settle()
    begun = time.perf_counter()
    loop.run_without_waiting(1)
    host = time.perf_counter() - begun
    settle()
    return host, took, steps


def waits(place: Place) -> Iterator[Row]:
    """Calls that wait for the device or allocate its memory, in profiles of a bare and of a watched loop."""
    steps = 5
    with scratch() as folder:
        for fused in (True, False):
            model = (*model_of(place), "fp16")
            bare = _calls(Loop(place, *model, fused=fused), steps)
            watched = _calls(Loop(place, *model, fused=fused, into=folder / str(fused), every=1), steps)
            added = {name: watched[name] - bare[name] for name in WAITS if watched[name] != bare[name]}
            measured = ", ".join(f"{n:+d} {name}" for name, n in added.items()) or "none added"
            yield Row(
                f"waiting for the device, {' '.join(model_of(place))}, {steps} steps{', fused' if fused else ''}",
                "no synchronisation and no allocation added",
                f"{measured}; the bare loop makes {sum(bare[name] for name in WAITS)}",
                "FAIL" if any(n > 0 for n in added.values()) else "pass",
                {"bare": bare, "watched": watched},
            )
            more = sum(watched[name] - bare[name] for name in LAUNCHES) / steps
            yield Row(
                f"launches of a sampled step, {' '.join(model_of(place))}{', fused' if fused else ''}",
                f"≤ {MAX_LAUNCHES} more than unwatched",
                f"{more:+.1f}; the bare step has {sum(bare[name] for name in LAUNCHES) / steps:.0f}",
                place.judged(more <= MAX_LAUNCHES),
                {"added": more},
            )


def _calls(loop: Loop, steps: int) -> dict[str, int]:
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):  # as many steps under way at once, with as many buffers, as in the profile
        loop.run(2 * steps)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        loop.run(steps)
    counts = {event.key: int(event.count) for event in profiler.key_averages()}
    loop.close()
    return {name: counts.get(name, 0) for name in (*WAITS, *LAUNCHES)}


def memory(place: Place) -> Iterator[Row]:
    """Additional peak of device memory with watching, relative to the size of the gradients."""
    with scratch() as folder:
        size = "mini" if place.quick else "small"
        bare, gradients = _peak(Loop(place, "text-gpt", size, "bf16", batch_size=4))
        for kinds in (("weight_grad",), ("weight_grad", "output_grad"), None):
            asked = {"level": "full"} if kinds is None else {"kinds": kinds}
            into = folder / str(len(kinds or ()))
            watched, _ = _peak(Loop(place, "text-gpt", size, "bf16", batch_size=4, into=into, every=1, **asked))
            more = (watched - bare) / gradients
            yield Row(
                f"memory of watching, text-gpt {size}, {'all kinds' if kinds is None else ' and '.join(kinds)}",
                "< 1 % of the gradients" if kinds is not None else "",
                f"{more:+.2%}: {(watched - bare) / 2**20:+.2f} of {gradients / 2**20:,.0f} MiB",
                place.judged(more < 0.01) if kinds is not None else "shown",
                {"bytes": watched - bare, "gradient_bytes": gradients},
            )


def _peak(loop: Loop) -> tuple[int, int]:
    loop.run(3)
    torch.cuda.reset_peak_memory_stats(loop.place.device)
    loop.run(4)
    # As requested: what the allocator adds to a tensor depends on what was freed before, up to 2 MiB each.
    requested = torch.cuda.memory_stats_as_nested_dict(loop.place.device)["requested_bytes"]["all"]["peak"]
    sizes = requested, loop.gradient_bytes()
    loop.close()
    return sizes


def engine(place: Place) -> Iterator[Row]:
    """Time of a step of the engine, watched as always, relative to the same loop written by hand and not watched."""
    workload, size = model_of(place)
    with scratch() as folder:
        other = Loop(place, workload, size, "bf16", fresh=True)
        batches = endless(other.workload, place.device, None)
        recorder = watch(other.model, other.optimizer, into=folder / "run", every=other.config.every)

        def steps_of_engine(count: int) -> None:
            for _ in range(count):
                train_step(
                    other.config, other.precision, other.workload, other.model, other.optimizer, batches, recorder
                )
            place.settle()

        steps_by_hand = by_hand(place, workload, size)
        took, steps = seconds_a_step(steps_by_hand, 0.02 if place.quick else 0.4)
        steps = max(10, steps // 10 * 10)
        steps_of_engine(3)
        turns = {"bare": plain(partial(steps_by_hand, steps)), "engine": plain(partial(steps_of_engine, steps))}
        seconds = alternate(place, turns, 2 if place.quick else 15, spare_s=4)
        recorder.close()
        other.close()
    ratio = quartiles(seconds["engine"], seconds["bare"])
    yield Row(
        f"the engine's loop, {workload} {size}, bf16",
        "≤ 1.01 of a bare hand-written one",
        f"{in_words(ratio)}; a step takes {took * 1e3:.1f} ms",
        place.judged(ratio[1] <= 1.01),
        {"ratio": ratio, "step_s": took},
    )


def by_hand(place: Place, workload: str, size: str) -> Callable[[int], None]:
    """This many steps of a plain loop with torch's own fused optimizer; only the model and its batches are the
    engine's."""
    made = build(TrainConfig(workload=workload, size=size, precision="bf16").resolved())
    model = made.model.to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = itertools.chain.from_iterable(itertools.repeat(made.batches))

    def run(steps: int) -> None:
        for _ in range(steps):
            batch = tree_map(partial(_moved, place.device), next(batches))
            with torch.autocast(place.device.type, dtype=torch.bfloat16):
                loss = made.loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        place.settle()

    return run


def _moved(device: torch.device, leaf: Any) -> Any:
    return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf


def sampler(place: Place) -> Iterator[Row]:
    """Time of a step while the device sampler runs, relative to steps without it."""
    loop = Loop(place, *model_of(place), "bf16")
    took, steps = seconds_a_step(loop, 0.1 if place.quick else 1.0, most=1000)
    with scratch() as folder:
        number = 0

        @contextmanager
        def sampling() -> Iterator[None]:
            nonlocal number
            number += 1
            writer = RunWriter(folder / str(number))
            observer = DeviceSampler(writer, place.device)
            loop.run(5)  # looking up the device is not timed
            try:
                yield
            finally:
                observer.close()
                writer.close("finished", None)

        competitors = {
            "without": (partial(loop.run, steps), nullcontext),
            "with": (partial(loop.run, steps), sampling),
        }
        seconds = alternate(place, competitors, 2 if place.quick else 9, spare_s=4)
    loop.close()
    ratio = quartiles(seconds["with"], seconds["without"])
    yield Row(
        f"cost of the device sampler, {' '.join(model_of(place))}, bf16",
        "≤ 1.005",
        in_words(ratio),
        place.judged(ratio[1] <= 1.005),
        {"ratio": ratio, "step_s": took},
    )


def closed_window(place: Place) -> Iterator[Row]:
    """Time of steps before a profiler window opens and after it closed, relative to a loop without a window.

    The profiler acts on the whole process, so that its after-effects would slow both loops alike: the loop without a
    window is also compared with itself, before and after.
    """
    number = 2 if place.quick else 9
    with scratch() as folder:
        none = Loop(place, *model_of(place), "bf16", into=folder / "none", every=10)
        _, steps = seconds_a_step(none, 0.02 if place.quick else 0.4)
        steps = max(10, steps // 10 * 10)
        first = 10 + number * steps
        one = Loop(place, *model_of(place), "bf16", into=folder / "one", every=10, profile=(first, first + 2))
        loops = {"none": none, "one": one}
        one.run(5)
        turns = {name: plain(partial(loop.run, steps)) for name, loop in loops.items()}
        before = alternate(place, turns, number, spare_s=12)
        one.run(first + 5 - len(one.losses))
        none.run(5)
        after = alternate(place, turns, number, spare_s=4)
        for loop in loops.values():
            loop.close()
        kernels = load_run(folder / "one").table("kernels").num_rows
    several = min(len(before["none"]), len(after["none"]))
    for title, ratio in (
        ("to come, over a loop without one", quartiles(before["one"], before["none"])),
        ("over, over a loop without one", quartiles(after["one"], after["none"])),
        ("over, on the rest of the process", quartiles(after["none"][:several], before["none"][:several])),
    ):
        yield Row(
            f"cost of a profiler window that is {title}, {' '.join(model_of(place))}, bf16",
            "≤ 1.005",
            f"{in_words(ratio)}; the window holds {kernels} rows of kernels",
            place.judged(ratio[1] <= 1.005 and kernels > 0),
            {"ratio": ratio},
        )
