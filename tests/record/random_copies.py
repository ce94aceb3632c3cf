"""Acts of `random_acts` with copies: new objects that replace watched ones, and copies of watched objects."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.record.random_census import archive, module_hooks, owned, parameter_hooks, refused_globals


def unpickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# new objects that replace watched ones


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


def _optimizer_copies(t: Any, duplicate: Callable[[Any], Any]) -> None:
    for optimizer in t.optimizers:
        twin = t.tried("copy of the optimizer", lambda optimizer=optimizer: duplicate(optimizer))
        if twin is None:
            continue
        t.note("copy of the optimizer", owned(twin))
        t.tried("step of the copy", lambda twin=twin: twin.step(lambda: torch.zeros(())))
        t.tried("zero_grad of the copy", twin.zero_grad)
        t.note("state of the copy", twin.state_dict())


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
    for name, value in (("model", t.model), ("optimizer", t.optimizers[0]), ("scalers", t.scalers)):
        t.tried(f"archive of the {name}", lambda value=value: archive(value))
        t.tried(f"globals of the {name}", lambda value=value: refused_globals(value))
    t.tried("state dict", lambda: archive(t.model.state_dict()))


COPIES: dict[str, Callable[[Any], None]] = {
    "new_optimizer": new_optimizer,
    "new_scaler": new_scaler,
    "load_optimizer": load_optimizer,
    "load_scaler": load_scaler,
    "load_model": load_model,
    "assign_model": assign_model,
    "go_on_with_copies": partial(_take, duplicate=copy.deepcopy),
    "go_on_with_pickled": partial(_take, duplicate=unpickled),
    "go_on_with_saved": partial(_take, duplicate=saved),
    "copy_scaler": partial(_scaler_copies, duplicate=copy.deepcopy),
    "shallow_copy_scaler": partial(_scaler_copies, duplicate=copy.copy),
    "pickle_scaler": partial(_scaler_copies, duplicate=unpickled),
    "copy_optimizer": partial(_optimizer_copies, duplicate=copy.deepcopy),
    "pickle_optimizer": partial(_optimizer_copies, duplicate=unpickled),
    "shallow_copy_optimizer": partial(_optimizer_copies, duplicate=copy.copy),
    "copy_model": partial(_model_copies, duplicate=copy.deepcopy),
    "pickle_model": partial(_model_copies, duplicate=unpickled),
    "save_model": partial(_model_copies, duplicate=saved),
    "shallow_copy_model": shallow_copy_model,
    "average": average,
    "serialise": serialise,
}
