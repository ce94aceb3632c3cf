"""How the operands of linear layers lie in the blocks of 8- and 4-bit recipes, into the table `blocks`.

    BlockWatch(writer, model, due=sampling.due, wanted=lambda name: True)        # an observer: see `observers`

On a sampled step the first call of each linear layer is measured: its input and its weight in forward, the gradient of
its output in backward. See `stats.blocks` for what is measured. That takes as long as several steps of a small model,
so sampled steps are left out where it would take more than `time_cap.MAX_TIME_FRAC` of the time; events say so.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from amp_core.quantization import BINS, OCTAVES
from amp_core.record.model import own
from amp_core.record.model.modules import is_compiled, is_linear
from amp_core.record.model.parameters import (
    device_of,
    has_values,
    in_backward,
    local_values,
    named_modules,
    named_parameters,
    real_values,
    unwrapped,
)
from amp_core.record.observer import Observer
from amp_core.record.observers.time_cap import TimeCap
from amp_core.record.stats.blocks import BlockRow, measure_blocks
from amp_core.record.stats.channels import channel_of
from amp_core.record.stats.dispatch import kernel_of
from amp_core.record.stats.host_transfer import HostTransfer
from amp_core.record.stats.layout import dtype_name, measurable
from amp_core.record.torch_internals.module_calls import Switches
from amp_core.record.torch_internals.tensor_hooks import TensorHooks
from amp_core.store.writer import RunWriter

MAX_WAITING = 8
"""Sampled steps whose numbers may still be on the device."""

_ROW = 4 * BINS + 3


class _Operand(NamedTuple):
    """A tensor that was measured, and its rows; the numbers are in the host transfer."""

    name: str
    kind: str
    dtype: str
    numel: int
    rows: list[BlockRow]


class BlockWatch(Observer):
    """Writes rows of `blocks` for the sampled steps of one training loop.

    `due(step)` says whether a step is sampled, `wanted(name)` whether a module or parameter of that name is. With
    `all_sampled`, no sampled step is left out.
    """

    def __init__(
        self,
        writer: RunWriter,
        model: torch.nn.Module,
        due: Callable[[int], bool],
        wanted: Callable[[str], bool],
        all_sampled: bool = False,
    ) -> None:
        self._writer = writer
        self._due = due
        self._wanted = wanted
        self._cap = TimeCap(writer, "blocks", all_sampled)
        self._names = {id(p): n for n, p in named_parameters(unwrapped(model))}
        self._step = 0
        self._called: set[str] = set()
        self._weights: set[int] = set()
        self._measured: list[_Operand] = []
        self._transfer = HostTransfer()
        self._sent: list[tuple[int, list[_Operand], HostTransfer]] = []
        self._on_tensors = TensorHooks()
        self._on = False
        layers = [(n, m) for n, m in named_modules(unwrapped(model)) if is_linear(m)]
        self._switches = Switches((m, self._listener(n, self._on_grad(n))) for n, m in layers)
        reason = "" if layers else "the model has no linear layer"
        if is_compiled(model):
            reason = "hooks do not reach into a compiled graph"
        if reason:
            self.awake = False
            writer.event("warning", name="not recorded", detail=f"blocks: {reason}")
        else:
            measure_blocks(
                torch.ones(1, 1, device="cpu"), "activation"
            )  # compiles the kernel, which no step should pay for
            device = device_of(model).type
            if kernel_of("blocks", device) is None:
                detail = f"no kernel measures blocks on {device}; plain torch is used, which is slower"
                writer.event("phase change", name="blocks", detail=detail)
        self._possible = not reason

    # moments of the loop

    def step_began(self, step: int) -> None:
        self._detach()
        self.awake = self._possible and self._due(step) and self._cap.allows(step)
        if self.awake:
            self._step, self._called, self._weights = step, set(), set()
            self._measured, self._transfer = [], HostTransfer()
            self._switches.on()
            self._on = True

    def step_ended(self, step: int) -> None:
        with self._cap:
            self._detach()
            if self._measured:
                self._transfer.send()
                self._sent.append((self._step, self._measured, self._transfer))
                self._measured = []
            self._write(MAX_WAITING)

    def close(self) -> None:
        self._detach()
        self._on_tensors.remove()
        self._write(0)
        self._cap.report(self._step)

    def _detach(self) -> None:
        if self._on:
            self._on = False
            self._switches.off()
        self._on_tensors.detach_leaves()

    # as layers run

    def _listener(self, name: str, on_grad: Callable[[torch.Tensor], None]) -> Callable[..., None]:
        def after_forward(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if name in self._called or not torch.is_grad_enabled() or self.at_own_work() or in_backward():
                return
            self._called.add(name)
            with self.watching():
                weight = own.parameter(module, "weight")
                if weight is not None and id(weight) not in self._weights:
                    self._weights.add(id(weight))
                    matrix = local_values(weight) if has_values(weight) else None
                    outputs_last = (channel_of(module) or (-1, 0))[1] == 1
                    self._measure(
                        self._names.get(id(weight), f"{name}.weight"),
                        "weight",
                        matrix.mT if matrix is not None and outputs_last and matrix.dim() == 2 else matrix,
                    )
                self._measure(name, "activation", next((t for t in (*args, *kwargs.values())), None))
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    self._on_tensors.attach(output, name, on_grad)

        return after_forward

    def _on_grad(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(grad: torch.Tensor) -> None:
            with self.watching():
                if self.awake:
                    self._measure(name, "output_grad", grad)

        return hook

    def _measure(self, name: str, kind: str, tensor: Any) -> None:
        """Measure a tensor as a matrix; one that is none, or has no real values, is left out."""
        with self._cap:
            self._measure_now(name, kind, tensor)

    def _measure_now(self, name: str, kind: str, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor) or not tensor.dim() or not self._wanted(name):
            return
        if not measurable(tensor) or tensor.layout is not torch.strided or not tensor.numel():
            return
        matrix = real_values(tensor.detach())
        matrix = matrix.reshape(1, -1) if matrix.dim() == 1 else matrix.flatten(0, -2)
        rows = measure_blocks(matrix, kind)
        numbers = [part for row in rows for part in (row.packed.flatten(), row.totals)]
        self._transfer.put(str(len(self._measured)), torch.cat(numbers))
        without = [_without_numbers(r) for r in rows]
        self._measured.append(_Operand(name, kind, dtype_name(tensor.dtype), tensor.numel(), without))

    # when the numbers have arrived

    def _write(self, max_waiting: int) -> None:
        """Write what has arrived, and wait for the oldest while too many are pending."""
        while self._sent and self._sent[0][2].ready(wait=len(self._sent) > max_waiting):
            step, operands, transfer = self._sent.pop(0)
            columns: dict[str, list[Any]] = {}
            for i, operand in enumerate(operands):
                numbers = transfer.values(str(i)).reshape(-1, _ROW)
                for row, values in zip(operand.rows, numbers, strict=True):
                    for column, value in _row(step, operand, row, values).items():
                        columns.setdefault(column, []).append(value)
            self._writer.append("blocks", columns)


def _row(step: int, operand: _Operand, row: BlockRow, values: "np.ndarray[Any, Any]") -> dict[str, Any]:
    counts, sums, squares, ties = values[: 4 * BINS].reshape(4, BINS)
    used = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 0
    tied = int(np.flatnonzero(ties[:OCTAVES])[-1]) + 1 if ties.any() else 0
    absmax, abs_sum, sq_sum = values[4 * BINS :].tolist()
    return {
        "step": step,
        "name": operand.name,
        "kind": operand.kind,
        "product": row.product,
        "dtype": operand.dtype,
        "block": row.block,
        "scaling": row.scaling,
        "numel": operand.numel,
        "nonzero": int(counts.sum()),
        "absmax": absmax,
        "abs_sum": abs_sum,
        "sq_sum": sq_sum,
        "counts": counts[:used].astype(np.int64),
        "ties": ties[:tied].astype(np.int64),
        "top_sums": sums[:used],
        "top_squares": squares[:used],
    }


def _without_numbers(row: BlockRow) -> BlockRow:
    """The row without its tensors, which the host transfer has."""
    nothing = torch.empty(0, device="cpu")
    return row._replace(packed=nothing, totals=nothing)
