"""Measures layer by layer how far a forward in the recipe is from the same forward in FP32.

>>> rows = forward_audit(replay, model, 1.0, step, "bf16")     # rows of `audits` of the kind `activation`
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from amp_core.record.audit import COLUMNS, COUNTS, Replay, compare_gradients
from amp_core.record.model.modules import computes, tensors_in
from amp_core.record.model.parameters import local_values, named_modules
from amp_core.record.quantized_products import QuantizedProducts
from amp_core.record.torch_internals.compiling import eager


def forward_audit(
    replay: Replay,
    model: torch.nn.Module,
    step: int,
    precision: str,
    products: QuantizedProducts | None = None,
    inspecting: AbstractContextManager[Any] | None = None,
) -> dict[str, list[Any]]:
    """Rows of `audits`: the first output of each module in its first call, in the order of the calls. With `products`,
    the recipe is FP32 with those quantized.

    Holds a copy of the FP32 outputs of one batch. Compiled code runs in eager mode, since hooks do not reach into its
    graphs. `inspecting` is a context around the forward in the recipe.
    """
    with eager(), module_outputs(model) as reference:
        replay.in_fp32()
    with eager(), module_outputs(model) as recipe:
        if products is None:
            with inspecting or nullcontext():
                replay.forward()
        else:
            replay.in_fp32(products)
    return compared_outputs(reference, recipe, step, precision, "activation")


def compared_outputs(
    reference: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor], step: int, precision: str, kind: str
) -> dict[str, list[Any]]:
    """Rows of `audits` of that kind: the outputs of the modules that are in both, in the order of `reference`."""
    names = [name for name in reference if name in outputs and reference[name].shape == outputs[name].shape]
    packed = [compare_gradients(reference[name], outputs[name], 1.0) for name in names]
    rows = torch.stack([p.to(packed[0].device) for p in packed]).tolist() if packed else []
    columns: dict[str, list[Any]] = {
        c: [int(row[i]) if c in COUNTS else row[i] for row in rows] for i, c in enumerate(COLUMNS)
    }
    same = {"step": step, "loss_scale": 1.0, "precision": precision, "kind": kind}
    return columns | {"name": names} | {name: [value] * len(rows) for name, value in same.items()}


@contextmanager
def module_outputs(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Copies of the modules' first floating-point outputs, by name, of the forwards inside."""
    outputs: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            first = next((t for t in tensors_in(output) if t.is_floating_point()), None)
            if first is not None and name not in outputs:
                outputs[name] = local_values(first.detach()).clone()

        return hook

    handles = [m.register_forward_hook(keep(name)) for name, m in named_modules(model) if name and computes(m)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
