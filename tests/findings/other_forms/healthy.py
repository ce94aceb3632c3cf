"""Sound trainings that look odd, in forms that the zoo does not have."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from tests.findings.other_forms.models import (
    BF,
    CK,
    CNN,
    GPT,
    RNN,
    STE,
    Attention,
    Block,
    H,
    Lora,
    MoE,
    adam,
    amp,
    ce,
    fit,
    gan,
    healthy,
    images,
    lm_loss,
    masked_attention,
    scaler,
    series,
    sgd,
    tokens,
    watched,
)


@healthy(each_time=True)
def functional_half_copies(into):
    m = RNN()
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for x, y in series(12):
            ps = {k: v.to(BF) for k, v in m.named_parameters()}
            value = ce(functional_call(m, ps, (x.to(BF),)), y)
            value.backward()
            o.step()
            o.zero_grad()


@healthy()
def torch_func_grad_assigned(into):
    m = CNN(bn=False)
    o = sgd(m, 0.1)
    ps = dict(m.named_parameters())

    def f(p, x, y):
        with amp(BF):
            return ce(functional_call(m, p, (x,)), y)

    with watched(m, o, into):
        for x, y in images(10):
            g = grad(f)({k: v.detach() for k, v in ps.items()}, x, y)
            for k, v in ps.items():
                v.grad = g[k]
            o.step()
            o.zero_grad()


@healthy()
def dp_sgd_per_sample(into):
    m = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    o = sgd(m, 0.1)
    ps = {k: v.detach() for k, v in m.named_parameters()}

    def f(p, x, y):
        return F.cross_entropy(functional_call(m, p, (x[None],)), y[None])

    with watched(m, o, into):
        for x, y in images(12):
            g = vmap(grad(f), in_dims=(None, 0, 0))(ps, x.flatten(1), y)
            n = torch.stack([v.flatten(1).norm(dim=1) for v in g.values()]).norm(dim=0)
            c = (1 / n).clamp(max=1)
            for k, p in m.named_parameters():
                p.grad = torch.einsum("b...,b->...", g[k], c) / 16
            o.step()
            o.zero_grad()


@healthy(each_time=True)
def static_loss_scale_by_hand(into):
    m = CNN()
    o = adam(m)
    with watched(m, o, into):
        for x, y in images(10):
            with amp():
                value = ce(m(x), y)
            (value * 1024.0).backward()
            for p in m.parameters():
                p.grad.div_(1024.0)
            o.step()
            o.zero_grad()


@healthy()
def wgan_gp_right(into):

    def gp(s, dis, real, fake):
        x = (real + fake.float()).div(2).requires_grad_()
        with amp():
            c = dis(x)
        (g,) = torch.autograd.grad(s.scale(c.float().sum()), x, create_graph=True)
        g = g / s.get_scale()
        return ((g.norm(dim=1) - 1) ** 2).mean()

    gan(into, False, gp)


@healthy()
def scaler_with_floor(into):

    class S(torch.amp.GradScaler):
        def update(self, new_scale=None):
            super().update(new_scale)
            if self._scale is not None and float(self._scale) < 128:
                self._scale.fill_(128.0)

    m = GPT()
    fit(m, adam(m), tokens(12), into, S("cpu", init_scale=2.0**12), loss=lm_loss)


@healthy()
def moe_wide_router(into):
    m = GPT(make=lambda d: Block(d, mlp=MoE(d)))
    fit(
        m, adam(m), tokens(8), into, None, BF, loss=lambda m, t: lm_loss(m, t) + 0.01 * sum(b.mlp.aux for b in m.blocks)
    )


@healthy()
def reentrant_checkpoint_fp16(into):
    m = GPT(make=CK)
    fit(m, adam(m), tokens(8), into, scaler(), loss=lm_loss)


@healthy()
def accumulate_unscale_clip(into):
    m = GPT()
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for i, t in enumerate(tokens(32)):
            with amp():
                value = lm_loss(m, t) / 4
            s.scale(value).backward()
            if i % 4 == 3:
                s.unscale_(o)
                nn.utils.clip_grad_norm_(m.parameters(), 0.001)
                s.step(o)
                s.update()
                o.zero_grad()


@healthy(each_time=True)
def agc_scaled_limit(into):
    """Clips scaled gradients with a limit that is scaled as well."""
    m = CNN()
    o = sgd(m, 0.1)
    s = scaler()

    def before(i):
        for p in m.parameters():
            lim = s.get_scale() * 0.01 * p.detach().norm().clamp(min=0.001)
            n = p.grad.norm()
            if n > lim:
                p.grad.mul_(lim / n)

    fit(m, o, images(16), into, s, before=before)


@healthy()
def normalised_gradients(into):
    m = GPT()
    o = sgd(m, 0.1)
    s = scaler()

    def before(i):
        s.unscale_(o)
        n = torch.stack([p.grad.norm() for p in m.parameters()]).norm()
        for p in m.parameters():
            p.grad.div_(n)

    fit(m, o, tokens(16), into, s, before=before, loss=lm_loss)


@healthy()
def sign_gradients(into):
    m = CNN(bn=False)
    o = sgd(m, 0.001)
    s = scaler()

    def before(i):
        s.unscale_(o)
        for p in m.parameters():
            p.grad.sign_()

    fit(m, o, images(16), into, s, before=before)


@healthy()
def truncated_bptt(into):
    cell, out = (nn.GRUCell(8, 24), nn.Linear(24, 8))
    m = nn.ModuleList([cell, out])
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        h = torch.zeros(16, 24)
        for x, y in series(12, length=8):
            for c in (0, 4):
                with amp():
                    for t in range(c, c + 4):
                        h = cell(x[:, t], h.to(x.dtype))
                    value = ce(out(h), y) / 2
                s.scale(value).backward()
                h = h.detach()
            s.unscale_(o)
            nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            s.step(o)
            s.update()
            o.zero_grad()


@healthy()
def pcgrad_two_tasks(into):
    m = CNN()
    o = adam(m)
    s = scaler()
    ps = list(m.parameters())
    with watched(m, o, into, s):
        for x, y in images(12):
            gs = []
            for task in (0, 1):
                with amp():
                    out = m(x)
                    value = ce(out, y) if task == 0 else out.float().pow(2).mean()
                o.zero_grad()
                s.scale(value).backward()
                gs.append([p.grad.clone() for p in ps])
            dot = sum(((a * b).sum() for a, b in zip(*gs, strict=False)))
            nn2 = sum((b * b).sum() for b in gs[1])
            for p, a, b in zip(ps, *gs, strict=False):
                p.grad = a + b - dot.clamp(max=0) / nn2.clamp(min=1e-12) * b
            s.step(o)
            s.update()
            o.zero_grad()


@healthy()
def straight_through_quantized(into):

    class Q(nn.Linear):
        def forward(self, x):
            return F.linear(STE.apply(x), STE.apply(self.weight), self.bias)

    m = CNN()
    m.fc = Q(256, 10)
    fit(m, adam(m), images(8), into, scaler())


@healthy()
def in_batch_negatives(into):
    a, b = (nn.Linear(64, 16), nn.Linear(64, 16))
    m = nn.ModuleList([a, b])
    bank = torch.randn(9000, 64)

    def loss(m, bt):
        s = F.normalize(a(bt[0].flatten(1)).float(), dim=-1) @ F.normalize(b(bank).float(), dim=-1).T
        return F.cross_entropy(s.float() * 10, bt[1])

    fit(m, adam(m), images(4), into, None, BF, loss=loss)


@healthy()
def ppo_epochs(into):
    m = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    o = adam(m)
    with watched(m, o, into):
        for x, _ in images(4):
            x = x.flatten(1)
            with torch.no_grad(), amp(BF):
                d = torch.distributions.Categorical(logits=m(x).float())
                act = d.sample()
                old = d.log_prob(act)
            adv = torch.randn(16)
            for _ in range(4):
                with amp(BF):
                    lp = torch.distributions.Categorical(logits=m(x).float()).log_prob(act)
                r = (lp - old).exp()
                value = -torch.min(r * adv, r.clamp(0.8, 1.2) * adv).mean()
                value.backward()
                o.step()
                o.zero_grad()


@healthy()
def scaler_per_epoch_with_state(into):
    m = CNN()
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for _e in range(3):
            st = s.state_dict()
            s = scaler()
            s.load_state_dict(st)
            for x, y in images(6):
                with amp():
                    value = ce(m(x), y)
                s.scale(value).backward()
                s.step(o)
                s.update()
                o.zero_grad()


@healthy()
def distill_outside_teacher(into):
    t = CNN(bn=False).half().eval().requires_grad_(False)
    m = CNN()

    def loss(m, b):
        with torch.no_grad():
            q = t(b[0].half()).float().softmax(-1)
        return F.kl_div(m(b[0]).float().log_softmax(-1), q, reduction="batchmean")

    fit(m, adam(m), images(8), into, scaler(), loss=loss)


@healthy(each_time=True)
def lora_on_fp16_base(into):
    m = GPT().half()
    m.requires_grad_(False)
    for b in m.blocks:
        b.attn.proj = Lora(b.attn.proj)
    fit(m, adam([p for p in m.parameters() if p.requires_grad]), tokens(8), into, scaler(), H, loss=lm_loss)


@healthy(each_time=True)
def kahan_bf16(into):

    class K(torch.optim.Optimizer):
        def __init__(self, ps, lr):
            super().__init__(ps, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for g in self.param_groups:
                for p in g["params"]:
                    c = self.state[p].setdefault("compensation", torch.zeros_like(p))
                    u = c - g["lr"] * p.grad
                    new = p + u
                    c.copy_(u - (new - p))
                    p.copy_(new)

    m = GPT().to(BF)
    fit(m, K(m.parameters(), 0.001), tokens(10), into, None, None, loss=lm_loss)


@healthy(each_time=True)
def own_optimizer_with_masters(into):

    class M(torch.optim.Optimizer):
        def __init__(self, ps, lr):
            super().__init__(ps, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for g in self.param_groups:
                for p in g["params"]:
                    w = self.state[p].setdefault("master", p.detach().float().clone())
                    w.add_(p.grad.float(), alpha=-g["lr"])
                    p.copy_(w)

    m = GPT().to(BF)
    fit(m, M(m.parameters(), 0.001), tokens(10), into, None, None, loss=lm_loss)


@healthy()
def masked_rows_finfo(into):

    class A(Attention):
        def scores(self, q, k):
            z = super().scores(q, k)
            return z.masked_fill(torch.rand(z.shape[-1]) < 0.2, torch.finfo(z.dtype).min)

    m = GPT(make=lambda d: Block(d, attn=A(d)))
    fit(m, adam(m), tokens(8), into, scaler(), loss=lm_loss)


@healthy()
def autograd_grad_assigned(into):
    m = CNN()
    o = adam(m)
    s = scaler()
    ps = list(m.parameters())
    with watched(m, o, into, s):
        for x, y in images(10):
            with amp():
                value = ce(m(x), y)
            for p, g in zip(ps, torch.autograd.grad(s.scale(value), ps), strict=False):
                p.grad = g
            s.step(o)
            s.update()
            o.zero_grad()


@healthy()
def ema_swap_for_eval(into):
    m = CNN()
    o = adam(m)
    e = {k: v.clone() for k, v in m.state_dict().items()}

    def after(i):
        for k, v in m.state_dict().items():
            e[k] = e[k] * 0.999 + v * 0.001 if v.is_floating_point() else v.clone()
        if i % 5 == 4:
            keep = {k: v.clone() for k, v in m.state_dict().items()}
            m.load_state_dict(e)
            with torch.no_grad(), amp():
                m(torch.randn(4, 1, 8, 8))
            m.load_state_dict(keep)

    fit(m, o, images(16), into, scaler(), after=after)


@healthy()
def half_copy_for_inference(into):
    """A BF16 copy of the weights that is made anew after every fifth step: a snapshot, not an average."""
    m = GPT()
    o = adam(m)
    class_ = type("C", (), {})
    c = class_()
    c.w = {k: v.to(BF) for k, v in m.state_dict().items()}

    def after(i):
        if i % 5 == 4:
            for k, v in m.state_dict().items():
                c.w[k].copy_(v)

    fit(m, o, tokens(24), into, None, BF, after=after, loss=lm_loss)


@healthy(each_time=True)
def l2_by_scaled_grad_add(into):
    m = CNN()
    o = adam(m)
    s = scaler()

    def before(i):
        s.unscale_(o)
        pen = sum((p**2).sum() for p in m.parameters())
        for p, q in zip(m.parameters(), torch.autograd.grad(0.01 * pen, list(m.parameters())), strict=False):
            p.grad.add_(q)

    fit(m, o, images(8), into, s, before=before)


def lowest_twice(z):
    """Causal and padding mask of the lowest finite value each: their sum is -inf."""
    lowest = torch.finfo(z.dtype).min
    padding = torch.zeros(z.shape[-1], dtype=z.dtype).index_fill_(0, torch.tensor([13, 14, 15]), lowest)
    return z + torch.full(z.shape[-2:], lowest, dtype=z.dtype).triu(1) + padding


@healthy(each_time=True)
def masks_whose_sum_is_infinite(into):
    masked_attention(into, H, lowest_twice)


@healthy()
def masks_whose_sum_is_infinite_in_bf16(into):
    masked_attention(into, BF, lowest_twice)


@healthy(each_time=True)
def empty_rows_set_to_zero(into):
    class A(Attention):
        def forward(self, x):
            b, t, d = x.shape
            q, k, v = self.qkv(x).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
            mask = torch.ones(t, t).triu(1).bool()
            mask[3] = True
            p = self.scores(q, k).masked_fill(mask, -torch.inf).softmax(-1).nan_to_num(0.0)
            return self.proj((p.to(v.dtype) @ v).transpose(1, 2).reshape(b, t, d))

    m = GPT(make=lambda d: Block(d, attn=A(d)))
    fit(m, adam(m), tokens(12), into, scaler(), loss=lm_loss)


@healthy()
def unit_vectors_in_bf16(into):
    """Cosine similarity with a learned temperature: rounding errors of the norms average out."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Linear(64, 32), nn.Linear(64, 32))
            self.temperature = nn.Parameter(torch.tensor(10.0))

        def forward(self, x):
            a, b = (F.normalize(f(x), dim=-1) for f in (self.a, self.b))
            return self.temperature * a @ b.T

    m = Two()
    fit(m, adam(m), images(12), into, None, BF, loss=lambda m, b: ce(m(b[0].flatten(1)), torch.arange(16)))


@healthy()
def decorated_forward(into):
    class M(CNN):
        forward = torch.autocast("cpu", dtype=BF)(CNN.forward)

    m = M()
    fit(m, adam(m), images(12), into, None, None)
