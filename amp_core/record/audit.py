"""Measures what a recipe loses, by replaying one batch with the same weights and random numbers in FP32 and in the
recipe.

    rec.audit(lambda: loss_fn(model(x), y))                       # at the current loss scale
    rec.audit(lambda: loss_fn(model(x), y), loss_scales=(1, 128, 65536))
    rec.audit(lambda: loss_fn(model(x), y), precision="nvfp4")    # linear layers on quantized operands

The closure computes the loss of one batch. It runs once in FP32, with TF32 and autocast off (even if the closure turns
autocast on), and once per loss scale in the recipe of the run. Where the closure or the model casts to 16 bits, which
FP32 weights do not accept, those casts are to FP32 (see `widening`). A quantization recipe runs as FP32 does, except
for the products of linear layers (see `quantized_products`): only they make a difference. Afterwards gradients, random
number generators, buffers such as BatchNorm's statistics, and backend flags are restored. The scaler is never touched.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.amp.autocast_mode import autocast
from torch.nn.parallel import DistributedDataParallel

from amp_core.record.backends import BACKENDS, backend_of, fp32_precision_restored
from amp_core.record.model import own
from amp_core.record.model.narrow_dtypes import NARROW
from amp_core.record.model.parameters import local_values
from amp_core.record.model.unchanged import unchanged
from amp_core.record.quantized_products import QuantizedProducts
from amp_core.record.widening import Widening, is_mismatch
from amp_core.schema import RunError

COLUMNS = ("numel", "nonzero", "lost", "nonfinite", "lost_mass_frac", "rel_error", "cosine")
"""What `compare_gradients` packs, in this order."""
COUNTS = ("numel", "nonzero", "lost", "nonfinite")
"""Those that are whole numbers."""


class Replay:
    """Runs one closure several times from the same state; each time returns the gradients of `parameters`."""

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[torch.Tensor],
        closure: Callable[[], torch.Tensor],
        device: torch.device,
        autocast_dtype: torch.dtype | None,
    ) -> None:
        self._model = model
        self._parameters = list(parameters)
        self._closure = closure
        self._device = device
        self._autocast_dtype = autocast_dtype
        self._widening = False  # whether the closure itself casts to 16 bits, which FP32 weights do not accept
        self.loss = math.nan
        """The loss of the last replay."""

    def in_fp32(self, products: QuantizedProducts | None = None) -> list[torch.Tensor | None]:
        """Gradients with autocast and TF32 off and 32-bit weights: the reference. With `products`, those of linear
        layers are quantized; raises `RunError` if no linear layer ran, or if the closure cannot run in FP32."""
        if not self._widening:
            try:
                return self._in_fp32(products)
            except RuntimeError as error:
                if not is_mismatch(error):
                    raise
            self._widening = True
        try:
            return self._in_fp32(products)
        except RuntimeError as error:
            if not is_mismatch(error):
                raise
            raise RunError(
                f"closure cannot run in FP32, as it mixes dtypes: {error}; cast its inputs to the dtype of the model's "
                "parameters"
            ) from error

    def _in_fp32(self, products: QuantizedProducts | None) -> list[torch.Tensor | None]:
        with (
            unchanged(self._model, self._device),
            _no_autocast(self._device),
            _no_tf32(),
            _wide(self._parameters, self._model),
            Widening() if self._widening else nullcontext(),
            products or nullcontext(),  # also around backward, in which checkpointing runs forward again
        ):
            gradients = self._gradients(1.0)
        if products is not None and not products.reached:
            raise RunError(
                f"precision={products.recipe.name!r} quantizes linear layers, but the closure ran none that has its "
                "own weight"
            )
        return gradients

    def forward(self) -> None:
        """The forward alone, as the run computes it."""
        with unchanged(self._model, self._device):
            self._loss(self._region())

    def in_recipe(self, loss_scale: float) -> list[torch.Tensor | None]:
        """Gradients as the run computes them, multiplied by `loss_scale`."""
        with unchanged(self._model, self._device):
            return self._gradients(loss_scale, self._region())

    def _region(self) -> Any:
        """The autocast region of the recipe; None if autocast is off and has to stay so."""
        kind, dtype = self._device.type, self._autocast_dtype
        if dtype is not None or torch.is_autocast_enabled(kind):  # some devices have no autocast
            return autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=True)
        return None

    def _loss(self, region: Any = None) -> torch.Tensor:
        alone = self._model.no_sync() if isinstance(self._model, DistributedDataParallel) else nullcontext()
        with torch.enable_grad(), alone, region if region is not None else nullcontext():
            loss = self._closure()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise RunError(f"closure returned {got}; it must return the loss of one batch, one number")
        self.loss = float(loss.detach())
        return loss

    def _gradients(self, loss_scale: float, region: Any = None) -> list[torch.Tensor | None]:
        loss = self._loss(region)
        # autograd.grad neither writes .grad nor runs accumulation hooks: DDP's reducers, optimizers in backward.
        grads = torch.autograd.grad(loss * loss_scale, self._parameters, allow_unused=True)
        return [local_values(g) if g is not None else None for g in grads]


def compare_gradients(reference: torch.Tensor, recipe: torch.Tensor, loss_scale: float) -> torch.Tensor:
    """`COLUMNS` of one gradient as a float64 vector, on its device if that has float64.

    `reference` is the FP32 gradient g, `recipe` the gradient of the scaled loss. `lost` counts elements with g != 0
    that are 0 in the recipe; `lost_mass_frac` is their share of sum |g|; `rel_error` is |r - g| / |g| and `cosine`
    r·g / (|r| |g|), both with r = recipe / loss_scale in float64, and NaN if the recipe's gradient is not finite.
    """
    if not backend_of(reference.device).has_float64:
        reference, recipe = reference.cpu(), recipe.cpu()
    g = reference.reshape(-1).to(torch.float64)
    r = recipe.reshape(-1).to(torch.float64) / loss_scale
    nonzero = g != 0
    lost = nonzero & (r == 0)
    mass = g.abs()
    norm, norm_recipe = g.norm(), r.norm()
    finite = torch.isfinite(r)
    rel_error = (r - g).norm() / norm
    return torch.stack(
        [
            torch.full((), g.numel(), dtype=torch.float64, device=g.device),
            nonzero.sum().to(torch.float64),
            lost.sum().to(torch.float64),
            (~finite).sum().to(torch.float64),
            (mass * lost).sum() / mass.sum(),
            torch.where(finite.all(), rel_error, torch.nan),
            (r * g).sum() / (norm * norm_recipe),
        ]
    )


def audit(
    replay: Replay,
    names: Sequence[str],
    loss_scales: Sequence[float],
    step: int,
    precision: str,
    products: QuantizedProducts | None = None,
) -> dict[str, list[Any]]:
    """Rows of `audits`: each gradient in the recipe, at each loss scale, against FP32. With `products`, the recipe is
    FP32 with those quantized, at the loss scale 1."""
    reference, loss = replay.in_fp32(), replay.loss
    labels: list[tuple[str, float, float]] = []
    packed: list[torch.Tensor] = []
    for loss_scale in loss_scales if products is None else (1.0,):
        gradients = replay.in_recipe(loss_scale) if products is None else replay.in_fp32(products)
        for name, g, r in zip(names, reference, gradients, strict=True):
            if g is not None and r is not None:
                labels.append((name, float(loss_scale), replay.loss - loss))
                packed.append(compare_gradients(g, r, loss_scale))
    rows = torch.stack([p.to(packed[0].device) for p in packed]).tolist() if packed else []
    columns: dict[str, list[Any]] = {c: [row[i] for row in rows] for i, c in enumerate(COLUMNS)}
    for counted in COUNTS:
        columns[counted] = [int(v) for v in columns[counted]]
    return columns | {
        "step": [step] * len(rows),
        "name": [name for name, *_ in labels],
        "loss_scale": [scale for _, scale, _ in labels],
        "loss_change": [change for *_, change in labels],
        "precision": [precision] * len(rows),
    }


@contextmanager
def _no_autocast(device: torch.device) -> Iterator[None]:
    """Disable autocast, also for autocast regions that are entered inside."""
    enter = autocast.__enter__

    def disabled(self: Any) -> Any:
        self._enabled = False
        return enter(self)  # type: ignore[no-untyped-call]

    with ExitStack() as outer:
        for kind in {*BACKENDS, device.type}:
            if torch.is_autocast_enabled(kind):
                outer.enter_context(autocast(kind, enabled=False))
        autocast.__enter__ = disabled  # type: ignore[method-assign]
        try:
            yield
        finally:
            autocast.__enter__ = enter  # type: ignore[method-assign]


@contextmanager
def _no_tf32() -> Iterator[None]:
    """Let matrix products, convolutions and recurrent layers compute in full FP32.

    The older switches go first: setting one of them also sets newer ones.
    """
    with fp32_precision_restored() as switches:
        for owner, name in switches:
            setattr(owner, name, False)
        for owner in (o for backend in BACKENDS.values() for o in backend.fp32_precision_owners()):
            owner.fp32_precision = "ieee"
        yield


@contextmanager
def _wide(parameters: Sequence[torch.Tensor], model: torch.nn.Module) -> Iterator[None]:
    """Hold 16-bit parameters and buffers in FP32 meanwhile."""
    tensors = [*parameters, *own.parameters(model), *own.buffers(model)]
    narrow = {id(t): t for t in tensors if t.dtype in NARROW}.values()
    before = [(t, t.data) for t in narrow]
    for tensor, data in before:
        tensor.data = data.float()
    try:
        yield
    finally:
        for tensor, data in before:
            tensor.data = data
