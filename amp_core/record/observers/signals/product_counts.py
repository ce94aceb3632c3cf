"""Products of one forward and loss: in which dtype they run, and those that run in FP32 though autocast is on.

>>> counts = ProductCounts(running)               # `running()`: the name of the module that runs
>>> counts.add(call, "addmm", args, out)          # each operator, after it has run
>>> counts.write(writer, step, "loss", cut=False)

What the program itself widened is in FP32 on purpose, and so is what follows from it outside of autocast.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from amp_core.record.backends import BACKENDS
from amp_core.record.environment import with_autocast
from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.observers.signals.marks import Marks
from amp_core.record.observers.signals.router_choices import SELECTIONS, size_by_row
from amp_core.record.op_trace.call_sites import CallSite
from amp_core.record.stats.layout import dtype_name
from amp_core.store.writer import RunWriter

MAX_MODULES = 50
"""Modules with products in FP32 that are written, those of most work first."""
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "convolution": 1, "_convolution": 1}
"""Products that autocast runs in 16 bits, with the argument whose size says how many terms each output sums. Not those
with a vector, such as the power iteration of spectral norm: no Tensor Core runs them."""
RECURRENT = ("mkldnn_rnn_layer", "_cudnn_rnn", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "miopen_rnn")
"""Layers that are one operator; those of a CPU in other cases are made of products."""
ATTENTION = ("_scaled_dot_product_", "_flash_attention", "_efficient_attention")
"""How the names of fused attention begin."""


class ProductCounts:
    """Counts the products of a step."""

    def __init__(self, running: Callable[[], str]) -> None:
        self._running = running
        # Module, multiplications, output size and shape of the factor of each product in FP32 in an autocast region.
        self._wide: list[tuple[str, float, tuple[int, int], tuple[int, ...]]] = []
        self._in_16_bits: set[tuple[str, tuple[int, ...]]] = set()  # modules and factors of products in 16 bits
        # Elements and a size of scores among which a maximum was selected.
        self._selected: set[tuple[int, int]] = set()
        self._all = 0.0
        self._in_region = self._cast = False  # whether autocast was on for an operator, and any result was in 16 bits
        self._outside: Counter[str] = Counter()  # FP32 results of products outside of any autocast region, by module
        self._narrow: dict[torch.dtype, float] = {}  # multiplications that autocast did in 16 bits
        self._widened: tuple[int, int] | None = None  # the call site whose operator last widened 16-bit values
        self._widened_by_hand: Marks[bool] = Marks()  # of what the program itself widened

    def add(self, call: CallSite, op: str, args: Any, out: Any) -> None:
        """Count an operator that has run, which Python called at `call`."""
        # Operators of the same call site are parts of one call that torch decomposed.
        if _widens(out, args):
            self._widened = call.key
            if not call.module.startswith("torch."):
                self._widened_by_hand.put(out, True)
        elif any(map(self._widened_by_hand.of, args)) and not _is_cast_again(op):
            self._widened_by_hand.put(out, True)
        self._in_region = self._in_region or _autocast_enabled()
        self._cast = self._cast or any(is_narrow(one) for one in (out if isinstance(out, (list, tuple)) else [out]))
        if op.rstrip("_") in SELECTIONS and args and isinstance(args[0], torch.Tensor):
            self._selected |= {(args[0].numel(), size) for size in args[0].shape}  # by expert or by token
        if op in PRODUCTS and isinstance(out, torch.Tensor) and inside_autocast():
            # An operator that widens its own inputs, such as unfused attention, does so on purpose.
            wide = out.dtype == torch.float32 and call.key != self._widened and _is_trained(args)
            self._count(op, args, out, wide=wide and not self._is_intended(call, args))
        elif (op in RECURRENT or op.startswith(ATTENTION)) and inside_autocast():
            self._count_fused(op, args, out)
        elif (op in PRODUCTS or op in RECURRENT) and _is_trained(args):
            made = out[0] if isinstance(out, tuple | list) else out
            if made.dtype == torch.float32:
                self._outside[self._running()] += made.numel()

    def _is_intended(self, call: CallSite, args: Any) -> bool:
        """Whether the program wrote a product in FP32 on purpose: of values that it widened itself, without autocast.
        A layer of torch's may be in such a region by mistake; what comes before it has to be widened to fit."""
        by_hand = any(map(self._widened_by_hand.of, args))
        return by_hand and not call.module.startswith("torch.nn.") and not _autocast_enabled()

    def _count(self, op: str, args: Any, out: torch.Tensor, wide: bool) -> None:
        factor = args[PRODUCTS[op]]
        terms = factor.shape[-1] if "conv" not in op else factor.numel() // max(1, factor.shape[0])
        work = out.numel() * terms
        self._all += work
        if out.dtype in NARROW and _autocast_enabled():
            self._narrow[out.dtype] = self._narrow.get(out.dtype, 0.0) + work
            self._in_16_bits.add((self._running(), tuple(factor.shape)))
        if wide and work:  # an empty tensor takes no work
            self._wide.append((self._running(), work, size_by_row(out), tuple(factor.shape)))

    def _count_fused(self, op: str, args: Any, out: Any) -> None:
        """A recurrent layer multiplies each vector of its input, or of its state, by each of its matrices; attention
        each query by all keys, and their shares by all values."""
        given = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        if op in RECURRENT:
            work = given[0].numel() // max(1, given[0].shape[-1]) * sum(t.numel() for t in given[1:] if t.dim() == 2)
        else:
            work = 2 * given[0].numel() * given[1].shape[-2]
        self._all += work
        made = out[0] if isinstance(out, tuple | list) else out
        if made.dtype in NARROW and _autocast_enabled():
            self._narrow[made.dtype] = self._narrow.get(made.dtype, 0.0) + work

    def write(self, writer: RunWriter, step: int, outside: str, *, cut: bool) -> None:
        """Write the modules with most FP32 products, as shares of all. `outside`: what operators outside
        of the model belong to; `cut`: whether there were more operators than were added.

        A router's product is in FP32 on purpose: its scores are compared. So is that of a layer which ran in 16 bits
        too, as a critic does whose gradient penalty is computed in FP32.
        """
        wide: dict[str, float] = {}
        for name, work, size, factor in self._wide:
            if size not in self._selected and (name, factor) not in self._in_16_bits:
                wide[name] = wide.get(name, 0.0) + work
        for name, work in sorted(wide.items(), key=lambda item: -item[1])[:MAX_MODULES]:
            writer.event("wide product", name, step=step, value=work / self._all, dtype="float32")
        if self._in_region and not self._cast and not cut:
            most = next((name for name, _ in self._outside.most_common() if name != outside), "")
            writer.event("nothing cast", most, step=step, count=len(self._outside))
        seen = dict(writer.head.config) | {"products_seen": self._all}
        if self._narrow and not seen.get("autocast_dtype"):  # the region is inside forward, not around it
            seen = with_autocast(seen, dtype_name(max(self._narrow, key=self._narrow.__getitem__)))
        writer.update_head(config=seen)


def is_narrow(out: Any) -> bool:
    """Whether it is a tensor in 16 bits."""
    return isinstance(out, torch.Tensor) and out.dtype in NARROW


def _widens(out: Any, args: Any) -> bool:
    return isinstance(out, torch.Tensor) and out.dtype == torch.float32 and bool(args) and is_narrow(args[0])


def _is_cast_again(op: str) -> bool:
    """Whether an operator is a product of which autocast casts the arguments, so that it is not of what was widened."""
    return op in PRODUCTS and _autocast_enabled()


def inside_autocast() -> bool:
    """Whether an autocast region is open, be it one that disables it within another."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth > 0


def _is_trained(args: Any) -> bool:
    """Whether a gradient may flow through an operator: not of a teacher without gradients, which runs as it likes. A
    custom autograd function computes without them, of tensors that have some."""
    return torch.is_grad_enabled() or any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)


def _autocast_enabled() -> bool:
    """Whether autocast was on when Python called the present operator. Within an operator that autocast handles,
    `is_autocast_enabled` is False."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return any(torch.is_autocast_enabled(kind) for kind in BACKENDS)
