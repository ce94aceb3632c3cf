"""What a training leaves behind, as plain values that two trainings can be compared by.

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
import torch._dynamo  # puts wrappers into torch when it is first imported
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
    """Every leaf of nested containers under its path; tensors bit for bit, other things as text without addresses."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        items = list(enumerate(value))
    else:
        return {path: _leaf(value)}
    found: dict[str, Any] = {f"{path} is": f"{type(value).__name__} of {len(items)}"}
    for key, item in items:
        found |= flat(item, f"{path}.{key}")
    return found


def _leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if isinstance(value, nn.parameter.UninitializedTensorMixin):
            return type(value).__name__
        held = value.detach().to_dense() if value.layout != torch.strided else value.detach()
        raw = torch.view_as_real(held).contiguous() if held.is_complex() else held.contiguous()
        data = raw.reshape(-1).view(torch.uint8).numpy().tobytes() if raw.numel() else b""
        hexed = data.hex() if len(data) <= MAX_HEX else hashlib.sha1(data).hexdigest()
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} {hexed}"
    return text(repr(value))


def text(said: str) -> str:
    """Without what differs between two runs of the same program: addresses, temporary folders, numbered classes."""
    return re.sub(r"0x[0-9a-f]+|/tmp/\S+|___torch_mangle_\d+\.", "…", said)


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
    """Every dictionary of hooks on every module, with its type; and which attributes the module has, in order."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        state = module.__dict__
        found[f"{name} attributes"] = list(state)
        found[f"{name} class"] = type(module).__qualname__
        for key, held in state.items():
            if "hook" in key and isinstance(held, dict):
                found[f"{name} {key}"] = (type(held).__name__, [_named(hook) for hook in held.values()])
    return found


def parameter_hooks(model: nn.Module) -> dict[str, Any]:
    """Hooks and attributes of every parameter and buffer, and whether anything holds a weak reference to it."""
    found: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        for key in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            held = getattr(tensor, key, None)
            found[f"{name} {key}"] = [_named(hook) for hook in held.values()] if held else []
        found[f"{name} attributes"] = sorted(vars(tensor))
    return found


def owned(thing: Any) -> dict[str, Any]:
    """The attributes of an optimizer or a scaler, the hooks among them, and which of its methods are its own."""
    found: dict[str, Any] = {"attributes": list(vars(thing)), "class": type(thing).__qualname__}
    for key, held in vars(thing).items():
        if "hook" in key and isinstance(held, dict):
            found[key] = (type(held).__name__, [_named(hook) for hook in held.values()])
        elif callable(held):
            found[key] = _named(held)
    return found


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
    """What is one for the whole process: functions of torch by identity, global hooks, modes, generators, handlers."""
    found: dict[str, Any] = {}
    for name in PATCHABLE:
        for key, held in vars(sys.modules[name]).items():
            if isinstance(held, types.FunctionType | types.BuiltinFunctionType | type):
                found[f"{name}.{key}"] = id(held)
            elif "hook" in key and isinstance(held, dict):
                found[f"{name}.{key}"] = len(held)
    for owner in _classes():
        for key, held in vars(owner).items():
            if key not in ("__doc__", "__weakref__", "__dict__"):
                found[f"{owner.__qualname__}.{key}"] = id(held)
    found |= {
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
    return found


def _classes() -> Iterator[type]:
    yield from (nn.Module, torch.Tensor, nn.Parameter, torch.optim.Optimizer, torch.amp.GradScaler)
    yield from (torch.autograd.Function, torch.autocast, torch.optim.lr_scheduler.LRScheduler)
    yield from (torch.optim.lr_scheduler.ReduceLROnPlateau, nn.Linear, nn.Sequential)


def optimizer_classes() -> dict[str, int]:
    """`step` of each optimizer class: torch wraps it when the first instance is made, so compare after one was."""
    kinds = vars(torch.optim).values()
    return {
        k.__name__: id(vars(k).get("step"))
        for k in kinds
        if inspect.isclass(k) and issubclass(k, torch.optim.Optimizer)
    }


def archive(thing: Any) -> dict[str, Any]:
    """The members of the file that `torch.save(thing)` writes, by name: of the pickle its opcodes, of others
    their size. The values of tensors are compared elsewhere; the ends of their storages may be left to chance."""
    file = io.BytesIO()
    torch.save(thing, file)
    found: dict[str, Any] = {}
    with zipfile.ZipFile(file) as opened:
        for name in opened.namelist():
            data = opened.read(name)
            if name.endswith("data.pkl"):
                found["pickle"] = opcodes(data)
            elif "serialization_id" not in name:
                found[name.partition("/")[2]] = f"{len(data)} bytes"
    return found


def opcodes(pickled: bytes) -> list[str]:
    """The opcodes of a pickle without its memo of texts: whether two equal texts are one object is left to chance."""
    texts: dict[int, str] = {}
    others: dict[int, int] = {}
    found: list[str] = []
    for opcode, argument, _ in pickletools.genops(pickled):
        if "PUT" in opcode.name:
            if found and found[-1].startswith("BINUNICODE"):
                texts[argument] = found[-1]
            else:
                others[argument] = len(others)
        elif "GET" in opcode.name:
            found.append(texts[argument] if argument in texts else f"GET {others[argument]}")
        else:
            found.append(f"{opcode.name} {argument}")
    return found


def refused_globals(thing: Any) -> list[str]:
    """What `torch.load` wants to be told is safe before it loads `thing` with `weights_only`."""
    file = io.BytesIO()
    torch.save(thing, file)
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
