"""Operators that lose too much if their input and output have 16 bits, by name: sums, statistics, classes, positions.

    ops = NarrowOps(report)
    ops.check("cumsum", args, out, module)     # after each operator; `module()` names the module that runs
    ops.send()                                 # starts the copy of what depends on values
    ops.finish()                               # reports it, once the values are on the host

`report(kind, op, name, value, limit, dtype)` writes an event; the kinds are in `schema.EVENT_KINDS`.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.observers.signals.angles import RoundedAngles, largest_exact_angle
from amp_core.record.observers.signals.bins import MAX_VALUES, most_terms
from amp_core.record.observers.signals.coarse_logits import CoarseLogits
from amp_core.record.observers.signals.cumulative_sums import CumulativeSums
from amp_core.record.observers.signals.decays import RoundedDecays
from amp_core.record.observers.signals.differences import Differences
from amp_core.record.observers.signals.distances import Distances
from amp_core.record.observers.signals.lost_factors import LostFactors
from amp_core.record.observers.signals.marks import Follower
from amp_core.record.observers.signals.masked_rows import REDUCTIONS, count_masked_rows
from amp_core.record.observers.signals.probabilities import RoundedProbabilities, logit_of_one
from amp_core.record.observers.signals.row_norms import RowNorms, is_root
from amp_core.record.observers.signals.slow_states import SlowStates
from amp_core.record.observers.signals.variances import Variances
from amp_core.record.stats.host_transfer import HostTransfer

MIN_CLASSES = 8192
"""Classes from which the logarithm of a softmax in 16 bits is reported: their logarithm is 9 and more, where bfloat16
has steps of 2^-4."""
MIN_SUM_TERMS = 4096
MIN_MEAN_TERMS = 65_536
"""Terms of a sum, and of a mean, from which a result in 16 bits is reported. Smaller ones are common in pooling."""
MIN_TERMS_PER_BIN = 256
MIN_CHAIN = 64
"""Additions to one number, or in one module to one tensor, one after the other."""
MIN_LOST_FRAC = {MIN_CHAIN: 0.5, 256: 0.25}
"""Share of a tensor's elements that such an addition leaves as they are, by the number of additions."""
MIN_STATISTIC_TERMS = 16
MAX_EXPERTS = 4096
INTEGERS = (torch.int16, torch.int32, torch.int64)
MAGNITUDES = ("pow", "square", "sum", "mean", "var", "norm", "linalg_vector_norm", "prod")
"""Operators that overflow float16 from finite numbers, and whose results often divide."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")
LOOP = "the loop"
"""The name of what runs outside of the model and its loss."""
MIN_ROWS = 16
"""Rows of an input whose columns are compared with their copies in 16 bits."""
MAX_ROUNDED_VARIANCE_FRAC = 0.02
"""Share of a column's variance by which rounding may change its values."""
MIN_GRID = 16
"""Coordinates of a grid along one dimension."""
COLUMN_PARTS = ("column errors", "column variances", "column means")
MIN_SPREAD_RATIO = 1e-5
"""Standard deviation of a column over its mean; below that, its values differ by rounding alone."""
SELECTIONS = ("topk", "max", "sort", "argmax")
"""Operators that select experts by their scores."""
ROUTERS = ("rout", "gate", "moe", "expert")
"""Parts of the names of modules that choose experts."""

Report = Callable[[str, str, str, float, float, torch.dtype], None]
"""Takes the kind of event, the operator, the module, the value, its limit and the dtype."""


class NarrowOps:
    """Inspects the operators of one step."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._softmax_sizes: set[int] = set()
        self._widened: dict[tuple[int, int], torch.dtype] = {}  # 16-bit values cast to FP32, by elements and last size
        self._wide_softmax: dict[str, int] = {}  # classes of a softmax over many, by module
        self._wide_sums: dict[tuple[int, ...], int] = {}  # terms of a sum over many classes, by its shape
        self._choices: list[tuple[str, str, str, int, int, torch.Tensor, torch.dtype]] = []
        self._statistics: set[tuple[int, ...]] = set()
        self._row_norms = RowNorms()
        self._follow_anew()
        # Kind, operator, module, dtype, and value and limit as tensors.
        self._pending: list[tuple[str, str, str, torch.dtype, torch.Tensor, float]] = []
        # Module, dtype, rows, and by column the norm of the rounding error, the variance and the mean.
        self._columns: list[tuple[str, torch.dtype, int, list[torch.Tensor]]] = []
        self._transfer = HostTransfer()

    def _follow_anew(self) -> None:
        """Forget what is known of tensors."""
        self._followers: tuple[Follower, ...] = (
            RoundedAngles(), Variances(), LostFactors(), Distances(), RoundedDecays(), CumulativeSums(), Differences(),
            CoarseLogits(),
        )  # fmt: skip
        self._probabilities = RoundedProbabilities()
        self._slow_states = SlowStates()
        self._long_sums: dict[int, tuple[int, Any]] = {}  # terms, and the sum, by its id
        self._differences: dict[int, tuple[Any, torch.dtype]] = {}  # the difference, and the 16-bit dtype in it, by id
        # By the id of a sum: additions so far, a reference to it, and the module that made the first of them.
        self._chains: dict[int, tuple[int, Callable[[], Any], str]] = {}

    def check(self, op: str, args: Sequence[Any], out: Any, module: Callable[[], str]) -> None:
        """Inspect an operator that has run."""
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if op in ("arange", "linspace") and isinstance(out, torch.Tensor) and out.dtype in NARROW and out.numel() > 1:
            # Neighbours that are equal were different positions.
            self._later("rounded positions", op, module(), out.dtype, (out[1:] == out[:-1]).sum(), 0.0)
        if first is None or not first.numel():
            return
        if op in REDUCTIONS and first.dim() and first.is_floating_point() and len(args) > 1:
            dims = [args[1]] if isinstance(args[1], int) else args[1]
            if len(dims) == 1:
                self._later("masked rows", op, module(), first.dtype, count_masked_rows(first, dims[0]), 0.0)
        self._follow_ratio(op, args, out, module)
        if (norms := self._row_norms.check(op, args, out)) is not None:
            self._statistic(op, *norms, module)
        for follower in self._followers:
            if (found := follower.check(op, args, out)) is not None:
                self._later(found.kind, found.op, module(), found.dtype, found.value, found.limit)
        if (state := self._slow_states.check(op, args, out)) is not None:
            self._report("slow state", op, module(), state.lost, state.limit, state.dtype)
        self._probabilities.check(op, args, out, module)
        result = out[0] if isinstance(out, tuple | list) and out else out
        name = op.rstrip("_")
        if not isinstance(result, torch.Tensor) or result.dtype not in NARROW:
            if first.dtype in NARROW and op == "_to_copy" and result.dtype in INTEGERS:
                # Integers that were in 16 bits meanwhile.
                largest = first.detach().abs().amax()
                self._later("rounded positions", "integers", module(), first.dtype, largest, _max_exact(first.dtype))
            elif first.dtype in NARROW and op == "argmax":
                self._choose(op, first, 1, module)
            elif first.dtype in NARROW and isinstance(result, torch.Tensor) and name in ("_to_copy", "_softmax"):
                self._widen(name, result, first.dtype)
            elif (source := self._widened.get(size_by_row(first))) is not None:
                self._check_widened(op, name, first, out, source, module)
            return
        if first.dtype not in NARROW:
            if op == "_to_copy" and first.dtype in INTEGERS:
                self._count_rounded(op, first, result, module)
            elif op == "_to_copy" and first.is_floating_point() and not first.requires_grad:
                if result.dtype == torch.float16:
                    self._check_mask(op, first, result, module)
                self._check_columns(first, result, module)
                self._check_grid(op, first, result, module)
            return
        if result.dtype == torch.float16 and name in PRODUCTS and module() == LOOP:
            self._check_product(op, args, result)
        if result.dtype == torch.float16 and (name in MAGNITUDES or name == "mul"):
            self._check_overflow(op, args, result, module)
        if name in ("_softmax", "sigmoid"):
            self._softmax_sizes.add(first.shape[-1] if first.dim() else 1)
            if name == "_softmax" and first.dim() and first.shape[-1] >= MIN_CLASSES:
                self._wide_softmax[module()] = first.shape[-1]
        elif name in SELECTIONS and isinstance(out, tuple | list):
            self._choose(op, first, result.shape[-1] if name == "topk" else 1, module)
        elif name in ("_log_softmax", "logsumexp", "log"):
            dims = [args[1]] if len(args) > 1 and isinstance(args[1], int) else [-1]
            classes = first.shape[dims[0]] if first.dim() else 1
            if name == "log" and self._wide_softmax:  # of the chosen class alone
                classes = max(classes, self._wide_softmax.get(module(), 0))
            if name == "log":  # of the sum of all exponentials
                classes = max(classes, self._wide_sums.get(tuple(first.shape), 0))
            if classes >= MIN_CLASSES:
                self._report("narrow classes", op, module(), float(classes), float(MIN_CLASSES), first.dtype)
        elif name in ("cos", "sin"):
            limit = largest_exact_angle(first.dtype)
            self._later("rounded positions", op, module(), first.dtype, first.detach().abs().amax(), limit)
        else:
            self._check_sum(op, name, args, first, result, module)

    def _widen(self, name: str, wide: torch.Tensor, source: torch.dtype) -> None:
        """Note that 16-bit values were cast to FP32, where those that were equal stay so. An operator may do both."""
        if wide.dtype == torch.float32 and wide.dim() > 1 and wide.shape[-1] <= MAX_EXPERTS:
            self._widened[size_by_row(wide)] = source
            if name == "_softmax":
                self._softmax_sizes.add(wide.shape[-1])

    def _check_widened(
        self, op: str, name: str, wide: torch.Tensor, out: Any, source: torch.dtype, module: Callable[[], str]
    ) -> None:
        """Inspect an operator on FP32 values that were 16-bit before, or on as many others."""
        if name in ("_softmax", "sigmoid"):
            self._softmax_sizes.add(wide.shape[-1])
        elif name in SELECTIONS and (name == "argmax" or isinstance(out, tuple | list)):
            chosen = out[0].shape[-1] if name == "topk" else 1
            self._choose(op, wide, chosen, module, source)

    def _check_sum(
        self, op: str, name: str, args: Sequence[Any], first: torch.Tensor, out: torch.Tensor, module: Callable[[], str]
    ) -> None:
        terms, limit = first.numel() // max(1, out.numel()), 0
        if name in ("mean", "var", "var_mean", "std", "std_mean") and terms >= MIN_STATISTIC_TERMS:
            if name.startswith("std"):
                self._statistic(op, out.numel(), out.dtype, module)
            else:
                self._statistics.add(tuple(out.shape))
        elif tuple(out.shape) in self._statistics and is_root(name, args):
            self._statistics.discard(tuple(out.shape))
            self._statistic(op, out.numel(), out.dtype, module)
        if name == "sub" and len(args) > 1 and isinstance(args[1], torch.Tensor):
            sums = [self._long_sums.get(id(t), (0, None))[0] for t in (first, args[1])]
            if all(sums):  # both have lost what tells them apart
                self._report("narrow sum", op, module(), float(min(sums)), float(_max_exact(out.dtype)), out.dtype)
        if name == "sum":
            limit = MIN_SUM_TERMS
            if terms >= _max_exact(first.dtype):
                self._long_sums[id(out)] = terms, out
            if terms >= MIN_CLASSES and out.numel() > 1:
                self._wide_sums[tuple(out.shape)] = terms
        elif name == "mean":
            limit = MIN_MEAN_TERMS
        elif name in ("cumsum", "logcumsumexp", "cumprod"):
            terms = first.shape[args[1]] if first.dim() and len(args) > 1 else first.numel()
            limit = _max_exact(first.dtype) + 1
        elif name in ("scatter_add", "index_add", "scatter_reduce", "index_put", "_index_put_impl"):
            if (most := most_terms(args)) is not None:
                self._later("narrow sum", op, module(), out.dtype, most, MIN_TERMS_PER_BIN - 1)
        elif name in ("add", "mul", "sub"):
            self._follow_chain(op, name, args, out, module)
        if limit and terms >= limit:
            self._report("narrow sum", op, module(), float(terms), float(limit), out.dtype)

    def _follow_chain(
        self, op: str, name: str, args: Sequence[Any], out: torch.Tensor, module: Callable[[], str]
    ) -> None:
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
                self._report("narrow sum", op, module(), float(made), float(MIN_CHAIN), out.dtype)
        elif len(terms) == 2 and terms[0].shape == terms[1].shape and terms[0] is not out and where == module():
            lost = ((out == terms[0]) & (terms[1] != 0)).float().mean() > MIN_LOST_FRAC[made]
            self._later("narrow sum", op, where, out.dtype, lost * made, 0.0)

    def _follow_ratio(self, op: str, args: Sequence[Any], out: Any, module: Callable[[], str]) -> None:
        """The loss of a policy has the ratio of its probabilities to earlier ones: the exponential of a difference of
        which one part has a gradient."""
        terms = [a for a in args[:2] if isinstance(a, torch.Tensor)]
        if op == "sub" and len(terms) == 2 and terms[0].shape == terms[1].shape and terms[0].dim():
            narrow = next((t.dtype for t in terms if t.dtype in NARROW), None)
            if narrow is not None and terms[0].requires_grad != terms[1].requires_grad:
                self._differences[id(out)] = out, narrow
        elif op in ("exp", "_to_copy") and terms and (found := self._differences.get(id(terms[0]))) is not None:
            if op == "_to_copy":  # autocast on a GPU casts what `exp` is given
                self._differences[id(out)] = out, found[1]
            elif module() == "loss":
                self._report("narrow ratio", op, "loss", float(out.numel()), 0.0, found[1])

    def send(self) -> None:
        """Start the copy of what depends on values to the host, and report the rest that is not reported yet."""
        for op, name, dtype in self._probabilities.losses:
            self._report("rounded probabilities", op, name, logit_of_one(dtype), 0.0, dtype)
        self._follow_anew()
        values = [value for _, _, _, _, value, _ in self._pending] + [ties for *_, ties, _ in self._choices]
        for place, value in enumerate(values):
            self._transfer.put(str(place), value)
        for place, (*_, parts) in enumerate(self._columns):
            for name, part in zip(COLUMN_PARTS, parts, strict=True):
                self._transfer.put(f"{name} {place}", part)
        self._transfer.send()

    def finish(self, wait: bool = False) -> bool:
        """Report what depended on values; False, and nothing is reported, while they are not on the host yet."""
        if not self._transfer.ready(wait):
            return False
        numbers = iter([self._transfer.values(str(n))[0] for n in range(len(self._pending) + len(self._choices))])
        for kind, op, module, dtype, _, limit in self._pending:
            if (size := float(next(numbers))) > limit:
                self._report(kind, op, module, -size if kind == "constant overflow" else size, limit, dtype)
        for kind, op, module, experts, chosen, _, dtype in self._choices:
            sizes, ties = {experts, chosen} - {1}, float(next(numbers))
            if self._softmax_sizes & sizes or any(part in module.lower() for part in ROUTERS):
                self._report(kind, op, module, ties, float(experts), dtype)
        for place, (name, dtype, rows, _) in enumerate(self._columns):
            error, variance, mean = (self._transfer.values(f"{part} {place}") for part in COLUMN_PARTS)
            if lost := _hardly_differ(error, variance, mean, rows, dtype):
                self._report("rounded positions", "columns", name, float(lost), 0.0, dtype)
        self._pending, self._choices, self._columns = [], [], []
        return True

    def _later(self, kind: str, op: str, module: str, dtype: torch.dtype, value: torch.Tensor, limit: float) -> None:
        self._pending.append((kind, op, module, dtype, value, limit))

    def _statistic(self, op: str, count: int, dtype: torch.dtype, module: Callable[[], str]) -> None:
        if (name := module()) != "loss":
            self._report("narrow statistics", op, name, float(count), 0.0, dtype)

    def _choose(
        self, op: str, scores: torch.Tensor, chosen: int, module: Callable[[], str], source: torch.dtype | None = None
    ) -> None:
        """A choice among scores; whether it is a router's is known once a softmax of as many was seen. `source`: the
        16-bit dtype that FP32 scores had before."""
        experts = scores.shape[-1] if 1 < scores.dim() < 4 else 1  # those of attention have a dimension of heads
        if not chosen < experts <= MAX_EXPERTS or not torch.is_grad_enabled() or (name := module()) == "loss":
            return
        best = scores.detach().topk(chosen + 1).values
        tied = (best[..., -1] == best[..., -2]) & (best[..., -1] > torch.finfo(best.dtype).min)  # not among masked ones
        # Of FP32 scores the share of ties tells whether they matter.
        kind, ties = ("narrow router", tied.sum()) if source is None else ("rounded logits", tied.float().mean())
        self._choices.append((kind, op, name, experts, chosen, ties, source or scores.dtype))

    def _check_overflow(self, op: str, args: Sequence[Any], out: torch.Tensor, module: Callable[[], str]) -> None:
        """Squares, products and sums that are infinite, which is hidden where something is divided by them. A mask is
        multiplied by a number."""
        factors = [a.detach() for a in args[:2] if isinstance(a, torch.Tensor) and a.dim()]
        hidden = torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        several = out.numel() > 1 or op == "sum"  # the number of what a loss is divided by
        if hidden and several and len(factors) > (op.rstrip("_") == "mul"):
            infinite = out.detach().isinf().sum()
            for factor in factors:
                infinite = infinite * factor.isfinite().all()
            self._later("inner overflow", op, module(), out.dtype, infinite, 0.0)

    def _check_product(self, op: str, args: Sequence[Any], out: torch.Tensor) -> None:
        """A product in the loop that is infinite: perhaps of a frozen model that makes the inputs of the other."""
        infinite = out.detach().isinf().sum()
        for factor in (a.detach() for a in args if isinstance(a, torch.Tensor)):
            infinite = infinite * factor.isfinite().all()
        self._later("input overflow", op, LOOP, out.dtype, infinite, 0.0)

    def _check_mask(self, op: str, wide: torch.Tensor, copy: torch.Tensor, module: Callable[[], str]) -> None:
        """A mask is 0 or a large negative constant, which becomes infinite."""
        lowest = torch.where(wide.isfinite(), wide, 0.0).amin()
        self._later(
            "constant overflow", op, module(), copy.dtype, -lowest * (wide.amax() <= 0), torch.finfo(copy.dtype).max
        )

    def _check_columns(self, wide: torch.Tensor, copy: torch.Tensor, module: Callable[[], str]) -> None:
        """Columns of an input, such as years, whose values differ by little beside their size."""
        values = wide.detach().flatten(0, -2) if wide.dim() > 1 else wide.new_zeros(0, 1)
        in_backward = torch._C._current_graph_task_id() != -1
        if (
            self._columns
            or in_backward
            or len(values) < MIN_ROWS
            or values.numel() > MAX_VALUES
            or wide.shape != copy.shape
        ):
            return
        error = torch.linalg.vector_norm(copy.detach().flatten(0, -2) - values, dim=0)
        self._columns.append((module(), copy.dtype, len(values), [error, *torch.var_mean(values, 0)]))

    def _check_grid(self, op: str, wide: torch.Tensor, copy: torch.Tensor, module: Callable[[], str]) -> None:
        """The coordinates of a grid are integers in equal steps. The first line along each dimension tells."""
        for dim in range(wide.dim()) if wide.shape == copy.shape and wide.numel() else ():
            first = tuple(slice(None) if d == dim else 0 for d in range(wide.dim()))
            line, rounded = wide.detach()[first], copy.detach()[first]
            if MIN_GRID <= len(line) <= MAX_VALUES:
                steps = line[1:] - line[:-1]
                is_grid = (steps == steps[0]).all() & (steps[0] != 0) & (line == line.round()).all()
                collisions = (rounded[1:] == rounded[:-1]).sum()
                self._later("rounded positions", op, module(), copy.dtype, collisions * is_grid, 0.0)

    def _count_rounded(self, op: str, whole: torch.Tensor, copy: torch.Tensor, module: Callable[[], str]) -> None:
        if whole.numel() <= MAX_VALUES and whole.shape == copy.shape:
            rounded = (copy.detach().to(torch.float32) != whole.to(torch.float32)).sum()
            self._later("rounded positions", op, module(), copy.dtype, rounded, 0.0)


def size_by_row(tensor: torch.Tensor) -> tuple[int, int]:
    """Number of elements and last size, which views with other leading sizes keep."""
    return tensor.numel(), tensor.shape[-1] if tensor.dim() else 1


def _hardly_differ(
    error: npt.NDArray[np.float64],
    variance: npt.NDArray[np.float64],
    mean: npt.NDArray[np.float64],
    rows: int,
    dtype: torch.dtype,
) -> int:
    """How many columns of so many rows rounding changes by a part of their variance. Not constants, and not a table of
    cosines, which are 1 at low frequencies."""
    with np.errstate(over="ignore", invalid="ignore"):
        differs = (np.abs(mean) >= _max_exact(dtype)) & (variance > (MIN_SPREAD_RATIO * mean) ** 2)
        return int((differs & (error**2 / rows > MAX_ROUNDED_VARIANCE_FRAC * variance)).sum())


def _max_exact(dtype: torch.dtype) -> int:
    """The integer up to which a dtype has all of them: 256 for bfloat16."""
    return int(2 / torch.finfo(dtype).eps)
