"""Let a model's layers run on this CPU in 16 bits, or raise an error before the training starts.

    >>> prepare_layers(model, Precision(config, torch.device("cpu")))

torch hands many layers to oneDNN, which implements them in BF16 and FP16 for some instruction sets only. Without
AVX-512 it has no BF16 LSTM, and hardly anywhere an FP16 one: the call raises "could not create a primitive descriptor".
Support depends on the CPU, on the versions of torch and oneDNN and on the environment (`ONEDNN_MAX_CPU_ISA`), so each
layer type is tried once.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from amp_core.schema import RunError
from amp_core.train.engine.recipes import Precision

_Probe = tuple[Callable[[], nn.Module], tuple[int, ...]]

PROBES: dict[str, _Probe] = {
    "Linear": (lambda: nn.Linear(4, 4), (2, 4)),
    "Conv1d": (lambda: nn.Conv1d(4, 4, 3), (2, 4, 8)),
    "Conv2d": (lambda: nn.Conv2d(4, 4, 3), (2, 4, 8, 8)),
    "Conv3d": (lambda: nn.Conv3d(4, 4, 3), (2, 4, 8, 8, 8)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 4, 3), (2, 4, 8)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 4, 3), (2, 4, 8, 8)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(4, 4, 3), (2, 4, 4, 4, 4)),
    "RNN": (lambda: nn.RNN(4, 4, batch_first=True), (2, 4, 4)),
    "GRU": (lambda: nn.GRU(4, 4, batch_first=True), (2, 4, 4)),
    "LSTM": (lambda: nn.LSTM(4, 4, batch_first=True), (2, 4, 4)),
}
"""By class of `torch.nn` that oneDNN may run: a function that makes a tiny layer, and the shape of its input."""


def prepare_layers(model: nn.Module, precision: Precision, islands: Sequence[str] = ()) -> None:
    """Let the model's layers run on this CPU in `precision`; on a GPU this does nothing.

    A layer that oneDNN does not implement in 16 bits runs in torch's own kernels instead, in the same dtypes. Modules
    named in `islands` compute in FP32 and need no 16-bit kernel. Raises `RunError` if torch has no kernel either.
    """
    autocast, weights = precision.autocast_dtype, precision.weights
    if precision.device.type != "cpu":
        return
    for name, module in model.named_modules():
        kind = next((kind for kind in PROBES if isinstance(module, getattr(nn, kind))), None)
        if kind is None or runs(kind, autocast, weights):
            continue
        if runs(kind, autocast, weights, onednn=False):
            if not isinstance(module, PortableLSTM):
                module.forward = functools.partial(_portable, kind, module, module.forward)
        elif not any(f"{name}.".startswith(f"{island}.") for island in islands):
            raise RunError(
                f"precision={precision.name!r} cannot run here: torch has no {kind} in "
                f"{str(autocast or weights).removeprefix('torch.')} for this CPU, which the module {name!r} needs; "
                "choose fp32"
            )


@functools.cache
def runs(kind: str, autocast: torch.dtype | None, weights: torch.dtype, onednn: bool = True) -> bool:
    """Whether a tiny layer of that class runs forward and backward on this CPU, with oneDNN or without it.

    `autocast` is None outside of autocast. The caller's random state stays unchanged, and dispatch modes that count or
    replace operators do not see the trial.
    """
    if autocast is None and weights == torch.float32:
        return True
    make, shape = PROBES[kind]
    untouched = torch.random.fork_rng(devices=[]), torch.enable_grad(), _disable_current_modes()
    apart = torch.autocast("cpu", enabled=False)  # the caller's, in which backward would run
    with ExitStack() as stack:
        for context in (*untouched, apart, nullcontext() if onednn else _without_onednn()):
            stack.enter_context(context)
        layer = make().to(weights)
        try:
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                out = layer(torch.ones(shape, dtype=weights))
            (out[0] if isinstance(out, tuple) else out).float().sum().backward()
        except RuntimeError:  # torch's error for an operator without a kernel; NotImplementedError is a RuntimeError
            return False
    return True


def _portable(kind: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `forward`, without oneDNN if that has no kernel for the dtypes of this call."""
    weight = next(module.parameters())
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    fake = isinstance(weight, FakeTensor)  # which runs no kernel: it stands for a tensor on another machine
    if fake or weight.device.type != "cpu" or runs(kind, autocast, weight.dtype):
        return forward(*args, **kwargs)
    with _without_onednn():
        return forward(*args, **kwargs)


class PortableLSTM(nn.LSTM):
    """`nn.LSTM` that also runs under autocast on a CPU for which oneDNN has no LSTM in 16 bits.

    There torch's own LSTM of matrix products runs instead, in autocast's dtype. CUDA uses cuDNN.
    """

    def forward(self, input, hx=None):  # type: ignore[no-untyped-def] # noqa: A002 - nn.LSTM's own signature
        """As `nn.LSTM.forward`."""
        return _portable("LSTM", self, super().forward, input, hx)


@contextmanager
def _without_onednn() -> Iterator[None]:
    # torch.backends.mkldnn.flags() would set its precision too, which warns in some versions of torch.
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before
