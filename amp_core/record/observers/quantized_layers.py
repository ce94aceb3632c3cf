"""Which linear layers a training quantizes, and why the others are not: events, written once.

    report_layers(writer, model, step, ran, converted, rows)

Kinds: `quantized layers` (how many, and their share of weights), `not quantized` (a layer, and the reason), `quantized
edge` (the first or last layer is quantized), `empty amax history`.
"""

from collections.abc import Collection, Mapping, Sequence

import torch

from amp_core.record.casts import transformer_engine
from amp_core.record.model import own
from amp_core.record.model.modules import is_linear
from amp_core.record.model.parameters import named_modules
from amp_core.store.writer import RunWriter

MULTIPLE = 16
"""FP8 tensor cores take matrices with sizes that are multiples of this."""
CONVERTED = ("Float8Linear", "MXFP8Linear", "NVFP4Linear", "Float8BlockwiseLinear")
"""Classes of torchao's quantized linear layers: by them converted layers are counted where casts cannot be seen."""


def report_layers(
    writer: RunWriter,
    model: torch.nn.Module,
    step: int,
    ran: Sequence[str],
    converted: set[str],
    rows: Mapping[str, int],
    engine: Collection[str] = (),
) -> None:
    """The linear layers of a model: those `converted`, those not and why, and first and last of those that `ran`.

    `rows` are the rows of each layer's input in its first call, `engine` the names of Transformer Engine's modules.
    """
    modules = dict(named_modules(model))
    linear = [n for n in modules if is_linear(modules[n]) or n in engine]
    unused = [n for n in linear if n not in ran and n not in converted]
    sizes = {n: _sizes(modules[n]) for n in linear}
    weights = {n: inputs * outputs for n, (inputs, outputs) in sizes.items()}
    total = sum(weights.values())
    share = sum(weights[n] for n in linear if n in converted) / total if total else 0.0
    parameters = (n for n, m in modules.items() if any(True for _ in own.parameters(m, recurse=False)))
    first = ran[0] if ran and ran[0] == next(parameters, None) else ""
    last = ran[-1] if ran else ""
    writer.event(
        "quantized layers",
        last,
        first,
        step,
        value=share,
        count=len(converted & {*linear}),
        limit=float(len(linear)),
    )
    for n in linear:
        if n in converted:
            continue
        inputs, outputs = sizes[n]
        detail = "sizes" if inputs % MULTIPLE or outputs % MULTIPLE else "not called" if n in unused else ""
        writer.event(
            "not quantized",
            n,
            detail,
            step,
            op=type(modules[n]).__name__,
            value=weights[n] / total if total else None,
            count=rows.get(n),
        )
    for where, name in (("first", first), ("last", last)):
        if name in converted and len(ran) > 1:
            writer.event("quantized edge", name, where, step, op=type(modules[name]).__name__)


def report_unseen(writer: RunWriter, model: torch.nn.Module, step: int, why: str) -> None:
    """The layers of a model by their classes, if any is converted and its casts cannot be seen."""
    classes = {n: type(m).__name__ for n, m in named_modules(model) if is_linear(m)}
    converted = {n for n, c in classes.items() if c in CONVERTED}
    if converted:
        detail = f"quantized: {why}; layers are counted by their classes"
        writer.event("warning", name="not recorded", detail=detail, step=step)
        report_layers(writer, model, step, [*classes], converted, {})


def report_empty_histories(writer: RunWriter, modules: Sequence[tuple[str, torch.nn.Module]], step: int) -> None:
    """Transformer Engine's modules whose delayed scaling knows no amax yet."""
    empty = [n for n, m in modules if transformer_engine.has_empty_history(m)]
    if empty:
        writer.event("empty amax history", empty[0], step=step, count=len(empty))


def _sizes(module: torch.nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    weight = own.parameter(module, "weight")
    if weight is None or weight.dim() != 2:
        return 0, 0
    outputs, inputs = weight.shape[::-1] if type(module).__name__ == "Conv1D" else weight.shape
    return inputs, outputs
