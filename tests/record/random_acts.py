"""Acts of a loop during training: `ACTS[name](training)`, once watched and once unwatched.

Each act notes its results and exceptions with `training.note` and `training.tried`; both trainings must note the same.
An act may replace the objects that `training` uses with copies or new ones.
"""

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.hooks import RemovableHandle

from tests.record.random_copies import COPIES
from tests.record.random_hooks import attach_hooks
from tests.record.random_models import WIDTH

Act = Callable[[Any], None]


def _first(t: Any) -> nn.Module:
    return next(iter(t.model.pieces.values()))


def _number_handles(t: Any) -> None:
    """Set the process-wide number of the next hook: the numbers are pickled with a module."""
    t.numbered += 10**6
    RemovableHandle.next_id = t.numbered


# other programs that look at the model


def _compiled(t: Any, label: str, make: Callable[[], Any]) -> None:
    program = t.tried(label, make)
    if program is not None:
        t.tried(f"result of {label}", lambda: t.result_of(program(t.fixed[0])))


class _Quiet:
    """Silences tracers, which warn about code of the model."""

    def __enter__(self) -> None:
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *error: object) -> None:
        self._caught.__exit__(*error)


def script(t: Any) -> None:
    """Script each piece; for a failure only the type is noted, since its message depends on earlier scripting."""
    with _Quiet():
        for piece in [*t.model.pieces.values(), t.model.head]:
            for label, duplicate in (("script", lambda it: it), ("script of a copy", copy.deepcopy)):
                try:
                    torch.jit.script(duplicate(piece))
                except Exception as error:
                    t.note(f"{label} of {type(piece).__qualname__}", type(error).__name__)
                else:
                    t.note(f"{label} of {type(piece).__qualname__}", "done")


def trace(t: Any) -> None:
    with _Quiet():
        _compiled(t, "jit trace", lambda: torch.jit.trace(t.model, t.fixed[0], check_trace=False, strict=False))


def symbolic_trace(t: Any) -> None:
    graph = t.tried("fx trace", lambda: torch.fx.symbolic_trace(t.model))
    if graph is not None:
        t.note("fx code", graph.code)
        t.tried("result of fx", lambda: t.result_of(graph(t.fixed[0])))


def export(t: Any) -> None:
    with _Quiet():
        program = t.tried("export", lambda: torch.export.export(t.model.head, (t.fixed[0],), strict=False).module())
        if program is not None:
            t.tried("result of export", lambda: program(t.fixed[0]))


def functional(t: Any) -> None:
    """`torch.func` on the model: a call with other parameters, and per-sample gradients."""
    state = {name: tensor.detach() for name, tensor in [*t.model.named_parameters(), *t.model.named_buffers()]}

    def loss(given: Any, x: torch.Tensor) -> torch.Tensor:
        return t.result_of(torch.func.functional_call(t.model, given, (x,))).float().sum()

    t.tried("functional call", lambda: loss(state, t.fixed[0]))
    t.tried("gradients of a function", lambda: torch.func.grad(loss)(state, t.fixed[0]))
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    t.tried("gradients of each sample", lambda: each(state, t.fixed[0][:, None]))


# changes of the model itself


def half_part(t: Any) -> None:
    _first(t).half()


def double_model(t: Any) -> None:
    t.model.double()


def swap_tensors(t: Any) -> None:
    """Like `module.to` under `torch.__future__.set_swap_module_params_on_conversion`."""
    weight = t.model.head.weight
    t.tried("swap", lambda: torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().clone() + 1)))


def grow(t: Any) -> None:
    added = nn.Linear(WIDTH, WIDTH)
    t.model.pieces["added"] = added
    t.tried("add_param_group", lambda: t.optimizers[0].add_param_group({"params": list(added.parameters())}))


def swap_piece(t: Any) -> None:
    t.model.pieces[next(iter(t.model.pieces))] = nn.Linear(WIDTH, WIDTH)


def freeze(t: Any) -> None:
    _first(t).requires_grad_(False)


def unfreeze(t: Any) -> None:
    for parameter in t.model.parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(True)


def register_hooks(t: Any) -> None:
    _number_handles(t)
    t.handles += attach_hooks(t.model.head)
    t.handles += attach_hooks(t.model)


def remove_hooks(t: Any) -> None:
    while t.handles:
        t.handles.pop().remove()


def parametrize_head(t: Any) -> None:
    t.tried("parametrize", lambda: (parametrizations.weight_norm(t.model.head), None)[1])


def remove_parametrization(t: Any) -> None:
    for module in list(t.model.modules()):
        if parametrize.is_parametrized(module, "weight"):
            t.tried("unparametrize", lambda m=module: (parametrize.remove_parametrizations(m, "weight"), None)[1])


def prune_head(t: Any) -> None:
    _number_handles(t)
    t.tried("prune", lambda: (prune.l1_unstructured(t.model.head, "weight", amount=3), None)[1])


# wrappers of the loop, which must stay in place


def _wrapped(value: Any, name: str, calls: list[str]) -> None:
    original = getattr(value, name)

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    setattr(value, name, own)


def wrap_methods(t: Any) -> None:
    """Wrap methods as profilers and older frameworks do."""
    for value, name in [
        *((s, "step") for s in t.scalers),
        *((o, "zero_grad") for o in t.optimizers),
        (t.model, "forward"),
    ]:
        _wrapped(value, name, t.calls)


def inspect_methods(t: Any) -> None:
    for value in [*t.scalers, *t.optimizers]:
        for name in ("step", "zero_grad", "update", "scale", "unscale_", "get_scale"):
            if hasattr(value, name):
                t.note(f"signature of {name}", str(inspect.signature(getattr(value, name))))
    for optimizer in t.optimizers:  # torch's schedulers read the function of the method
        t.note("step is a method", inspect.ismethod(optimizer.step))
    t.note("representation", (repr(t.model), len(dir(t.model))))


# the recorder


def close(t: Any) -> None:
    if t.recorder is not None:
        t.recorder.close()


def watch_again(t: Any) -> None:
    close(t)
    if t.recorder is not None:
        t.begin_watching()


ACTS: dict[str, Act] = COPIES | {
    act.__name__: act
    for act in (
        script,
        trace,
        symbolic_trace,
        functional,
        export,
        half_part,
        double_model,
        swap_tensors,
        grow,
        swap_piece,
        freeze,
        unfreeze,
        register_hooks,
        remove_hooks,
        parametrize_head,
        remove_parametrization,
        prune_head,
        wrap_methods,
        inspect_methods,
        close,
        watch_again,
    )
}
