"""Whose memory it is: bytes of the storages behind tensors, each counted once, and those that autograd keeps.

    parameters = storages(model.parameters(), device)       # bytes by address
    saved = Saved(device)
    unseen = saved.start(ignored=parameters)                # None, or why it cannot be seen
    loss = loss_fn(model(x), y)
    saved.activations, saved.autocast                       # bytes alive now
    loss.backward()                                         # … and they go, as backward is done with them
    saved.stop()

Views share a storage, so a tensor and its transpose are counted once. Only storages of the device that is looked at are
counted.
"""

import _thread
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.autograd import graph

from amp_core.record.model.parameters import in_backward, local_values

Key = int
"""Address of a storage: two that live at the same time never share it."""
AGAIN_S = 0.01
"""How soon a Ctrl-C comes again that came where Python drops exceptions."""


def storage_of(tensor: torch.Tensor, device: torch.device) -> tuple[Key, int] | None:
    """Address and bytes of the storage behind `tensor`; None where it is elsewhere, empty, or has none to be seen."""
    if tensor.device != device:
        return None
    try:
        storage = local_values(tensor).untyped_storage()
        size = storage.nbytes()
        return (storage.data_ptr(), size) if size else None
    except (RuntimeError, NotImplementedError, ValueError):  # wrappers of tensors and lazy ones hold no memory
        return None


def storages(tensors: Iterable[torch.Tensor], device: torch.device) -> dict[Key, int]:
    """Bytes of each distinct storage behind `tensors` on `device`, by its address."""
    found = (storage_of(tensor, device) for tensor in tensors)
    return dict(one for one in found if one is not None)


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    """Every tensor in the state of the optimizers."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (v for v in state.values() if isinstance(v, torch.Tensor))


class Saved:
    """What autograd keeps for backward, seen through `torch.autograd.graph.saved_tensors_hooks` while it is started.

    Autograd gets a detached alias of the very tensor it would have kept: the same memory, the same values. When it lets
    go of that alias the tensor is counted off. Storages in `ignored` (parameters, buffers) are not counted.

    torch.func refuses to run under such hooks, whoever put them on. So where anything is about to turn them off for a
    while, ours are taken off first, and `interrupted` says that the count is no longer whole.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ignored: set[Key] = set()
        self._alive: dict[Key, list[Any]] = {}  # by storage: aliases that live, bytes, what it is
        self._references: dict[int, weakref.ref[torch.Tensor]] = {}
        self._bytes = {"activations": 0, "autocast": 0}
        self._lock = threading.RLock()  # aliases go on autograd's threads; reentrant, as that may happen within `pack`
        self._hooks: Any = None
        self._turning_off: Any = graph.disable_saved_tensors_hooks
        self._thread = 0
        self.counting = True
        self.interrupted: str | None = None
        """Why what was counted since the start is not all; None where it is."""
        self.seen = False
        """Whether anything has been counted since the start."""
        self.before_release: Callable[[], None] | None = None
        """Called once, before the next tensor that is let go is counted off."""

    @property
    def activations(self) -> int:
        """Bytes kept for backward now, weights' casts apart."""
        return self._bytes["activations"]

    @property
    def autocast(self) -> int:
        """Bytes of 16-bit casts of weights kept for backward now."""
        return self._bytes["autocast"]

    def start(self, ignored: Iterable[Key]) -> str | None:
        """See what is kept from now on, on this thread; where that would disturb the program, why it is not done."""
        self._ignored = set(ignored)
        self._alive.clear()
        self._references.clear()
        self._bytes = dict.fromkeys(self._bytes, 0)
        self.counting, self.seen, self.before_release, self.interrupted = True, False, None, None
        if hooks_are_on():  # ours would take their place: of nested hooks the innermost alone are called
            return "the program has saved-tensor hooks of its own"
        hooks = graph.saved_tensors_hooks(self._pack, _unpack)
        try:
            hooks.__enter__()
        except RuntimeError as error:  # torch.autograd.graph.disable_saved_tensors_hooks
            return f"saved-tensor hooks are turned off: {error}"
        self._hooks, self._thread = hooks, threading.get_ident()
        self._turning_off = graph.disable_saved_tensors_hooks
        graph.disable_saved_tensors_hooks = self._make_way
        return None

    def stop(self) -> None:
        """See no more. On another thread than `start`'s there is nothing to take off, and nothing is done."""
        if self._hooks is None or self._thread != threading.get_ident() or in_backward():
            return  # what is taken off in backward, where an optimizer may step, autograd puts on again
        self._hooks.__exit__(None, None, None)
        self._hooks = None
        if graph.disable_saved_tensors_hooks == self._make_way:
            graph.disable_saved_tensors_hooks = self._turning_off

    def _make_way(self, error_message: str) -> Any:
        """In place of `torch.autograd.graph.disable_saved_tensors_hooks` while ours are on."""
        original = self._turning_off
        if self._hooks is not None and self._thread == threading.get_ident():
            self.interrupted = f"the program turned saved-tensor hooks off, as torch.func does ({error_message[:80]})"
            self.stop()
        return original(error_message)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach()  # torch asks not to keep `tensor` itself: an output would refer to itself
        if self.counting:
            try:
                found = storage_of(kept, self._device)
                if found is not None and found[0] not in self._ignored:
                    self._count(kept, *found, kind="autocast" if is_cast_of_weight(tensor) else "activations")
            except Exception as error:  # this runs within the program's own forward
                self.counting, self.interrupted = False, f"{type(error).__name__}: {error}"
        return kept

    def _count(self, kept: torch.Tensor, key: Key, size: int, kind: str) -> None:
        with self._lock:
            self.seen = True
            entry = self._alive.setdefault(key, [0, size, kind])
            if not entry[0]:
                self._bytes[kind] += size
            entry[0] += 1
            reference = weakref.ref(kept, functools.partial(self._gone, key))
            self._references[id(reference)] = reference

    def _gone(self, key: Key, reference: "weakref.ref[torch.Tensor]") -> None:
        try:
            self._count_off(key, reference)
        except (
            KeyboardInterrupt
        ):  # nobody hears of it here, in the callback of a weak reference: once more, in a moment
            threading.Timer(AGAIN_S, _thread.interrupt_main).start()

    def _count_off(self, key: Key, reference: "weakref.ref[torch.Tensor]") -> None:
        with self._lock:
            if self._references.pop(id(reference), None) is None:  # of an earlier step
                return
            tell, self.before_release = self.before_release, None
            if tell is not None:
                tell()
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
        node: Any = torch.ones(1, requires_grad=True).exp().grad_fn
    try:
        node._raw_saved_result.register_hooks(_unpack, _unpack)  # refused to a tensor that was saved under others
    except RuntimeError:
        return True
    return False


def _unpack(kept: torch.Tensor) -> torch.Tensor:
    return kept


_VIEWS = ("TBackward", "TransposeBackward", "ViewBackward", "UnsafeViewBackward", "PermuteBackward", "ExpandBackward")
_DEEPEST = 6


def is_cast_of_weight(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is what autocast made of a parameter: a cast, or a view of one, straight from a leaf."""
    node = tensor.grad_fn
    for _ in range(_DEEPEST):
        if node is None:
            return False
        above = [n for n, _ in node.next_functions if n is not None]
        if node.name().startswith("ToCopyBackward"):
            return len(above) == 1 and hasattr(above[0], "variable")
        if not node.name().startswith(_VIEWS) or len(above) != 1:
            return False
        node = above[0]
    return False
