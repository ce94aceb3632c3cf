"""Converts values of Keras for torch and the tables.

>>> with_gradients(optimizer, grads, None)      # of the variables that the optimizer was built with
[('net/first/kernel', <tensor>), ('net/first/bias', <tensor>)]
>>> rows((x, y))                                # samples of a batch
32
"""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import torch
from torch.utils._pytree import tree_leaves


def with_gradients(optimizer: Any, grads: Iterable[Any], variables: Sequence[Any] | None) -> list[tuple[str, Any]]:
    """Name and gradient of each variable that has one, as given to `optimizer.apply`. Raises `ValueError` if
    their numbers differ."""
    if variables is None:
        variables = optimizer._trainable_variables
    names = [getattr(v, "path", None) or v.name for v in variables]  # TensorFlow's own variables have no path
    return [(name, grad) for name, grad in zip(names, grads, strict=True) if grad is not None]


def rows(data: Any) -> Any:
    """How many samples a batch has: of its first array, a number or a tensor of the current graph."""
    # torch's pytree takes an eighth of the time of Keras's, which counts in each step.
    first = next((leaf for leaf in tree_leaves(data) if len(getattr(leaf, "shape", ())) > 0), None)
    if first is None or isinstance(first.shape[0], int):
        return first.shape[0] if first is not None else None
    return keras.ops.shape(first)[0]  # of a tensor in a graph that takes batches of any size


def as_torch(array: Any) -> torch.Tensor:
    """NumPy's array as a tensor on the same memory, which TensorFlow does not reuse while the array is alive."""
    if array.dtype.kind == "V":  # BF16, which NumPy itself does not have
        return torch.from_numpy(array.view("uint16")).view(torch.bfloat16)
    return torch.from_numpy(array)
