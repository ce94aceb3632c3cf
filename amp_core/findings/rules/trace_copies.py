"""The rule on the copies and fills of an imported trace: advice by their direction, memory and stream."""

import re
from dataclasses import replace

from amp_core.analysis.performance.compiled import is_compiled_in_part, replays_unfused_graphs
from amp_core.analysis.performance.host_copies import TO_HOST, copies_on_own_streams, tiny_copies
from amp_core.analysis.performance.idle import longest_named
from amp_core.analysis.performance.kernels import kernel_rows, numbers_of_import, window_rows
from amp_core.analysis.performance.main_device import of_main
from amp_core.analysis.performance.saving import Saving
from amp_core.analysis.performance.training_part import ZEROING
from amp_core.findings.launch_remedies import ONE_COPY
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding, Remedy
from amp_core.findings.registry import rule
from amp_core.findings.rules.trace_hosts import CREATES, created_on_device
from amp_core.findings.trace_findings import SAVING_THRESHOLD, guides_remedy, reported_saving, saving_finding, trains
from amp_core.store.run import Run
from amp_core.text.formatting import number
from amp_core.traces.operators import is_compiled_code


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
    saving = reported_saving(run, "copies", Saving)
    if saving is None:
        return []
    remedy = _remedy(run, saving)
    within = _beside_others(run, saving)
    advice = " ".join(filter(None, (remedy.advice, within.advice)))
    snippet = "\n".join(filter(None, (remedy.snippet, within.snippet)))
    return [saving_finding(run, saving, replace(remedy, advice=advice, snippet=snippet))]


def _beside_others(run: Run, saving: Saving) -> Remedy:
    """What to advise for copies within the device beside longer ones in another direction; empty where they are little
    of what could be saved."""
    if _way(saving.where) == "within the device":
        return _NOTHING
    rows, windows = of_main(run, kernel_rows(run, everything=True)), of_main(run, window_rows(run))
    rows = rows[(rows["category"] == "memcpy") & (rows["name"].map(_way) == "within the device")]
    us = float(rows["total_us"].sum()) / (float(windows["steps"].fillna(0.0).sum()) or max(1, len(windows)))
    if us < MIN_OF_SAVED_FRAC * saving.saved_us or not us:
        return _NOTHING
    took = f"Beside them, copies within the device take {number(us / 1e3, 'ms')}"
    config = run.head.config
    if config.get("graph_launches") and (config.get("compiled_calls") or is_compiled_in_part(run)):
        return Remedy(
            f"{took}: compiled code that replays CUDA graphs copies its inputs into the memory of the graph. Produce "
            "them there, within the compiled code, or keep them at one address and mark it.",
            "torch._dynamo.mark_static_address(x)   # an input that is written in place, before the first call",
        )
    return Remedy(f"{took}: contiguous(), clone(), cat and changes of layout. Avoid or fuse those.", "")


_NOTHING = Remedy("", "")
MIN_OF_SAVED_FRAC = 0.2
"""Share of copies within the device in what copies could save from which they get advice of their own."""


def _remedy(run: Run, saving: Saving) -> Remedy:
    """What to advise for copies, by the direction of the longest."""
    way = _way(saving.where)
    if way == "fill":
        return _fills(run, saving.where)
    if way == "pinned to the device" and copies_on_own_streams(run):
        return Remedy(_ON_OWN_STREAM, "x = bytes_of_images.to(device, non_blocking=True).float().div_(255)")
    if way == "to the device":
        op = longest_named(window_rows(run), "host_op")[0]
        is_created = CREATES.fullmatch(op) is not None
        if is_created:
            return replace(_CREATED, snippet=created_on_device(op))
        remedy = guides_remedy(saving)
        return remedy if run.head.config.get("loader") else replace(remedy, snippet=_PINNED_BY_HAND)
    if way == "to the host":
        return _to_host(run, saving)
    if way == "between devices" and numbers_of_import(run, "peer_links", "us")[0] > 0:
        return _SLOW_LINK
    if way == "within the device" and is_compiled_in_part(run):
        if not _is_of_compiled_code(run, saving.where):
            return _WITHIN_COMPILED
        return _OF_GRAPHS if replays_unfused_graphs(run) else _BY_COMPILED
    return _REMEDIES.get(way, _OF_UNKNOWN_WAY)


def _to_host(run: Run, saving: Saving) -> Remedy:
    """What to advise for copies to the host."""
    if tiny_copies(run)[0]:
        return ONE_COPY
    if trains(run) and _mean_bytes(run, saving.where) >= MIN_STATE_BYTES:
        return _STATE
    if _is_pageable_both_ways(run):
        return replace(_PIN_BOTH, advice=_PIN_ON_TWO_STREAMS) if _has_stream_per_way(run) else _PIN_BOTH
    if "Pageable" in saving.where and _is_in_few(run, saving.where):
        return _TO_HOST_AT_ONCE
    return _TO_HOST if trains(run) else _TO_HOST_OF_INFERENCE


_PINNED_BY_HAND = "x = x.pin_memory()   # once; of a DataLoader: pin_memory=True\nx = x.to(device, non_blocking=True)"
_SLOW_LINK = Remedy(
    "One link between devices is far slower than another, as where two of them have no NVLink in common. Look at how "
    "they are connected, and exchange between those that are, or by way of one that is linked with both.",
    "nvidia-smi topo -m",
)
MIN_STATE_BYTES = 2**20
"""Mean size of copies to the host in a training from which they are of its state, and not of losses or metrics."""


def _mean_bytes(run: Run, name: str) -> float:
    """The mean size of copies of a kind; 0 where it is not known."""
    rows = kernel_rows(run, everything=True)
    rows = rows[(rows["name"] == name) & (rows["moved_bytes"] > 0)]
    return float(rows["moved_bytes"].sum() / max(1.0, float(rows["count"].sum())))


_STATE = Remedy(
    "Large tensors are copied to the host, as those of a checkpoint. Save less often, and copy to pinned memory while "
    "the next step runs, so that a thread or another process writes them meanwhile.",
    "import torch.distributed.checkpoint as dcp\n\nsaving = dcp.async_save(state, checkpoint_id=path)   # returns once "
    "the state is staged",
)
_WAYS = (
    ("fill", r"[Mm]emset|MEMSET|[Ff]ill_?[Bb]uffer"),
    ("between devices", r"PtoP|P2P|PeerToPeer"),
    ("within the device", r"DtoD|D2D|DeviceToDevice"),
    ("to the host", TO_HOST),
    ("pinned to the device", r"(?:HtoD|H2D|M2D|HostToDevice).*Pinned"),
    ("to the device", r"HtoD|H2D|M2D|HostToDevice"),
)
"""Directions of copies, and how the profilers of CUDA, ROCm, XPU and NPU name them; the first match decides."""


def _way(name: str) -> str:
    """The direction of a copy by its name; empty if that does not tell it."""
    return next((way for way, pattern in _WAYS if re.search(pattern, name)), "")


MIN_OF_LONGEST_FRAC = 0.3
"""Share of the longest copy in the time of all of its kind from which few make up most of it."""


def _is_in_few(run: Run, name: str) -> bool:
    """Whether few copies take most of the time of a kind of them."""
    rows = kernel_rows(run, everything=True)
    rows = rows[rows["name"] == name]
    return bool(rows["longest_us"].max() >= MIN_OF_LONGEST_FRAC * rows["total_us"].sum() > 0)


def _is_of_compiled_code(run: Run, name: str) -> bool:
    """Whether compiled code starts most of a kind of copies, or most of the work, as where it is one call per step."""
    launched_frac = run.head.config.get("compiled_launch_frac")
    if isinstance(launched_frac, float) and launched_frac > MIN_OF_COMPILED_FRAC:
        return True
    rows = kernel_rows(run, everything=True)
    rows = rows[rows["name"] == name]
    us = rows["total_us"][
        rows["op"].map(is_compiled_code).astype(bool) | rows["top_op"].map(is_compiled_code).astype(bool)
    ]
    return bool(us.sum() > MIN_OF_COMPILED_FRAC * rows["total_us"].sum())


MIN_OF_COMPILED_FRAC = 0.5


def _fills(run: Run, name: str) -> Remedy:
    """What to advise for fills: for those of gradients where most are of tensors that exist already."""
    rows = kernel_rows(run, everything=True)
    rows = rows[rows["name"] == name]
    in_place = rows["top_op"].isin(ZEROING) & trains(run)
    return _FILLS_IN_PLACE if rows["total_us"][in_place].sum() > rows["total_us"].sum() / 2 else _FILLS


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
    "The host creates tensors while the GPU waits, and then copies them: created on the device, they need no copy."
)
_FILLS_IN_PLACE = Remedy(
    "Fills of tensors that exist already, as of gradients before backward: let the optimizer free these instead of "
    "setting them to 0.",
    "optimizer.zero_grad(set_to_none=True)",
)
_FILLS = Remedy(
    "Fills of whole tensors: allocate with empty() what is overwritten, and keep what stays 0.",
    "y = torch.empty(shape, device=device)   # instead of zeros, where all of it is written",
)
_TO_HOST = Remedy(
    "Results are copied to the host. Reduce them on the device first, and copy only occasionally.",
    "total += loss.detach()   # on the device; total.item() once per epoch",
)
_TO_HOST_OF_INFERENCE = Remedy(_TO_HOST.advice, "results.append(y)   # on the device; torch.cat(results).cpu() once")
_TO_HOST_AT_ONCE = Remedy(
    "Results are copied to the host, most of them at once, to memory that is not pinned. Copy to pinned memory, beside "
    "what is computed next, and fewer bytes.",
    "host = torch.empty(shape, pin_memory=True)\nhost.copy_(result, non_blocking=True)",
)
_BY_COMPILED = Remedy(
    "Compiled code itself starts most of these copies: of inputs that it changes, of outputs that share memory with "
    "them, and, where its backend does not fuse, each clone and change of layout. Take a backend that fuses, and "
    "return new tensors instead of changing inputs.",
    'model = torch.compile(model, backend="inductor")   # not eager, aot_eager or ts',
)
_OF_GRAPHS = Remedy(
    "Each call of compiled code replays a graph, with memory of its own: its backend copies all inputs into it, "
    "parameters and saved activations too, and all outputs out of it. Take inductor with its graph trees, which need "
    "no copies of those.",
    'model = torch.compile(model, mode="reduce-overhead")   # of inductor, instead of backend="cudagraphs"',
)
_WITHIN_COMPILED = Remedy(
    "These are copies within the device: contiguous(), clone(), cat and changes of layout, and part of the program "
    "is compiled already. A timeline shows the operators that start them: avoid these, or compile them too.",
    "x = x.reshape(shape)   # a view where the layout allows it, instead of x.contiguous().view(shape)",
)
_OF_UNKNOWN_WAY = Remedy(
    "Their names do not tell from where to where these copies go; a timeline shows the operators that start them. Keep "
    "on the device what is reused, and pin the host's memory where they cross to it.",
    "x = x.to(device, non_blocking=True)   # once, from pinned memory",
)
_REMEDIES = {
    "within the device": Remedy(
        "These are copies within the device: contiguous(), clone(), cat and changes of layout. Avoid them, or let a "
        "compiler fuse them.",
        "model = torch.compile(model)",
    ),
    "between devices": Remedy(
        "These are copies from one device to another, as of a model that is split over devices, or whose replicas one "
        "process keeps. Exchange fewer bytes, copy beside what is computed, or give each device a process of its own.",
        "torchrun --nproc-per-node gpu main.py   # with DistributedDataParallel, instead of DataParallel",
    ),
    "pinned to the device": Remedy(
        "The host's memory is pinned already. Copy the next batch on a stream of its own while this one is computed, "
        "and copy fewer bytes: integers and 16 bits, widened on the device.",
        "with torch.cuda.stream(side):   # and torch.cuda.current_stream().wait_stream(side) before its use\n"
        "    following = batch.to(device, non_blocking=True)",
    ),
}
"""Advice by the direction of most copies; the guide's is for those to the device from memory that is not pinned."""
