"""Losses of what was rounded to 16 bits: probabilities near 1, and variances that are small beside their mean."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import BF, H, adam, amp, bf16, ce, fp16, step, watched
from tests.findings.other_forms.models import CNN, Net, images, vectors


def _detector(last):
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10), last)


def _labels():
    return ((x, F.one_hot(y, 10).float()) for x, y in vectors(4))


@fault("rounded-probabilities", "loss", each_time=True)
def sigmoid_of_a_model_in_bf16_and_its_loss_in_fp32(into):
    m, bce = _detector(nn.Sigmoid()), nn.BCELoss()
    o = adam(m)
    with watched(m, o, into):
        for x, y in _labels():
            with amp(BF):
                p = m(x)
            bce(p.float(), y).backward()
            step(o)


@fault("rounded-probabilities", "loss")
def cross_entropy_by_hand_of_a_softmax_in_fp16(into):
    def loss(m, b):
        p = m(b[0]).half().softmax(-1)
        return -(b[1] * (p + 1e-4).log() + (1 - b[1]) * torch.log1p(-p + 1e-4)).float().mean()

    fp16(_detector(nn.Identity()), _labels(), into, loss=loss)


@fault("rounded-probabilities", "loss", each_time=True)
def discriminator_whose_probabilities_are_cast_to_fp16(into):
    def loss(m, b):
        p = m(b[0]).float().sigmoid().to(H)[:, 0].float().clamp(1e-7, 1)
        return -(1 - p).clamp_min(1e-7).log().mean()

    fp16(_detector(nn.Identity()), _labels(), into, loss=loss)


@healthy(each_time=True)
def entropy_of_gates_in_bf16(into):
    def loss(m, b):
        p = m(b[0]).sigmoid()
        entropy = -(p * (p + 1e-6).log() + (1 - p) * (1 - p + 1e-6).log())
        return F.mse_loss(p.float(), b[1]) + 0.01 * entropy.float().mean()

    bf16(_detector(nn.Identity()), _labels(), into, loss=loss)


@healthy()
def overlap_of_probabilities_in_bf16(into):
    def loss(m, b):
        p = m(b[0]).sigmoid().float()
        return 1 - 2 * (p * b[1]).sum() / (p + b[1]).sum()

    bf16(_detector(nn.Identity()), _labels(), into, loss=loss)


@healthy()
def cross_entropy_by_hand_in_fp32(into):
    def loss(m, b):
        p = m(b[0]).float().sigmoid()
        return -(b[1] * (p + 1e-7).log() + (1 - b[1]) * (1 - p + 1e-7).log()).mean()

    fp16(_detector(nn.Identity()), _labels(), into, loss=loss)


def _spread(into, dtype, variances, shift=4.0):
    """Features whose variance over the batch a loss holds up, beside a mean of `shift`."""
    m = Net(lambda m, x: m.body(x) + shift, body=nn.Linear(64, 32), head=nn.Linear(32, 10))

    def loss(m, b):
        z = m(b[0])
        spread = variances(z.to(dtype)).float().clamp_min(0)
        return ce(m.head(z), b[1]) + F.relu(1 - (spread + 1e-4).sqrt()).mean()

    bf16(m, vectors(4, rows=32), into, loss=loss)


def _difference(z):
    return z.square().mean(0) - z.mean(0).square()


@fault("half-statistics", "loss", each_time=True)
def variance_as_a_difference_in_bf16(into):
    _spread(into, BF, _difference)


@fault("half-statistics", "loss")
def variance_of_sums_in_bf16(into):
    _spread(into, BF, lambda z: (z * z).sum(0) / len(z) - (z.sum(0) / len(z)) ** 2)


@healthy(each_time=True)
def variance_as_a_difference_of_centred_values_in_bf16(into):
    _spread(into, BF, _difference, shift=0.0)


@healthy()
def variance_as_a_difference_in_fp32(into):
    _spread(into, torch.float32, _difference)


@healthy()
def contrast_of_images_about_their_mean_in_bf16(into):
    def loss(m, b):
        contrast = (b[0].to(BF) - b[0].to(BF).mean((1, 2, 3), keepdim=True)).square().mean((1, 2, 3))
        return (F.cross_entropy(m(b[0]).float(), b[1], reduction="none") * contrast.float()).mean()

    bf16(CNN(), images(4), into, loss=loss)


def _distances_of_squares_first(z, codes):
    return z.pow(2).sum(-1, keepdim=True) + codes.pow(2).sum(-1) - 2 * z @ codes.T


def _distances_of_products_first(z, codes):
    return (z**2).sum(1, keepdim=True) - 2 * (z @ codes.T) + (codes**2).sum(1)


def _quantizer(into, distances, shift, dtype=BF):
    """A model whose latents are replaced by the nearest of 64 codes, all of them about `shift`."""

    def quantized(m, x):
        z = m.encode(x).to(dtype) + shift
        with amp(BF, enabled=dtype == BF):
            nearest = distances(z, m.codes.to(dtype)).argmin(-1)
        return m.decode((z + (m.codes[nearest] - z).detach()).to(x.dtype))

    m = Net(quantized, encode=nn.Linear(64, 8), decode=nn.Linear(8, 10))
    m.register_buffer("codes", shift + torch.randn(64, 8) * 0.2)
    bf16(m, vectors(4, rows=32), into)


@fault("half-statistics", "Net", each_time=True)
def distances_to_codes_in_bf16(into):
    _quantizer(into, _distances_of_squares_first, shift=6.0)


@fault("half-statistics", "Net")
def distances_to_codes_with_the_product_first(into):
    _quantizer(into, _distances_of_products_first, shift=6.0)


@healthy(each_time=True)
def distances_to_codes_about_zero_in_bf16(into):
    _quantizer(into, _distances_of_squares_first, shift=0.0)


@healthy(each_time=True)
def distances_to_codes_in_fp32(into):
    _quantizer(into, _distances_of_products_first, shift=6.0, dtype=torch.float32)


def divergence_from_a_teacher(into, teacher_dtype):
    """Distillation that takes the logarithm of the teacher's probabilities."""
    weight = torch.randn(10, 64) * 2

    def loss(m, b):
        log_q = m(b[0]).float().log_softmax(-1)
        p = (b[0] @ weight.T).to(teacher_dtype).softmax(-1)
        return (p * (p.log() - log_q)).sum(-1).mean()

    fp16(_detector(nn.Identity()), vectors(6), into, loss=loss)


@fault("loss-nonfinite", "loss", each_time=True)
def logarithm_of_probabilities_that_are_zero_in_fp16(into):
    divergence_from_a_teacher(into, H)


@healthy(each_time=True)
def logarithm_of_small_probabilities_in_fp32(into):
    divergence_from_a_teacher(into, torch.float32)
