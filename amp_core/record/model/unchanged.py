"""Runs a model once more without a trace of it: random number generators, buffers and plain attributes are restored.

with unchanged(model, device):
    model(x)
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from amp_core.record.backends import backend_of
from amp_core.record.model import own

_PLAIN = (int, float, bool, str, tuple, type(None))


@contextmanager
def unchanged(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Restore random number generators, buffers, and numbers that modules count in attributes afterwards.

    Restores the buffers' version counters too: between a forward and its backward, autograd would reject a buffer that
    was written, even if its old values were written back.
    """
    buffers = [(b, b.detach().clone()) for b in own.buffers(model)]
    counted = [(m, {k: v for k, v in vars(m).items() if type(v) in _PLAIN}) for m in own.modules(model)]
    keep_versions = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
    with backend_of(device).fork_random(), ExitStack() as kept:
        for buffer, _ in buffers:  # one by one: torch 2.6 does not accept a tuple
            kept.enter_context(keep_versions(buffer))
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            for module, attributes in counted:
                vars(module).update(attributes)
