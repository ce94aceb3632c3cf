"""Faults of operators, ranges and autocast regions, in forms that the zoo does not have."""

from __future__ import annotations

import contextlib
import math
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.findings.other_forms.models import (
    BF,
    CNN,
    FP32MM,
    GPT,
    RNN,
    Attention,
    Block,
    MoE,
    Trainer,
    adam,
    amp,
    ce,
    fault,
    fit,
    images,
    lm_loss,
    masked_attention,
    scaler,
    series,
    sgd,
    tokens,
    watched,
)


@fault("half-logits", "")
def pure_bf16_lm_large_vocab(into):
    m = GPT(vocab=20000).to(BF)
    o = sgd(m, 0.3)
    with watched(m, o, into):
        for t in tokens(3, vocab=20000):
            value = F.cross_entropy(m(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())
            value.backward()
            o.step()
            o.zero_grad()


@fault("half-logits|half-sum", "")
def contrastive_log_softmax_half(into):
    a, b = (nn.Linear(16, 8), nn.Linear(16, 8))
    m = nn.ModuleList([a, b])
    o = adam(m)
    bank = torch.randn(10000, 16)
    with watched(m, o, into):
        for _i in range(3):
            x = torch.randn(8, 16)
            with amp(BF):
                s = a(x) @ b(bank).T
            lp = s - s.exp().sum(-1, keepdim=True).log()
            value = -lp[:, 0].float().mean()
            value.backward()
            o.step()
            o.zero_grad()


@fault("half-router", "mlp", each_time=True)
def moe_sigmoid_sort_bf16(into):

    def gate(self, x):
        return self.router(x).sigmoid()

    class M(MoE):
        def forward(self, x):
            p = gate(self, x)
            w, i = p.sort(-1, descending=True)
            w, i = (w[..., :2], i[..., :2])
            out = torch.stack([e(x) for e in self.ex], -2)
            return (out.gather(-2, i[..., None].expand(*i.shape, x.shape[-1])) * w[..., None]).sum(-2)

    m = GPT(make=lambda d: Block(d, mlp=M(d)))
    o = adam(m)
    with watched(m, o, into):
        for t in tokens(4):
            with amp(BF):
                value = lm_loss(m, t)
            value.backward()
            o.step()
            o.zero_grad()


@fault("rounded-positions", "")
def alibi_arange_bf16(into):

    class A(Attention):
        def scores(self, q, k):
            t = q.shape[-2]
            pos = torch.arange(t, dtype=q.dtype)
            return super().scores(q, k) - 0.1 * (pos[:, None] - pos[None]).abs()

    m = GPT(length=600, depth=1, make=lambda d: Block(d, attn=A(d)))
    o = adam(m)
    with watched(m, o, into):
        for t in tokens(2, rows=1, length=600):
            with amp(BF):
                value = lm_loss(m, t)
            value.backward()
            o.step()
            o.zero_grad()


@fault("rounded-positions", "")
def diffusion_timestep_bf16(into):

    class U(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Linear(64 + 32, 64), nn.Linear(64, 64))

        def emb(self, t):
            f = torch.exp(-math.log(10000) * torch.arange(16, dtype=t.dtype) / 16)
            a = t[:, None] * f
            return torch.cat([a.sin(), a.cos()], -1)

        def forward(self, x, t):
            return self.b(F.silu(self.a(torch.cat([x, self.emb(t.to(x.dtype))], -1))))

    m = U().to(BF)
    o = sgd(m, 0.3)
    with watched(m, o, into):
        for x, _ in images(4):
            t = torch.linspace(0, 999, 16).long()
            x = x.flatten(1).to(BF)
            n = torch.randn_like(x)
            F.mse_loss(m(x + n, t).float(), n.float()).backward()
            o.step()
            o.zero_grad()


@fault("half-statistics", "bn")
def cnn_bf16_batchnorm(into):
    m = CNN().to(BF)
    o = sgd(m, 0.3)
    with watched(m, o, into):
        for x, y in images(6):
            F.cross_entropy(m(x.to(BF)).float(), y).backward()
            o.step()
            o.zero_grad()


@fault("half-statistics", "")
def own_groupnorm_half(into):

    class G(nn.Module):
        def forward(self, x):
            b, _c, _h, _w = x.shape
            z = x.reshape(b, 2, -1)
            mu = z.mean(-1, keepdim=True)
            v = ((z - mu) ** 2).mean(-1, keepdim=True)
            return ((z - mu) / torch.sqrt(v + 1e-05)).reshape(x.shape)

    m = CNN()
    m.bn = G()
    o = adam(m)
    with watched(m, o, into):
        for x, y in images(4):
            with amp(BF):
                value = F.cross_entropy(m(x).float(), y)
            value.backward()
            o.step()
            o.zero_grad()


class OwnNorm(nn.Module):
    """`normalized(x)` over the last dimension, with a learned gain."""

    def __init__(self, d, normalized):
        super().__init__()
        self.weight, self.normalized = (nn.Parameter(torch.ones(d)), normalized)

    def forward(self, x):
        return self.weight * self.normalized(x)


def own_norm(into, normalized):
    m = GPT(make=lambda d: Block(d, norm=lambda d: OwnNorm(d, normalized))).to(BF)
    fit(m, sgd(m, 0.3), tokens(4), into, None, None, loss=lm_loss)


@fault("half-statistics", "n1")
def rms_norm_from_unit_vectors(into):
    own_norm(into, lambda x: F.normalize(x, dim=-1) * x.shape[-1] ** 0.5)


@fault("half-statistics", "n1")
def rms_norm_by_einsum(into):
    own_norm(into, lambda x: x * torch.rsqrt(torch.einsum("...d,...d->...", x, x)[..., None] / x.shape[-1] + 1e-6))


@fault("half-statistics", "n", each_time=True)
def rms_norm_under_autocast(into):
    norm = OwnNorm(48, lambda x: x * 48**0.5 / torch.linalg.vector_norm(x, dim=-1, keepdim=True))
    m = nn.ModuleDict({"a": nn.Linear(64, 48), "n": norm, "b": nn.Linear(48, 10)})
    fit(m, adam(m), images(4), into, None, BF, loss=lambda m, b: ce(m["b"](m["n"](m["a"](b[0].flatten(1)))), b[1]))


@fault("autocast-inactive", 'autocast("cuda")')
def decorator_of_another_device(into):
    class M(CNN):
        forward = torch.autocast("cuda", dtype=BF)(CNN.forward)  # torch disables it where there is no GPU

    m = M()
    fit(m, adam(m), images(6), into, None, None)


@fault("fp16-without-scaler", "")
def decorated_inner_module(into):
    class Inner(CNN):
        forward = torch.autocast("cpu", dtype=torch.float16)(CNN.forward)

    m = nn.Sequential(Inner())
    fit(m, adam(m), images(6), into, None, None)


def empty_row(z):
    return z + torch.zeros(z.shape[-2:], dtype=z.dtype).index_fill_(0, torch.tensor([3]), -torch.inf)


@fault("fully-masked-row", "attn", each_time=True)
def additive_mask_with_an_empty_row(into):
    masked_attention(into, torch.float16, empty_row)


@fault("fully-masked-row", "attn")
def own_softmax_of_an_empty_row(into):
    class A(Attention):
        def forward(self, x):
            b, t, d = x.shape
            q, k, v = self.qkv(x).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
            e = empty_row(self.scores(q, k))
            e = (e - e.amax(-1, keepdim=True)).exp()
            return self.proj((e / e.sum(-1, keepdim=True) @ v).transpose(1, 2).reshape(b, t, d))

    m = GPT(make=lambda d: Block(d, attn=A(d)))
    fit(m, adam(m), tokens(4), into, None, BF, loss=lm_loss)


@fault("fully-masked-row", "attn")
def empty_row_within_checkpointing(into):
    class A(Attention):
        def scores(self, q, k):
            return empty_row(super().scores(q, k))

    class C(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.b = Block(d, attn=A(d))

        def forward(self, x):
            return checkpoint(self.b, x, use_reentrant=False)

    m = GPT(make=C)
    fit(m, adam(m), tokens(4), into, None, BF, loss=lm_loss)


@fault("fully-masked-row", "loss")
def no_legal_action(into):
    m = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 6))
    turn = iter(range(100))

    def loss(m, b):
        legal = torch.rand(16, 6) < 0.7
        legal[:, 0] = True
        legal[3] &= next(turn) != 5
        logits = m(b[0].flatten(1)).float().masked_fill(~legal, -torch.inf)
        chosen = torch.distributions.Categorical(logits=logits, validate_args=False)
        return -(chosen.log_prob(legal.float().argmax(-1)) * torch.randn(16)).mean()

    fit(m, adam(m), images(8), into, None, BF, loss=loss)


@fault("half-sum", "")
def vae_sum_reduction_bf16(into):
    m = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 64))
    o = adam(m)
    with watched(m, o, into):
        for x, _ in images(4, rows=128):
            x = x.flatten(1)
            with amp(BF):
                r = m(x)
            d = r - x.to(BF)
            value = (d * d).sum().float() / 128
            value.backward()
            o.step()
            o.zero_grad()


@fault("activation-overflow", "blocks")
def attention_scores_overflow(into):

    class A(Attention):
        def scores(self, q, k):
            return q * 60 @ (k * 60).transpose(-1, -2)

    m = GPT(make=lambda d: Block(d, attn=A(d)))
    o = adam(m)
    s = scaler()
    with torch.no_grad():
        for b in m.blocks:
            b.attn.qkv.weight.mul_(8)
    with watched(m, o, into, s):
        for t in tokens(8):
            with amp():
                value = lm_loss(m, t)
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("activation-overflow", "act")
def power_activation_overflow(into):

    class P(nn.Module):
        def forward(self, x):
            return x**4

    class N(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.act, self.b = (nn.Linear(64, 32), P(), nn.Linear(32, 10))
            nn.init.normal_(self.a.weight, std=4.0)

        def forward(self, x):
            return self.b(self.act(self.a(x.flatten(1))))

    m = N()
    Trainer(m, adam(m), scaler()).fit(images(8), into)


@fault("mask-constant-overflow|loss-nonfinite", "blocks", each_time=True)
def additive_mask_half(into):

    class A(Attention):
        def forward(self, x):
            b, t, d = x.shape
            q, k, v = self.qkv(x).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
            s = self.scores(q, k)
            mask = (1.0 - torch.ones(t, t).triu(1)) * -1000000000.0
            s = s + mask.to(s.dtype)
            return self.proj((s.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(b, t, d))

    m = GPT(make=lambda d: Block(d, attn=A(d)))
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for t in tokens(4):
            with amp():
                value = lm_loss(m, t)
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("eps-rounds-to-zero", "")
def cosine_similarity_half(into):

    class C(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = nn.Linear(64, 16)
            self.eps = torch.tensor(1e-08)

        def forward(self, x, c):
            z = self.f(x)
            return z @ c.T.to(z.dtype) / (z.norm(dim=-1, keepdim=True) * c.norm(dim=-1).to(z.dtype) + self.eps)

    m = C()
    o = adam(m)
    s = scaler()
    c = torch.randn(10, 16)
    with watched(m, o, into, s):
        for x, y in images(4):
            with amp():
                value = F.cross_entropy(m(x.flatten(1), c).float(), y)
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("eps-rounds-to-zero", "")
def rms_norm_half_eps(into):

    class R(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.w = nn.Parameter(torch.ones(d))
            self.variance_epsilon = 1e-08

        def forward(self, x):
            x = x.half()
            return self.w.half() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    m = GPT(make=lambda d: Block(d, norm=R))
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for t in tokens(4):
            with amp():
                value = lm_loss(m, t)
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("loss-nonfinite", "loss")
def where_trick_nan_gradient(into):
    m = RNN()
    o = adam(m)
    with watched(m, o, into) as rec:
        for i, (x, y) in enumerate(series(8)):
            with amp(BF):
                z = m(x).float()
            d = (z - z.detach() * (1.0 if i > 3 else 0.0)).norm(dim=1)
            value = F.cross_entropy(z, y) + torch.where(d > 0, d.sqrt(), d * 0).mean()
            rec.log(loss=value)
            value.backward()
            o.step()
            o.zero_grad()


@fault("loss-nonfinite", "loss")
def kl_log_zero(into):
    m = CNN()
    o = adam(m, 0.01)
    with watched(m, o, into) as rec:
        for i, (x, y) in enumerate(images(8)):
            with amp(BF):
                p = m(x * (60.0 if i == 4 else 1.0)).float().softmax(-1)
            t = F.one_hot(y, 10).float()
            value = (t * (t.log() - p.log())).sum(-1).mean()
            rec.log(loss=value)
            value.backward()
            o.step()
            o.zero_grad()


@fault("gradient-underflow", "")
def rnn_static_scale_underflow(into):
    m = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    o = adam(m)
    s = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=10**9)
    with watched(m, o, into, s, every=1):
        for x, y in images(10, rows=256):
            with amp():
                value = F.cross_entropy(m(x.flatten(1)), y) * 0.001
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("batchnorm-poisoned|activation-overflow", "")
def cnn_bn_poisoned(into):
    m = CNN()
    with torch.no_grad():
        m.conv2.weight.mul_(1.0)

    class L(nn.Module):
        def __init__(self):
            super().__init__()
            self.c = nn.Conv2d(8, 8, 1)
            self.n = nn.BatchNorm2d(8)
            nn.init.constant_(self.c.weight, 30000.0)

        def forward(self, x):
            return self.n(self.c(x))

    m.bn = L()
    Trainer(m, adam(m), scaler()).fit(images(4), into)


@fault("backward-under-autocast", "backward")
def decorated_train_step(into):
    m = GPT()
    o = adam(m)

    @torch.autocast("cpu", dtype=BF)
    def step(t):
        value = lm_loss(m, t)
        value.backward()
        return value

    with watched(m, o, into):
        for t in tokens(4):
            step(t)
            o.step()
            o.zero_grad()


@fault("compile-autocast-mismatch", "compile")
def compiled_step_backward_inside(into):
    m = CNN(bn=False)
    m.compile(backend="aot_eager")
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for x, y in images(4):
            with amp():
                value = F.cross_entropy(m(x).float(), y)
                s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("autocast-inactive", "mlp")
def custom_fwd_casts_to_fp32(into):

    class L(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(d, d) / d**0.5)

        def forward(self, x):
            return FP32MM.apply(x, self.weight)

    m = GPT(make=lambda d: Block(d, mlp=L(d)))
    o = adam(m)
    with watched(m, o, into):
        for t in tokens(4):
            with amp(BF):
                value = lm_loss(m, t)
            value.backward()
            o.step()
            o.zero_grad()


@fault("autocast-not-in-thread", "ex")
def pool_of_experts(into):

    class E(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.ex, self.fc = (
                nn.Linear(64, 16),
                nn.ModuleList(nn.Linear(16, 16) for _ in range(3)),
                nn.Linear(16, 10),
            )
            self.pool = ThreadPoolExecutor(2)

        def forward(self, x):
            x = self.inp(x.flatten(1))
            return self.fc(sum(self.pool.map(lambda e: e(x.float()), self.ex)))

    m = E()
    o = adam(m)
    with watched(m, o, into):
        for x, y in images(4):
            with amp(BF):
                value = F.cross_entropy(m(x).float(), y)
            value.backward()
            o.step()
            o.zero_grad()
    m.pool.shutdown()


@fault("checkpoint-dtype-mismatch", "blocks")
def checkpoint_context_fn_other(into):

    class C(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.b = Block(d)

        def forward(self, x):
            return checkpoint(
                self.b,
                x,
                use_reentrant=False,
                determinism_check="none",
                context_fn=lambda: (contextlib.nullcontext(), amp(BF, False)),
            )

    m = GPT(make=C)
    o = adam(m)
    with watched(m, o, into), contextlib.suppress(Exception):
        for t in tokens(4):
            with amp(BF):
                value = lm_loss(m, t)
            value.backward()
            o.step()
            o.zero_grad()


@fault("custom-function-dtype", "")
def conv_function_two_dtypes(into):

    class Fn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return (g @ w.T.float(), x.T @ g)

    class L(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = nn.Linear(64, 16)
            self.w = nn.Parameter(torch.randn(16, 10) / 4)

        def forward(self, x):
            return Fn.apply(self.inp(x.flatten(1)), self.w.to(BF))

    m = L()
    o = adam(m)
    with contextlib.suppress(RuntimeError), watched(m, o, into):
        for x, y in images(3):
            with amp(BF):
                value = F.cross_entropy(m(x).float(), y)
            value.backward()
            o.step()
            o.zero_grad()


@fault("bce-banned", "")
def functional_bce(into):
    m = CNN()
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for x, y in images(3):
            with amp():
                value = F.binary_cross_entropy(m(x).sigmoid().float(), F.one_hot(y, 10).float())
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("scale-collapse|activation-overflow", "")
def gan_collapse(into):
    gen, dis = (nn.Linear(8, 16), nn.Linear(16, 1))
    m = nn.ModuleDict({"g": gen, "d": dis})
    og, od, s = (adam(gen), adam(dis), scaler(4.0))
    nn.init.constant_(dis.weight, 60000.0)
    with watched(m, [og, od], into, s):
        for _i in range(12):
            z = torch.randn(8, 8)
            with amp():
                value = F.softplus(dis(gen(z).detach()) * 10).float().mean()
            s.scale(value).backward()
            s.step(od)
            with amp():
                l2 = F.softplus(-dis(gen(z)) * 10).float().mean()
            s.scale(l2).backward()
            s.step(og)
            s.update()
            og.zero_grad()
            od.zero_grad()


@fault("half-logits", "", each_time=True)
def softmax_then_log_half(into):
    m = GPT(vocab=16384)
    o = adam(m)

    def loss(m, t):
        z = m(t[:, :-1])
        with amp(enabled=False):
            p = z.softmax(-1)
            return -p.gather(-1, t[:, 1:, None]).log().float().mean()

    fit(m, o, tokens(3, vocab=16384), into, None, BF, loss=loss)


@fault("half-router", "mlp")
def moe_argmax_router(into):

    class M(MoE):
        def forward(self, x):
            with amp(BF):
                g = self.router(x)
            i = g.argmax(-1)
            w = g.softmax(-1).gather(-1, i[..., None])
            out = torch.stack([e(x) for e in self.ex], -2)
            return out.gather(-2, i[..., None, None].expand(*i.shape, 1, x.shape[-1])).squeeze(-2) * w.to(x.dtype)

    m = GPT(make=lambda d: Block(d, mlp=M(d)))
    fit(m, adam(m), tokens(4), into, None, BF, loss=lm_loss)


@fault("half-router", "mlp")
def moe_pure_bf16(into):
    m = GPT(make=lambda d: Block(d, mlp=MoE(d, gate=lambda s, x: s.router(x).softmax(-1)))).to(BF)
    fit(m, sgd(m, 0.5), tokens(4), into, None, None, loss=lm_loss)


@fault("half-sum", "")
def gnn_scatter_bf16(into):

    class G(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Linear(8, 16), nn.Linear(16, 4))

        def forward(self, x, e):
            h = self.a(x)
            z = torch.zeros(4, 16, dtype=h.dtype).index_add_(0, e, h)
            return self.b(z)

    m = G()
    fit(
        m,
        adam(m),
        ((torch.randn(4000, 8), torch.randint(4, (4000,))) for _ in range(3)),
        into,
        None,
        BF,
        loss=lambda m, b: m(*b).float().square().mean() * 1e-06,
    )


@fault("activation-overflow|loss-nonfinite", "")
def exp_overflow_in_loss(into):
    m = nn.Linear(64, 10)
    m.weight.data.mul_(60)
    fit(
        m,
        adam(m),
        images(6),
        into,
        scaler(),
        loss=lambda m, b: m(b[0].flatten(1)).half().exp().sum(-1).log().float().mean(),
    )


@fault("batchnorm-poisoned|activation-overflow", "")
def bn1d_poisoned_late(into):
    m = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))

    def after(i):
        if i == 4:
            m[0].weight.data.mul_(1000000.0)

    fit(m, sgd(m, 0.0001), images(8), into, scaler(), after=after, loss=lambda m, b: ce(m(b[0].flatten(1)), b[1]))


@fault("autocast-inactive", "")
def nested_disabled_encoder(into):

    class G(GPT):
        def forward(self, i):
            x = self.tok(i) + self.pos(torch.arange(i.shape[1]))
            with amp(BF, False):
                for b in self.blocks:
                    x = b(x.float())
            return self.head(self.norm(x))

    m = G()
    fit(m, adam(m), tokens(4), into, None, BF, loss=lm_loss)


@fault("checkpoint-dtype-mismatch", "")
def reentrant_own_recompute_fp32(into):

    class Fn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, f, x, *ps):
            ctx.f = f
            ctx.save_for_backward(x)
            with torch.no_grad():
                return f(x)

        @staticmethod
        def backward(ctx, g):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.f(x)
            gs = torch.autograd.grad(y, [x, *ctx.f.parameters()], g.to(y.dtype))
            return (None, *gs)

    class C(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.b = Block(d)

        def forward(self, x):
            return Fn.apply(self.b, x, *self.b.parameters())

    m = GPT(make=C)
    fit(m, adam(m), tokens(3), into, None, BF, loss=lm_loss)


@fault("mask-constant-overflow", "")
def finfo32_min_in_half(into):

    class A(Attention):
        def scores(self, q, k):
            z = super().scores(q, k)
            return z.masked_fill(torch.rand(z.shape[-1]) < 0.2, torch.finfo(torch.float32).min)

    m = GPT(make=lambda d: Block(d, attn=A(d)))
    with contextlib.suppress(RuntimeError):
        fit(m, adam(m), tokens(3), into, scaler(), loss=lm_loss)


@fault("mask-constant-overflow", "")
def key_padding_bias_half(into):

    class G(GPT):
        def forward(self, i):
            bias = torch.zeros(i.shape[1]).masked_fill(torch.arange(i.shape[1]) > 12, -1000000000000.0).half()
            x = self.tok(i) + self.pos(torch.arange(i.shape[1]))
            w = (x.mean(-1) + bias).softmax(-1)
            x = x + (w[..., None] * x).sum(1, keepdim=True)
            for b in self.blocks:
                x = b(x)
            return self.head(self.norm(x))

    m = G()
    fit(m, adam(m), tokens(3), into, scaler(), loss=lm_loss)


@fault("custom-function-dtype", "")
def f_linear_two_dtypes(into):

    class L(nn.Linear):
        def forward(self, x):
            with amp(BF, False):
                return F.linear(x, self.weight, self.bias)

    m = CNN()
    m.fc = L(256, 10)
    with contextlib.suppress(RuntimeError):
        fit(m, adam(m), images(3), into, None, BF)


@fault("gradient-underflow", "")
def deep_tanh_underflow(into):
    m = nn.Sequential(*[value for _ in range(6) for value in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 10))
    for value in m:
        if isinstance(value, nn.Linear):
            value.weight.data.mul_(0.2)
    fit(
        m,
        adam(m),
        images(12, rows=128),
        into,
        torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=10**6),
        every=1,
        loss=lambda m, b: F.cross_entropy(m(b[0].flatten(1)), b[1]),
    )


@fault("backward-under-autocast", "backward")
def gan_backward_inside(into):
    m = CNN()
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for x, y in images(5):
            with amp():
                value = ce(m(x), y)
                o.zero_grad()
                s.scale(value).backward()
            s.step(o)
            s.update()


@fault("bce-banned", "")
def bce_loss_gan(into):
    dis = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
    crit = nn.BCELoss()
    o = adam(dis)
    s = scaler()
    with watched(dis, o, into, s):
        for _i in range(4):
            with amp():
                value = crit(dis(torch.randn(8, 16)).float(), torch.ones(8, 1))
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()
