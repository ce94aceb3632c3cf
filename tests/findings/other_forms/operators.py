"""Faults of operators and their ranges, in forms that the zoo does not have."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import BF, H, Trainer, adam, amp, bf16, ce, fp16, pure, scaler, sgd, step, watched
from tests.findings.other_forms.models import CNN, GPT, RNN, MoE, Net, images, series, sinusoids, tokens, vectors


@fault("half-logits")
def pure_bf16_lm_large_vocab(into):
    m = GPT(vocab=20000).to(BF)

    def loss(m, t):
        return F.cross_entropy(m(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())

    pure(m, sgd(m, 0.3), tokens(3, vocab=20000), into, loss=loss)


@fault("half-logits", each_time=True)
def contrastive_log_softmax_half(into):
    m = nn.ModuleList([nn.Linear(16, 8), nn.Linear(16, 8)])
    bank = torch.randn(10000, 16)

    def loss(m, x):
        s = m[0](x) @ m[1](bank).T
        with amp(enabled=False):
            return -(s - s.exp().sum(-1, keepdim=True).log())[:, 0].float().mean()

    bf16(m, (torch.randn(8, 16) for _ in range(3)), into, loss=loss)


@fault("half-logits", each_time=True)
def softmax_then_log_half(into):
    def loss(m, t):
        z = m(t[:, :-1])
        with amp(enabled=False):
            p = z.softmax(-1)
            return -p.gather(-1, t[:, 1:, None]).log().float().mean()

    bf16(GPT(vocab=16384), tokens(3, vocab=16384), into, loss=loss)


@fault("half-router", "mlp", each_time=True)
def moe_sigmoid_sort_bf16(into):
    class M(MoE):
        def gate(self, x):
            return self.router(x).sigmoid()

        def chosen(self, p):
            w, i = p.sort(-1, descending=True)
            return (w[..., :2], i[..., :2])

    bf16(GPT(mlp=M), tokens(4), into)


@fault("half-router", "mlp")
def moe_argmax_router(into):
    class M(MoE):
        def gate(self, x):
            with amp(BF):
                return self.router(x)

        def chosen(self, p):
            i = p.argmax(-1)[..., None]
            return (p.softmax(-1).gather(-1, i), i)

    bf16(GPT(mlp=M), tokens(4), into)


@fault("half-router", "mlp")
def moe_pure_bf16(into):
    class M(MoE):
        def gate(self, x):
            return self.router(x).softmax(-1)

    m = GPT(mlp=M).to(BF)
    pure(m, sgd(m, 0.5), tokens(4), into)


@fault("half-sum")
def vae_sum_reduction_bf16(into):
    m = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 64))

    def loss(m, b):
        r = m(b[0])
        with amp(enabled=False):
            d = r - b[0].to(BF)
            return (d * d).sum().float() / 128

    bf16(m, vectors(4, rows=128), into, loss=loss)


@fault("half-sum")
def gnn_scatter_bf16(into):
    def graph(m, x, e):
        h = m.a(x)
        return m.b(torch.zeros(4, 16, dtype=h.dtype).index_add_(0, e, h))

    m = Net(graph, a=nn.Linear(8, 16), b=nn.Linear(16, 4))
    graphs = ((torch.randn(4000, 8), torch.randint(4, (4000,))) for _ in range(3))
    bf16(m, graphs, into, loss=lambda m, b: m(*b).float().square().mean() * 1e-06)


@fault("rounded-positions", "numbers", each_time=True)
def list_of_positions_converted_with_the_model(into):
    def rotated(m, x):
        angles = m.numbers[-x.shape[1] :, None].float() * 0.01
        h = m.a(x)
        return m.b((h * angles.cos().to(h.dtype)).mean(1))

    m = Net(rotated, a=nn.Linear(8, 16), b=nn.Linear(16, 8))
    m.register_buffer("numbers", torch.arange(600.0))
    m = m.to(BF)
    pure(m, sgd(m, 0.3), series(3), into)


@healthy(each_time=True)
def positions_that_are_clamped(into):
    """The last positions of the list are equal on purpose."""

    def biased(m, x):
        return m.b(m.a(x).mean(1) + m.numbers[-1] * 1e-3)

    m = Net(biased, a=nn.Linear(8, 16), b=nn.Linear(16, 8))
    m.register_buffer("numbers", torch.arange(600.0).clamp(max=255))
    bf16(m, series(3), into)


def _with_table(into, table, buffer=True):
    """Activations are scaled by rows of a table that was computed before the training."""

    def scaled(m, x):
        h = m.a(x)
        return m.b((h * (1 + 1e-3 * m.table[-x.shape[1] :].real.float().reshape(x.shape[1], -1)[:, :1])).mean(1))

    m = Net(scaled, a=nn.Linear(8, 16), b=nn.Linear(16, 8))
    if buffer:
        m.register_buffer("table", table)
    else:
        m.table = table
    bf16(m, series(3), into)


def _angles(dtype=torch.float32):
    return torch.outer(torch.arange(600.0), 10000 ** -(torch.arange(8) / 8)).to(dtype).float()


@fault("rounded-positions", "table", each_time=True)
def rotary_table_of_rounded_angles(into):
    _with_table(into, _angles(BF).cos())


@fault("rounded-positions", "table", each_time=True)
def complex_rotary_table_that_is_no_buffer(into):
    angles = _angles(BF)
    _with_table(into, torch.polar(torch.ones_like(angles), angles), buffer=False)


@fault("rounded-positions", "table")
def angles_in_bf16(into):
    _with_table(into, _angles(BF).to(BF))


@healthy(each_time=True)
def rotary_table_in_bf16_of_exact_angles(into):
    _with_table(into, _angles().cos().to(BF))


@healthy()
def complex_rotary_table_of_exact_angles(into):
    _with_table(into, torch.polar(torch.ones(600, 8), _angles()), buffer=False)


@fault("rounded-positions", "table", each_time=True)
def timesteps_that_fall_in_bf16(into):
    _with_table(into, torch.arange(999.0, -1, -1).to(BF))


@healthy(each_time=True)
def ids_of_segments_in_bf16(into):
    _with_table(into, (torch.arange(600) // 3).to(BF))


@healthy(each_time=True)
def sorted_data_in_bf16(into):
    _with_table(into, torch.randn(5000).sort().values.to(BF))


@fault("rounded-positions", "table")
def coordinates_rounded_to_bf16_in_fp32(into):
    _with_table(into, torch.linspace(0, 1, 1000).to(BF).float())


@fault("rounded-positions")
def diffusion_timestep_bf16(into):
    def denoised(m, x, t):
        return m.b(F.silu(m.a(torch.cat([x, sinusoids(t.to(x.dtype))], -1))))

    def loss(m, b):
        noise = torch.randn_like(b[0])
        return F.mse_loss(m(b[0] + noise, torch.linspace(0, 999, 16).long()).float(), noise.float())

    m = Net(denoised, a=nn.Linear(64 + 32, 64), b=nn.Linear(64, 64)).to(BF)
    pure(m, sgd(m, 0.3), vectors(4), into, loss=loss)


@fault("half-statistics", "bn")
def cnn_bf16_batchnorm(into):
    m = CNN().to(BF)
    pure(m, sgd(m, 0.3), images(6), into)


def _centred(into, dtype, **parts):
    """Activations less their running mean, which is an attribute and no buffer."""

    def centred(m, x):
        mean = x.detach().mean((0, 2, 3), keepdim=True).to(dtype)
        m.running_mean = mean if m.running_mean is None else 0.99 * m.running_mean + 0.01 * mean
        return x - m.running_mean.to(x.dtype)

    m = CNN()
    m.bn = Net(centred, running_mean=None, **parts)
    pure(m.to(BF), sgd(m, 0.3), images(6), into)


@fault("half-statistics", "bn")
def running_mean_in_an_attribute(into):
    _centred(into, BF)


@healthy()
def running_mean_in_fp32_and_constants_in_bf16(into):
    _centred(into, torch.float32, ema_start=torch.zeros(3, dtype=BF))


@fault("half-statistics")
def own_groupnorm_half(into):
    def normalized(_, x):
        z = x.reshape(len(x), 2, -1)
        mu = z.mean(-1, keepdim=True)
        v = ((z - mu) ** 2).mean(-1, keepdim=True)
        return ((z - mu) / torch.sqrt(v + 1e-05)).reshape(x.shape)

    m = CNN()
    m.bn = Net(normalized)
    bf16(m, images(4), into)


def own_norm(d, normalized):
    """`normalized(x)` over the last dimension of `d`, with a learned gain."""
    return Net(lambda m, x: m.weight * normalized(x), weight=nn.Parameter(torch.ones(d)))


@fault("half-statistics", "n1")
def rms_norm_from_unit_vectors(into):
    m = GPT(norm=lambda d: own_norm(d, lambda x: F.normalize(x, dim=-1) * d**0.5)).to(BF)
    pure(m, sgd(m, 0.3), tokens(4), into)


@fault("half-statistics", "n1")
def rms_norm_by_einsum(into):
    def normalized(x):
        return x * torch.rsqrt(torch.einsum("...d,...d->...", x, x)[..., None] / x.shape[-1] + 1e-6)

    m = GPT(norm=lambda d: own_norm(d, normalized)).to(BF)
    pure(m, sgd(m, 0.3), tokens(4), into)


@fault("half-statistics", "n", each_time=True)
def rms_norm_under_autocast(into):
    norm = own_norm(48, lambda x: x * 48**0.5 / torch.linalg.vector_norm(x, dim=-1, keepdim=True))
    m = Net(lambda m, x: m.b(m.n(m.a(x))), a=nn.Linear(64, 48), n=norm, b=nn.Linear(48, 10))
    bf16(m, vectors(4), into)


@fault("eps-rounds-to-zero")
def cosine_similarity_half(into):
    def similarity(m, x):
        z = m.f(x)
        return z @ c.T.to(z.dtype) / (z.norm(dim=-1, keepdim=True) * c.norm(dim=-1).to(z.dtype) + m.eps)

    m = Net(similarity, f=nn.Linear(64, 16), eps=torch.tensor(1e-08))
    c = torch.randn(10, 16)
    fp16(m, vectors(4), into)


@fault("eps-rounds-to-zero")
def rms_norm_half_eps(into):
    def normalized(m, x):
        x = x.half()
        return m.w.half() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon))

    def norm(d):
        return Net(normalized, w=nn.Parameter(torch.ones(d)), variance_epsilon=1e-08)

    fp16(GPT(norm=norm), tokens(4), into)


@fault("activation-overflow", "act")
def power_activation_overflow(into):
    m = Net(lambda m, x: m.b(m.act(m.a(x))), a=nn.Linear(64, 32), act=Net(lambda _, x: x**4), b=nn.Linear(32, 10))
    nn.init.normal_(m.a.weight, std=4.0)
    Trainer(m, adam(m), scaler()).fit(vectors(8), into)


@fault("activation-overflow|loss-nonfinite")
def exp_overflow_in_loss(into):
    m = nn.Linear(64, 10)
    m.weight.data.mul_(60)
    fp16(m, vectors(6), into, loss=lambda m, b: m(b[0]).half().exp().sum(-1).log().float().mean())


@fault("batchnorm-poisoned|activation-overflow")
def cnn_bn_poisoned(into):
    m = CNN()
    m.bn = Net(lambda m, x: m.n(m.c(x)), c=nn.Conv2d(8, 8, 1), n=nn.BatchNorm2d(8))
    nn.init.constant_(m.bn.c.weight, 30000.0)
    Trainer(m, adam(m), scaler()).fit(images(4), into)


@fault("batchnorm-poisoned|activation-overflow")
def bn1d_poisoned_late(into):
    m = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))

    def after(i):
        if i == 4:
            m[0].weight.data.mul_(1000000.0)

    fp16(m, vectors(8), into, sgd(m, 0.0001), after=after)


@fault("scale-collapse|activation-overflow")
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
            step(og, s)
            od.zero_grad()


@fault("loss-nonfinite", "loss")
def where_trick_nan_gradient(into):
    def loss(m, b):
        i, (x, y) = b
        z = m(x).float()
        with amp(enabled=False):
            d = (z - z.detach() * (1.0 if i > 3 else 0.0)).norm(dim=1)
            return ce(z, y) + torch.where(d > 0, d.sqrt(), d * 0).mean()

    bf16(RNN(), enumerate(series(8)), into, loss=loss, log=lambda rec, loss: rec.log(loss=loss))


@fault("loss-nonfinite", "loss")
def kl_log_zero(into):
    def loss(m, b):
        i, (x, y) = b
        p = m(x * (60.0 if i == 4 else 1.0)).float().softmax(-1)
        t = F.one_hot(y, 10).float()
        return (t * (t.log() - p.log())).sum(-1).mean()

    m = CNN()
    bf16(m, enumerate(images(8)), into, adam(m, 0.01), loss=loss, log=lambda rec, loss: rec.log(loss=loss))


def _energy(into, dtype, normalized):
    """An island without autocast, which divides by a norm that may be infinite."""

    def island(m, x):
        with amp(enabled=False):
            return normalized(x.to(dtype))

    m = Net(lambda m, x: m.b(m.n(m.a(x * 60))), a=nn.Linear(64, 256), n=Net(island), b=nn.Linear(256, 10))
    fp16(m, vectors(6), into)


def _by_energy(h):
    return h / (h.pow(2).sum(-1, keepdim=True) / h.shape[-1] + 1.0).sqrt()


@fault("activation-overflow", "n", each_time=True)
def island_that_forgot_to_widen(into):
    _energy(into, torch.float16, _by_energy)


@healthy(each_time=True)
def island_that_widens(into):
    _energy(into, torch.float32, _by_energy)


@fault("activation-overflow", "n")
def norm_that_overflows_and_divides(into):
    _energy(into, torch.float16, lambda h: 300 * h / (300 * h).norm(dim=-1, keepdim=True))


@fault("activation-overflow", "n")
def product_with_itself_that_overflows(into):
    def normalized(h):
        h = 10 * h
        return h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-3)

    _energy(into, torch.float16, normalized)


def _rows_that_are_zero(into, dtype):
    def unit(m, x):
        h = m.f(x * (torch.arange(len(x)) > 2)[:, None]).to(dtype)
        return m.g(h / (h.pow(2).sum(-1, keepdim=True) + 1e-8).sqrt())

    fp16(Net(unit, f=nn.Linear(64, 16, bias=False), g=nn.Linear(16, 10)), vectors(8), into)


@fault("eps-rounds-to-zero", "", each_time=True)
def rows_of_zeros_divided_by_their_norm(into):
    _rows_that_are_zero(into, torch.float16)


@healthy()
def rows_of_zeros_divided_by_their_norm_in_fp32(into):
    _rows_that_are_zero(into, torch.float32)


def small_scale():
    return scaler(2.0, growth_interval=10**9)


@fault("gradient-underflow")
def rnn_static_scale_underflow(into):
    m = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def loss(m, b):
        return F.cross_entropy(m(b[0]), b[1]) * 0.001

    fp16(m, vectors(10, rows=256), into, s=small_scale(), every=1, loss=loss)


@fault("gradient-underflow")
def deep_tanh_underflow(into):
    m = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 10))
    for layer in m:
        if isinstance(layer, nn.Linear):
            layer.weight.data.mul_(0.2)
    fp16(m, vectors(12, rows=128), into, s=small_scale(), every=1)


def contrastive(into, scale):
    """Pairs of two towers; their similarities are multiplied by a learned scale in the loss."""
    m = nn.ModuleDict({"image": nn.Linear(64, 16), "text": nn.Linear(64, 16)})
    log_scale = nn.Parameter(torch.tensor(float(scale)).log())

    def loss(m, b):
        a, t = (F.normalize(m[name](b[0]).float(), dim=-1) for name in ("image", "text"))
        z = log_scale.exp() * (a @ t.T)
        return ce(z, torch.arange(len(z)))

    fp16(m, vectors(8), into, adam([*m.parameters(), log_scale]), loss=loss)


@fault("activation-overflow", "loss", each_time=True)
def contrastive_scale_overflows_in_the_loss(into):
    contrastive(into, 1e6)


@fault("activation-overflow", "loss", each_time=True)
def similarities_in_half_precision_times_a_constant_in_the_loss(into):
    """Each row becomes NaN in the softmax, as if it was masked."""
    m = nn.Linear(64, 16)

    def loss(m, b):
        a = m(b[0]) / m(b[0]).norm(dim=-1, keepdim=True)
        return ce(1e6 * (a @ a.T), torch.arange(len(a)))

    fp16(m, vectors(8), into, loss=loss)


@healthy()
def contrastive_scale_as_usual(into):
    contrastive(into, 14.0)


class WideSoftmax(MoE):
    """The scores are cast to FP32 once 16 bits have rounded them."""

    def gate(self, x):
        return self.router(x).float().softmax(-1)


@fault("half-router", "mlp")
def moe_softmax_in_fp32_of_bf16_logits(into):
    bf16(GPT(mlp=WideSoftmax), tokens(4), into)


def _large_rows(into, s, wide):
    """Rows above 255, whose squares overflow FP16; the scale is too high for the first steps."""

    class Norm(nn.Module):
        def forward(self, x):
            x = x.float() if wide else x
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)

    m = Net(lambda n, x: n.head(n.body(x) + n.norm(1e4 * n.body(x))), body=nn.Linear(64, 32), head=nn.Linear(32, 10))
    m.norm = Norm()
    fp16(m, vectors(16), into, s=s)


@fault("activation-overflow", "norm", each_time=True)
def rms_norm_overflows_in_a_skipped_step(into):
    _large_rows(into, scaler(2.0**24), wide=False)


@healthy()
def rms_norm_of_large_rows_in_fp32(into):
    _large_rows(into, scaler(2.0**24), wide=True)


class RunningSum(nn.Module):
    """The linear recurrence of attention without softmax, over 400 tokens: sums in `dtype`."""

    def __init__(self, dtype):
        super().__init__()
        self.emb, self.key, self.head, self.dtype = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 64), dtype

    def forward(self, t):
        k = F.elu(self.key(self.emb(t))).to(self.dtype) + 1
        total, out = torch.zeros_like(k[:, 0]), []
        for i in range(k.shape[1]):
            total = total + k[:, i]
            out.append(total / (i + 1))
        return self.head(torch.stack(out, 1))


@fault("half-sum", "RunningSum", each_time=True)
def recurrence_of_400_tokens_in_bf16(into):
    bf16(RunningSum(BF), tokens(4, rows=4, length=400), into)


@healthy()
def recurrence_of_400_tokens_in_fp32(into):
    bf16(RunningSum(torch.float32), tokens(4, rows=4, length=400), into)


def _policy(into, dtype, kl=False):
    """PPO whose earlier log-probabilities are kept in `dtype`, or a penalty on the distance to them."""
    m = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    o = adam(m)
    with watched(m, o, into):
        for x, _ in vectors(4):
            with torch.no_grad():
                before = m(x).log_softmax(-1)
                actions = before.exp().multinomial(1)
                before = before.gather(1, actions).to(dtype)
            for _ in range(3):
                after = m(x).log_softmax(-1).gather(1, actions)
                ratio = (after - before).exp() if not kl else (before - after).exp() - (before - after) - 1
                ratio.sub(0.5).square().mean().backward()
                step(o)


@fault("half-logits", "loss", each_time=True)
def earlier_log_probabilities_in_bf16(into):
    _policy(into, BF)


@fault("half-logits", "loss")
def distance_to_log_probabilities_in_half(into):
    _policy(into, H, kl=True)


@healthy(each_time=True)
def earlier_log_probabilities_in_fp32(into):
    _policy(into, torch.float32)


def _areas(into, size):
    """Offsets over the area of a box, in FP16: an infinite area makes them zero."""
    m = Net(lambda n, x: n.head(n.off(x) / ((n.w(x) + size) * (n.h(x) + size))), off=nn.Linear(64, 8))
    m.w, m.h, m.head = nn.Linear(64, 8), nn.Linear(64, 8), nn.Linear(8, 10)
    fp16(m, vectors(6), into)


@fault("activation-overflow", "Net", each_time=True)
def areas_of_boxes_overflow(into):
    _areas(into, 400.0)


@healthy()
def areas_of_small_boxes(into):
    _areas(into, 4.0)


class SlowTrace(nn.Module):
    """A state that keeps 1 - `lost` of itself in each of 200 steps, in `dtype`."""

    def __init__(self, dtype, lost):
        super().__init__()
        self.emb, self.head, self.dtype, self.lost = nn.Embedding(64, 16), nn.Linear(16, 64), dtype, lost

    def forward(self, t):
        x = self.emb(t).to(self.dtype)
        state, out = torch.zeros_like(x[:, 0]), []
        for i in range(x.shape[1]):
            state = (1 - self.lost) * state + self.lost * x[:, i]
            out.append(state)
        return self.head(torch.stack(out, 1))


@fault("average-stands-still", "SlowTrace", each_time=True)
def slow_state_in_bf16(into):
    bf16(SlowTrace(BF, 0.003), tokens(4, rows=4, length=200), into)


@healthy(each_time=True)
def slow_state_in_fp32(into):
    bf16(SlowTrace(torch.float32, 0.003), tokens(4, rows=4, length=200), into)


@healthy()
def fast_state_in_bf16(into):
    bf16(SlowTrace(BF, 0.1), tokens(4, rows=4, length=200), into)


class Decays(nn.Module):
    """A state-space layer over 100 tokens: decays between two of them from differences of a cumulative sum."""

    def __init__(self, dtype):
        super().__init__()
        self.emb, self.rate, self.head, self.dtype = nn.Embedding(64, 8), nn.Linear(8, 8), nn.Linear(8, 64), dtype

    def forward(self, t):
        x = self.emb(t)
        total = -F.softplus(self.rate(x) + 1).to(self.dtype).cumsum(1)
        gap = total[:, :, None] - total[:, None]
        later = torch.ones(t.shape[1], t.shape[1], dtype=torch.bool).triu(1)[None, :, :, None]
        decay = gap.masked_fill(later, float("-inf")).exp().to(x.dtype)
        return self.head(torch.einsum("btsd,bsd->btd", decay, x))


@fault("half-sum", "Decays", each_time=True)
def decays_from_a_cumulative_sum_in_bf16(into):
    bf16(Decays(BF), tokens(4, rows=4, length=100), into)


@healthy(each_time=True)
def decays_from_a_cumulative_sum_in_fp32(into):
    bf16(Decays(torch.float32), tokens(4, rows=4, length=100), into)


def _masked_mean(into, dtype):
    """The mean over 90,000 tokens that count, whose number is summed in `dtype`."""

    def loss(m, t):
        losses = F.cross_entropy(m(t).flatten(0, 1).float(), t.flatten(), reduction="none")
        mask = (torch.rand(t.numel()) < 0.9).to(dtype)
        return (losses * mask).sum() / mask.sum()

    m = nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64))
    fp16(m, tokens(3, rows=1000, length=100), into, loss=loss)


@fault("activation-overflow", "loss", each_time=True)
def number_of_tokens_overflows(into):
    _masked_mean(into, H)


@healthy(each_time=True)
def number_of_tokens_in_fp32(into):
    _masked_mean(into, torch.float32)


class Distances(nn.Module):
    """Messages along edges by the squared distance of their ends, after a cast to `dtype`, or before it."""

    def __init__(self, dtype, first):
        super().__init__()
        self.dtype, self.first = dtype, first
        self.message, self.out = nn.Sequential(nn.Linear(1, 16), nn.SiLU()), nn.Linear(16, 10)

    def forward(self, points):
        if self.first:
            points = points.to(self.dtype)
        a, b = torch.combinations(torch.arange(points.shape[1])).T
        squares = (points[:, a] - points[:, b]).square().sum(-1, keepdim=True)
        return self.out(self.message(squares.float()).mean(1))


def _points(into, far, first, dtype=BF):
    """Clouds of 12 points around a centre that is `far` from the origin."""
    data = ((torch.randn(16, 12, 3) + far, torch.randint(10, (16,))) for _ in range(4))
    bf16(Distances(dtype, first), data, into)


@fault("rounded-positions", "Distances", each_time=True)
def distances_of_rounded_coordinates(into):
    _points(into, 5000.0, first=True)


@fault("rounded-positions", "Distances")
def distances_of_coordinates_in_fp16(into):
    _points(into, 20_000.0, first=True, dtype=H)


@healthy(each_time=True)
def distances_that_are_rounded(into):
    _points(into, 5000.0, first=False)


@healthy()
def distances_of_rounded_coordinates_near_the_origin(into):
    _points(into, 1.0, first=True)


def _similarities(into, temperature, wide=False):
    """A contrastive loss over 64 pairs, of similarities that `temperature` divides."""
    towers = nn.ModuleList([nn.Linear(16, 32), nn.Linear(16, 32)])

    def loss(m, x):
        a, b = (F.normalize(m[i](part).float(), dim=-1) for i, part in enumerate(x))
        with amp(BF, enabled=not wide):
            logits = a @ b.T / temperature
        return F.cross_entropy(logits.float(), torch.arange(len(a)))

    bf16(towers, (torch.randn(2, 64, 16) for _ in range(4)), into, loss=loss)


@fault("half-logits", "loss", each_time=True)
def similarities_over_a_small_temperature(into):
    _similarities(into, 0.001)


@healthy(each_time=True)
def similarities_over_a_small_temperature_in_fp32(into):
    _similarities(into, 0.001, wide=True)


@healthy()
def similarities_over_a_usual_temperature(into):
    _similarities(into, 0.07)


@healthy(each_time=True)
def policy_whose_reward_compares_whole_numbers_of_the_same_sizes(into):
    m = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 6))
    o, s = adam(m), scaler()
    torch.manual_seed(1)
    with watched(m, o, into, s):
        for _ in range(8):
            x = torch.randint(0, 3, (64, 12)).float()
            with amp():
                logits = m(x)
            policy = torch.distributions.Categorical(logits=logits.float())
            action = policy.sample()
            reward = (action == x[:, :6].argmax(1)).float() - 0.2
            s.scale(-(policy.log_prob(action) * reward).mean()).backward()
            step(o, s)
