"""The rule on the copies and fills of an imported trace: advice by their direction, memory and stream."""

from dataclasses import replace

from amp_core.analysis.performance.idle_savings import longest_named
from amp_core.analysis.performance.kernels import kernel_rows, window_rows
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import rule
from amp_core.findings.rules.trace_hosts import CREATES, ON_DEVICE
from amp_core.findings.trace_findings import SAVING_THRESHOLD, saving_finding, trains
from amp_core.store.run import Run


@rule(
    Entry(
        code="copies",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=435,
        what="Copies and fills take a noticeable part of the step of an imported trace.",
        signal="Time of memcpy and memset operations.",
        threshold=SAVING_THRESHOLD,
        advice="Pin host memory: copies from it are faster, and run beside kernels and what the host does. Keep reused "
        "data on the device.",
        snippet="loader = DataLoader(data, batch_size, pin_memory=True)\nx = x.to(device, non_blocking=True)",
        page="step-cost",
    )
)
def copies(run: Run) -> list[Finding]:
    """`copies`: time of copies and fills."""
    findings = saving_finding(run, "copies")
    known = _COPIES if trains(run) else _COPIES | _COPIES_OF_INFERENCE
    remedy = next((r for word, r in known.items() if findings and word in findings[0].where), None)
    if remedy is _COPIES["Pinned"]:
        rows = run.timeline
        copied = rows["category"] == "memcpy"
        if copied.any() and not rows["stream"][copied].isin(rows["stream"][~copied]).any():
            remedy = Remedy(_ON_OWN_STREAM, "x = bytes_of_images.to(device, non_blocking=True).float().div_(255)")
    elif remedy is None and CREATES.fullmatch(longest_named(window_rows(run), "host_op")[0]):
        remedy = _CREATED
    elif remedy is known["DtoH"] and _is_pageable_both_ways(run):
        remedy = replace(_PIN_BOTH, advice=_PIN_ON_TWO_STREAMS) if _has_stream_per_way(run) else _PIN_BOTH
    return [replace(f, advice=remedy.advice, snippet=remedy.snippet) for f in findings] if remedy else findings


def _has_stream_per_way(run: Run) -> bool:
    """Whether copies to and from the device are on different streams."""
    rows = run.timeline
    down, up = (set(rows["stream"][rows["name"].str.contains(way)].dropna()) for way in ("DtoH", "HtoD"))
    return bool(down and up) and not down & up


def _is_pageable_both_ways(run: Run) -> bool:
    """Whether copies from and to memory that is not pinned both take long."""
    rows = kernel_rows(run, everything=True)
    us = rows[rows["name"].str.contains("Pageable")].groupby("name")["total_us"].sum()
    down, up = (us[us.index.str.contains(way)].sum() for way in ("DtoH", "HtoD"))
    return bool(up >= MIN_BOTH_WAYS_FRAC * (up + down) > 0)


MIN_BOTH_WAYS_FRAC = 0.25
"""Share of the copies to the device among those from and to memory that is not pinned."""
_PIN_BOTH = Remedy(
    "Copies in both directions use memory that is not pinned: the driver copies it once more, and one direction waits "
    "for the other. Pin it, and copy each direction on a stream of its own.",
    "host = torch.empty(shape, pin_memory=True)\nhost.copy_(result, non_blocking=True)",
)
_PIN_ON_TWO_STREAMS = (
    "Copies in both directions use memory that is not pinned: the driver copies it once more, and one direction waits "
    "for the other, though they are on streams of their own. Pin it."
)
_ON_OWN_STREAM = (
    "The copies already come from pinned memory, on a stream of their own, and outlast what runs beside them. Copy "
    "fewer bytes: integers and 16 bits, widened on the device."
)
_CREATED = Remedy(
    "The host creates tensors while the GPU waits, and then copies them: created on the device, they need no copy.",
    ON_DEVICE.snippet,
)
_COPIES = {
    "DtoD": Remedy(
        "These are copies within the device: contiguous(), clone(), cat and changes of layout. Avoid them, or let a "
        "compiler fuse them.",
        "model = torch.compile(model)",
    ),
    "Memset": Remedy(
        "Fills of whole tensors: let the optimizer free gradients instead of setting them to 0, and allocate with "
        "empty() what is overwritten.",
        "optimizer.zero_grad(set_to_none=True)",
    ),
    "Pinned": Remedy(
        "The host's memory is pinned already. Copy the next batch on a stream of its own while this one is computed, "
        "and copy fewer bytes: integers and 16 bits, widened on the device.",
        "with torch.cuda.stream(side):   # and torch.cuda.current_stream().wait_stream(side) before its use\n"
        "    following = batch.to(device, non_blocking=True)",
    ),
    "DtoH": Remedy(
        "Results are copied to the host. Reduce them on the device first, and copy only occasionally.",
        "total += loss.detach()   # on the device; total.item() once per epoch",
    ),
}
"""Advice by the direction of most copies, as the profiler names it; the guide's is for copies from pageable memory."""
_COPIES_OF_INFERENCE = {
    "Memset": Remedy(
        "Fills of whole tensors: allocate with empty() what is overwritten, and keep what stays 0.",
        "y = torch.empty(shape, device=device)   # instead of zeros, where all of it is written",
    ),
    "DtoH": Remedy(
        "Results are copied to the host. Reduce them on the device first, and copy only occasionally.",
        "results.append(y)   # on the device; torch.cat(results).cpu() once",
    ),
}
"""The same where the trace contains no training."""
