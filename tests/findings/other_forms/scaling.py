"""Faults of the loss scale and of the order of calls, in forms that the zoo does not have."""

from __future__ import annotations

import contextlib
import io
import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.models import (
    BF,
    CNN,
    GPT,
    RNN,
    Block,
    MoE,
    Trainer,
    adam,
    amp,
    ce,
    fault,
    fit,
    gan,
    images,
    lm_loss,
    scaler,
    series,
    sgd,
    tokens,
    watched,
)


@fault("clip-before-unscale", "clip")
def cnn_trainer_clip_value(into):
    m = CNN()
    Trainer(m, adam(m), scaler(), lambda p: nn.utils.clip_grad_value_(p, 0.5)).fit(images(10), into)


@fault("clip-before-unscale", "")
def cnn_clip_with_norm_split(into):
    m = CNN()

    def clip(ps):
        ps = list(ps)
        n = nn.utils.get_total_norm([p.grad for p in ps])
        nn.utils.clip_grads_with_norm_(ps, 0.5, n)

    Trainer(m, adam(m), scaler(), clip).fit(images(10), into)


@fault("clip-before-unscale", "gradients", each_time=True)
def gpt_agc_unitwise(into):
    m = GPT()
    o = adam(m)
    s = scaler()

    def unit(x):
        return x.norm() if x.dim() < 2 else x.norm(dim=1, keepdim=True)

    with watched(m, o, into, s):
        for t in tokens(16):
            with amp():
                value = lm_loss(m, t)
            s.scale(value).backward()
            for p in m.parameters():
                pn, gn = (unit(p.detach()).clamp(min=0.001), unit(p.grad))
                p.grad.copy_(torch.where(gn > 0.01 * pn, p.grad * (0.01 * pn / gn.clamp(min=1e-06)), p.grad))
            s.step(o)
            s.update()
            o.zero_grad()


@fault("unscale-per-microbatch", "unscale_")
def trainer_unscale_each(into):
    m = CNN()
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s), contextlib.suppress(RuntimeError):
        for i, (x, y) in enumerate(images(12)):
            with amp():
                value = F.cross_entropy(m(x).float(), y) / 2
            s.scale(value).backward()
            s.unscale_(o)
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            if i % 2:
                s.step(o)
                s.update()
                o.zero_grad()


@fault("unscale-per-microbatch", "")
def gpt_update_each_micro(into):
    m = GPT()
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for i, t in enumerate(tokens(24)):
            with amp():
                value = lm_loss(m, t) / 4
            s.scale(value).backward()
            if i % 4 == 3:
                s.step(o)
                o.zero_grad()
            if i % 4 == 3:
                s.update()
            if i % 4 != 3:
                with contextlib.suppress(AssertionError):
                    s.unscale_(o)
                    s.update()


@fault("missing-scaler-update", "scaler.update")
def gan_second_scaler_not_updated(into):
    gen, dis = (nn.Linear(8, 16), nn.Linear(16, 1))
    m = nn.ModuleDict({"g": gen, "d": dis})
    og, od, sg, sd = (adam(gen), adam(dis), scaler(), scaler())
    with contextlib.suppress(RuntimeError), watched(m, [og, od], into, sd):
        for _i in range(8):
            z = torch.randn(8, 8)
            with amp():
                value = F.softplus(dis(gen(z).detach()).float()).mean()
            sd.scale(value).backward()
            sd.step(od)
            od.zero_grad()
            with amp():
                value = F.softplus(-dis(gen(z)).float()).mean()
            sg.scale(value).backward()
            sg.step(og)
            sg.update()
            og.zero_grad()


@fault("optimizer-step-bypasses-scaler", "optimizer.step")
def rnn_manual_unscale_and_step(into):
    m = RNN()
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for x, y in series(10):
            with amp():
                value = F.cross_entropy(m(x).float(), y)
            s.scale(value).backward()
            s.unscale_(o)
            o.step()
            s.update()
            o.zero_grad()


@fault("optimizer-step-bypasses-scaler", "optimizer.step")
def closure_step_scaled(into):
    m = CNN()
    o = sgd(m, 1e-05)
    s = scaler()
    with watched(m, o, into, s):
        for x, y in images(8):

            def closure(x=x, y=y):
                o.zero_grad()
                with amp():
                    value = F.cross_entropy(m(x).float(), y)
                s.scale(value).backward()
                return value

            o.step(closure)
            s.update() if s._scale is None else None


@fault("unscaled-loss-term", "backward")
def moe_aux_unscaled(into):
    m = GPT(make=lambda d: Block(d, mlp=MoE(d)))
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for t in tokens(8):
            with amp():
                value = lm_loss(m, t)
                aux = sum(b.mlp.aux for b in m.blocks)
            s.scale(value).backward(retain_graph=True)
            (0.01 * aux).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("unscaled-loss-term", "backward")
def vae_kl_unscaled_list(into):
    enc, dec = (nn.Linear(64, 16), nn.Linear(8, 64))
    m = nn.ModuleList([enc, dec])
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for x, _ in images(8):
            x = x.flatten(1)
            with amp():
                mu, lv = enc(x).chunk(2, -1)
                r = F.mse_loss(dec(mu + torch.randn_like(mu) * (lv / 2).exp()).float(), x)
            kl = -0.5 * (1 + lv.float() - mu.float() ** 2 - lv.float().exp()).mean()
            torch.autograd.backward([s.scale(r), kl])
            s.step(o)
            s.update()
            o.zero_grad()


@fault("unscaled-loss-term", "", each_time=True)
def l2_by_grad_add(into):
    m = CNN()
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for x, y in images(8):
            with amp():
                value = F.cross_entropy(m(x).float(), y)
            s.scale(value).backward()
            pen = sum((p**2).sum() for p in m.parameters())
            g = torch.autograd.grad(0.1 * pen, list(m.parameters()))
            for p, q in zip(m.parameters(), g, strict=False):
                p.grad.add_(q)
            s.step(o)
            s.update()
            o.zero_grad()


@fault("logged-scaled-values", "loss")
def trainer_logs_scaled(into):
    m = RNN()
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s) as rec:
        for x, y in series(8):
            with amp():
                loss = F.cross_entropy(m(x).float(), y)
            loss = s.scale(loss)
            loss.backward()
            s.step(o)
            s.update()
            o.zero_grad()
            rec.log(loss=loss.item())


@fault("logged-scaled-values", "grad_norm")
def logs_scaled_norm_own(into):
    m = CNN()
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s) as rec:
        for x, y in images(8):
            with amp():
                value = F.cross_entropy(m(x).float(), y)
            s.scale(value).backward()
            rec.log(grad_norm=math.sqrt(sum(float(p.grad.norm()) ** 2 for p in m.parameters())))
            s.step(o)
            s.update()
            o.zero_grad()


@fault("fp16-without-scaler", "GradScaler")
def decorated_forward_fp16(into):

    class D(CNN):
        @torch.autocast("cpu", dtype=torch.float16)
        def forward(self, x):
            return super().forward(x)

    m = D()
    o = adam(m)
    with watched(m, o, into):
        for x, y in images(6):
            F.cross_entropy(m(x).float(), y).backward()
            o.step()
            o.zero_grad()


@fault("fp16-without-scaler", "GradScaler")
def gpt_fp16_scaler_scale_one(into):
    m = GPT()
    o = adam(m)
    s = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=10**9)
    with watched(m, o, into, s):
        for t in tokens(6):
            with amp():
                value = lm_loss(m, t)
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("scaler-with-bf16", "GradScaler")
def bf16_decorated_step_scaler(into):
    m = RNN()
    o = adam(m)
    s = torch.amp.GradScaler("cpu")

    @torch.autocast("cpu", dtype=BF)
    def fwd(x, y):
        return F.cross_entropy(m(x).float(), y)

    with watched(m, o, into, s):
        for x, y in series(6):
            s.scale(fwd(x, y)).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("no-gradients", "")
def zero_grad_before_step(into):
    m = CNN()
    o = adam(m)
    s = scaler()
    with contextlib.suppress(AssertionError), watched(m, o, into, s):
        for x, y in images(4):
            with amp():
                value = F.cross_entropy(m(x).float(), y)
            s.scale(value).backward()
            o.zero_grad()
            s.step(o)
            s.update()


@fault("no-gradients", "", each_time=True)
def head_replaced_after_optimizer(into):
    m = CNN()
    o = adam(m)
    m.fc = nn.Linear(256, 10)
    s = scaler()
    with watched(m, o, into, s):
        for x, y in images(6):
            with amp():
                value = F.cross_entropy(m(x).float(), y)
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("scheduler-steps-on-skip", "scheduler")
def one_cycle_in_trainer(into):
    m = RNN()
    o = adam(m)
    s = scaler(2.0**24)
    sch = torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=30)
    with watched(m, o, into, s):
        for x, y in series(14):
            with amp():
                value = F.cross_entropy(m(x).float(), y)
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()
            sch.step()


@fault("scheduler-steps-on-skip", "scheduler")
def own_lambda_schedule_on_skip(into):
    m = CNN()
    o = adam(m)
    s = scaler(2.0**26)
    ws = torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=5), torch.optim.lr_scheduler.CosineAnnealingLR(o, 20)],
        [5],
    )
    with watched(m, o, into, s):
        for x, y in images(16):
            with amp():
                value = F.cross_entropy(m(x).float(), y)
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()
            ws.step()


@fault("scaler-state-not-restored", "GradScaler")
def checkpoint_file_without_scaler(into):
    m = CNN()
    o = adam(m)
    s = scaler()
    for x, y in images(5):
        with amp():
            value = F.cross_entropy(m(x).float(), y)
        s.scale(value).backward()
        s.step(o)
        s.update()
        o.zero_grad()
    f = io.BytesIO()
    torch.save({"m": m.state_dict(), "o": o.state_dict()}, f)
    f.seek(0)
    c = torch.load(f)
    m = CNN()
    m.load_state_dict(c["m"])
    o = adam(m)
    o.load_state_dict(c["o"])
    Trainer(m, o, torch.amp.GradScaler("cpu")).fit(images(10), into)


@fault("scaler-state-not-restored", "GradScaler")
def sgd_momentum_resumed(into):
    m = RNN()
    o = sgd(m, 0.05, momentum=0.9)
    for x, y in series(5):
        F.cross_entropy(m(x), y).backward()
        o.step()
        o.zero_grad()
    m2 = RNN()
    m2.load_state_dict(m.state_dict())
    o2 = sgd(m2, 0.05, momentum=0.9)
    o2.load_state_dict(o.state_dict())
    Trainer(m2, o2, torch.amp.GradScaler("cpu")).fit(series(10), into)


@fault("shared-backoff", "scaler.update")
def gan_update_twice(into):
    gan(into, True)


@fault("scaled-gradient-penalty", "")
def wgan_gp_scaled(into):

    def gp(s, dis, real, fake):
        x = (real + fake.float()).div(2).requires_grad_()
        with amp():
            c = dis(x)
        (g,) = torch.autograd.grad(s.scale(c.float().sum()), x, create_graph=True)
        return ((g.norm(dim=1) - 1) ** 2).mean() * 0.0001

    gan(into, False, gp)


@fault("scaled-gradient-penalty", "")
def r1_penalty_backward_create_graph(into):
    m = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for x, y in images(6):
            x = x.flatten(1).requires_grad_()
            with amp():
                value = F.cross_entropy(m(x).float(), y)
            s.scale(value).backward(create_graph=True)
            pen = x.grad.pow(2).sum() * 1e-08
            s.scale(pen).backward()
            x.grad = None
            s.step(o)
            s.update()
            o.zero_grad()


@fault("scale-unbounded", "loss scale")
def all_masked_loss(into):
    m = GPT()
    o = adam(m)
    s = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)
    with watched(m, o, into, s):
        for t in tokens(14):
            with amp():
                value = (
                    F.cross_entropy(m(t[:, :-1]).float().flatten(0, 1), t[:, 1:].flatten(), reduction="none") * 0.0
                ).sum()
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("frequent-skips|calibration-skips", "")
def scale_set_each_epoch(into):
    m = CNN()
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for _e in range(8):
            for x, y in images(15):
                with amp():
                    value = F.cross_entropy(m(x).float(), y)
                s.scale(value).backward()
                s.step(o)
                s.update()
                o.zero_grad()
            s.update(2.0**30)


@fault("frequent-skips|branch-always-skipped", "")
def outlier_batches(into):
    m = RNN()
    o = sgd(m, 0.001)
    s = scaler()
    with watched(m, o, into, s):
        for i, (x, y) in enumerate(series(140)):
            with amp():
                value = F.mse_loss(m(x).float(), F.one_hot(y, 8) * (100000000.0 if i % 11 == 10 else 1.0))
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("anomaly-mode-with-scaler", "anomaly")
def detect_anomaly_context(into):
    m = CNN()
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for x, y in images(4):
            with torch.autograd.detect_anomaly(check_nan=False):
                with amp():
                    value = F.cross_entropy(m(x).float(), y)
                s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("branch-always-skipped", "aux")
def rare_aux_head(into):

    class A(CNN):
        def __init__(self):
            super().__init__()
            self.aux = nn.Linear(64, 10)

        def forward(self, x, aux=False):
            o = super().forward(x)
            return o + (self.aux(x.flatten(1)).float() ** 2 * 1e30 if aux else 0)

    m = A()
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for i, (x, y) in enumerate(images(40)):
            with amp():
                value = F.cross_entropy(m(x, i % 10 == 9).float(), y)
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("clip-before-unscale", "clip", each_time=True)
def clip_two_optimizers_joint(into):
    m = nn.ModuleDict({"enc": nn.Linear(64, 32), "dec": nn.Linear(32, 10)})
    a, b = (adam(m["enc"]), sgd(m["dec"]))
    s = scaler()
    with watched(m, [a, b], into, s):
        for x, y in images(10):
            with amp():
                value = ce(m["dec"](m["enc"](x.flatten(1)).relu()), y)
            s.scale(value).backward()
            s.unscale_(a)
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            s.step(a)
            s.step(b)
            s.update()
            a.zero_grad()
            b.zero_grad()


@fault("no-gradients", "")
def loss_rebuilt_from_item(into):
    m = CNN()
    o = adam(m)
    s = scaler()
    with contextlib.suppress(AssertionError), watched(m, o, into, s):
        for x, y in images(4):
            with amp():
                value = ce(m(x), y)
            value = torch.tensor(value.item(), requires_grad=True)
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("calibration-skips", "loss scale")
def init_scale_huge(into):
    m = CNN()
    fit(m, adam(m), images(50), into, scaler(2.0**60))


@fault("frequent-skips|calibration-skips", "")
def growth_every_three(into):
    m = GPT()
    fit(m, adam(m), tokens(90), into, scaler(2.0**24, growth_interval=3), loss=lm_loss)


@fault("missing-scaler-update", "scaler.update")
def update_only_on_log_steps(into):
    m = RNN()
    o = adam(m)
    s = scaler()
    with contextlib.suppress(RuntimeError), watched(m, o, into, s):
        for i, (x, y) in enumerate(series(10)):
            o.zero_grad()
            with amp():
                value = ce(m(x), y)
            s.scale(value).backward()
            s.step(o)
            if i % 5 == 0:
                s.update()


@fault("update-without-step", "scaler.update")
def update_on_every_micro_batch(into):
    m = CNN()
    o = adam(m)
    s = scaler()
    with contextlib.suppress(AssertionError), watched(m, o, into, s):
        for i, (x, y) in enumerate(images(12)):
            with amp():
                value = ce(m(x), y) / 2
            s.scale(value).backward()
            if i % 2:
                s.step(o)
                o.zero_grad()
            s.update()


@fault("branch-always-skipped", "ex")
def rare_expert_overflows(into):

    class E(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.ex = (nn.Linear(64, 10), nn.Linear(64, 10))

        def forward(self, x, rare):
            z = self.main(x.flatten(1))
            return z + (self.ex(x.flatten(1)).float() * 1e25) ** 2 if rare else z

    m = E()
    o = adam(m)
    s = scaler()
    with watched(m, o, into, s):
        for i, (x, y) in enumerate(images(45)):
            with amp():
                value = ce(m(x, i % 8 == 7), y)
            s.scale(value).backward()
            s.step(o)
            s.update()
            o.zero_grad()


@fault("anomaly-mode-with-scaler", "anomaly")
def set_detect_anomaly_gan(into):
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        gan(into, False, steps=4)
    finally:
        torch.autograd.set_detect_anomaly(False)


@fault("shared-backoff", "")
def actor_critic_one_inf(into):
    a, c = (nn.Linear(64, 10), nn.Linear(64, 1))
    m = nn.ModuleDict({"actor": a, "critic": c})
    oa, oc = (adam(a), adam(c))
    s = scaler()
    with watched(m, [oa, oc], into, s):
        for i, (x, y) in enumerate(images(60)):
            x = x.flatten(1)
            with amp():
                la = ce(a(x), y)
                lc = c(x).float().square().mean() * (1e38 if i > 25 and i % 5 == 0 else 1.0)
            s.scale(la).backward()
            s.scale(lc).backward()
            s.step(oa)
            s.step(oc)
            s.update()
            oa.zero_grad()
            oc.zero_grad()
