"""Bytes of the storages behind tensors, each counted once, and of the tensors that autograd saves for backward.

    parameters = storages(model.parameters(), device)       # bytes by address
    saved = Saved(device)
    unseen = saved.start(ignored=parameters)                # None, or why they cannot be counted
    loss = loss_fn(model(x), y)
    saved.activations, saved.autocast                       # bytes alive now
    loss.backward()                                         # … and they are released as backward proceeds
    saved.stop()

Views share a storage, so a tensor and its transpose are counted once. Only storages of the given device are counted.
"""

import _thread
import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import graph

from amp_core.record.model.parameters import in_backward, local_values
from amp_core.text.errors import in_one_line

Key = int
"""Address of a storage: two that live at the same time never share it."""
REPEAT_INTERRUPT_S = 0.01
"""Delay after which a Ctrl-C is raised again if it came where Python drops exceptions."""


def storage_of(tensor: torch.Tensor, device: torch.device) -> tuple[Key, int] | None:
    """Address and bytes of the storage behind `tensor`; None if it is on another device, empty, or inaccessible."""
    if tensor.device != device:
        return None
    try:
        storage = local_values(tensor).untyped_storage()
        size = storage.nbytes()
        return (storage.data_ptr(), size) if size else None
    except (RuntimeError, NotImplementedError, ValueError):  # tensor wrappers and lazy tensors hold no memory
        return None


def storages(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[Key, int]:
    """Bytes of each distinct storage behind `tensors` on `device`, by its address."""
    present = (storage_of(tensor, device) for tensor in tensors)
    return dict(storage for storage in present if storage is not None)


class Saved:
    """Counts the tensors that autograd saves for backward, by `torch.autograd.graph.saved_tensors_hooks`.

    Autograd gets a detached alias of the tensor that it would have saved: the same memory, the same values. When it
    releases the alias, the tensor is subtracted. Storages in `ignored` (parameters, buffers) are not counted.

    torch.func refuses to run under any such hooks. So when a program is about to disable them, these hooks are detached
    first, and `interrupted` says that the count is incomplete.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ignored: set[Key] = set()
        self._alive: dict[Key, list[Any]] = {}  # by storage: live aliases, bytes, kind
        self._references: dict[int, weakref.ref[torch.Tensor]] = {}
        self._bytes = {"activations": 0, "autocast": 0}
        # Autograd's threads release aliases; reentrant, since that may happen within `_pack`.
        self._lock = threading.RLock()
        self._hooks: Any = None
        self._original_disable: Any = graph.disable_saved_tensors_hooks
        self._thread = 0
        self.counting = True
        self.interrupted: str | None = None
        """Why the count since the start is incomplete; None if it is complete."""
        self.seen = False
        """Whether anything has been counted since the start."""
        self.before_release: Callable[[], None] | None = None
        """Called once, before the next released tensor is subtracted."""

    @property
    def activations(self) -> int:
        """Bytes saved for backward now, without casts of weights."""
        return self._bytes["activations"]

    @property
    def autocast(self) -> int:
        """Bytes of 16-bit casts of weights saved for backward now."""
        return self._bytes["autocast"]

    def start(self, ignored: Iterable[Key]) -> str | None:
        """Count from now on, on this thread. Returns None, or the reason if counting would disturb the program."""
        self._ignored = set(ignored)
        self._alive.clear()
        self._references.clear()
        self._bytes = dict.fromkeys(self._bytes, 0)
        self.counting, self.seen, self.before_release, self.interrupted = True, False, None, None
        if hooks_are_on():  # of nested hooks only the innermost are called, so ours would replace them
            return "the program has saved-tensor hooks of its own"
        hooks = graph.saved_tensors_hooks(self._pack, _unpack)
        try:
            hooks.__enter__()
        except RuntimeError as error:  # torch.autograd.graph.disable_saved_tensors_hooks
            return f"saved-tensor hooks are turned off: {error}"
        self._hooks, self._thread = hooks, threading.get_ident()
        self._original_disable = graph.disable_saved_tensors_hooks
        graph.disable_saved_tensors_hooks = self._detach_and_disable
        return None

    def stop(self) -> None:
        """Stop counting. On another thread than `start`'s this does nothing."""
        if self._hooks is None or self._thread != threading.get_ident() or in_backward():
            return  # hooks that are removed within backward, where an optimizer may step, autograd restores
        self._hooks.__exit__(None, None, None)
        self._hooks = None
        if graph.disable_saved_tensors_hooks == self._detach_and_disable:
            graph.disable_saved_tensors_hooks = self._original_disable

    def _detach_and_disable(self, error_message: str) -> Any:
        """Replaces `torch.autograd.graph.disable_saved_tensors_hooks` while our hooks are attached."""
        original = self._original_disable
        if self._hooks is not None and self._thread == threading.get_ident():
            self.interrupted = f"the program turned saved-tensor hooks off, as torch.func does ({error_message[:80]})"
            self.stop()
        return original(error_message)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach()  # keeping `tensor` itself would make an output refer to itself
        if self.counting:
            try:
                storage = storage_of(kept, self._device)
                if storage is not None and storage[0] not in self._ignored:
                    self._count(kept, *storage, kind="autocast" if is_cast_of_weight(tensor) else "activations")
            except Exception as error:  # this runs within the program's own forward
                self.counting, self.interrupted = False, in_one_line(error)
        return kept

    def _count(self, kept: torch.Tensor, key: Key, size: int, kind: str) -> None:
        with self._lock:
            self.seen = True
            entry = self._alive.setdefault(key, [0, size, kind])
            if not entry[0]:
                self._bytes[kind] += size
            entry[0] += 1
            reference = weakref.ref(kept, functools.partial(self._on_release, key))
            self._references[id(reference)] = reference

    def _on_release(self, key: Key, reference: "weakref.ref[torch.Tensor]") -> None:
        try:
            self._subtract(key, reference)
        except KeyboardInterrupt:  # Python drops exceptions in weak reference callbacks: raise it again shortly
            threading.Timer(REPEAT_INTERRUPT_S, _thread.interrupt_main).start()

    def _subtract(self, key: Key, reference: "weakref.ref[torch.Tensor]") -> None:
        with self._lock:
            if self._references.pop(id(reference), None) is None:  # of an earlier step
                return
            callback, self.before_release = self.before_release, None
            if callback is not None:
                callback()
            entry = self._alive[key]
            entry[0] -= 1
            if not entry[0]:
                del self._alive[key]
                self._bytes[entry[2]] -= entry[1]


def hooks_are_on() -> bool:
    """Whether saved-tensor hooks are in effect on this thread."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # from PyTorch 2.7 on
    if top is not None:
        return top(False) is not None
    with torch.enable_grad():
        node: Any = torch.ones(1, requires_grad=True, device="cpu").exp().grad_fn
    try:
        node._raw_saved_result.register_hooks(_unpack, _unpack)  # refused for a tensor that was saved under other hooks
    except RuntimeError:
        return True
    return False


def _unpack(kept: torch.Tensor) -> torch.Tensor:
    return kept


_VIEWS = ("TBackward", "TransposeBackward", "ViewBackward", "UnsafeViewBackward", "PermuteBackward", "ExpandBackward")
_MAX_DEPTH = 6


def is_cast_of_weight(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is autocast's cast of a parameter: a cast of a leaf, or a view of such a cast."""
    node = tensor.grad_fn
    for _ in range(_MAX_DEPTH):
        if node is None:
            return False
        above = [n for n, _ in node.next_functions if n is not None]
        if node.name().startswith("ToCopyBackward"):
            return len(above) == 1 and hasattr(above[0], "variable")
        if not node.name().startswith(_VIEWS) or len(above) != 1:
            return False
        node = above[0]
    return False
