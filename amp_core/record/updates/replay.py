"""Repeats an optimizer's step on copies: its own class, given other tensors.

    >>> replay = Replay(optimizer)
    >>> [copied.weight for copied in replay.step(parts)]     # the weights after the step, in float64

The optimizer itself, its state and random numbers stay as they are: a step that would write to other tensors than the
copies, act through an object that the optimizer holds, or talk to other processes, is refused. Code of the program
(`is_own_code`) may still have invisible side effects, so it is repeated only if the user requested it.
"""

import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from amp_core.record.backends import backend_of
from amp_core.record.updates import bitsandbytes_steps
from amp_core.record.updates.held import Part
from amp_core.text.errors import in_one_line

_HOOKS = ("step_pre", "step_post", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
_NOT_COPIED = frozenset(
    {"step", "state", "param_groups", "grad_scale", "found_inf", *(f"_optimizer_{hook}_hooks" for hook in _HOOKS)}
)
"""`step` in an instance is the wrapper that a learning rate scheduler put there; hooks are not called for copies."""
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, types.BuiltinFunctionType})
_FOR_SPEED = ("fused", "foreach")
"""Settings of a group that choose an implementation. The copies are few large tensors on any device."""


class ReplayError(Exception):
    """The step cannot be repeated; the message says why, without a subject: `writes to a tensor …`."""


def is_own_code(optimizer: torch.optim.Optimizer) -> bool:
    """Whether repeating a step would run code of the program: true of all classes but torch's own, and those of
    torchao and bitsandbytes whose step torch has too."""
    module = f"{type(optimizer).__module__}."  # Adafactor and Muon are of `torch.optim` itself
    return not module.startswith("torch.optim.") and not _has_equal_in_torch(optimizer)


class Replay:
    """Repeats steps of one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._by_element: dict[tuple[int, int], bool] = {}

    def step(self, parts: Sequence[Part], *, decay: bool = True, wide: bool = True) -> list[Part]:
        """The parts as a step leaves them, in float64; with `wide=False` in their own dtypes and with the optimizer's
        own implementation. `decay=False`: without weight decay.

        Raises `ReplayError` if the step cannot be repeated.
        """
        copies = [_copied(part, wide=wide) for part in parts]
        stepped = _optimizer_like(self._optimizer, copies, decay=decay, wide=wide)
        run = type(stepped).step
        run = getattr(run, "__wrapped__", run) if getattr(run, "hooked", False) else run
        with ExitStack() as around:
            around.enter_context(backend_of(copies[0].weight.device).fork_random())
            if is_own_code(self._optimizer):
                around.enter_context(_OnlyCopies(stepped))
            try:
                run(stepped)
            except ReplayError:
                raise
            except Exception as error:
                raise ReplayError(f"fails on copies: {in_one_line(error)}") from error
        for part in copies:
            part.state = dict(stepped.state.get(part.weight, {}))
            part.weight = part.weight.detach()
        return copies

    @property
    def rounds_once(self) -> bool:
        """Whether the optimizer computes in FP32 and rounds the new weight, where its own code is not repeated."""
        return _has_equal_in_torch(self._optimizer)

    def treats_elements_alone(self, part: Part) -> bool:
        """Whether a step moves each element without regard to the others of its tensor: then some stand for all.

        Tested once for each group and number of dimensions: the first half of the elements has to move as it does
        together with the second, and no state may have another shape.
        """
        key = part.group, part.parameter.dim()
        if key not in self._by_element:
            self._by_element[key] = self._halves_agree(part)
        return self._by_element[key]

    def _halves_agree(self, part: Part) -> bool:
        flat = _flat(part, part.taken)
        tensors = [value for value in part.state.values() if isinstance(value, torch.Tensor) and value.dim()]
        if flat is None or any(value.numel() != part.taken for value in tensors):
            return False
        half = _flat(part, part.taken // 2)
        if part.taken < 2 or half is None:
            return True
        try:
            both, alone = self.step([flat])[0].weight, self.step([half])[0].weight
        except ReplayError:
            return False
        before = _widened(half.weight)
        moved_with_others = both[: len(alone)] - before
        return torch.allclose(moved_with_others, alone - before, rtol=1e-6, atol=0.0, equal_nan=True)


def _flat(part: Part, count: int) -> Part | None:
    """The first elements of a part, flat; None if its state does not allow it."""
    state = {
        key: value.reshape(-1)[:count] if isinstance(value, torch.Tensor) and value.dim() else value
        for key, value in part.state.items()
    }
    return replace(
        part, taken=count, weight=part.weight.reshape(-1)[:count], grad=part.grad.reshape(-1)[:count], state=state
    )


def _copied(part: Part, *, wide: bool) -> Part:
    """A part with tensors of its own that a step may write to."""
    weight = torch.nn.Parameter(_widened(part.weight) if wide else part.weight.clone())
    grad = _widened(part.grad) if wide else part.grad.to(part.weight.dtype, copy=True)
    weight.grad = grad
    state = {key: _copy_of_state(key, value, part.parameter, wide=wide) for key, value in part.state.items()}
    return replace(part, weight=weight, grad=grad, state=state)


def _copy_of_state(key: str, value: Any, parameter: torch.Tensor, *, wide: bool) -> Any:
    """Single numbers stay as they are, such as the count of steps, unless the parameter is one."""
    if not isinstance(value, torch.Tensor):
        return _own(value, "state")
    floating = value.dtype.is_floating_point or value.dtype.is_complex
    of_elements = value.dim() or (not parameter.dim() and key != "step")
    return _widened(value) if wide and floating and of_elements else value.clone()


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64, copy=True)


def _optimizer_like(
    optimizer: torch.optim.Optimizer, parts: Sequence[Part], *, decay: bool, wide: bool
) -> torch.optim.Optimizer:
    """An optimizer of the same class, settings and attributes whose parameters are those of `parts`."""
    own = _own if is_own_code(optimizer) else _cloned
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: own(value, key) for key, value in group.items() if key != "params"}
        settings["params"] = [part.weight for part in parts if part.group == index]
        if wide:
            settings |= {key: None for key in _FOR_SPEED if key in settings}
            settings |= _resolved_eps(settings, [part.parameter for part in parts if part.group == index])
        if not decay and "weight_decay" in settings:
            settings["weight_decay"] = 0.0
        groups.append(settings)
    stepped = _equal_class(optimizer, groups) or _same_class(optimizer, groups)
    stepped.state = defaultdict(dict, {part.weight: dict(part.state) for part in parts if part.state})
    return stepped


def _same_class(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    stepped: torch.optim.Optimizer = object.__new__(type(optimizer))
    own = _own if is_own_code(optimizer) else _cloned
    vars(stepped).update({k: own(v, k) for k, v in vars(optimizer).items() if k not in _NOT_COPIED})
    stepped.param_groups = groups
    return stepped


def _cloned(value: Any, _: str) -> Any:
    """The same for torch's own classes, whose steps write to no other attribute."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _own(value: Any, name: str) -> Any:
    """A copy of a setting or attribute. Raises `ReplayError` for one through which a step could change the program."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return value.detach().clone()
    if kind is dict or kind is OrderedDict:
        return kind((key, _own(inner, name)) for key, inner in value.items())
    if kind in (list, tuple, set):
        return kind(_own(inner, name) for inner in value)
    if (
        value is None
        or kind in _PLAIN
        or issubclass(kind, np.generic)
        or (kind is types.FunctionType and value.__closure__ is None)
    ):
        return value
    raise ReplayError(f"may change a {kind.__name__} that it holds as {name!r}")


def _resolved_eps(settings: dict[str, Any], parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
    """`torch.optim.Adafactor` takes the machine epsilon of the weights' dtype for an eps of None."""
    eps = settings.get("eps")
    if isinstance(eps, tuple | list) and len(eps) == 2 and eps[0] is None and parameters:
        return {"eps": (torch.finfo(parameters[0].dtype).eps, eps[1])}
    return {}


def _equal_class(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
    """Of an optimizer that compiles its step or calls its own kernels, torch's class with the same step; None for
    others.

    torchao's `Adam8bit`, `AdamW4bit` and the like dequantize the state, step in FP32 and quantise
    (torchao/optim/adam.py).
    """
    if bitsandbytes_steps.is_known(optimizer):
        return bitsandbytes_steps.torch_optimizer(optimizer, groups)
    if not _is_torchao_adam(optimizer):
        return None
    kind = torch.optim.AdamW if optimizer.is_adamw else torch.optim.Adam  # type: ignore[attr-defined]
    names = ("params", "betas", "eps", "weight_decay", "amsgrad")
    given = [{name: group[name] for name in names} | {"lr": float(group["lr"])} for group in groups]
    return kind([group for group in given if group["params"]])


def _has_equal_in_torch(optimizer: torch.optim.Optimizer) -> bool:
    return _is_torchao_adam(optimizer) or bitsandbytes_steps.is_known(optimizer)


def _is_torchao_adam(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.partition(".")[0] == "torchao" and hasattr(optimizer, "is_adamw")


class _OnlyCopies(TorchDispatchMode):
    """Refuses operators that write to tensors from outside, and collectives."""

    def __init__(self, stepped: torch.optim.Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        held = [v for group in stepped.param_groups for v in group.values()]
        held += [p for group in stepped.param_groups for p in group["params"]]
        held += [p.grad for group in stepped.param_groups for p in group["params"]]
        held += [v for state in stepped.state.values() for v in state.values()]
        held += list(vars(stepped).values())
        self._known: dict[int, StorageWeakRef] = {}  # a storage that is referred to keeps its address
        self._know(held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "c10d" in func.namespace:
            raise ReplayError(f"calls the collective {func.name()}")
        if func._schema.is_mutable:
            values = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = values.get(argument.name)
                    for tensor in given if isinstance(given, list | tuple) else (given,):
                        if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._known:
                            raise ReplayError(f"writes with {func.name()} to a tensor that is not in its state")
        result = func(*args, **kwargs)
        self._know(result if isinstance(result, list | tuple) else (result,))
        return result

    def _know(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                reference = StorageWeakRef(value.untyped_storage())
                self._known[reference.cdata] = reference
