"""Pieces of random models: each maps `(batch, WIDTH)` to the same shape, perhaps with further outputs.

    >>> torch.manual_seed(0)
    >>> model = Stack(("linear", "spectral_norm"), returns="dict")
    >>> READS                            # how often user-defined attributes were read

All classes are at module level, because only models that can be pickled test pickling.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.record.random_hooks import READS, attach_hooks

WIDTH = 8


class CountedProperty(nn.Linear):
    """`weight` is a property that counts its reads and moves a buffer, as power iteration does."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.stored = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.register_buffer("reads", torch.zeros(()))

    @property
    def weight(self) -> torch.Tensor:
        READS["property"] += 1
        with torch.no_grad():
            self.reads += 1
        return self.stored * (1 + self.reads / 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class ComputedAttribute(nn.Module):
    """`weight` and `bias` are computed by `__getattr__`."""

    def __init__(self) -> None:
        super().__init__()
        self.stored = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            READS[f"__getattr__ {name}"] += 1
            return super().__getattr__("stored") * 2
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class LazyAttribute(nn.Module):
    """`weight` draws from the random generator at its first read; outside forward it raises."""

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self.strict, self.inside = strict, False
        self.linear = nn.Linear(WIDTH, WIDTH)

    @property
    def weight(self) -> torch.Tensor:
        READS["lazy"] += 1
        if self.strict and not self.inside:
            raise RuntimeError("weight is known in forward only")
        if "_drawn" not in self.__dict__:
            self.__dict__["_drawn"] = torch.rand(WIDTH)
        return self.__dict__["_drawn"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inside = True
        try:
            return self.linear(x) * self.weight
        finally:
            self.inside = False


class Growing(nn.Module):
    """A parametrization whose buffer counts its calls, and whose result depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        READS["parametrization"] += 1
        with torch.no_grad():
            self.calls += 1
        return weight * (1 + self.calls / 1000)


@dataclasses.dataclass
class DataclassOutput:
    """A dataclass output."""

    x: torch.Tensor
    extra: Any = None


class LazyOut:
    """An output whose fields are computed when they are read."""

    def __init__(self, x: torch.Tensor) -> None:
        self.held = x

    @property
    def x(self) -> torch.Tensor:
        READS["output"] += 1
        return self.held


class Returning(nn.Module):
    """Returns a parameter beside its result: a policy's `log_std`, a contrastive model's `temperature`."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.log_std = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.linear(x)
        if self.form == "tuple":
            return x, self.log_std
        if self.form == "dict":
            return {"x": x, "extra": self.log_std}
        return DataclassOutput(x, self.log_std)


class Reshaped(nn.Module):
    """An inner module that needs another shape; its output may be a tuple."""

    def __init__(self, inner: nn.Module, shape: tuple[int, ...], times: int = 1) -> None:
        super().__init__()
        self.inner, self.shape, self.times = inner, shape, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = len(x)
        reshaped = x.reshape(batch, *self.shape)
        if getattr(self.inner, "batch_first", True) is False:
            reshaped = reshaped.transpose(0, 1)
        out = self.inner(*[reshaped] * self.times)
        out = out[0] if isinstance(out, tuple) else out
        if getattr(self.inner, "batch_first", True) is False:
            out = out.transpose(0, 1)
        return x + out.reshape(batch, -1, WIDTH).mean(1)


class Embedded(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=sparse)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table((x.detach().nan_to_num().float() > 0).sum(-1) % 5)


class Tied(nn.Module):
    """One parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Shared(nn.Module):
    """One module under two names, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).real


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class InPlace(nn.Module):
    """Overwrites its input and the output of its own linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu = nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.linear(x)).mul_(0.5).add_(0.1)


class Half(nn.Module):
    """A part kept in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.half()).to(x.dtype)


class OwnState(nn.Module):
    """Has its own `__getstate__`, `__setstate__` and `__deepcopy__`, and a cache that is not copied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cache = nn.Linear(WIDTH, WIDTH), {}

    def __getstate__(self) -> dict[str, Any]:
        READS["__getstate__"] += 1
        return {**self.__dict__, "cache": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        READS["__setstate__"] += 1
        super().__setstate__(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OwnState":
        READS["__deepcopy__"] += 1
        new = OwnState.__new__(OwnState)
        memo[id(self)] = new
        nn.Module.__init__(new)
        new.cache = {}
        new.linear = nn.Linear(WIDTH, WIDTH, device="meta").to_empty(device="cpu")
        new.linear.load_state_dict(self.linear.state_dict())
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache["last"] = x.detach()
        return self.linear(x)


class Empty(nn.Module):
    """A module that is false, since it has a length of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def __len__(self) -> int:
        return 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Tiny(nn.Module):
    """Thousands of tensors of a few elements each."""

    def __init__(self, count: int = 2000) -> None:
        super().__init__()
        self.many = nn.ParameterList(torch.randn(2) / 10 for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.stack(list(self.many)).mean()


def hooked() -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    attach_hooks(linear)
    return linear


def frozen() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH).requires_grad_(False)


def custom_parametrization() -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(linear, "weight", Growing())
    return linear


PIECES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "conv": lambda: Reshaped(nn.Conv1d(1, 2, 3, padding=1), (1, WIDTH)),
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "batch_norm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "embedding": lambda: Embedded(sparse=False),
    "sparse_embedding": lambda: Embedded(sparse=True),
    "lstm": lambda: Reshaped(nn.LSTM(4, 4, batch_first=True), (2, 4)),
    "lstm_time_first": lambda: Reshaped(nn.LSTM(4, 4), (2, 4)),
    "attention": lambda: Reshaped(nn.MultiheadAttention(4, 2, batch_first=True), (2, 4), times=3),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "old_spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "custom_parametrization": custom_parametrization,
    "counted_property": CountedProperty,
    "computed_attribute": ComputedAttribute,
    "lazy_attribute": lambda: LazyAttribute(strict=False),
    "strict_attribute": lambda: LazyAttribute(strict=True),
    "returning_tuple": lambda: Returning("tuple"),
    "returning_dict": lambda: Returning("dict"),
    "returning_dataclass": lambda: Returning("dataclass"),
    "tied": Tied,
    "shared": Shared,
    "complex": Complex,
    "zero_sized": lambda: nn.Sequential(nn.Linear(WIDTH, 0), nn.Linear(0, WIDTH)),
    "lazy": lambda: nn.LazyLinear(WIDTH),
    "lazy_batch_norm": nn.LazyBatchNorm1d,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed_reentrant": lambda: Checkpointed(reentrant=True),
    "in_place": InPlace,
    "half": Half,
    "own_state": OwnState,
    "empty": Empty,
    "hooked": hooked,
    "frozen": frozen,
}


class PlantedError(Exception):
    """Raised where the case makes a step fail."""


class Stack(nn.Module):
    """`pieces` one after another, and a head; returns its result in the form `returns`, with the further outputs of the
    pieces."""

    def __init__(self, pieces: tuple[str, ...], returns: str = "tensor", tiny: int = 0) -> None:
        super().__init__()
        self.returns = returns
        self.fails = False
        self.pieces = nn.ModuleDict({f"p{i}": PIECES[piece]() for i, piece in enumerate(pieces)})
        if tiny:
            self.pieces["tiny"] = Tiny(tiny)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        x, extras = self.through(x)
        x = self.head(x)
        if self.returns == "tuple":
            return (x, *extras, self.head.bias)
        if self.returns == "dict":
            return {"x": x, "extra": self.head.bias, "none": None}
        if self.returns == "dataclass":
            return DataclassOutput(x, self.head.bias)
        return LazyOut(x) if self.returns == "lazy" else x

    def through(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Calls each piece separately, as a loop does with a `ModuleDict`."""
        extras = []
        for name, piece in self.pieces.items():
            out = piece(x)
            if isinstance(out, tuple):
                x, *more = out
                extras += more
            elif isinstance(out, dict | DataclassOutput):
                fields = out if isinstance(out, dict) else vars(out)
                x, extras = fields["x"], [*extras, fields["extra"]]
            else:
                x = out
            if self.fails and name == "p0":
                raise PlantedError("planted in forward")
        return x, extras
