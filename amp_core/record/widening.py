"""Runs code that casts to 16 bits in FP32: for the reference of an audit, whose weights are held in FP32.

    with Widening():
        loss = loss_fn(model(x.to(torch.bfloat16)), y)      # x stays FP32

Every function of torch gets FP32 where its arguments are 16-bit tensors or name a 16-bit dtype. The tensors themselves
stay as they are: what the code writes to one, it writes to the FP32 copy that replaces it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from amp_core.record.model.narrow_dtypes import NARROW

_CASTS: dict[Any, Callable[..., Any]] = dict.fromkeys((torch.Tensor.bfloat16, torch.Tensor.half), torch.Tensor.float)
_BIT_PATTERNS = frozenset({torch.Tensor.view})
"""Functions whose dtype says how to read bits."""
_MESSAGES = ("dtype", "scalar type", "Input type", "input type")


def is_mismatch(error: BaseException) -> bool:
    """Whether torch raised `error` because an operator's arguments have different dtypes."""
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


class Widening(TorchFunctionMode):
    """Replaces 16-bit arguments of functions by FP32 ones."""

    def __init__(self) -> None:
        super().__init__()
        self._wide: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of the narrow one, which it keeps

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _BIT_PATTERNS:
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(self._widened, (args, kwargs or {}))
        return _CASTS.get(func, func)(*args, **kwargs)

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.float32 if value in NARROW else value
        with torch._C.DisableTorchFunction():
            if not isinstance(value, torch.Tensor) or value.dtype not in NARROW:
                return value
            if id(value) not in self._wide:
                self._wide[id(value)] = value, value.float()
            return self._wide[id(value)][1]
