"""Faults of weights, updates, averages and optimizer states, in forms that the zoo does not have."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.models import (
    BF,
    CNN,
    GPT,
    RNN,
    OwnLion,
    Trainer,
    adam,
    amp,
    ce,
    fault,
    fit,
    images,
    lightning,
    lm_loss,
    scaler,
    series,
    sgd,
    tokens,
    watched,
)


@fault("half-model", "GPT")
def gpt_to_half_sgd(into):
    m = GPT().half()
    o = sgd(m, 0.001)
    with watched(m, o, into):
        for t in tokens(6):
            lm_loss(m, t).backward()
            o.step()
            o.zero_grad()


@fault("lost-weight-updates", "", each_time=True)
def own_optimizer_bf16_pure(into):
    m = GPT().to(BF)
    o = OwnLion(m.parameters(), 1e-05)
    with watched(m, o, into):
        for t in tokens(12):
            lm_loss(m, t).backward()
            o.step()
            o.zero_grad()


@fault("lost-weight-updates", "", each_time=True)
def adafactor_bf16_pure(into):
    m = CNN(bn=False).to(BF)
    o = torch.optim.Adafactor(m.parameters(), lr=1e-05)
    with watched(m, o, into):
        for x, y in images(12):
            F.cross_entropy(m(x.to(BF)).float(), y).backward()
            o.step()
            o.zero_grad()


@fault("lost-weight-updates", "")
def optimizer_in_backward_bf16(into):
    m = GPT().to(BF)
    opts = {p: torch.optim.SGD([p], lr=1e-06) for p in m.parameters()}

    def hook(p):
        opts[p].step()
        opts[p].zero_grad()

    for p in m.parameters():
        p.register_post_accumulate_grad_hook(hook)
    with watched(m, list(opts.values()), into):
        for t in tokens(10):
            lm_loss(m, t).backward()


@fault("average-stands-still", "")
def averaged_model_bf16(into):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    m = CNN(bn=False).to(BF)
    o = sgd(m, 0.5)
    e = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    with watched(m, o, into):
        for x, y in images(20):
            F.cross_entropy(m(x.to(BF)).float(), y).backward()
            o.step()
            o.zero_grad()
            e.update_parameters(m)


@fault("average-stands-still", "", each_time=True)
def ema_foreach_half_list(into):
    m = GPT()
    o = adam(m)

    class E:
        pass

    e = E()
    e.w = [p.detach().clone().to(BF) for p in m.parameters()]
    with watched(m, o, into):
        for t in tokens(20):
            with amp(BF):
                value = lm_loss(m, t)
            value.backward()
            o.step()
            o.zero_grad()
            torch._foreach_mul_(e.w, 0.9995)
            torch._foreach_add_(e.w, [p.detach().to(BF) for p in m.parameters()], alpha=0.0005)


@fault("average-stands-still", "", each_time=True)
def ema_state_dict_copy(into):
    m = CNN(bn=False)
    o = adam(m)
    sd = {k: v.clone().half() for k, v in m.state_dict().items()}
    with watched(m, o, into):
        for x, y in images(20):
            with amp(BF):
                value = F.cross_entropy(m(x).float(), y)
            value.backward()
            o.step()
            o.zero_grad()
            for k, v in m.state_dict().items():
                sd[k] = sd[k] * 0.9999 + v.half() * 0.0001


@fault("half-accumulation", "")
def metric_module_bf16_total(into):

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = CNN(bn=False)
            self.register_buffer("seen_loss", torch.zeros((), dtype=BF))

        def forward(self, x, y):
            value = F.cross_entropy(self.net(x).float(), y)
            self.seen_loss += value.detach().to(BF)
            return value

    m = M()
    o = adam(m)
    with watched(m, o, into):
        for x, y in images(8):
            with amp(BF):
                value = m(x, y)
            value.backward()
            o.step()
            o.zero_grad()


@fault("half-accumulation", "")
def bf16_pure_accumulation(into):
    m = GPT().to(BF)
    o = sgd(m, 0.3)
    with watched(m, o, into):
        for i, t in enumerate(tokens(24)):
            (lm_loss(m, t) / 8).backward()
            if i % 8 == 7:
                o.step()
                o.zero_grad()


@fault("vanishing-second-moments", "")
def rmsprop_bf16_moments(into):
    m = GPT().to(BF)
    o = torch.optim.RMSprop(m.parameters(), lr=0.03, alpha=0.999)
    with watched(m, o, into):
        for t in tokens(10):
            lm_loss(m, t).backward()
            o.step()
            o.zero_grad()


@fault("vanishing-second-moments", "")
def foreach_adam_bf16_moments(into):
    m = CNN(bn=False).to(BF)
    o = torch.optim.Adam(m.parameters(), lr=0.03, foreach=True)
    with watched(m, o, into):
        for x, y in images(10):
            F.cross_entropy(m(x.to(BF)).float(), y).backward()
            o.step()
            o.zero_grad()


@fault("missing-fp32-masters|lost-weight-updates", "")
def accelerate_bf16_weights(into):
    from accelerate import Accelerator

    a = Accelerator(mixed_precision="bf16", cpu=True)
    m = CNN(bn=False).to(BF)
    o = adam(m, 0.01)
    m, o = a.prepare(m, o)
    with watched(m, o, into):
        for x, y in images(6):
            value = F.cross_entropy(m(x).float(), y)
            a.backward(value)
            o.step()
            o.zero_grad()


@fault("lost-weight-updates", "")
def lightning_bf16_true(into):
    lightning(into, "bf16-true")


@fault("optimizer-eps-rounds-to-zero", "eps")
def nadam_fp16(into):
    m = RNN().half()
    o = torch.optim.NAdam(m.parameters(), lr=0.001)
    with watched(m, o, into):
        for x, y in series(3):
            F.cross_entropy(m(x.half()).float(), y).backward()
            o.step()
            o.zero_grad()


@fault("bf16-model-in-fp16", "GPT")
def bf16_checkpoint_file_in_fp16(into):
    m = GPT()
    sd = {k: v.to(BF) for k, v in m.state_dict().items()}
    m.load_state_dict(sd)
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


@fault("fp16-parameters", "")
def lora_fp16_params(into):

    class L(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = (nn.Parameter(torch.randn(32, 4).half() * 0.1), nn.Parameter(torch.zeros(4, 32).half()))

        def forward(self, x):
            return self.base(x) + x @ self.a @ self.b

    m = GPT()
    for b in m.blocks:
        b.attn.proj = L(b.attn.proj)
    o = adam([p for p in m.parameters() if p.requires_grad])
    s = scaler()
    with contextlib.suppress(ValueError), watched(m, o, into, s):
        for t in tokens(3):
            with amp():
                value = lm_loss(m, t)
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("lost-weight-decay|lost-weight-updates", "")
def bf16_decay_lost_gpt(into):
    m = GPT().to(BF)
    o = adam(m, 0.003, weight_decay=0.1)
    with watched(m, o, into):
        for t in tokens(12):
            lm_loss(m, t).backward()
            o.step()
            o.zero_grad()


@fault("lost-weight-updates", "", each_time=True)
def muon_bf16(into):
    m = nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU(), nn.Linear(32, 10, bias=False)).to(BF)
    o = torch.optim.Muon(m.parameters(), lr=1e-05)
    fit(m, o, images(10), into, None, None, loss=lambda m, b: ce(m(b[0].flatten(1).to(BF)), b[1]))


@fault("lost-weight-updates", "", each_time=True)
def own_sgd_data_write(into):

    class Own(torch.optim.Optimizer):
        def __init__(self, ps, lr):
            super().__init__(ps, {"lr": lr})

        def step(self, closure=None):
            for g in self.param_groups:
                for p in g["params"]:
                    p.data.add_(p.grad.data, alpha=-g["lr"])

    m = GPT().to(BF)
    fit(m, Own(m.parameters(), 0.0001), tokens(12), into, None, None, loss=lm_loss)


@fault("average-stands-still", "")
def trainer_ema_attribute(into):

    class T(Trainer):
        def fit(self, data, into):
            self.ema = copy.deepcopy(self.model).to(BF)
            with watched(self.model, self.opt, into, self.scaler):
                for b in data:
                    self.training_step(b)
                    with torch.no_grad():
                        for e, p in zip(self.ema.parameters(), self.model.parameters(), strict=False):
                            e.copy_(e * 0.9995 + p.to(BF) * 0.0005)

    m = CNN(bn=False)
    T(m, adam(m), scaler()).fit(images(24), into)


@fault("average-stands-still", "", each_time=True)
def ema_kept_in_closure(into):
    m = RNN()
    o = adam(m)

    def make():
        shadow = {n: p.detach().clone().to(BF) for n, p in m.named_parameters()}

        def update():
            with torch.no_grad():
                for n, p in m.named_parameters():
                    shadow[n].lerp_(p.to(BF), 0.0005)

        return update

    up = make()
    with watched(m, o, into):
        for x, y in series(24):
            with amp(BF):
                value = ce(m(x), y)
            value.backward()
            o.step()
            o.zero_grad()
            up()


@fault("average-stands-still", "", each_time=True)
def ema_as_buffers(into):

    class E(nn.Module):
        def __init__(self, m):
            super().__init__()
            for n, p in m.named_parameters():
                self.register_buffer(n.replace(".", "_"), p.detach().clone().half())

        @torch.no_grad()
        def update(self, m):
            for n, p in m.named_parameters():
                b = getattr(self, n.replace(".", "_"))
                b.mul_(0.9999).add_(p.half(), alpha=0.0001)

    m = CNN(bn=False)
    o = adam(m)
    e = E(m)
    fit(m, o, images(24), into, scaler(), after=lambda i: e.update(m))


@fault("half-model|missing-fp32-masters", "")
def encoder_half_decoder_float(into):

    class E(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = (nn.Sequential(nn.Linear(64, 32), nn.ReLU()).half(), nn.Linear(32, 10))

        def forward(self, x):
            return self.dec(self.enc(x.flatten(1).half()).float())

    m = E()
    fit(m, sgd(m, 0.01), images(6), into, None, None)


@fault("missing-fp32-masters|lost-weight-updates", "")
def bf16_model_autocast_gpt(into):
    m = GPT().to(BF)
    fit(m, adam(m, 0.01), tokens(6), into, None, BF, loss=lm_loss)
