"""The number of samples of a forward: which dimension of its inputs is the batch dimension.

    batch = BatchSize(model)
    batch.began(model, args, kwargs)
    batch.ended(output)                   # 32; None if unknown

By convention it is the first dimension of the first input. Recurrent layers and attention may take time first,
(T, N, C), as their `batch_first` says. So in the first forwards of each entry point, the batch size of their inputs is
read, and the dimension of the model's input that has this size is the batch dimension. Without such layers the outputs
have to agree: an output's first dimension is the batch size or a multiple of it (tokens or views of a sample, as rows).
If inputs and outputs contradict each other, the batch size is unknown.
"""

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from amp_core.record.model import own
from amp_core.record.model.modules import is_compiled, tensors_in
from amp_core.record.torch_internals.module_calls import before_call

MAX_UNFIT = 3
"""Forwards of an entry point in which no dimension matches the layers' batch size, before layers are no longer read."""
ONE = -1
"""Stands for a dimension: the input is one sample, without a batch dimension."""
Shape = tuple[int, ...]


class BatchSize:
    """The batch sizes of one model's forwards, one after another."""

    def __init__(self, model: torch.nn.Module) -> None:
        layers = (torch.nn.RNNBase, torch.nn.RNNCellBase, torch.nn.MultiheadAttention)
        self._layers = [m for m in own.modules(model) if isinstance(m, layers)]
        self._compiled = is_compiled(model)
        self._unfit: dict[tuple[int, int], int] = {}  # forwards in which no dimension matched
        self._dimension: dict[tuple[int, int], int] = {}  # of the batch, by entry and number of dimensions
        self._entry = (0, 0)
        self._shapes: list[Shape] = []
        self._packed: int | None = None
        self._layer_sizes: list[int] = []
        self._handles: list[Any] = []

    def began(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A forward of `module` begins."""
        self.detach()
        leaves = [*args, *kwargs.values()]
        self._packed = next((_packed(leaf) for leaf in leaves if isinstance(leaf, PackedSequence)), None)
        if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):  # pytree is slow
            leaves = tree_leaves((args, kwargs))
        self._shapes = [tuple(t.shape) for t in leaves if isinstance(t, torch.Tensor) and t.dim()]
        self._layer_sizes = []
        self._entry = id(module), len(self._shapes[0]) if self._shapes else 0
        known = self._entry in self._dimension or self._unfit.get(self._entry, 0) >= MAX_UNFIT
        if known or self._compiled or self._packed is not None:
            return
        if module in self._layers:
            self._read_size(module, args, kwargs)
        elif self._layers:
            self._handles = [before_call(m, self._read_size) for m in self._layers]

    def ended(self, output: Any) -> int | None:
        """The forward returned `output`. Returns its number of samples; None if unknown."""
        self.detach()
        if self._packed is not None:
            return self._packed
        if not self._shapes:
            return 0
        first = self._shapes[0]
        known = self._dimension.get(self._entry)
        if known is not None:
            return 1 if known == ONE else first[known]
        if self._layer_sizes:
            return self._by_layers(first)
        if self._layers and any(own.held(m, "batch_first") is False for m in self._layers):
            return self._by_outputs(first, output, sure=False)  # compiled, or they were not called
        return self._by_outputs(first, output, sure=True)

    def detach(self) -> None:
        """Detach from the layers."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _read_size(self, layer: torch.nn.Module, args: Any, kwargs: Any) -> None:
        given = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor | PackedSequence)), None)
        if isinstance(given, PackedSequence):
            self._layer_sizes.append(_packed(given))
        elif given is not None:
            cell = isinstance(layer, torch.nn.RNNCellBase)
            batched = given.dim() == (2 if cell else 3)
            place = 0 if cell or own.held(layer, "batch_first") else 1
            self._layer_sizes.append(given.shape[place] if batched else 1)

    def _by_layers(self, first: Shape) -> int | None:
        samples = self._layer_sizes[0]
        fits = [i for i, size in enumerate(first[:2]) if size == samples]
        if not fits and samples == 1:
            fits = [ONE]
        elif not fits and first[0] and samples % first[0] == 0:  # windows or heads of each sample, in rows
            fits = [0]
        if not fits:
            self._unfit[self._entry] = self._unfit.get(self._entry, 0) + 1
            return None
        if len(fits) == 1:
            self._dimension[self._entry] = fits[0]
        return 1 if fits == [ONE] else first[fits[0]]

    def _by_outputs(self, first: Shape, output: Any, *, sure: bool) -> int | None:
        """`sure`: no layer takes time first, so the first dimension is the batch unless an output contradicts it."""
        rows = [t.shape[0] for t in tensors_in(output) if t.dim()]
        ahead = [shape[0] for shape in self._shapes]
        if first[0] in rows or not rows:
            if not sure and len(first) > 1 and first[1] != first[0]:
                return None
            # Without rows to compare, images or sequences of several sizes in a list have no batch dimension.
            return first[0] if rows or _agree(ahead, self._shapes) else None
        if len(first) > 1 and first[1] in rows:
            return first[1]  # (T, N, C) in, (N, classes) out
        if sure and first[0] and any(size and size % first[0] == 0 for size in rows):
            return first[0]
        return None


def _agree(ahead: list[int], shapes: list[Shape]) -> bool:
    """Whether several inputs can be one batch: those of the first one's rank have its first dimension."""
    alike = [n for n, shape in zip(ahead, shapes, strict=True) if len(shape) == len(shapes[0])]
    return len(set(alike)) == 1


def _packed(sequence: PackedSequence) -> int:
    return int(sequence.batch_sizes[0])  # always on the CPU
