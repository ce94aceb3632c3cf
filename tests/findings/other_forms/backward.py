"""What goes wrong in backward, or with gradients that the loop uses itself: own autograd functions, perturbations of
weights and inputs, a loss scale that grows after every step."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import amp, fp16, scaled_backward, scaler, sgd, step, usual_loss, watched
from tests.findings.other_forms.models import images, vectors


class _Swish(torch.autograd.Function):
    """x · sigmoid(x), whose derivative divides by (1 + e⁻ˣ)²."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        e = torch.exp(-x)
        return grad * (1 / (1 + e) + x * e / (1 + e).pow(2))


class _LogSum(torch.autograd.Function):
    """log(1 + eˣ) of an exponential that float16 holds, whose derivative squares it."""

    @staticmethod
    def forward(ctx, x):
        e = torch.exp(x.clamp(max=10.0))
        ctx.save_for_backward(e)
        return torch.log1p(e)

    @staticmethod
    def backward(ctx, grad):
        (e,) = ctx.saved_tensors
        return grad * (e * e + e) / (1 + e).square()


class Own(nn.Module):
    """A function of one's own as a module, in float32 if it is `wide`."""

    def __init__(self, function, wide=False):
        super().__init__()
        self.function, self.wide = function, wide

    def forward(self, x):
        y = self.function.apply(x.float() if self.wide else x)
        return y.to(x.dtype)


def _own_function(into, function, wide=False):
    m = nn.Sequential(nn.Linear(64, 32), Own(function, wide), nn.Linear(32, 10))
    data = ((20 * x, y) for x, y in vectors(30))
    fp16(m, data, into, sgd(m), scaler(2.0**6, backoff_factor=0.25))


@fault("scale-collapse", "1")
def own_swish_whose_backward_overflows(into):
    _own_function(into, _Swish)


@fault("scale-collapse", "1")
def own_softplus_whose_backward_overflows(into):
    _own_function(into, _LogSum)


@healthy()
def own_swish_in_float32(into):
    _own_function(into, _Swish, wide=True)


def _sharpness_aware(into, checked):
    """Weights are perturbed along scaled gradients, which overflow at first, and restored before the step."""
    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    o, s = sgd(m), scaler(2.0**24)
    with watched(m, o, into, s):
        for b in vectors(24):
            scaled_backward(m, b, s)
            norm = torch.stack([p.grad.norm() for p in m.parameters()]).norm()
            rho = 0.05 if norm.isfinite() or not checked else 0.0
            moved = [rho * (p.grad / norm).nan_to_num() if checked else rho * p.grad / norm for p in m.parameters()]
            with torch.no_grad():
                torch._foreach_add_(list(m.parameters()), moved)
            o.zero_grad()
            scaled_backward(m, b, s)
            with torch.no_grad():
                torch._foreach_sub_(list(m.parameters()), moved)
            step(o, s)


@fault("loss-nonfinite", "0")
def perturbation_along_gradients_that_overflowed(into):
    _sharpness_aware(into, checked=False)


@healthy()
def perturbation_along_finite_gradients(into):
    _sharpness_aware(into, checked=True)


def _adversarial(into, perturb):
    """`perturb(gradient, scaler)` is added to the inputs."""
    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    o, s = sgd(m), scaler()
    with watched(m, o, into, s):
        for x, y in vectors(12):
            x.requires_grad_()
            with amp():
                value = usual_loss(m, (x, y))
            (gradient,) = torch.autograd.grad(s.scale(value), x)
            scaled_backward(m, ((x + perturb(gradient, s)).detach(), y), s)
            step(o, s)


@fault("scaled-gradient-penalty", "torch.autograd.grad")
def adversarial_inputs_along_scaled_gradients(into):
    _adversarial(into, lambda gradient, s: gradient)


@healthy()
def adversarial_inputs_along_signs(into):
    _adversarial(into, lambda gradient, s: 0.1 * gradient.sign())


@healthy()
def adversarial_inputs_along_unscaled_gradients(into):
    _adversarial(into, lambda gradient, s: gradient / s.get_scale())


@fault("calibration-skips", "loss scale")
def scale_that_grows_after_every_step(into):
    m = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    fp16(m, images(120), into, sgd(m), scaler(2.0**16, growth_interval=1), loss=_eightfold_loss)


def _eightfold_loss(m, b):
    return 8 * F.cross_entropy(m(b[0]).float(), b[1])
