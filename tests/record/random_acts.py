"""What a loop does in mid-run beside training: `ACTS[name](training)`, once watched and once not.

Each act notes what came of it, exceptions too, with `training.note` and `training.tried`; both trainings must note the
same. An act may put copies or new objects in the place of what `training` uses.
"""

import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.hooks import RemovableHandle

from tests.record.random_census import archive, module_hooks, owned, parameter_hooks, refused_globals
from tests.record.random_hooks import put_hooks_on
from tests.record.random_models import WIDTH

Act = Callable[[Any], None]


def _first(t: Any) -> nn.Module:
    return next(iter(t.model.pieces.values()))


def _unpickled(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def _saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _number_handles(t: Any) -> None:
    """Hooks are numbered through the whole process, and the numbers are pickled with a module: begin at a known one."""
    t.numbered += 10**6
    RemovableHandle.next_id = t.numbered


# another object in the place of one that is watched


def new_optimizer(t: Any) -> None:
    t.optimizers[0] = t.make_optimizer(t.optimizers[0].param_groups[0]["params"])


def new_scaler(t: Any) -> None:
    t.scalers = [t.make_scaler(i) for i in range(len(t.scalers))]


def load_optimizer(t: Any) -> None:
    t.optimizers[0].load_state_dict(copy.deepcopy(t.optimizers[0].state_dict()))


def load_scaler(t: Any) -> None:
    for scaler in t.scalers:
        scaler.load_state_dict(scaler.state_dict())


def load_model(t: Any) -> None:
    t.model.load_state_dict(copy.deepcopy(t.model.state_dict()))


def assign_model(t: Any) -> None:
    t.model.load_state_dict(copy.deepcopy(t.model.state_dict()), assign=True)


def _take(t: Any, duplicate: Callable[[Any], Any]) -> None:
    copies = t.tried("copies", lambda: duplicate((t.model, t.optimizers, t.scalers)))
    if copies is not None:
        t.model, t.optimizers, t.scalers = copies


def go_on_with_copies(t: Any) -> None:
    _take(t, copy.deepcopy)


def go_on_with_pickled(t: Any) -> None:
    _take(t, _unpickled)


def go_on_with_saved(t: Any) -> None:
    _take(t, _saved)


# copies beside what is watched


def _scaler_copies(t: Any, duplicate: Callable[[Any], Any]) -> None:
    for scaler in t.scalers:
        twin = t.tried("copy of the scaler", lambda scaler=scaler: duplicate(scaler))
        if twin is None:
            continue
        t.note("copy of the scaler", owned(twin))
        twin.scale(torch.ones(1))
        t.tried("update of the copy", lambda twin=twin: twin.update(new_scale=4.0))
        t.note("scale of the copy and of the scaler", (twin.get_scale(), scaler.get_scale()))
        t.note("state of the copy", twin.state_dict())


def copy_scaler(t: Any) -> None:
    _scaler_copies(t, copy.deepcopy)


def shallow_copy_scaler(t: Any) -> None:
    _scaler_copies(t, copy.copy)


def pickle_scaler(t: Any) -> None:
    _scaler_copies(t, _unpickled)


def _optimizer_copies(t: Any, duplicate: Callable[[Any], Any]) -> None:
    for optimizer in t.optimizers:
        twin = t.tried("copy of the optimizer", lambda optimizer=optimizer: duplicate(optimizer))
        if twin is None:
            continue
        t.note("copy of the optimizer", owned(twin))
        t.tried("step of the copy", lambda twin=twin: twin.step(lambda: torch.zeros(())))
        t.tried("zero_grad of the copy", twin.zero_grad)
        t.note("state of the copy", twin.state_dict())


def copy_optimizer(t: Any) -> None:
    _optimizer_copies(t, copy.deepcopy)


def pickle_optimizer(t: Any) -> None:
    _optimizer_copies(t, _unpickled)


def shallow_copy_optimizer(t: Any) -> None:
    _optimizer_copies(t, copy.copy)


def _model_copies(t: Any, duplicate: Callable[[Any], nn.Module]) -> None:
    twin = t.tried("copy of the model", lambda: duplicate(t.model))
    if twin is None:
        return
    t.note("hooks on the copy", module_hooks(twin) | parameter_hooks(twin))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        t.tried("training of the copy", lambda: t.loss_of(twin, *t.fixed).backward())
        t.tried("step of the copy", optimizer.step)
        optimizer.zero_grad()
    t.note("copy after its training", twin.state_dict())


def copy_model(t: Any) -> None:
    _model_copies(t, copy.deepcopy)


def pickle_model(t: Any) -> None:
    _model_copies(t, _unpickled)


def save_model(t: Any) -> None:
    _model_copies(t, _saved)


def shallow_copy_model(t: Any) -> None:
    twin = copy.copy(t.model)
    t.tried("loss of the shallow copy", lambda: t.loss_of(twin, *t.fixed).item())


def average(t: Any) -> None:
    if not hasattr(t, "averaged"):
        t.averaged = t.tried("average", lambda: torch.optim.swa_utils.AveragedModel(t.model))
    if t.averaged is not None:
        t.tried("averaging", lambda: t.averaged.update_parameters(t.model))
        t.tried("loss of the average", lambda: t.loss_of(t.averaged, *t.fixed).item())
        t.note("average", t.averaged.state_dict())


def serialise(t: Any) -> None:
    """Bytes as they are, and what a strict loader is asked to trust."""
    for name, thing in (("model", t.model), ("optimizer", t.optimizers[0]), ("scalers", t.scalers)):
        t.tried(f"archive of the {name}", lambda thing=thing: archive(thing))
        t.tried(f"globals of the {name}", lambda thing=thing: refused_globals(thing))
    t.tried("state dict", lambda: archive(t.model.state_dict()))


# other programs that look at the model


def _compiled(t: Any, label: str, make: Callable[[], Any]) -> None:
    program = t.tried(label, make)
    if program is not None:
        t.tried(f"result of {label}", lambda: t.result_of(program(t.fixed[0])))


class _Quiet:
    """Tracers warn of what they meet in a model."""

    def __enter__(self) -> None:
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *error: object) -> None:
        self._caught.__exit__(*error)


def script(t: Any) -> None:
    """Each piece; of a failure the type alone is noted, since its text tells what was scripted before."""
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
    """`torch.func` over the model: a call with other parameters, and the gradients of each sample."""
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
    """What `module.to` does under `torch.__future__.set_swap_module_params_on_conversion`."""
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
    t.handles += put_hooks_on(t.model.head)
    t.handles += put_hooks_on(t.model)


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


# the loop's own wrappers, which stay its own


def _wrapped(thing: Any, name: str, calls: list[str]) -> None:
    original = getattr(thing, name)

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    setattr(thing, name, own)


def wrap_methods(t: Any) -> None:
    """As profilers and older frameworks do."""
    for thing, name in [
        *((s, "step") for s in t.scalers),
        *((o, "zero_grad") for o in t.optimizers),
        (t.model, "forward"),
    ]:
        _wrapped(thing, name, t.calls)


def inspect_methods(t: Any) -> None:
    for thing in [*t.scalers, *t.optimizers]:
        for name in ("step", "zero_grad", "update", "scale", "unscale_", "get_scale"):
            if hasattr(thing, name):
                t.note(f"signature of {name}", str(inspect.signature(getattr(thing, name))))
    for optimizer in t.optimizers:  # torch's schedulers ask it for its function
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


ACTS: dict[str, Act] = {
    act.__name__: act
    for act in (
        new_optimizer,
        new_scaler,
        load_optimizer,
        load_scaler,
        load_model,
        assign_model,
        go_on_with_copies,
        go_on_with_pickled,
        go_on_with_saved,
        copy_scaler,
        shallow_copy_scaler,
        pickle_scaler,
        copy_optimizer,
        pickle_optimizer,
        shallow_copy_optimizer,
        copy_model,
        pickle_model,
        save_model,
        shallow_copy_model,
        average,
        serialise,
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
