"""Measures layer by layer how far the outputs of compiled code are from those of the same code in eager mode.

>>> rows = compiled_audit(replay, model, step, "bf16")  # rows of `audits` of the kind `compiled`

The forward is compiled once more, with the output of each module as a further output of its graph, by the backend that
compiled the program. The graphs of the program itself stay as they are. A fused kernel that also writes such an output
may still use its unrounded value, as it does in the program.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from amp_core.record.audit import Replay
from amp_core.record.forward_audit import compared_outputs, module_outputs
from amp_core.record.model.modules import computes
from amp_core.record.model.parameters import named_modules
from amp_core.record.torch_internals.compiling import eager
from amp_core.schema import RunError

Compiled = Callable[..., Any]


def compiled_audit(replay: Replay, model: torch.nn.Module, step: int, precision: str) -> dict[str, list[Any]]:
    """Rows of `audits`: the output of each module in compiled code against eager mode, in the order of the forward.

    Raises `RunError` if the closure ran no compiled code, or this torch cannot compile it once more.
    """
    with eager(), module_outputs(model) as reference:
        replay.forward()
    outputs: dict[str, torch.Tensor] = {}
    names = {str(id(module)): name for name, module in named_modules(model) if name and computes(module)}
    with _with_outputs(names, outputs):
        replay.forward()
    if not outputs:
        raise RunError(
            "compiled=True compares compiled code with eager mode, but the closure ran none that torch names"
        )
    return compared_outputs(reference, outputs, step, precision, "compiled")


def _with_outputs(names: dict[str, str], outputs: dict[str, torch.Tensor]) -> AbstractContextManager[Any]:
    """Within it, compiled code is compiled once more and puts the modules' outputs into `outputs`, by name."""
    backend = _backend_in_use()

    def compile_with_outputs(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        ends = _ends(graph.graph, names)
        end = graph.graph.output_node()
        count = len(end.args[0])  # type: ignore[arg-type]
        end.args = ((*end.args[0], *ends.values()),)  # type: ignore[misc]
        graph.recompile()
        run = backend(graph, inputs)

        def call(*given: Any) -> Any:
            everything = run(*given)
            for name, output in zip(ends, everything[count:], strict=True):
                outputs.setdefault(name, output.detach().clone())
            return everything[:count]

        return call

    stance: AbstractContextManager[Any] = torch.compiler.set_stance("default", force_backend=compile_with_outputs)
    return stance


def _ends(graph: torch.fx.Graph, names: dict[str, str]) -> dict[str, torch.fx.Node]:
    """The node that computes each module's output: the last one within the module that is a floating-point tensor."""
    ends: dict[str, torch.fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if node.op in ("placeholder", "output") or not isinstance(value, torch.Tensor):
            continue
        if value.is_floating_point():
            for key in node.meta.get("nn_module_stack") or {}:
                if str(key) in names:
                    ends[names[str(key)]] = node
    return ends


def _backend_in_use() -> Compiled:
    """The backend that compiled last in this process."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    known: Iterator[Any] = (b for b in reversed(getattr(compiler, "cached_backends", {}).values()) if callable(b))
    backend: Compiled | None = next(known, None)
    if backend is None:
        raise RunError("compiled=True compares compiled code with eager mode, but nothing was compiled yet")
    return backend
