"""Launches that share one table, and so one copy to the device: one for each kernel and dtype.

>>> batch = Batch(torch.device("cuda:0"))
>>> packed = batch.measure(gradients, caps)
>>> batch.launch()
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from amp_core.formats import FORMAT_OF_DTYPE
from amp_core.record.stats.channels import ChannelMax
from amp_core.record.stats.cuda import program
from amp_core.record.stats.cuda.table import COLUMNS, Rows, Table, on_device, rows, stretches
from amp_core.record.stats.layout import Cap, addresses_of, dtype_name, in_one_row, packed_size

PART = 8192
"""Values of one channel that a warp takes at a time, as the source has it."""
VALUES = 1 << 16
"""Values of a block of `channels`, about."""
FORMATS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that one launch of `channels` or `largest` takes, in the order of their numbers in the source."""


class Launch(NamedTuple):
    """A kernel for a format, and what it reads."""

    form: str
    kernel: str
    table: Table


class Batch:
    """Work on tensors of one device. The memory of what it reads is kept until `launch`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: list[torch.Tensor] = []
        self._work: list[tuple[str, str, Rows, torch.Tensor | None]] = []  # format, kernel, rows, results
        self._doubles = 0  # results that come with the table, to which the work without others belongs
        self._reserved = torch.empty(0, device="cpu")
        self._used = 0  # doubles of it
        self.launched: list[Launch] = []

    def measure(self, tensors: Sequence[torch.Tensor], caps: Sequence[Cap | None] = ()) -> torch.Tensor:
        """The packed vectors, one after another, as `measure_together` has them; filled by `launch`."""
        sizes = [packed_size(t.dtype) for t in tensors]
        capped = [i for i, cap in enumerate(caps) if cap is not None]
        length = sum(sizes) + sum(sizes[i] for i in capped)
        results, begin = self._zeros(length + len(tensors))  # behind the vectors a ticket for each tensor
        starts = np.cumsum([begin, *sizes, *(sizes[i] for i in capped)])
        behind = dict(zip(capped, starts[len(tensors) :].tolist(), strict=False))
        groups: dict[tuple[torch.dtype, bool], list[int]] = {}
        for i, tensor in enumerate(tensors):
            if tensor.numel():
                groups.setdefault((tensor.dtype, i in behind), []).append(i)
        for (dtype, is_capped), members in groups.items():
            columns: dict[str, Sequence[int]] = {
                "out": starts[members].tolist(),
                "ticket": [int(starts[-1]) + i for i in members],
            }
            if is_capped:  # the order of the values is that of their channels
                held = [t if (t := tensors[i]).is_contiguous() else t.detach().contiguous() for i in members]
                limits = [self._limits(cap) for i in members if (cap := caps[i]) is not None]
                columns |= {"caps": [c.largest.data_ptr() for c in limits], "inner": [c.inner for c in limits]}
                columns |= {"channels": [len(c.largest) for c in limits], "capped_out": [behind[i] for i in members]}
            else:
                held = [in_one_row(tensors[i]) for i in members]
            self._add(dtype, "capped" if is_capped else "measure", held, results, columns)
        return results[begin : begin + length]

    def norms(self, tensors: Sequence[torch.Tensor]) -> None:
        """The 2-norm of each: the first ones of what `launch` returns."""
        self._doubles = 2 * len(tensors)  # so few that they come with the table, and no launch makes them zeros
        groups: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if tensor.numel():
                groups.setdefault(tensor.dtype, []).append(i)
        for dtype, members in groups.items():
            columns = {"out": members, "ticket": [len(tensors) + i for i in members]}
            self._add(dtype, "norms", [in_one_row(tensors[i]) for i in members], None, columns)

    def largest(self, tensors: Sequence[torch.Tensor]) -> None:
        """The largest magnitude of each float32, float16 or bfloat16 tensor: float32 in what `launch` returns."""
        self._doubles = -(-len(tensors) // 2)
        groups: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if tensor.numel():
                groups.setdefault(tensor.dtype, []).append(i)
        parts = []
        for dtype, members in groups.items():
            held = [in_one_row(tensors[i]) for i in members]
            self._held += held
            columns = {"out": members, "format": [FORMATS.index(dtype)] * len(members)}
            parts.append(stretches(*_lengths_and_addresses(held), dtype.itemsize, **columns))
        if parts:
            self._work.append(("fp32", "largest", np.concatenate(parts), None))

    def channels(self, wanted: Sequence[ChannelMax]) -> list[torch.Tensor]:
        """The largest magnitude of each channel as float32, or larger ones that were there; filled by `launch`.

        The gradients are contiguous, in float32, float16 or bfloat16.
        """
        lengths = [one.channels if one.into is None else 0 for one in wanted]
        memory, begin = self._zeros(sum(lengths))
        made = memory[begin:].view(torch.float32)[: sum(lengths)].split(lengths)
        results: list[torch.Tensor] = []
        for one, new in zip(wanted, made, strict=True):
            results.append(new if one.into is None else results[one.into] if isinstance(one.into, int) else one.into)
        parts: list[Rows] = []
        for one, result in zip(wanted, results, strict=True):
            if one.grad.numel():
                self._held += [one.grad, result]
                parts.append(_channel_rows(one, result.data_ptr()))
        if parts:
            self._work.append(("fp32", "channels", np.concatenate(parts), results[0]))
        return results

    def reserve(
        self, tensors: Sequence[torch.Tensor], wanted: Sequence[ChannelMax], capped: Sequence[torch.Tensor]
    ) -> None:
        """Make the memory for `measure` and `channels` of these at once, and for `measure` of tensors that may all
        have caps."""
        count = sum(packed_size(t.dtype) + 1 for t in tensors) + sum(2 * packed_size(t.dtype) + 1 for t in capped)
        count += sum(one.channels for one in wanted if one.into is None)
        self._reserved, self._used = torch.zeros(count, dtype=torch.float64, device=self._device), 0

    def launch(self) -> torch.Tensor:
        """Copy the table, and start each kernel once for each dtype. Returns the results that came with the table.

        `launched` has the launches. Raises `RuntimeError` if that fails.
        """
        alike: dict[tuple[str, str, int], list[Rows]] = {}
        memory: dict[int, torch.Tensor | None] = {}
        for form, kernel, made, results in self._work:
            alike.setdefault((form, kernel, id(results)), []).append(made)
            memory[id(results)] = results
        tables, behind = on_device([np.concatenate(parts) for parts in alike.values()], self._doubles, self._device)
        for (form, kernel, place), table in zip(alike, tables, strict=True):
            into = memory[place]
            program.launch(self._device, form, kernel, table, behind if into is None else into)
            self.launched.append(Launch(form, kernel, table))
        self._held, self._work = [], []
        return behind

    def _zeros(self, count: int) -> tuple[torch.Tensor, int]:
        """Memory that has that number of zeros, as doubles, from the place that comes second."""
        begin = self._used
        if len(self._reserved) < begin + count:
            return torch.zeros(count, dtype=torch.float64, device=self._device), 0
        self._used += count
        return self._reserved, begin

    def _limits(self, cap: Cap) -> Cap:
        wide = torch.float64 if cap.largest.dtype == torch.float64 else torch.float32  # as wide as they are compared
        limits = cap if cap.largest.dtype == wide else Cap(cap.largest.to(wide), cap.inner)
        self._held.append(limits.largest)
        return limits

    def _add(
        self,
        dtype: torch.dtype,
        kernel: str,
        held: list[torch.Tensor],
        results: torch.Tensor | None,
        columns: Mapping[str, Sequence[int]],
    ) -> None:
        self._held += held
        made = stretches(*_lengths_and_addresses(held), dtype.itemsize, **columns)
        self._work.append((_form(dtype), kernel, made, results))


def _lengths_and_addresses(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    return [t.numel() for t in tensors], addresses_of(tensors)


def _channel_rows(one: ChannelMax, out: int) -> Rows:
    """Rows of a tensor of (…, channels, inner). Where `inner` is 1, channels lie side by side: a row is some columns of
    some values of each; else it is some runs of one channel."""
    values, channels, inner, _ = one
    size = values.dtype.itemsize
    if inner == 1:
        columns = 32 * 16 // size  # a load for each thread of a warp
        count, taken = values.numel() // channels, VALUES // columns
        row, column = np.meshgrid(np.arange(0, count, taken), np.arange(0, channels, columns), indexing="ij")
        begin, first = row.ravel(), column.ravel()
        address = values.data_ptr() + begin * channels * size
    else:
        count, taken = values.numel() // inner * -(-inner // PART), max(16, VALUES // min(inner, PART))
        begin = first = np.arange(0, count, taken)
        address = values.data_ptr() + 0 * begin
    return rows(
        *(len(first), COLUMNS),
        address=address, length=np.minimum(taken, count - begin), out=out, channels=channels, inner=inner, first=first,
        format=FORMATS.index(values.dtype),
    )  # fmt: skip


def _form(dtype: torch.dtype) -> str:
    return FORMAT_OF_DTYPE[dtype_name(dtype)].name
