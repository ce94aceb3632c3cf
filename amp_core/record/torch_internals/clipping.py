"""Being told when gradients are about to be clipped.

A loop without a scaler clips between `backward()` and `optimizer.step()`, so a look at `step()` would see clipped
gradients. `torch.nn.utils.clip_grad_norm_` calls a function of its own module by name for the actual clipping; that
name is wrapped while anybody listens, which also reaches callers who imported `clip_grad_norm_` before.
"""

from collections.abc import Callable
from typing import Any

from torch.nn.utils import clip_grad

from amp_core.record.torch_internals.compiling import untraced
from amp_core.record.torch_internals.patches import Patches

_INNER = "_clip_grads_with_norm_"

_listeners: list[Callable[[], None]] = []
_patches = Patches()


def listen(listener: Callable[[], None]) -> None:
    """Call `listener()` before each clipping by norm, in whatever part of the program."""
    _listeners.append(listener)
    if len(_patches) == 0 and hasattr(clip_grad, _INNER):
        _patches.wrap(clip_grad, _INNER, _around)


def unlisten(listener: Callable[[], None]) -> None:
    """Stop calling `listener`; the last one to go restores torch. Twice is harmless."""
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners:
        _patches.restore()


def _around(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip(*args: Any, **kwargs: Any) -> Any:
        _tell()
        return original(*args, **kwargs)

    return clip


@untraced
def _tell() -> None:
    for listener in tuple(_listeners):
        listener()
