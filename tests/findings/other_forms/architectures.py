"""Faults and sound trainings of other architectures: vision transformers, diffusion, reinforcement learning, flows."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import BF, adam, amp, bf16, fp16, scaler, step, watched
from tests.findings.other_forms.models import Net, images, series, sinusoids, vectors


class ViT(nn.Module):
    def __init__(self, d=32, depth=2):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
        self.patch, self.pos = (nn.Conv2d(1, d, 2, 2), nn.Parameter(torch.randn(1, 16, d) * 0.02))
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = (nn.LayerNorm(d), nn.Linear(d, 10))

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        return self.head(self.norm(self.encoder(x)).mean(1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.down, self.norm = (nn.Linear(32, 16), nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16))
        self.mid, self.up = (nn.Conv2d(16, 32, 3, 2, 1), nn.ConvTranspose2d(32, 16, 2, 2))
        self.out = nn.Conv2d(32, 1, 3, padding=1)

    def embedded(self, t):
        return sinusoids(t.float())

    def forward(self, x, t):
        h = F.silu(self.norm(self.down(x) + self.time(self.embedded(t))[:, :, None, None]))
        return self.out(torch.cat([h, self.up(F.silu(self.mid(h)))], 1))


def diffusion_loss(m, b):
    x = b[0]
    t, noise = (torch.randint(0, 1000, (len(x),)), torch.randn_like(x))
    a = torch.cos(t / 1000 * math.pi / 2)[:, None, None, None]
    return F.mse_loss(m(a * x + (1 - a * a).sqrt() * noise, t).float(), noise)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.pi, self.v = (nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 4), nn.Linear(32, 1))

    def forward(self, x):
        h = self.body(x)
        return (self.pi(h).float(), self.v(h).squeeze(-1).float())


@fault("clip-before-unscale", "clip_grad_norm_")
def vit_clipped_while_scaled(into):
    m = ViT()
    fp16(m, images(10), into, before=lambda i: nn.utils.clip_grad_norm_(m.parameters(), 1.0))


@fault("rounded-positions")
def unet_with_timesteps_in_bf16(into):
    class M(UNet):
        def embedded(self, t):
            return sinusoids(t.to(BF))

    bf16(M(), images(6), into, loss=diffusion_loss)


def _continuous_timesteps(into, dtype, largest):
    class M(UNet):
        def embedded(self, t):
            return sinusoids(t.float())

    def loss(m, b):
        t, noise = torch.rand(len(b[0])) * largest, torch.randn_like(b[0])
        return F.mse_loss(m(b[0] + noise, t.to(dtype)).float(), noise)

    bf16(M(), images(6), into, loss=loss)


@fault("rounded-positions", "M", each_time=True)
def timesteps_rounded_to_bf16_before_their_sines_in_fp32(into):
    _continuous_timesteps(into, BF, 1000)


@healthy(each_time=True)
def timesteps_in_fp32(into):
    _continuous_timesteps(into, torch.float32, 1000)


@healthy(each_time=True)
def flow_times_below_one_in_bf16(into):
    _continuous_timesteps(into, BF, 1)


def _latents(into, dtype):
    """Trains on what a frozen encoder, whose weights are large, makes of the images."""
    encoder = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)).to(dtype)
    with torch.no_grad():
        for p in encoder[:2].parameters():
            p.mul_(2000)
    m, s = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)), scaler()
    o = adam(m)
    with watched(m, o, into, s):
        for x, y in vectors(6):
            with torch.no_grad():
                latents = encoder(x.to(dtype)).float()
            with amp():
                loss = F.cross_entropy(m(latents).float(), y)
            s.scale(loss).backward()
            step(o, s)


@fault("activation-overflow", "the loop", each_time=True)
def latents_of_a_frozen_encoder_that_overflows_fp16(into):
    _latents(into, torch.float16)


@healthy(each_time=True)
def latents_of_a_frozen_encoder_in_bf16(into):
    _latents(into, BF)


@fault("logged-scaled-values", "loss")
def unet_logs_the_scaled_loss(into):
    s = scaler(2.0**12, growth_interval=4)
    fp16(UNet(), images(16), into, s=s, loss=diffusion_loss, log=lambda rec, loss: rec.log(loss=s.scale(loss)))


@fault("optimizer-step-bypasses-scaler")
def policy_gradient_without_scaler_step(into):
    m = Policy()
    o, s = (adam(m), scaler())
    with watched(m, o, into, s):
        for _ in range(10):
            x, reward = (torch.randn(32, 8), torch.randn(32))
            with amp():
                logits, value = m(x)
            chosen = torch.distributions.Categorical(logits=logits)
            loss = F.mse_loss(value, reward) - (chosen.log_prob(chosen.sample()) * (reward - value.detach())).mean()
            s.scale(loss).backward()
            step(o)


@fault("half-logits")
def queue_of_negatives_in_bf16(into):
    m, queue = (nn.Linear(64, 32), F.normalize(torch.randn(16384, 32), dim=-1).to(BF))

    def loss(m, b):
        similar = F.normalize(m(b[0]).float(), dim=-1).to(BF) @ queue.T / 0.07
        with amp(enabled=False):
            return -similar.log_softmax(-1)[:, 0].float().mean()

    bf16(m, vectors(4), into, loss=loss)


@fault("half-sum")
def running_mean_of_a_sequence_in_bf16(into):
    def mean(m, x):
        return m.out(m.inp(x).relu().cumsum(1)[:, -1] / x.shape[1])

    bf16(Net(mean, inp=nn.Linear(8, 16), out=nn.Linear(16, 8)), series(4, rows=4, length=600), into)


@healthy()
def proximal_policy_optimization_in_bf16(into):
    m = Policy()
    o = adam(m)
    with watched(m, o, into):
        for _ in range(5):
            x, reward = (torch.randn(64, 8), torch.randn(64))
            with torch.no_grad(), amp(BF):
                old = torch.distributions.Categorical(logits=m(x)[0])
            action = old.sample()
            for _ in range(3):
                with amp(BF):
                    logits, value = m(x)
                now = torch.distributions.Categorical(logits=logits)
                ratio = (now.log_prob(action) - old.log_prob(action)).exp()
                gain = torch.min(ratio * reward, ratio.clamp(0.8, 1.2) * reward).mean()
                loss = 0.5 * F.mse_loss(value, reward) - gain - 0.01 * now.entropy().mean()
                o.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(m.parameters(), 0.5)
                o.step()


@healthy()
def q_learning_with_a_target_in_fp16(into):
    m = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    target = copy.deepcopy(m).requires_grad_(False)

    def loss(m, b):
        x, after = (b[0][:, 0], b[0][:, 1])
        with torch.no_grad():
            aim = b[1] / 8 + 0.99 * target(after).max(1).values
        return F.smooth_l1_loss(m(x).gather(1, (b[1] % 4)[:, None])[:, 0].float(), aim.float())

    def after(i):
        if i % 5 == 4:
            target.load_state_dict(m.state_dict())

    fp16(m, series(20), into, loss=loss, after=after)


@healthy()
def diffusion_with_an_average_in_bf16(into):
    m = UNet()
    average = torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    bf16(m, images(16), into, loss=diffusion_loss, after=lambda i: average.update_parameters(m))


@healthy()
def masked_autoencoder_in_fp16(into):
    class M(ViT):
        def __init__(self):
            super().__init__()
            self.hidden, self.pixels = (nn.Parameter(torch.zeros(1, 1, 32)), nn.Linear(32, 4))

        def forward(self, x):
            h = self.patch(x).flatten(2).transpose(1, 2)
            keep = (torch.rand(h.shape[:2]) < 0.25)[..., None]
            z = self.norm(self.encoder(torch.where(keep, h, self.hidden.to(h.dtype)) + self.pos))
            error = (self.pixels(z).float() - F.unfold(x, 2, stride=2).transpose(1, 2)).square()
            return (error * ~keep).sum() / (~keep).sum()

    m = M()
    m.head.requires_grad_(False)
    fp16(m, images(12), into, loss=lambda m, b: m(b[0]))


@healthy()
def normalizing_flow_in_bf16(into):
    m = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(2))

    def loss(m, b):
        z, volume = (b[0], 0.0)
        for net in m:
            left, right = z.flip(-1).chunk(2, -1)
            scale, shift = net(left).float().chunk(2, -1)
            z, volume = (torch.cat([left, right * scale.tanh().exp() + shift], -1), volume + scale.tanh().sum(-1))
        return (0.5 * z.square().sum(-1) - volume).mean()

    bf16(m, vectors(12), into, loss=loss)


@healthy(each_time=True)
def critic_whose_penalty_is_computed_in_fp32(into):
    m = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def loss(m, b):
        with amp(BF, enabled=False):
            x = b[0].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return m(b[0]).float().mean() - m(-b[0]).float().mean() + (gradient.norm(dim=1) - 1).square().mean()

    bf16(m, vectors(12), into, loss=loss)


@healthy(each_time=True)
def discriminator_beside_a_generator_with_its_own_scaler(into):
    """The generator, its optimizer and its scaler are not watched."""
    generator, critic = (nn.Linear(8, 64), nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    og, oc, sg, sc = (adam(generator), adam(critic), scaler(), scaler())
    with watched(critic, oc, into, sc):
        for x, _ in vectors(12):
            with amp():
                fake = generator(torch.randn(len(x), 8))
                loss = F.softplus(-critic(x).float()).mean() + F.softplus(critic(fake.detach()).float()).mean()
            sc.scale(loss).backward()
            step(oc, sc)
            with amp():
                loss = F.softplus(-critic(fake).float()).mean()
            sg.scale(loss).backward()
            step(og, sg)
            critic.zero_grad()


@fault("half-accumulation", each_time=True)
def hooks_sum_gradients_in_bf16(into):
    """They take the gradients away; the optimizer is given their sums in FP32."""
    _summed_by_hooks(into, BF)


@healthy(each_time=True)
def hooks_sum_gradients_in_fp32(into):
    _summed_by_hooks(into, torch.float32)


def _summed_by_hooks(into, dtype):
    m = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))
    sums = {name: torch.zeros_like(p, dtype=dtype) for name, p in m.named_parameters()}

    def add(p, name):
        sums[name].add_(p.grad.to(dtype))
        p.grad = None

    for name, p in m.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: add(p, name))
    o = adam(m)
    with watched(m, o, into):
        for i, (x, y) in enumerate(vectors(16)):
            with amp(BF):
                out = m(x)
            F.cross_entropy(out.float(), y).backward()
            if i % 4 == 3:
                for name, p in m.named_parameters():
                    p.grad = sums[name].float() / 4
                    sums[name].zero_()
                step(o)


def _squared_relu_attention(into, dtype):
    """Of gated attention units: scores are squared where they are positive, and divided by their sum."""

    def attended(m, x):
        h = m.inp(x)
        scores = (h @ h.transpose(-1, -2)).to(dtype).relu().square()
        weights = scores / scores.sum(-1, keepdim=True).clamp(min=1e-3)
        return m.out((weights.to(h.dtype) @ h).mean(1))

    m = Net(attended, inp=nn.Linear(8, 64), out=nn.Linear(64, 8))
    torch.nn.init.normal_(m.inp.weight, std=2.0)
    fp16(m, series(12), into)


@fault("activation-overflow")
def squared_relu_attention_in_fp16(into):
    _squared_relu_attention(into, torch.float16)


@healthy()
def squared_relu_attention_in_fp32(into):
    _squared_relu_attention(into, torch.float32)
