"""Operators that lose too much if their input and output have 16 bits: sums, statistics, classes, positions, choices.

    ops = NarrowOps(write, model)
    ops.check("cumsum", args, out, module)     # after each operator; `module()` names the module that runs
    ops.send()                                 # starts the copy of what depends on values
    ops.finish()                               # reports it, once the values are on the host

Each kind of operator has an inspection of its own; here they get the operators that concern them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.observers.signals.angles import RoundedAngles, largest_exact_angle
from amp_core.record.observers.signals.coarse_logits import CoarseLogits
from amp_core.record.observers.signals.coarse_predictions import CoarsePredictions
from amp_core.record.observers.signals.cumulative_sums import CumulativeSums
from amp_core.record.observers.signals.decays import RoundedDecays
from amp_core.record.observers.signals.differences import Differences
from amp_core.record.observers.signals.distances import Distances
from amp_core.record.observers.signals.graphless_casts import GraphlessCasts
from amp_core.record.observers.signals.inner_overflows import PRODUCTS, InnerOverflows
from amp_core.record.observers.signals.lost_factors import LostFactors
from amp_core.record.observers.signals.marks import Follower
from amp_core.record.observers.signals.masked_rows import REDUCTIONS, count_masked_rows
from amp_core.record.observers.signals.narrow_sums import NarrowSums
from amp_core.record.observers.signals.op_reports import Module, OpReports, Write
from amp_core.record.observers.signals.probabilities import RoundedProbabilities, logit_of_one
from amp_core.record.observers.signals.rounded_inputs import INTEGERS, RoundedInputs
from amp_core.record.observers.signals.router_choices import RouterChoices
from amp_core.record.observers.signals.slow_states import SlowStates
from amp_core.record.observers.signals.variances import Variances
from amp_core.record.observers.signals.wide_classes import WideClasses


class NarrowOps:
    """Inspects the operators of one step."""

    def __init__(self, write: Write, model: torch.nn.Module) -> None:
        self._reports = OpReports(write)
        self._choices = RouterChoices(self._reports)
        self._inputs = RoundedInputs(self._reports)
        self._sums = NarrowSums(self._reports)
        self._classes = WideClasses(self._reports)
        self._overflows = InnerOverflows(self._reports)
        self._graphless = GraphlessCasts(self._reports, model)
        self._follow_anew()

    def _follow_anew(self) -> None:
        """Forget what is known of tensors."""
        self._followers: tuple[Follower, ...] = (
            RoundedAngles(), Variances(), LostFactors(), Distances(), RoundedDecays(), CumulativeSums(), Differences(),
            CoarseLogits(), CoarsePredictions(),
        )  # fmt: skip
        self._probabilities = RoundedProbabilities()
        self._slow_states = SlowStates()
        self._sums.forget()
        self._classes.forget()

    def check(self, op: str, args: Sequence[Any], out: Any, module: Module) -> None:
        """Inspect an operator that has run."""
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if op in ("arange", "linspace") and isinstance(out, torch.Tensor) and out.dtype in NARROW and out.numel() > 1:
            # Neighbours that are equal were different positions.
            self._reports.later("rounded positions", op, module(), out.dtype, (out[1:] == out[:-1]).sum(), 0.0)
        if first is None or not first.numel():
            return
        self._check_any(op, args, out, module)
        result = out[0] if isinstance(out, tuple | list) and out else out
        if not isinstance(result, torch.Tensor):
            return
        narrow = result.dtype in NARROW
        if first.dtype not in NARROW:
            if narrow and op == "_to_copy":
                self._inputs.check(first, result, module)
        elif narrow:
            self._check_narrow(op, args, result, module)
        elif op == "_to_copy" and result.dtype in INTEGERS:
            self._inputs.check_back(first, module)

    def _check_any(self, op: str, args: Sequence[Any], out: Any, module: Module) -> None:
        """Inspect an operator of any dtype."""
        first = args[0]
        if op in REDUCTIONS and first.dim() and first.is_floating_point() and len(args) > 1:
            dims = [args[1]] if isinstance(args[1], int) else args[1]
            if len(dims) == 1:
                rows = count_masked_rows(first, dims[0])
                self._reports.later("masked rows", op, module(), first.dtype, rows, 0.0)
        self._classes.check_ratio(op, args, out, module)
        self._sums.check_row_norms(op, args, out, module)
        for follower in self._followers:
            if (found := follower.check(op, args, out)) is not None:
                self._reports.later(found.kind, found.op, module(), found.dtype, found.value, found.limit)
        if (state := self._slow_states.check(op, args, out)) is not None:
            self._reports.write("slow state", op, module(), state.lost, state.limit, state.dtype)
        self._probabilities.check(op, args, out, module)
        self._choices.check(op, args, out, module)
        if op in PRODUCTS:
            self._graphless.check(op, args, module)

    def _check_narrow(self, op: str, args: Sequence[Any], out: torch.Tensor, module: Module) -> None:
        """Inspect an operator with 16-bit input and output."""
        if out.dtype == torch.float16:
            self._overflows.check(op, args, out, module)
        if op.rstrip("_") in ("cos", "sin"):
            first = args[0]
            limit = largest_exact_angle(first.dtype)
            self._reports.later("rounded positions", op, module(), first.dtype, first.detach().abs().amax(), limit)
        self._classes.check(op, args, out, module)
        self._sums.check(op, args, out, module)

    def send(self) -> None:
        """Start the copy of what depends on values to the host, and report the rest that is not reported yet."""
        for op, name, dtype in self._probabilities.losses:
            self._reports.write("rounded probabilities", op, name, logit_of_one(dtype), 0.0, dtype)
        self._follow_anew()
        self._choices.send()
        self._inputs.send()
        self._reports.send()

    def finish(self, wait: bool = False) -> bool:
        """Report what depended on values; False, and nothing is reported, while they are not on the host yet."""
        if not self._reports.finish(wait):
            return False
        self._choices.finish()
        self._inputs.finish()
        return True
