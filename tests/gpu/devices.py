"""Recording on other devices and streams than the current ones, without a compiler, and in channels-last format."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from amp_core.record.stats import dispatch
from amp_core.record.stats.channels import channel_largest
from tests.fake_cuda.loops import recorded
from tests.gpu.checks import Place, Row
from tests.gpu.loops import scratch

NO_COMPILER = "Failed to find C compiler."


def devices(place: Place) -> Iterator[Row]:
    """The same loop on every device and stream: losses are equal bit for bit, and no row is missing."""
    here = str(place.device)
    index = place.device.index or 0
    other = next((f"cuda:{i}" for i in range(torch.cuda.device_count()) if i != index), None)
    side = torch.cuda.Stream(place.device)
    yield _row("on a stream of its own", partial(recorded, stream=lambda: side), here)
    if other is None:
        yield Row("recording on two devices", "", "there is one", "skipped")
    else:
        yield _row("on a device that is not the current one", recorded, other)
        yield _row("of a model on two devices", partial(recorded, second=other), here)
    yield _row("without a compiler", _without_compiler, here)
    yield channels_last(place)


def _row(what: str, record: Callable[..., Any], device: str) -> Row:
    with scratch() as folder:
        try:
            run = record(folder, device)
            wrong = ""
        except AssertionError as error:
            wrong = " ".join(str(error).split())[:200] or "a row or a loss differs"
    return Row(
        f"recording {what}",
        "losses equal bit for bit, every row recorded, no warning",
        wrong or f"{len(run.steps)} steps, {len(run.tensors())} tensors",
        "FAIL" if wrong else "pass",
    )


def _without_compiler(folder: Path, device: str) -> Any:
    """Launches raise, as if the kernels had failed to compile."""

    def fail(*args: Any) -> Any:
        raise RuntimeError(NO_COMPILER)

    kernels, fallbacks = dispatch._kernels.copy(), dispatch.fallbacks.copy()
    dispatch._kernels["cuda"] = dict.fromkeys(("measure", "channels", "norms", "outputs"), fail)
    dispatch.fallbacks.clear()
    try:
        run = recorded(folder, device)
    finally:
        dispatch._kernels.clear()
        dispatch._kernels.update(kernels)
        dispatch.fallbacks.clear()
        dispatch.fallbacks.update(fallbacks)
    detail = run.events[run.events["name"] == "statistics"].detail
    assert len(detail) == 1 and detail.iloc[0].endswith(NO_COMPILER), "no event reports that plain torch measures"
    return run


def channels_last(place: Place) -> Row:
    """A channels-last gradient is read in place: no copy of it is allocated."""
    shape = (4, 16, 8, 8) if place.quick else (64, 256, 56, 56)
    grad = torch.randn(shape, device=place.device, dtype=torch.float16).to(memory_format=torch.channels_last)
    wanted = grad.contiguous().abs().amax((0, 2, 3))
    channel_largest(grad, 1)
    torch.cuda.reset_peak_memory_stats(place.device)
    before = torch.cuda.memory_allocated(place.device)
    largest = channel_largest(grad, 1)
    more = (torch.cuda.max_memory_allocated(place.device) - before) / grad.nbytes
    good = torch.equal(largest, wanted) and (more < 0.1 or place.quick)
    return Row(
        "channel maxima of a channels-last gradient",
        "equal to torch's, allocating less than 10 % of its size",
        f"{'equal' if torch.equal(largest, wanted) else 'differs'}, {more:.1%} of {grad.nbytes / 2**20:.1f} MiB",
        "pass" if good else "FAIL",
        {"memory_ratio": more},
    )
