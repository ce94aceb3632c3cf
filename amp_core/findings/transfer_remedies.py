"""Advice on the transfer of exposed communication: what hides it, and what makes it smaller.

>>> transfer_remedy(Transfers(run, savings)).advice
'Overlap communication with backward by using smaller buckets, or accumulate over micro-batches. Waiting for ...'
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from amp_core.analysis.performance.collectives import collective_rows, collective_table, has_all_ranks
from amp_core.analysis.performance.communication_savings import compress_hook
from amp_core.analysis.performance.gemm_shapes import tensor_shapes
from amp_core.analysis.performance.kernels import holds_collectives_alone, kernel_rows, window_rows
from amp_core.analysis.performance.main_device import of_main
from amp_core.analysis.performance.matrix_kinds import is_matrix
from amp_core.analysis.performance.saving import MIN_SAVED_FRAC
from amp_core.analysis.performance.savings import Savings
from amp_core.findings.model import Remedy
from amp_core.formats import element_bytes
from amp_core.hardware.kernel_names import SMALL_TYPES
from amp_core.store.run import Run
from amp_core.text.formatting import join_words, number, size
from amp_core.traces.operators import is_compiled_code

_OTHER_RANKS = " Waiting for a slower rank looks the same: import the traces of all ranks to compare them."
OVERLAP = Remedy(
    "Overlap communication with backward by using smaller buckets, or accumulate over micro-batches." + _OTHER_RANKS,
    "model = DistributedDataParallel(model, bucket_cap_mb=10, gradient_as_bucket_view=True)",
)
"""For reduced gradients, and in the guide."""


@dataclass(frozen=True)
class Transfers:
    """What a trace transfers between its ranks with nothing beside it."""

    run: Run
    savings: Savings

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Of `collective_rows`."""
        return collective_rows(self.run)

    @cached_property
    def name(self) -> str:
        """The kind of collective with the most exposed time; empty where none has."""
        exposed = self.rows.groupby("name")["alone_us"].sum()
        return str(exposed.idxmax()) if exposed.sum() > 0 else ""

    @cached_property
    def longest(self) -> pd.DataFrame:
        """Rows of that kind."""
        return self.rows[self.rows["name"] == self.name]

    @cached_property
    def kernels(self) -> pd.DataFrame:
        """Rows of `kernel_rows` of that kind."""
        rows = kernel_rows(self.run)
        return rows[rows["name"].isin(set(self.longest["kernel"]))]

    @cached_property
    def dtype(self) -> str:
        """Of their elements; empty if it is not known."""
        us = self.longest.groupby("dtype")["alone_us"].sum()
        return str(us.idxmax()) if len(us) else ""

    @cached_property
    def of_experts(self) -> bool:
        """Whether they are DeepEP's kernels."""
        return bool(self.longest["kernel"].str.contains(EXPERT_KERNELS).any())

    @cached_property
    def transfer_frac(self) -> float:
        """The most of exposed communication that is transfer, as a share of it; what is not known is taken for it."""
        known = self.rows[self.rows["transfer_us"].notna()]
        alone_us = float(self.rows["alone_us"].sum())
        least_us = float(alone_us - (known["alone_us"] - known["transfer_us"]).clip(lower=0.0).sum())
        return least_us / alone_us if alone_us > 0 else 1.0

    @property
    def fewer_bytes_help(self) -> bool:
        """Whether more than a small part of it is transfer."""
        return self.transfer_frac >= MIN_TRANSFER_FRAC

    @cached_property
    def are_wide(self) -> bool:
        """Whether fewer bits help, since values of more than 16 are exchanged."""
        is_wide = self.dtype in ("float64", "float32") or not (self.dtype or _computes_in_16_bits(self.run))
        return is_wide and self.fewer_bytes_help

    @property
    def lack_peers(self) -> bool:
        """Whether the fastest large collective is slower than any between GPUs that read each other's memory."""
        large = self.rows[self.rows["message_bytes"] >= MIN_LARGE_BYTES]
        rates = large["message_bytes"] / large["total_us"].where(large["total_us"] > 0) / 1e3
        return bool(rates.max() < MIN_PEER_GB_PER_S)

    @cached_property
    def are_many_small(self) -> bool:
        """Whether there are enough of that kind per step for one to replace several, which are not long each."""
        table = collective_table(self.run)
        are_large = len(self.longest) and self.longest["total_us"].mean() >= MIN_LARGE_US
        return bool(table["count"][table["name"] == self.name].sum() >= MIN_SEVERAL and not are_large)

    @property
    def computes_us(self) -> float:
        """Time per step in which the device does something other than communicating."""
        parts = self.savings.cost.parts
        return float(parts["us"][~parts["part"].isin(["data", "gaps", "communication", "watch"])].sum())

    @property
    def exposed_us(self) -> float:
        """Time per step in which the device only communicates."""
        return float(np.nan_to_num(self.savings.cost.us("communication")))

    @cached_property
    def beside_us(self) -> float:
        """Time per step in which the device does so beside a collective."""
        windows = of_main(self.run, window_rows(self.run))
        us = (windows["communication_us"] - windows["communication_alone_us"]).fillna(0.0)
        return float(us.sum()) / (float(windows["steps"].fillna(0.0).sum()) or float(len(windows)))

    @property
    def free_us(self) -> float:
        """Time per step in which the device does so with no collective beside it."""
        return max(0.0, self.computes_us - self.beside_us)

    @cached_property
    def hidden_at_most(self) -> str:
        """How much overlap hides at most, as a sentence after others; empty where that may be much of the exposed
        communication."""
        if self.free_us >= MIN_OVERLAP_RATIO * self.exposed_us:
            return ""
        free, exposed = number(self.free_us / 1e3), number(self.exposed_us / 1e3, "ms")
        alone = " without collectives beside it" if self.beside_us > 0 else ""
        return (
            f" The device computes for {free} ms per {self.savings.unit}{alone}, so overlap hides at most that of "
            f"{exposed}."
        )


MIN_LARGE_BYTES, MIN_PEER_GB_PER_S = 2**20, 12.0
"""Messages bound by their bytes, and a rate that PCIe of the fourth generation exceeds between GPUs that have access to
each other's memory; GeForce's have none since Ada."""
MIN_TRANSFER_FRAC = 0.1
"""Share of transfer in exposed communication from which fewer bytes help."""
MIN_OVERLAP_RATIO = 1 / 3
"""Share of exposed communication that computing without it has to last, for overlap to hide much of it."""
EXPERT_KERNELS = r"(?i:deep_?ep::|\bep::(?:inter|intra)node)"
"""In the names of DeepEP's kernels."""


def transfer_remedy(transfers: Transfers) -> Remedy:
    """What to advise for the transfer. That waiting looks the same is said where the traces do not tell them apart."""
    if holds_collectives_alone(transfers.run):
        remedy = _ALONE
    else:
        in_training = transfers.savings.trains
        remedy = (
            _of_few_bytes(transfers)
            or _functional(transfers)
            or _nothing_beside(transfers)
            or (_in_training(transfers) if in_training else _in_inference(transfers))
        )
    if has_all_ranks(transfers.run):
        return without_other_ranks(remedy)
    return remedy


def without_other_ranks(remedy: Remedy) -> Remedy:
    """The same without the request for the other ranks' traces."""
    return replace(remedy, advice=remedy.advice.replace(_OTHER_RANKS, ""))


def _in_inference(transfers: Transfers) -> Remedy:
    """Advice where a trace has no backward beside which gradients could be reduced."""
    if transfers.of_experts:
        return _exchange(transfers)
    run, overlap = transfers.run, "" if transfers.hidden_at_most else "overlap communication with computation"
    fewer = "make fewer, larger collectives" if transfers.are_many_small else ""
    narrower = "exchange 16-bit activations" if transfers.are_wide else ""
    ways = join_words(list(filter(None, (overlap, "shard the model differently", fewer, narrower))), "or")
    advice = f"{ways[0].upper()}{ways[1:]}."
    if overlap:
        return Remedy(advice, _ASYNCHRONOUS.get(transfers.name, _ASYNCHRONOUS["all_reduce"]))
    return Remedy(f"{advice}{transfers.hidden_at_most}{_OTHER_RANKS}", _LINKS if has_all_ranks(run) else RECORD_ALL)


MIN_LARGE_US = 1000.0
"""Mean time of collectives that are bound by their bytes, and not by their number."""
MIN_SEVERAL = 4.0
"""Collectives of a kind per step, or profiled window, of which fewer may be made."""


def _in_training(transfers: Transfers) -> Remedy:
    """Advice where gradients are reduced, weights gathered, or tokens exchanged."""
    run, name, hidden = transfers.run, transfers.name, transfers.hidden_at_most
    if name == "all_reduce":
        remedy = OVERLAP
        if _is_per_parameter(run):
            remedy = _BUCKETS
        elif _is_unsplit(transfers.rows) and not _is_bucket(run, transfers.rows):
            remedy = replace(_UNSPLIT, snippet=_UNSPLIT.snippet.replace("bf16_compress_hook", compress_hook(run)))
        elif hidden:
            remedy = _OUTLASTS
    elif name in _EXCHANGES:
        remedy = _exchange(transfers)
    elif name in _COLLECTIVES:
        in_optimizer = _is_in_optimizer(run, name)
        remedy = Remedy(_OPTIMIZER_SHARDS, _ASYNCHRONOUS[name]) if in_optimizer else _COLLECTIVES[name]
    else:
        remedy = OVERLAP
    return replace(remedy, advice=f"{remedy.advice}{hidden}")


def _of_few_bytes(transfers: Transfers) -> Remedy | None:
    """Advice where the collectives of the longest kind are launched by graphs, carry a few bytes, or run beside
    computing already; None for others."""
    rows, kernels, config = transfers.longest, transfers.kernels, transfers.run.head.config
    alone_us, total_us = float(rows["alone_us"].sum()), float(rows["total_us"].sum())
    in_graphs = (kernels["op"] == "") | kernels["op"].map(is_compiled_code).astype(bool)
    captured_us = float(kernels["total_us"][in_graphs].sum())
    is_captured = captured_us >= MIN_CAPTURED_FRAC * float(kernels["total_us"].sum()) > 0
    has_operators = config.get("without_operators") is not True  # otherwise no kernel has one
    if is_captured and has_operators and config.get("graph_launches"):
        has_own = kernels["name"].str.contains(_ENGINES_OWN).any()
        advice = _IN_GRAPHS.advice.replace(_USE_OWN, "") if has_own else _IN_GRAPHS.advice
        return replace(_IN_GRAPHS, advice=advice)
    tiny_us = float(rows["alone_us"][rows["message_bytes"] <= MAX_TINY_BYTES].sum())
    if tiny_us >= MIN_TINY_FRAC * alone_us > 0:
        largest = float(rows["message_bytes"][rows["message_bytes"] <= MAX_TINY_BYTES].max())
        return replace(_TINY, advice=_TINY.advice.format(bytes=size(largest)))
    if alone_us <= MAX_ALONE_FRAC * total_us and transfers.name in _EXCHANGES:
        part = "Most" if alone_us <= total_us / 2 else "Part"
        return replace(_OVERLAPPED, advice=f"{part} of {_OVERLAPPED.advice}")
    return None


def _functional(transfers: Transfers) -> Remedy | None:
    """Advice where most of the collectives are DTensor's or functional ones, which are asynchronous; None for
    others."""
    kernels, hidden, narrower = transfers.kernels, transfers.hidden_at_most, transfers.are_wide
    us = float(kernels["total_us"][kernels["top_op"].str.contains(_FUNCTIONAL_OPS)].sum())
    if us < MIN_FUNCTIONAL_FRAC * float(kernels["total_us"].sum()) or us <= 0 or transfers.lack_peers:
        return None
    if hidden and transfers.free_us < MIN_HIDDEN_FRAC * transfers.exposed_us:
        bits = "exchange 16 bits, or " if narrower else ""
        gathers = bool((transfers.longest["name"] == "all_gather").all())
        return Remedy(
            f"{hidden.lstrip()} {_SMALLER.advice}{bits}use a faster link.{_OTHER_RANKS}",
            _SMALLER.snippet if gathers else _REDUCED_APART,
        )
    also = ", shard the model differently, or exchange 16 bits" if narrower else ", or shard the model differently"
    return replace(_FUNCTIONAL, advice=f"{_FUNCTIONAL.advice}{also}.{hidden}{_OTHER_RANKS}")


MIN_HIDDEN_FRAC = 0.1
"""Share of exposed communication that overlap may hide from which it is advised on."""
_SMALLER = Remedy(
    "Make the transfer smaller: keep results sharded where the next layer or the loss can use them so, gather only "
    "what is used, ",
    "ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)   # the result stays sharded",
)
_REDUCED_APART = "RowwiseParallel(output_layouts=Shard(1))   # each rank keeps its part of the sum"
MIN_FUNCTIONAL_FRAC = 0.5
"""Share of such collectives from which that is told."""
_FUNCTIONAL_OPS = r"^(?:_?c10d_functional::|Redistribute)"
"""Operators of functional collectives, and DTensor's around them."""
_FUNCTIONAL = Remedy(
    "These collectives are DTensor's or functional ones, asynchronous already, but what comes next needs their "
    "results. Let tensor parallelism overlap parts of them with products",
    "torch._inductor.config._micro_pipeline_tp = True   # asynchronous tensor parallelism\n"
    "model = torch.compile(model)",
)
MIN_CAPTURED_FRAC, MIN_TINY_FRAC = 0.9, 0.5
MAX_ALONE_FRAC = 0.8
"""Share of exchanges with nothing beside them up to which the program lets them run beside what it computes."""
MAX_TINY_BYTES = 512
"""Messages up to this hold a few values, as sizes, and are bound by latency."""
_ENGINES_OWN = r"(?i)allreduce_fusion|one_?shot|two_?shot|cross_device_reduce|multimem|quick_?reduce"
"""In the names of kernels that serving engines have for collectives of small messages."""
_USE_OWN = "use its own kernels where the messages are small, "
_LINKS = "nvidia-smi topo -m   # the links between the GPUs; on AMD: rocm-smi --showtopo"
RECORD_ALL = (
    'save = torch.profiler.tensorboard_trace_handler("traces")   # on every rank: one file each\n'
    "with torch.profiler.profile(on_trace_ready=save) as prof:\n    train_step(batch)"
)
_IN_GRAPHS = Remedy(
    "These collectives are launched by captured graphs, so what runs beside them is set where the graph is captured: "
    "let the engine overlap them with products there, use its own kernels where the messages are small, or shard the "
    "model differently." + _OTHER_RANKS,
    _LINKS,
)
_TINY = Remedy(
    "Most of this is in messages of {bytes} or less, whose transfer takes microseconds: the rest is waiting for other "
    "ranks, or the latency of each call. Exchange such values less often, on the host's own group, or together with "
    "others, and record all ranks to see which is late.",
    'sizes = torch.distributed.new_group(backend="gloo")   # for values that the host needs\n'
    "torch.distributed.all_gather_object(out, value, group=sizes)",
)
_OVERLAPPED = Remedy(
    "this communication runs beside computing already, and this is what is left: give it more to run beside, or "
    "exchange fewer bytes." + _OTHER_RANKS,
    "...   # more that does not depend on what is exchanged\nwork.wait()",
)
_OUTLASTS = Remedy(
    "Collectives take longer than what is computed beside them, so smaller ones that begin earlier change little: "
    "exchange fewer bytes, or less often, as after several micro-batches." + _OTHER_RANKS,
    "with model.no_sync():   # in all micro-batches but the last\n    loss.backward()",
)
_ALONE = Remedy(
    "Whether the device computes beside these collectives is not in the trace, so what overlap would save is unknown. "
    "Record the CPU and all kernels on every rank." + _OTHER_RANKS,
    RECORD_ALL,
)
"""Of traces that hold collectives and nothing else."""


def _nothing_beside(transfers: Transfers) -> Remedy | None:
    """Advice where the device computes nothing that overlap could use; None for others."""
    if transfers.computes_us >= MIN_SAVED_FRAC * transfers.savings.cost.step_us:
        return None
    nothing = "The device does hardly anything beside its collectives, so no overlap hides them:"
    narrower = "in 16 bits" if transfers.are_wide else ""
    if transfers.are_many_small:
        smaller = f", {narrower}" if narrower else ""
        return Remedy(
            f"{nothing} send fewer, larger messages{smaller}, and give each rank more work.{_OTHER_RANKS}",
            "out = torch.cat(parts)   # one message\ntorch.distributed.all_reduce(out)",
        )
    smaller = f", and exchange values {narrower}" if narrower else ""
    return Remedy(
        f"{nothing} give each rank more work{smaller}.{_OTHER_RANKS}",
        _LINKS if has_all_ranks(transfers.run) else RECORD_ALL,
    )


def _computes_in_16_bits(run: Run) -> bool:
    """Whether most time of products is in 16 or fewer bits, so that what they exchange hardly is in more."""
    rows = kernel_rows(run)
    rows = rows[is_matrix(rows) & (rows["precision"] != "")]
    return bool(rows["total_us"][rows["precision"].isin(SMALL_TYPES)].sum() > rows["total_us"].sum() / 2)


def _is_per_parameter(run: Run) -> bool:
    """Whether gradients are reduced one by one: many small all-reduces in backward and none known to
    be elsewhere."""
    table = collective_table(run)
    table = table[table["name"] == "all_reduce"]
    count = float(table["count"].sum())
    small = table["message_bytes"].isna() | (table["message_bytes"] < MAX_SMALL_BYTES)
    short = 1e3 * float(table["ms"].sum()) < MAX_SMALL_US * count
    in_backward = (table["phase"] == "backward") | (run.head.config.get("without_operators") is True)  # then unknown
    return bool(count >= MIN_SMALL_COUNT and short and (small & in_backward).all())


def _is_unsplit(rows: pd.DataFrame) -> bool:
    """Whether most bytes of gradients are reduced in messages that no smaller bucket splits: of `collective_rows`."""
    bytes_ = rows["message_bytes"][(rows["name"] == "all_reduce") & (rows["phase"] != "forward")].fillna(0.0)
    return bool(bytes_[bytes_ > BUCKET_BYTES].sum() > bytes_.sum() / 2)


def _is_bucket(run: Run, rows: pd.DataFrame) -> bool:
    """Whether the largest message holds more than the largest tensor that any recorded operator takes, and so more than
    one parameter."""
    reduced = rows[(rows["name"] == "all_reduce") & rows["message_bytes"].notna() & (rows["dtype"] != "")]
    if reduced.empty:
        return False
    widths = reduced["dtype"].map(lambda dtype: element_bytes(dtype) or 4).astype(float)
    elements = float((reduced["message_bytes"] / widths).max())
    taken = kernel_rows(run)
    taken = taken[taken["category"] != "communication"]
    largest = max((math.prod(s) for text in taken["in_shapes"].unique() for s in tensor_shapes(text)), default=0)
    return bool(0 < largest < elements)


BUCKET_BYTES = 1.05 * 25 * 2**20
"""What a bucket of DistributedDataParallel holds by default, 25 MiB; a larger parameter has one of its own."""
_UNSPLIT = Remedy(
    "Most bytes are in messages of more than 25 MiB. At DistributedDataParallel's default each of these is one "
    "parameter, which smaller buckets do not split: reduce gradients in 16 bits, or accumulate over micro-batches."
    + _OTHER_RANKS,
    "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n\n"
    "model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
)


def _is_in_optimizer(run: Run, name: str) -> bool:
    """Whether most time of a collective is in the optimizer's steps: its state is sharded, and not the model."""
    table = collective_table(run)
    ms = table[table["name"] == name].groupby("phase")["ms"].sum()
    return bool(len(ms) and ms.get("optimizer", 0.0) > ms.sum() / 2)


MIN_SMALL_COUNT, MAX_SMALL_BYTES, MAX_SMALL_US = 50, 2**20, 500.0
"""All-reduces per step, and bytes and time of each, by which gradients are taken to be reduced one by one. A bucket of
DistributedDataParallel holds 25 MB."""
_BUCKETS = Remedy(
    "Gradients are reduced one by one in many calls, and little runs beside them. Reduce them in buckets while "
    "backward goes on, as DistributedDataParallel does." + _OTHER_RANKS,
    "model = DistributedDataParallel(model, gradient_as_bucket_view=True)   # no all_reduce of one's own",
)
_ASYNCHRONOUS = {
    "all_reduce": "work = torch.distributed.all_reduce(x, async_op=True)\n...\nwork.wait()",
    "all_gather": "work = torch.distributed.all_gather_into_tensor(out, x, async_op=True)\n...\nwork.wait()",
    "reduce_scatter": "work = torch.distributed.reduce_scatter_tensor(out, x, async_op=True)\n...\nwork.wait()",
    "all_to_all": "work = torch.distributed.all_to_all_single(out, x, async_op=True)\n...\nwork.wait()",
    "broadcast": "work = torch.distributed.broadcast(x, src=0, async_op=True)\n...\nwork.wait()",
    **dict.fromkeys(("send_recv", "send", "recv"), "work = torch.distributed.irecv(x, src=other)\n...\nwork.wait()"),
}
"""How each collective runs beside what is computed before `wait`."""


def _exchange(transfers: Transfers) -> Remedy:
    """Advice for ranks that exchange values. DeepEP's low-latency kernels are for decoding."""
    width = element_bytes(transfers.dtype) if transfers.dtype else None
    are_integers = transfers.dtype.startswith(("int", "uint", "bool", "long"))
    are_narrow = width is not None and (width <= MAX_NARROW_BYTES or are_integers)
    narrower = "" if are_narrow or not transfers.fewer_bytes_help else ", and exchange 16 bits or fewer"
    if transfers.of_experts:
        return Remedy(
            "Ranks exchange tokens here. Where dispatch and combine are one kernel each, split them into sending and "
            "receiving, or let them finish asynchronously (async_finish=True), and compute what does not depend on the "
            f"tokens meanwhile, as the other micro-batch{narrower}.{_OTHER_RANKS}",
            _ASYNC_BUFFER if transfers.savings.trains else _BUFFER,
        )
    return Remedy(
        "Ranks exchange tokens or embedding rows here. Compute what does not depend on them in the meantime"
        f"{narrower}.{_OTHER_RANKS}",
        _ALL_TO_ALL,
    )


MAX_NARROW_BYTES = 2
"""Elements of more bytes can be exchanged in 16 bits."""
_EXCHANGES = ("all_to_all", "send_recv", "send", "recv")
_ALL_TO_ALL = "work = torch.distributed.all_to_all_single(out, x, async_op=True)\n...   # the dense layers\nwork.wait()"
_BUFFER = (
    "tokens, counts, handle, event, receive = buffer.low_latency_dispatch(\n"
    "    x, experts_of_tokens, max_tokens, num_experts, return_recv_hook=True\n)\n"
    "...   # the other half of the batch, or the shared expert\nreceive()"
)
_ASYNC_BUFFER = (
    "out, _, event = buffer.combine(x, handle, async_finish=True)\n"
    "...   # the other micro-batch\nevent.current_stream_wait()"
)
_GATHER = Remedy(
    "Sharded weights are gathered before the layers that need them. Prefetch them, or shard less." + _OTHER_RANKS,
    "for block, following in zip(blocks, blocks[1:]):   # FSDP2\n"
    "    block.set_modules_to_forward_prefetch([following])",
)
_REDUCE_SHARDS = Remedy(
    "Each rank reduces its shard of the gradients here. Begin that as soon as a gradient is computed, while backward "
    "goes on." + _OTHER_RANKS,
    _ASYNCHRONOUS["reduce_scatter"],
)
_OPTIMIZER_SHARDS = (
    "The optimizer exchanges shards of gradients and weights in its step, with little beside it. Begin each exchange "
    "as soon as its gradient or its new weight is computed, and wait for weights in the next forward." + _OTHER_RANKS
)
_COLLECTIVES = {"all_gather": _GATHER, "reduce_scatter": _REDUCE_SHARDS}
"""Advice by the collective with the most exposed time; the guide's is for reduced gradients."""
