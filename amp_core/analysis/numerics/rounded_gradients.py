"""Which gradients backward rounds to 16 bits, and which of them are matrices.

    rounded = Rounding(run)
    rounded.outputs(["blocks.0.fc", "blocks.0.norm1"])         # [True, False]
    rounded.weights(["blocks.0.fc.weight", "tokens.weight"])   # [True, False]

Autocast runs matrix products, convolutions and recurrent layers in 16 bits, normalisations, embeddings and losses in
FP32; backward follows the dtypes of forward (`amp_core.hardware.autocast_ops` has the lists of operators; here CUDA's,
by the classes of modules). A run under autocast recorded whether a module's output gradient is 16-bit. For an FP32 run
it follows from the classes of the modules in the head; modules that keep the dtype of their input (ReLU, dropout, batch
norm, pooling) take that of the module that ran before. Without either, all gradients count as rounded.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from amp_core.formats import autocast_dtypes
from amp_core.store.run import Run

LOWERED_MODULES = ("Linear", "Conv", "LSTM", "GRU", "RNN", "MultiheadAttention")
"""Classes whose names contain one of these run in 16 bits under autocast: Conv2d, LazyConv1d, LSTMCell, GPT-2's Conv1D,
MultiheadAttention's NonDynamicallyQuantizableLinear."""

RECURRENT = ("LSTM", "GRU", "RNN")

FP32_MODULES = (
    *("LayerNorm", "RMSNorm", "GroupNorm", "LocalResponseNorm", "Embedding", "Loss", "Softmax", "Softplus"),
    "Bilinear",  # promoted to the widest input, and its weights are FP32
)
"""Classes whose names contain one of these return FP32."""

ASSUMED_ROWS = 256.0
"""Samples times positions that a weight gradient is summed over, where no output gradients were recorded."""


class Rounding:
    """Which gradients of a run autocast rounds to 16 bits."""

    def __init__(self, run: Run) -> None:
        model = run.head.model
        self._layers = _mapping(model.get("layers"))
        self._shapes = _mapping(model.get("shapes"))
        self._with_matrix = {n.rpartition(".")[0] for n in self._shapes if self._matrix(n)}
        self._aliases: dict[str, list[str]] = {}
        for alias, name in _mapping(model.get("tied")).items():
            self._aliases.setdefault(str(name), []).append(alias)
        table = run.table("tensors").select(["step", "name", "kind", "dtype"])
        self._narrow_weights = _narrow_names(table, "weight_grad")
        narrow, order = _narrow_names(table, "output_grad"), _forward_order(table)
        self._narrow_run = bool(narrow)
        self._outputs = dict.fromkeys(order, False) | dict.fromkeys(narrow, True)
        self._next = dict(itertools.pairwise(order))
        if not self._narrow_run:
            before = False
            for name in order:
                before = self._outputs[name] = self._by_class(name, before)

    def is_rounded(self, kind: str, names: Sequence[str]) -> np.ndarray:
        """For each tensor of `kind` whether it is rounded; a weight is if autocast casts it for its operator."""
        return self.weights(names) if kind in ("weight_grad", "weight") else self.outputs(names)

    def outputs(self, names: Sequence[str]) -> np.ndarray:
        """For each module whether its output gradient is 16-bit under autocast."""
        return np.array([self._outputs.get(n, True) for n in names], dtype=bool)

    def weights(self, names: Sequence[str]) -> np.ndarray:
        """For each parameter whether its gradient is rounded to 16 bits."""
        return np.array([self._weight(n) for n in names], dtype=bool)

    def matrices(self, names: Sequence[str]) -> np.ndarray:
        """For each parameter whether it has two dimensions or more: not a bias, nor a norm's factor."""
        return np.array([self._matrix(n) for n in names], dtype=bool)

    def sources(self, name: str) -> list[str]:
        """The modules whose 16-bit output gradients give the gradient of a parameter: several if it is tied.

        For a parameter that stays in FP32, the next 16-bit module in forward, from which its gradient comes.
        """
        owners = [n.rpartition(".")[0] for n in (name, *self._aliases.get(name, ()))]
        narrow = [o for o in owners if self._outputs.get(o, False)]
        following = self._next.get(owners[0])
        while not narrow and following is not None:
            narrow = [following] if self._outputs[following] else []
            following = self._next.get(following)
        return narrow

    def owner(self, name: str) -> str:
        """The layer that a parameter or a module's output belongs to."""
        return name if name in self._layers or name in self._outputs else name.rpartition(".")[0] or name

    def in_order(self, layers: Iterable[str]) -> list[str]:
        """Each layer once, in the model's order; layers that the head does not list come last, as given."""
        place = {name: i for i, name in enumerate(self._layers)}
        return sorted(dict.fromkeys(layers), key=lambda name: place.get(name, len(place)))

    def layer_class(self, layer: str) -> str:
        """The class of a layer; empty if not recorded."""
        return str(self._layers.get(layer, ""))

    def hidden_octaves(self, names: Sequence[str], numel: Mapping[str, float]) -> np.ndarray:
        """For each weight, by how many octaves the 16-bit gradient that it is computed from is smaller than its own, if
        no hook sees that gradient; -1 if a hook does, or if there is none.

        Such gradients are hidden in recurrent layers, whose gates stay within one operator, and in attention that calls
        its projections as functions. A weight gradient is a sum over N rows (samples times positions), so it is about
        √N times as large as the products in it. `numel` gives the elements of the output gradients that were recorded.
        """
        rows = np.array([self._hidden_rows(n, numel) for n in names], dtype=float)
        return np.where(rows >= 1, np.rint(0.5 * np.log2(np.maximum(rows, 1))), -1).astype(np.int64)

    def _hidden_rows(self, name: str, numel: Mapping[str, float]) -> float:
        if not numel:
            return ASSUMED_ROWS if self._matrix(name) and self._weight(name) else 0.0
        shape = self._shapes.get(name)
        owners = [n.rpartition(".")[0] for n in (name, *self._aliases.get(name, ()))]
        kinds = [str(self._layers.get(owner, "")) for owner in owners]
        recurrent = _contains_any(RECURRENT, kinds[0])
        if not isinstance(shape, list) or len(shape) < 2 or "Embedding" in kinds[0]:
            return 0.0
        if not recurrent and any(self._outputs.get(owner, False) for owner in owners):
            return 0.0
        width = float(min(shape))
        if recurrent:
            states = [p for p in self._shapes if p.startswith(f"{owners[0]}.weight_hh_l0")]  # two where bidirectional
            width = float(sum(self._shapes[p][1] for p in states)) or width
        owner = owners[0]
        while owner and owner not in numel:
            owner = owner.rpartition(".")[0]
        return numel.get(owner, 0.0) / width if width else 0.0

    def _weight(self, name: str) -> bool:
        return name in self._narrow_weights or any(
            self._is_lowered_weight(n) for n in (name, *self._aliases.get(name, ()))
        )

    def _is_lowered_weight(self, name: str) -> bool:
        """Whether a parameter under one of its names is the weight of a 16-bit operator."""
        owner = name.rpartition(".")[0]
        kind = str(self._layers.get(owner, ""))
        if _contains_any(LOWERED_MODULES, kind):
            # A layer kept out of autocast shows in the recorded dtypes; a recurrent one may return FP32 in any case.
            recorded = self._narrow_run and not _contains_any(RECURRENT, kind)
            return self._outputs.get(owner, True) if recorded else True
        if "Embedding" in kind:
            # Its gradient is its output gradient, which is 16-bit if a 16-bit operator reads the output.
            following = self._next.get(owner, "")
            return _contains_any(LOWERED_MODULES, str(self._layers.get(following, "")))
        if _contains_any(FP32_MODULES, kind) or "Norm" in kind or not self._matrix(name):
            return False
        return self._outputs.get(owner, True) if self._narrow_run else True

    def _matrix(self, name: str) -> bool:
        shape = self._shapes.get(name)
        if isinstance(shape, list):
            return len(shape) > 1
        return "bias" not in name.rpartition(".")[2]

    def _by_class(self, name: str, before: bool) -> bool:
        kind = str(self._layers.get(name, ""))
        if not kind or _contains_any(LOWERED_MODULES, kind):
            return True
        if _contains_any(FP32_MODULES, kind):
            return False
        return name in self._with_matrix or before


def _forward_order(table: pa.Table) -> list[str]:
    """Modules in forward order: output gradients arrive from the last to the first."""
    rows = table.filter(pc.equal(table.column("kind"), "output_grad"))
    rows = rows.filter(pc.equal(rows.column("step"), pc.min(rows.column("step"))))
    return list(dict.fromkeys(reversed(rows.column("name").to_pylist())))


def _narrow_names(table: pa.Table, kind: str) -> set[str]:
    narrow = pc.is_in(table.column("dtype"), pa.array(autocast_dtypes()))
    rows = table.filter(pc.and_(pc.equal(table.column("kind"), kind), narrow))
    return set(pc.unique(rows.column("name")).to_pylist())


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _contains_any(parts: Sequence[str], kind: str) -> bool:
    return any(part in kind for part in parts)
