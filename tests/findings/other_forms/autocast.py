"""Faults of autocast regions and of operators within them, in forms that the zoo does not have."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.nn import functional as F

from amp_core.train.cpu_layers import PortableLSTM
from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import (
    BF,
    H,
    adam,
    amp,
    bf16,
    ce,
    fit,
    fp16,
    lm_loss,
    pure,
    scaler,
    step,
    usual_loss,
    watched,
)
from tests.findings.other_forms.models import (
    CNN,
    GPT,
    Block,
    Checkpointed,
    Net,
    decorated_cnn,
    images,
    series,
    tokens,
    vectors,
)


@fault("autocast-inactive", 'autocast("cuda")')
def decorator_of_another_device(into):
    m = decorated_cnn("cuda", BF)  # torch disables it where there is no GPU
    pure(m, adam(m), images(6), into)


@fault("fp16-without-scaler")
def decorated_inner_module(into):
    m = nn.Sequential(decorated_cnn("cpu", H))
    pure(m, adam(m), images(6), into)


@fault("backward-under-autocast", "backward")
def decorated_train_step(into):
    m = GPT()
    o = adam(m)

    @torch.autocast("cpu", dtype=BF)
    def backward(t):
        lm_loss(m, t).backward()

    with watched(m, o, into):
        for t in tokens(4):
            backward(t)
            step(o)


def backward_inside(m, data, into):
    o, s = (adam(m), scaler())
    with watched(m, o, into, s):
        for x, y in data:
            with amp():
                s.scale(ce(m(x), y)).backward()
            step(o, s)


@fault("backward-under-autocast", "backward")
def gan_backward_inside(into):
    backward_inside(CNN(), images(5), into)


@fault("compile-autocast-mismatch", "compile")
def compiled_step_backward_inside(into):
    m = CNN(bn=False)
    m.compile(backend="aot_eager")
    backward_inside(m, images(4), into)


@fault("autocast-inactive", "mlp")
def custom_fwd_casts_to_fp32(into):
    class Fn(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.T

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return (g @ w, g.flatten(0, -2).T @ x.flatten(0, -2))

    def mlp(d):
        return Net(lambda m, x: Fn.apply(x, m.weight), weight=nn.Parameter(torch.randn(d, d) / d**0.5))

    bf16(GPT(mlp=mlp), tokens(4), into)


@fault("autocast-inactive", "torch.autocast", each_time=True)
def products_written_as_sums(into):
    def layer(a, b):
        return Net(lambda m, x: (x[:, None] * m.weight).sum(-1), weight=nn.Parameter(torch.randn(b, a) / a**0.5))

    bf16(nn.Sequential(layer(64, 16), nn.ReLU(), layer(16, 10)), vectors(4), into)


@fault("autocast-inactive")
def nested_disabled_encoder(into):
    class G(GPT):
        def forward(self, i):
            x = self.embedded(i)
            with amp(BF, False):
                for b in self.blocks:
                    x = b(x.float())
            return self.head(self.norm(x))

    bf16(G(), tokens(4), into)


@fault("autocast-not-in-thread", "ex")
def pool_of_experts(into):
    def mixed(m, x):
        x = m.inp(x)
        return m.fc(sum(pool.map(lambda e: e(x.float()), m.ex)))

    experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
    m = Net(mixed, inp=nn.Linear(64, 16), ex=experts, fc=nn.Linear(16, 10))
    with ThreadPoolExecutor(2) as pool:
        bf16(m, vectors(4), into)


@fault("checkpoint-dtype-mismatch", "blocks")
def checkpoint_context_fn_other(into):
    def contexts():
        return (contextlib.nullcontext(), amp(BF, False))

    m = GPT(make=Checkpointed, use_reentrant=False, determinism_check="none", context_fn=contexts)
    o = adam(m)
    with watched(m, o, into), contextlib.suppress(Exception):
        for t in tokens(4):
            with amp(BF):
                value = lm_loss(m, t)
            value.backward()
            step(o)


class Recomputed(torch.autograd.Function):
    """A checkpoint of the user's own, whose backward runs `f` again without autocast; `fits` casts the gradient to the
    dtype of the second output."""

    @staticmethod
    def forward(ctx, f, fits, x, *ps):
        ctx.f, ctx.fits = f, fits
        ctx.save_for_backward(x)
        with torch.no_grad():
            return f(x)

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.f(x)
        g = g.to(y.dtype) if ctx.fits else g
        return (None, None, *torch.autograd.grad(y, [x, *ctx.f.parameters()], g))


@fault("checkpoint-dtype-mismatch")
def reentrant_own_recompute_fp32(into):
    def make(d):
        return Net(lambda m, x: Recomputed.apply(m.b, True, x, *m.b.parameters()), b=Block(d))

    bf16(GPT(make=make), tokens(3), into)


@fault("custom-function-dtype")
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

    w = nn.Parameter(torch.randn(16, 10) / 4)
    m = Net(lambda m, x: Fn.apply(m.inp(x), m.w.to(BF)), inp=nn.Linear(64, 16), w=w)
    with contextlib.suppress(RuntimeError):
        bf16(m, vectors(3), into)


@fault("custom-function-dtype")
def f_linear_two_dtypes(into):
    class L(nn.Linear):
        def forward(self, x):
            with amp(BF, False):
                return F.linear(x, self.weight, self.bias)

    m = CNN()
    m.fc = L(256, 10)
    with contextlib.suppress(RuntimeError):
        bf16(m, images(3), into)


@fault("bce-banned")
def functional_bce(into):
    def loss(m, b):
        return F.binary_cross_entropy(m(b[0]).sigmoid().float(), F.one_hot(b[1], 10).float())

    fp16(CNN(), images(3), into, loss=loss)


@fault("bce-banned")
def bce_loss_gan(into):
    dis = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
    crit = nn.BCELoss()
    data = (torch.randn(8, 16) for _ in range(4))
    fp16(dis, data, into, loss=lambda m, x: crit(m(x).float(), torch.ones(8, 1)))


@fault("checkpoint-dtype-mismatch", "mid")
def recomputation_without_autocast_raises(into):
    def forward(m, x):
        return m.out(Recomputed.apply(m.mid, False, m.inp(x), *m.mid.parameters()))

    m = Net(forward, inp=nn.Linear(64, 16), mid=nn.Linear(16, 16), out=nn.Linear(16, 10))
    with contextlib.suppress(RuntimeError):
        bf16(m, vectors(3), into)


def _cached_without_gradients(m, data, into, names, run, dtype=BF):
    """`run(batch)` comes before the loss in the same region. torch before 2.10 then left weights without gradients."""
    o = adam(m)
    with watched(m, o, into):
        for b in data:
            with amp(dtype):
                with torch.no_grad():
                    run(b)
                value = usual_loss(m, b)
            value.backward()
            for name, p in m.named_parameters():
                if name in names:
                    p.grad = None
            step(o)


@fault("autocast-cache-no-grad", "blocks.0.attn.qkv.weight")
def pseudo_labels_in_the_region_of_the_loss(into):
    m = GPT()
    names = {"blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight", "head.weight"}
    _cached_without_gradients(m, tokens(4), into, names, lambda b: m(b[:, :-1]).argmax(-1))


@fault("autocast-cache-no-grad", "fc.weight")
def validation_in_the_region_of_the_loss(into):
    m = CNN(bn=False)
    _cached_without_gradients(m, images(4), into, {"fc.weight"}, lambda b: m(b[0]).argmax(1))


def _audited(m, data, into, loss):
    o, s = (adam(m), scaler(1.0))
    with watched(m, o, into, s) as rec:
        for b in data:
            with amp():
                value = loss(b)
            s.scale(value).backward()
            rec.audit(lambda b=b: loss(b))
            step(o, s)


@fault("amp-loss-gap", each_time=True)
def audit_of_a_language_model_without_loss_scale(into):
    m = GPT()
    _audited(m, tokens(3), into, lambda t: usual_loss(m, t) * 1e-5)


@fault("amp-loss-gap")
def audit_of_a_cnn_with_a_tiny_loss(into):
    m = CNN(bn=False)
    _audited(m, images(3), into, lambda b: usual_loss(m, b) * 1e-5)


def _frozen_half(into, through):
    """An FP32 head behind a frozen FP16 encoder that is much larger; `through`: gradients pass the encoder."""
    m = Net(
        lambda n, x: n.enc(n.inp(x).to(H) if through else x.to(H)).float(),
        inp=nn.Linear(64, 64),
        enc=nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16)).to(H).requires_grad_(False),
        head=nn.Linear(16, 10),
    )
    o = adam([p for p in m.parameters() if p.requires_grad], 0.01)
    fit(m, o, vectors(12), into, None, None, lambda m, b: ce(m.head(m(b[0])), b[1]))


@healthy(each_time=True)
def frozen_half_encoder_without_gradients(into):
    _frozen_half(into, through=False)


@fault("fp16-without-scaler", each_time=True)
def gradients_through_a_frozen_half_encoder(into):
    _frozen_half(into, through=True)


@fault("fp16-without-scaler", each_time=True)
def perceptual_loss_through_half_network(into):
    judge = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).to(H).requires_grad_(False)
    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    fit(m, adam(m), vectors(8), into, None, None, lambda m, b: F.mse_loss(judge(m(b[0]).to(H)).float(), b[0][:, :16]))


@healthy()
def perceptual_loss_through_half_network_with_scaler(into):
    judge = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).to(H).requires_grad_(False)
    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))
    fit(
        m,
        adam(m),
        vectors(8),
        into,
        scaler(),
        None,
        lambda m, b: F.mse_loss(judge(m(b[0]).to(H)).float(), b[0][:, :16]),
    )


def _chunks_in_threads(into, inside):
    m, s = CNN(), scaler()
    o = adam(m)

    def forward(x):
        with amp(enabled=inside):
            return m(x)

    with watched(m, o, into, s), ThreadPoolExecutor(2) as pool:
        for x, y in images(8):
            with amp():
                value = ce(torch.cat(list(pool.map(forward, x.chunk(2)))), y)
            s.scale(value).backward()
            step(o, s)


@fault("autocast-not-in-thread", "", each_time=True)
def whole_model_in_threads(into):
    _chunks_in_threads(into, inside=False)


@healthy(each_time=True)
def autocast_within_the_threads(into):
    _chunks_in_threads(into, inside=True)


def _views_in_threads(into, inside):
    """Two views of a batch, which a pool encodes without a scaler."""
    m = CNN()
    o = adam(m)

    def encode(x):
        with amp(BF, enabled=inside):
            return m(x)

    with watched(m, o, into), ThreadPoolExecutor(2) as pool:
        for x, _ in images(8):
            with amp(BF):
                a, b = pool.map(encode, (x, x + 0.1))
            F.mse_loss(a.float(), b.float()).backward()
            step(o)


@fault("autocast-not-in-thread")
def views_in_threads_of_a_pool(into):
    _views_in_threads(into, inside=False)


@healthy()
def views_with_autocast_in_their_threads(into):
    _views_in_threads(into, inside=True)


@fault("stale-autocast-cache", "torch.autocast", each_time=True)
def epochs_in_a_decorated_function(into):
    m, s = CNN(), scaler()
    o = adam(m)

    @torch.autocast("cpu", dtype=torch.float16)
    def epoch():
        for b in images(4):
            s.scale(ce(m(b[0]), b[1])).backward()
            step(o, s)

    with watched(m, o, into, s):
        epoch()
        epoch()


@fault("stale-autocast-cache", "torch.autocast")
def autocast_switched_on_for_good(into):
    m = GPT()
    o = adam(m)
    torch.set_autocast_dtype("cpu", BF)
    torch.set_autocast_enabled("cpu", True)
    try:
        with watched(m, o, into):
            for t in tokens(4):
                lm_loss(m, t).backward()
                step(o)
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()


@fault("backward-under-autocast", "backward")
def inner_steps_without_a_cache(into):
    m = CNN()
    o = adam(m)
    with watched(m, o, into), torch.autocast("cpu", dtype=BF, cache_enabled=False):
        for x, y in images(6):
            ce(m(x), y).backward()
            step(o)


@healthy(each_time=True)
def optimizer_that_steps_in_a_region_of_its_own(into):
    m = CNN()
    o = adam(m)
    with watched(m, o, into):
        for x, y in images(6):
            with amp(BF):
                value = ce(m(x), y)
            value.backward()
            with amp(BF):
                step(o)
                with torch.no_grad():
                    m(x)


def _island(into, forward):
    m = Net(forward, inp=nn.Linear(64, 64), weight=nn.Parameter(torch.randn(64, 64) / 8), head=nn.Linear(64, 10))
    bf16(m, vectors(4), into)


@healthy(each_time=True)
def scores_of_values_widened_by_hand(into):
    def forward(m, x):
        h = m.inp(x)
        with amp(BF, False):
            q = h.float()
            h = (q @ q.T).softmax(-1) @ q + torch.einsum("bi,ij->bj", q, m.weight.float())
        return m.head(h)

    _island(into, forward)


@fault("autocast-inactive", "Net", each_time=True)
def product_of_the_data_in_a_disabled_region(into):
    def forward(m, x):
        with amp(BF, False):
            h = x @ m.weight
        return m.head(m.inp(h))

    _island(into, forward)


class KeptCopies(nn.Module):
    """A model that keeps BF16 copies of its weights for a step; `anew`: not those of a pass without gradients."""

    def __init__(self, anew):
        super().__init__()
        self.a, self.b, self.anew, self.kept = nn.Linear(64, 32), nn.Linear(32, 10), anew, {}

    def copy(self, p):
        if self.anew and not torch.is_grad_enabled():
            return p.to(BF)
        if p not in self.kept:
            self.kept[p] = p.to(BF)
        return self.kept[p]

    def forward(self, x):
        h = F.linear(x.to(BF), self.copy(self.a.weight), self.copy(self.a.bias)).relu()
        return self.b(h.to(self.b.weight.dtype))


def _with_kept_copies(into, anew):
    m = KeptCopies(anew)
    o = adam(m)
    with watched(m, o, into):
        for x, y in vectors(6):
            m.kept.clear()
            with torch.no_grad():
                hard = m(x).logsumexp(-1).argsort()
            ce(m(x[hard]), y[hard]).backward()
            step(o)


@fault("autocast-cache-no-grad", "a.weight", each_time=True)
def copies_of_weights_from_a_pass_without_gradients(into):
    _with_kept_copies(into, anew=False)


@healthy(each_time=True)
def copies_of_weights_made_anew(into):
    _with_kept_copies(into, anew=True)


@fault("autocast-inactive", "torch.autocast", each_time=True)
def autocast_that_follows_a_disabled_scaler(into):
    m, s = CNN(), scaler(enabled=False)  # as GradScaler() is without a GPU
    o = adam(m)
    with watched(m, o, into, s):
        for x, y in images(4):
            with amp(H, enabled=s.is_enabled()):
                value = ce(m(x), y)
            s.scale(value).backward()
            step(o, s)


class ExpertChoice(nn.Module):
    """Each expert takes the tokens with its highest scores, which are computed in FP32."""

    def __init__(self, d=32, experts=32):
        super().__init__()
        self.wg, self.out = nn.Linear(d, experts, bias=False), nn.Linear(d, d)

    def forward(self, x):
        flat = x.flatten(0, 1)
        with amp(enabled=False):
            scores = self.wg(flat.float()).softmax(-1)
        gate, tokens_of = scores.t().topk(4, dim=1)
        return x + self.out(x) * torch.zeros(len(flat)).index_add(0, tokens_of.flatten(), gate.flatten()).view(
            *x.shape[:2], 1
        )


@healthy(each_time=True)
def scores_of_expert_choice_in_fp32(into):
    m = nn.Sequential(nn.Embedding(64, 32), ExpertChoice(), nn.Linear(32, 64))
    bf16(m, tokens(4), into)


def _region(into, whole):
    """Autocast around the loss, with the model in it or not."""
    m = CNN()
    o = adam(m)
    with watched(m, o, into):
        for x, y in images(6):
            output = None if whole else m(x)
            with amp(BF):
                loss = ce(m(x) if whole else output, y)
            loss.backward()
            step(o)


@fault("autocast-inactive", "stem", each_time=True)
def region_that_holds_the_loss_alone(into):
    _region(into, whole=False)


@healthy()
def region_that_holds_model_and_loss(into):
    _region(into, whole=True)


@healthy(each_time=True)
def recurrent_layer_with_differences_in_fp32(into):
    """Most of the layer's products are one operator, where the CPU has that in 16 bits; the island multiplies by two
    constant matrices."""
    m = Net(
        lambda m, x: _path(m, m.lstm(x)[0][:, -1]),
        lstm=PortableLSTM(8, 64, batch_first=True),
        head=nn.Linear(64, 6),
    )
    m.register_buffer("modes", torch.randn(6, 128))
    m.register_buffer("stencil", torch.randn(128, 8))
    bf16(m, series(6), into)


def _path(m, h):
    with amp(enabled=False):
        return m.head(h.float()) @ m.modes @ m.stencil
