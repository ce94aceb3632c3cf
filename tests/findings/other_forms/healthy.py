"""Sound trainings that look odd, in forms that the zoo does not have."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from tests.findings.other_forms.form import healthy
from tests.findings.other_forms.loops import (
    BF,
    OwnOptimizer,
    adam,
    amp,
    bf16,
    ce,
    fp16,
    gan,
    gradient_norm,
    lm_loss,
    pure,
    scaled_backward,
    scaler,
    sgd,
    step,
    watched,
)
from tests.findings.other_forms.models import (
    CNN,
    GPT,
    RNN,
    Attention,
    Checkpointed,
    MoE,
    Net,
    decorated_cnn,
    images,
    masked_gpt,
    series,
    tokens,
    vectors,
)


@healthy(each_time=True)
def functional_half_copies(into):
    m = RNN()
    o, s = (adam(m), scaler())
    with watched(m, o, into, s):
        for x, y in series(12):
            ps = {k: v.to(BF) for k, v in m.named_parameters()}
            ce(functional_call(m, ps, (x.to(BF),)), y).backward()
            step(o)


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
            step(o)


@healthy()
def dp_sgd_per_sample(into):
    m = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    o = sgd(m, 0.1)
    ps = {k: v.detach() for k, v in m.named_parameters()}

    def f(p, x, y):
        return F.cross_entropy(functional_call(m, p, (x[None],)), y[None])

    with watched(m, o, into):
        for x, y in vectors(12):
            g = vmap(grad(f), in_dims=(None, 0, 0))(ps, x, y)
            n = torch.stack([v.flatten(1).norm(dim=1) for v in g.values()]).norm(dim=0)
            c = (1 / n).clamp(max=1)
            for k, p in m.named_parameters():
                p.grad = torch.einsum("b...,b->...", g[k], c) / 16
            step(o)


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
            step(o)


@healthy()
def wgan_gp_right(into):
    def gp(s, *samples):
        return ((gradient_norm(s, *samples) / s.get_scale() - 1) ** 2).mean()

    gan(into, False, gp)


@healthy()
def scaler_with_floor(into):
    class S(torch.amp.GradScaler):
        def update(self, new_scale=None):
            super().update(new_scale)
            if self._scale is not None and float(self._scale) < 128:
                self._scale.fill_(128.0)

    fp16(GPT(), tokens(12), into, s=S("cpu", init_scale=2.0**12))


@healthy()
def scaler_per_epoch_with_state(into):
    m = CNN()
    o, s = (adam(m), scaler())
    with watched(m, o, into, s):
        for _e in range(3):
            st = s.state_dict()
            s = scaler()
            s.load_state_dict(st)
            for b in images(6):
                scaled_backward(m, b, s)
                step(o, s)


@healthy()
def moe_wide_router(into):
    def loss(m, t):
        return lm_loss(m, t) + 0.01 * sum(b.mlp.aux for b in m.blocks)

    bf16(GPT(mlp=MoE), tokens(8), into, loss=loss)


@healthy()
def reentrant_checkpoint_fp16(into):
    fp16(GPT(make=Checkpointed, use_reentrant=True), tokens(8), into)


@healthy()
def accumulate_unscale_clip(into):
    m = GPT()
    o, s = (adam(m), scaler())
    with watched(m, o, into, s):
        for i, t in enumerate(tokens(32)):
            scaled_backward(m, t, s, of=4)
            if i % 4 == 3:
                s.unscale_(o)
                nn.utils.clip_grad_norm_(m.parameters(), 0.001)
                step(o, s)


@healthy(each_time=True)
def agc_scaled_limit(into):
    """Clips scaled gradients with a limit that is scaled as well."""
    m = CNN()
    s = scaler()

    def clip(i):
        for p in m.parameters():
            lim = s.get_scale() * 0.01 * p.detach().norm().clamp(min=0.001)
            n = p.grad.norm()
            if n > lim:
                p.grad.mul_(lim / n)

    fp16(m, images(16), into, sgd(m, 0.1), s, before=clip)


@healthy()
def normalised_gradients(into):
    m = GPT()
    o, s = (sgd(m, 0.1), scaler())

    def normalise(i):
        s.unscale_(o)
        n = torch.stack([p.grad.norm() for p in m.parameters()]).norm()
        for p in m.parameters():
            p.grad.div_(n)

    fp16(m, tokens(16), into, o, s, before=normalise)


@healthy()
def sign_gradients(into):
    m = CNN(bn=False)
    o, s = (sgd(m, 0.001), scaler())

    def sign(i):
        s.unscale_(o)
        for p in m.parameters():
            p.grad.sign_()

    fp16(m, images(16), into, o, s, before=sign)


@healthy(each_time=True)
def l2_by_scaled_grad_add(into):
    m = CNN()
    o, s = (adam(m), scaler())

    def add_penalty(i):
        s.unscale_(o)
        ps = list(m.parameters())
        for p, g in zip(ps, torch.autograd.grad(0.01 * sum((p**2).sum() for p in ps), ps), strict=True):
            p.grad.add_(g)

    fp16(m, images(8), into, o, s, before=add_penalty)


@healthy()
def truncated_bptt(into):
    cell, out = (nn.GRUCell(8, 24), nn.Linear(24, 8))
    m = nn.ModuleList([cell, out])
    o, s = (adam(m), scaler())
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
            step(o, s)


@healthy()
def pcgrad_two_tasks(into):
    m = CNN()
    o, s = (adam(m), scaler())
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
            step(o, s)


@healthy()
def autograd_grad_assigned(into):
    m = CNN()
    o, s = (adam(m), scaler())
    ps = list(m.parameters())
    with watched(m, o, into, s):
        for x, y in images(10):
            with amp():
                value = ce(m(x), y)
            for p, g in zip(ps, torch.autograd.grad(s.scale(value), ps), strict=False):
                p.grad = g
            step(o, s)


@healthy()
def straight_through_quantized(into):
    class Fn(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x):
            return (x * 8).round() / 8

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, g):
            return g

    class Q(nn.Linear):
        def forward(self, x):
            return F.linear(Fn.apply(x), Fn.apply(self.weight), self.bias)

    m = CNN()
    m.fc = Q(256, 10)
    fp16(m, images(8), into)


@healthy()
def in_batch_negatives(into):
    m = nn.ModuleList([nn.Linear(64, 16), nn.Linear(64, 16)])
    bank = torch.randn(9000, 64)

    def loss(m, b):
        s = F.normalize(m[0](b[0]).float(), dim=-1) @ F.normalize(m[1](bank).float(), dim=-1).T
        return ce(s.float() * 10, b[1])

    bf16(m, vectors(4), into, loss=loss)


@healthy()
def ppo_epochs(into):
    m = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    o = adam(m)
    with watched(m, o, into):
        for x, _ in vectors(4):
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
                step(o)


@healthy()
def distill_outside_teacher(into):
    t = CNN(bn=False).half().eval().requires_grad_(False)

    def loss(m, b):
        with torch.no_grad():
            q = t(b[0].half()).float().softmax(-1)
        return F.kl_div(m(b[0]).float().log_softmax(-1), q, reduction="batchmean")

    fp16(CNN(), images(8), into, loss=loss)


@healthy(each_time=True)
def lora_on_fp16_base(into):
    def adapted(m, x):
        return m.base(x.to(m.base.weight.dtype)) + F.linear(F.linear(x, m.a), m.b)

    m = GPT().half().requires_grad_(False)
    for b in m.blocks:
        low, high = (nn.Parameter(torch.randn(4, 32) * 0.1), nn.Parameter(torch.zeros(32, 4)))
        b.attn.proj = Net(adapted, base=b.attn.proj, a=low, b=high)
    fp16(m, tokens(8), into, adam([p for p in m.parameters() if p.requires_grad]))


@healthy(each_time=True)
def kahan_bf16(into):
    def update(p, state, lr):
        c = state.setdefault("compensation", torch.zeros_like(p))
        u = c - lr * p.grad
        new = p + u
        c.copy_(u - (new - p))
        p.copy_(new)

    m = GPT().to(BF)
    pure(m, OwnOptimizer(m, 0.001, update), tokens(10), into)


@healthy(each_time=True)
def own_optimizer_with_masters(into):
    def update(p, state, lr):
        w = state.setdefault("master", p.detach().float().clone())
        w.add_(p.grad.float(), alpha=-lr)
        p.copy_(w)

    m = GPT().to(BF)
    pure(m, OwnOptimizer(m, 0.001, update), tokens(10), into)


@healthy(each_time=True)
def last_gradients_kept_in_bf16(into):
    """Copies for a log, made after each of several micro-batches: nothing is added to them."""
    m = CNN(bn=False)
    o = sgd(m, 0.1)
    last = [torch.zeros_like(p, dtype=BF) for p in m.parameters()]
    with watched(m, o, into):
        for i, b in enumerate(images(16)):
            with amp(BF):
                value = ce(m(b[0]), b[1]) / 4
            value.backward()
            for copy, p in zip(last, m.parameters(), strict=True):
                copy.copy_(p.grad)
            if i % 4 == 3:
                step(o)


@healthy()
def ema_swap_for_eval(into):
    m = CNN()
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

    fp16(m, images(16), into, after=after)


@healthy()
def half_copy_for_inference(into):
    """A BF16 copy of the weights that is made anew after every fifth step: a snapshot, not an average."""
    m = GPT()
    c = SimpleNamespace(w={k: v.to(BF) for k, v in m.state_dict().items()})

    def after(i):
        if i % 5 == 4:
            for k, v in m.state_dict().items():
                c.w[k].copy_(v)

    bf16(m, tokens(24), into, after=after)


@healthy()
def masked_rows_finfo(into):
    def mask(z):
        return z.masked_fill(torch.rand(z.shape[-1]) < 0.2, torch.finfo(z.dtype).min)

    fp16(masked_gpt(mask), tokens(8), into)


def lowest_twice(z):
    """Causal and padding mask of the lowest finite value each: their sum is -inf."""
    lowest = torch.finfo(z.dtype).min
    padding = torch.zeros(z.shape[-1], dtype=z.dtype).index_fill_(0, torch.tensor([13, 14, 15]), lowest)
    return z + torch.full(z.shape[-2:], lowest, dtype=z.dtype).triu(1) + padding


@healthy(each_time=True)
def masks_whose_sum_is_infinite(into):
    fp16(masked_gpt(lowest_twice), tokens(12), into)


@healthy()
def masks_whose_sum_is_infinite_in_bf16(into):
    bf16(masked_gpt(lowest_twice), tokens(12), into)


@healthy(each_time=True)
def empty_rows_set_to_zero(into):
    class A(Attention):
        def weights(self, s):
            mask = torch.ones(s.shape[-2:]).triu(1).bool()
            mask[3] = True
            return s.masked_fill(mask, -torch.inf).softmax(-1).nan_to_num(0.0)

    fp16(GPT(attn=A), tokens(12), into)


@healthy()
def unit_vectors_in_bf16(into):
    """Cosine similarity with a learned temperature: rounding errors of the norms average out."""

    def similarity(m, x):
        a, b = (F.normalize(f(x), dim=-1) for f in (m.a, m.b))
        return m.temperature * a @ b.T

    temperature = nn.Parameter(torch.tensor(10.0))
    m = Net(similarity, a=nn.Linear(64, 32), b=nn.Linear(64, 32), temperature=temperature)
    bf16(m, ((x, torch.arange(16)) for x, _ in vectors(12)), into)


@healthy()
def decorated_forward(into):
    m = decorated_cnn("cpu", BF)
    pure(m, adam(m), images(12), into)


@healthy(each_time=True)
def critic_in_fp32_behind_a_scaled_actor(into):
    """The scaled loss reaches the critic, whose own unscaled gradients alone are applied."""
    m = nn.ModuleDict({"actor": nn.Linear(64, 16), "critic": nn.Linear(16, 1)})
    a, c, s = (adam(m["actor"]), adam(m["critic"]), scaler())
    with watched(m, [a, c], into, s):
        for x, _ in vectors(8):
            with amp():
                value = -m["critic"](m["actor"](x)).float().mean()
            s.scale(value).backward()
            step(a, s)
            c.zero_grad()
            m["critic"](m["actor"](x).detach()).square().mean().backward()
            step(c)


@healthy(each_time=True)
def wide_router_of_a_small_model(into):
    def switched(m, x):
        h = m.inp(x[:, :12])
        with amp(BF, False):
            share, i = m.router(h.float()).softmax(-1).max(-1)
        return m.out(h + share[:, None] * torch.einsum("bd,bde->be", h, m.experts[i].to(h.dtype)))

    layers = {"inp": nn.Linear(12, 16), "router": nn.Linear(16, 8), "out": nn.Linear(16, 10)}
    bf16(Net(switched, experts=nn.Parameter(torch.randn(8, 16, 16) / 4), **layers), vectors(4), into)


@healthy(each_time=True)
def masters_by_hand_beside_an_unused_parameter(into):
    m = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 10)).to(BF)
    m.register_parameter("unused", nn.Parameter(torch.zeros(4, dtype=BF)))
    masters = [p.detach().float().clone().requires_grad_() for p in m.parameters()]
    o = adam(masters)
    with watched(m, o, into):
        for x, y in vectors(6):
            ce(m(x.to(BF)), y).backward()
            for master, p in zip(masters, m.parameters(), strict=True):
                master.grad = None if p.grad is None else p.grad.float()
            step(o)
            m.zero_grad()
            with torch.no_grad():
                for master, p in zip(masters, m.parameters(), strict=True):
                    p.copy_(master)


def _altered(into, alter):
    """A BF16 model of two layers whose weights the loop changes after each step: `alter(step, weights)`."""
    m = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 10)).to(BF)

    @torch.no_grad()
    def after(i):
        alter(i, list(m.parameters()))

    pure(m, sgd(m, 1.0), vectors(20), into, after=after)


@healthy(each_time=True)
def weights_of_constant_norm_in_bf16(into):
    """All weights are multiplied by one factor, but another in each step."""
    norms = []

    def alter(i, weights):
        norms.append(float(torch.cat([p.float().flatten() for p in weights]).norm()))
        for p in weights:
            p.mul_(norms[0] / norms[-1])

    _altered(into, alter)


@healthy(each_time=True)
def decay_by_hand_rounded_stochastically(into):
    def alter(i, weights):
        for p in weights:
            bits = (p.float() * (1 - 1e-4)).view(torch.int32)
            bits += torch.randint_like(bits, 1 << 16)
            p.copy_(bits.bitwise_and_(-(1 << 16)).view(torch.float32))

    _altered(into, alter)


@healthy(each_time=True)
def pruned_and_clipped_in_bf16(into):
    def alter(i, weights):
        for p in weights:
            p.clamp_(-0.5, 0.5)
            p.mul_(p.abs() > 0.01)

    _altered(into, alter)


@healthy(each_time=True)
def weights_swapped_for_their_average_in_bf16(into):
    averages = []

    def alter(i, weights):
        averages[:] = averages or [p.float() for p in weights]
        torch._foreach_lerp_(averages, [p.float() for p in weights], 0.01)
        if i % 5 == 4:
            kept = [p.clone() for p in weights]
            torch._foreach_copy_(weights, averages)
            torch._foreach_copy_(weights, kept)

    _altered(into, alter)


@healthy(each_time=True)
def spectral_norm_in_bf16(into):
    m = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 10)).to(BF)
    pure(m, sgd(m, 1.0), vectors(6), into)


@healthy(each_time=True)
def fp32_weights_cast_for_the_forward_and_restored(into):
    m = CNN(bn=False)
    o = adam(m)
    with watched(m, o, into):
        for x, y in images(12):
            kept = [p.data for p in m.parameters()]
            for p in m.parameters():
                p.data = p.data.to(BF).float()
            ce(m(x), y).backward()
            for p, data in zip(m.parameters(), kept, strict=True):
                p.data = data
            step(o)
