"""Detects sums and statistics that are accumulated in 16 bits: long sums, chains of additions, means and variances.

sums = NarrowSums(reports)
sums.check("cumsum", args, out, module)    # after each operator with 16-bit input and output
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from amp_core.record.observers.signals.bins import most_terms
from amp_core.record.observers.signals.op_reports import Module, OpReports
from amp_core.record.observers.signals.row_norms import RowNorms, is_root

MIN_SUM_TERMS = 4096
MIN_MEAN_TERMS = 65_536
"""Terms of a sum, and of a mean, from which a result in 16 bits is reported. Smaller ones are common in pooling."""
MIN_TERMS_PER_BIN = 256
MIN_CHAIN = 64
"""Additions to one number, or in one module to one tensor, one after the other."""
MIN_LOST_FRAC = {MIN_CHAIN: 0.5, 256: 0.25, 512: 0.25, 1024: 0.25}
"""Share of a tensor's elements that such an addition leaves as they are, by the number of additions."""
MIN_STATISTIC_TERMS = 16
MEANS = ("mean", "var", "var_mean", "std", "std_mean")
BY_INDEX = ("scatter_add", "index_add", "scatter_reduce", "index_put", "_index_put_impl")


class NarrowSums:
    """The operators of one step, in their order."""

    def __init__(self, reports: OpReports) -> None:
        self._reports = reports
        self._means: set[tuple[int, ...]] = set()  # shapes of means and variances
        self._row_norms = RowNorms()
        self._long_sums: dict[int, tuple[int, Any]] = {}  # terms, and the sum, by its id
        # By the id of a sum: additions so far, a reference to it, and the module that made the first of them.
        self._chains: dict[int, tuple[int, Callable[[], Any], str]] = {}

    def forget(self) -> None:
        """Forget what is known of tensors."""
        self._long_sums, self._chains = {}, {}

    def check_row_norms(self, op: str, args: Sequence[Any], out: Any, module: Module) -> None:
        """Inspect an operator of any dtype that may divide rows by their norms."""
        if (norms := self._row_norms.check(op, args, out)) is not None:
            self._statistic(op, *norms, module)

    def check(self, op: str, args: Sequence[Any], out: torch.Tensor, module: Module) -> None:
        """Inspect an operator with 16-bit input and output."""
        name, first = op.rstrip("_"), args[0]
        terms, limit = first.numel() // max(1, out.numel()), 0
        self._check_statistic(op, name, args, terms, out, module)
        if name == "sub":
            self._check_difference(op, args, out, module)
        if name == "sum":
            limit = MIN_SUM_TERMS
            if terms >= max_exact(first.dtype):
                self._long_sums[id(out)] = terms, out
        elif name == "mean":
            limit = MIN_MEAN_TERMS
        elif name in ("cumsum", "logcumsumexp", "cumprod"):
            terms = first.shape[args[1]] if first.dim() and len(args) > 1 else first.numel()
            limit = max_exact(first.dtype) + 1
        elif name in BY_INDEX:
            if (most := most_terms(args)) is not None:
                self._reports.later("narrow sum", op, module(), out.dtype, most, MIN_TERMS_PER_BIN - 1)
        elif name in ("add", "mul", "sub"):
            self._follow_chain(op, name, args, out, module)
        if limit and terms >= limit:
            self._reports.write("narrow sum", op, module(), float(terms), float(limit), out.dtype)

    def _check_statistic(
        self, op: str, name: str, args: Sequence[Any], terms: int, out: torch.Tensor, module: Module
    ) -> None:
        """A standard deviation, or the root of a variance."""
        shape = tuple(out.shape)
        if name in MEANS and terms >= MIN_STATISTIC_TERMS:
            if name.startswith("std"):
                self._statistic(op, out.numel(), out.dtype, module)
            else:
                self._means.add(shape)
        elif shape in self._means and is_root(name, args):
            self._means.discard(shape)
            self._statistic(op, out.numel(), out.dtype, module)

    def _check_difference(self, op: str, args: Sequence[Any], out: torch.Tensor, module: Module) -> None:
        """Two long sums that are subtracted have lost what tells them apart."""
        sums = [self._long_sums.get(id(t), (0, None))[0] for t in args[:2]]
        if all(sums):
            self._reports.write("narrow sum", op, module(), float(min(sums)), float(max_exact(out.dtype)), out.dtype)

    def _follow_chain(self, op: str, name: str, args: Sequence[Any], out: torch.Tensor, module: Module) -> None:
        """Count how many additions, one after the other, made a number, or a tensor within one module: the layers of a
        network add to their stream too, but only a few times each."""
        terms = [a for a in args[:2] if isinstance(a, torch.Tensor)]
        chains = [c for a in terms if a.shape == out.shape and (c := self._chains.get(id(a))) and c[1]() is a]
        before, _, where = max(chains, key=lambda chain: chain[0], default=(0, None, ""))
        made = before + (name != "mul")
        if not made:
            return
        whole = out.numel() > 1
        if whole and made == MIN_CHAIN // 8:
            where = module()
        self._chains[id(out)] = made, weakref.ref(out) if whole else lambda: out, where
        if made not in MIN_LOST_FRAC or name == "mul":
            return
        if not whole:
            if made == MIN_CHAIN:
                self._reports.write("narrow sum", op, module(), float(made), float(MIN_CHAIN), out.dtype)
        elif len(terms) == 2 and terms[0].shape == terms[1].shape and terms[0] is not out and where == module():
            lost = ((out == terms[0]) & (terms[1] != 0)).float().mean() > MIN_LOST_FRAC[made]
            self._reports.later("narrow sum", op, where, out.dtype, lost * made, 0.0)

    def _statistic(self, op: str, count: int, dtype: torch.dtype, module: Module) -> None:
        if (name := module()) != "loss":
            self._reports.write("narrow statistics", op, name, float(count), 0.0, dtype)


def max_exact(dtype: torch.dtype) -> int:
    """The integer up to which a dtype has all of them: 256 for bfloat16."""
    return int(2 / torch.finfo(dtype).eps)
