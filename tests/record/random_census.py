"""The state after a training as plain values, to compare two trainings.

>>> flat({"a": [torch.zeros(2)]})
{".a.0": "float32 (2,) 0000000000000000"}
>>> differences({".a": 1}, {".a": 2})
[".a: 1 unwatched, 2 watched"]
"""

import gc
import hashlib
import inspect
import io
import pickletools
import re
import signal
import sys
import threading
import types
import zipfile
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo  # patches torch at its first import
from torch import nn

from amp_core.record.observers.storages import hooks_are_on

PATCHABLE = (
    "torch",
    "torch.amp.autocast_mode",
    "torch.amp.grad_scaler",
    "torch.autograd",
    "torch.autograd.function",
    "torch.autograd.graph",
    "torch.nn.functional",
    "torch.nn.modules.module",
    "torch.nn.utils",
    "torch.nn.utils.clip_grad",
    "torch.optim.lr_scheduler",
    "torch.optim.optimizer",
    "torch.utils.checkpoint",
    "copy",
    "pickle",
)
"""Modules whose functions, classes and their methods must be after `close` what they were before `watch`."""

MAX_HEX = 32


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of nested containers by its path; tensors bit for bit, other objects as text without addresses."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        items = list(enumerate(value))
    else:
        return {path: _leaf(value)}
    entries: dict[str, Any] = {f"{path} is": f"{type(value).__name__} of {len(items)}"}
    for key, item in items:
        entries |= flat(item, f"{path}.{key}")
    return entries


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if isinstance(value, nn.parameter.UninitializedTensorMixin):
            return type(value).__name__
        held = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        raw = torch.view_as_real(held).contiguous() if held.is_complex() else held.contiguous()
        data = raw.reshape(-1).view(torch.uint8).numpy().tobytes() if raw.numel() else b""
        hexed = data.hex() if len(data) <= MAX_HEX else hashlib.sha1(data).hexdigest()
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} {hexed}"
    return stable_text(repr(value))


def stable_text(raw: str) -> str:
    """The text without parts that differ between two runs of a program: addresses, temporary folders, numbered
    classes."""
    return re.sub(r"0x[0-9a-f]+|/tmp/\S+|___torch_mangle_\d+\.", "…", raw)


def differences(unwatched: dict[str, Any], watched: dict[str, Any]) -> list[str]:
    """One line for each path at which the two differ."""
    absent = "nothing"
    lines = []
    for path in [*unwatched, *(p for p in watched if p not in unwatched)]:
        one, other = unwatched.get(path, absent), watched.get(path, absent)
        if one != other:
            lines.append(f"{path}: {one!s:.200} unwatched, {other!s:.200} watched")
    return lines


def _named(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def module_hooks(model: nn.Module) -> dict[str, Any]:
    """Every dictionary of hooks on every module, with its type; and the module's attributes, in order."""
    entries: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        state = module.__dict__
        entries[f"{name} attributes"] = list(state)
        entries[f"{name} class"] = type(module).__qualname__
        for key, held in state.items():
            if "hook" in key and isinstance(held, dict):
                entries[f"{name} {key}"] = (type(held).__name__, [_named(hook) for hook in held.values()])
    return entries


def parameter_hooks(model: nn.Module) -> dict[str, Any]:
    """Hooks and attributes of every parameter and buffer, and whether anything holds a weak reference to it."""
    entries: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        for key in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            held = getattr(tensor, key, None)
            entries[f"{name} {key}"] = [_named(hook) for hook in held.values()] if held else []
        entries[f"{name} attributes"] = sorted(vars(tensor))
    return entries


def owned(value: Any) -> dict[str, Any]:
    """The attributes of an optimizer or a scaler, including hooks, and the methods that it overrides itself."""
    entries: dict[str, Any] = {"attributes": list(vars(value)), "class": type(value).__qualname__}
    for key, held in vars(value).items():
        if "hook" in key and isinstance(held, dict):
            entries[key] = (type(held).__name__, [_named(hook) for hook in held.values()])
        elif callable(held):
            entries[key] = _named(held)
    return entries


def hook_count(model: nn.Module) -> int:
    """Hooks on modules and on parameters together."""
    on_modules = sum(
        len(held)
        for m in model.modules()
        for key, held in m.__dict__.items()
        if "hook" in key and hasattr(held, "items")
    )
    on_parameters = (
        len(getattr(p, key, None) or ())
        for p in model.parameters()
        for key in ("_backward_hooks", "_post_accumulate_grad_hooks")
    )
    return on_modules + sum(on_parameters)


def process_state() -> dict[str, Any]:
    """State of the whole process: functions of torch by identity, global hooks, modes, generators, signal handlers."""
    entries: dict[str, Any] = {}
    for name in PATCHABLE:
        for key, held in vars(sys.modules[name]).items():
            if isinstance(held, types.FunctionType | types.BuiltinFunctionType | type):
                entries[f"{name}.{key}"] = id(held)
            elif "hook" in key and isinstance(held, dict):
                entries[f"{name}.{key}"] = len(held)
    for owner in _classes():
        for key, held in vars(owner).items():
            if key not in ("__doc__", "__weakref__", "__dict__"):
                entries[f"{owner.__qualname__}.{key}"] = id(held)
    entries |= {
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": str(torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad mode": torch.is_grad_enabled(),
        "saved tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "saved tensor hooks on": hooks_are_on(),
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("ampscope")),
        "gc": (gc.isenabled(), [_named(call) for call in gc.callbacks]),
        "trace": (sys.gettrace() is None, sys.getprofile() is None),
        "excepthook": _named(sys.excepthook),
        "signals": [_named(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
    }
    return entries


def _classes() -> Iterator[type]:
    yield from (nn.Module, torch.Tensor, nn.Parameter, torch.optim.Optimizer, torch.amp.GradScaler)
    yield from (torch.autograd.Function, torch.autocast, torch.optim.lr_scheduler.LRScheduler)
    yield from (torch.optim.lr_scheduler.ReduceLROnPlateau, nn.Linear, nn.Sequential)


def optimizer_classes() -> dict[str, int]:
    """`step` of each optimizer class. torch wraps it when the first instance is created, so compare only after that."""
    kinds = vars(torch.optim).values()
    return {
        k.__name__: id(vars(k).get("step"))
        for k in kinds
        if inspect.isclass(k) and issubclass(k, torch.optim.Optimizer)
    }


def archive(value: Any) -> dict[str, Any]:
    """The members of the file that `torch.save(value)` writes, by name: the opcodes of the pickle, and the size of the
    others. Tensor values are compared elsewhere; unused bytes of their storages may be random."""
    file = io.BytesIO()
    torch.save(value, file)
    entries: dict[str, Any] = {}
    with zipfile.ZipFile(file) as opened:
        for name in opened.namelist():
            data = opened.read(name)
            if name.endswith("data.pkl"):
                entries["pickle"] = opcodes(data)
            elif "serialization_id" not in name:
                entries[name.partition("/")[2]] = f"{len(data)} bytes"
    return entries


def opcodes(pickled: bytes) -> list[str]:
    """The opcodes of a pickle without its memo of strings: whether two equal strings are the same object may vary."""
    texts: dict[int, str] = {}
    others: dict[int, int] = {}
    entries: list[str] = []
    for opcode, argument, _ in pickletools.genops(pickled):
        if "PUT" in opcode.name:
            if entries and entries[-1].startswith("BINUNICODE"):
                texts[argument] = entries[-1]
            else:
                others[argument] = len(others)
        elif "GET" in opcode.name:
            entries.append(texts[argument] if argument in texts else f"GET {others[argument]}")
        else:
            entries.append(f"{opcode.name} {argument}")
    return entries


def refused_globals(value: Any) -> list[str]:
    """The globals that must be declared safe before `torch.load` loads `value` with `weights_only`."""
    file = io.BytesIO()
    torch.save(value, file)
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
