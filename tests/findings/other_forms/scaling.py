"""Faults of the loss scale and of the order of calls, in forms that the zoo does not have."""

from __future__ import annotations

import contextlib
import io
import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import (
    BF,
    H,
    Trainer,
    adam,
    amp,
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
from tests.findings.other_forms.models import CNN, GPT, RNN, MoE, Net, decorated_cnn, images, series, tokens, vectors


@fault("clip-before-unscale", "clip")
def cnn_trainer_clip_value(into):
    m = CNN()
    Trainer(m, adam(m), scaler(), lambda p: nn.utils.clip_grad_value_(p, 0.5)).fit(images(10), into)


@fault("clip-before-unscale")
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

    def unit(x):
        return x.norm() if x.dim() < 2 else x.norm(dim=1, keepdim=True)

    def clip(i):
        for p in m.parameters():
            pn, gn = (unit(p.detach()).clamp(min=0.001), unit(p.grad))
            p.grad.copy_(torch.where(gn > 0.01 * pn, p.grad * (0.01 * pn / gn.clamp(min=1e-06)), p.grad))

    fp16(m, tokens(16), into, before=clip)


@fault("clip-before-unscale", "clip", each_time=True)
def clip_two_optimizers_joint(into):
    m = nn.ModuleDict({"enc": nn.Linear(64, 32), "dec": nn.Linear(32, 10)})
    a, b = (adam(m["enc"]), sgd(m["dec"]))
    s = scaler()
    with watched(m, [a, b], into, s):
        for x, y in vectors(10):
            with amp():
                value = ce(m["dec"](m["enc"](x).relu()), y)
            s.scale(value).backward()
            s.unscale_(a)
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            s.step(a)
            step(b, s)
            a.zero_grad()


@fault("unscale-per-microbatch", "unscale_")
def trainer_unscale_each(into):
    m = CNN()
    o, s = (adam(m), scaler())
    with watched(m, o, into, s), contextlib.suppress(RuntimeError):
        for i, b in enumerate(images(12)):
            scaled_backward(m, b, s, of=2)
            s.unscale_(o)
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            if i % 2:
                step(o, s)


@fault("unscale-per-microbatch")
def gpt_update_each_micro(into):
    m = GPT()
    o, s = (adam(m), scaler())
    with watched(m, o, into, s):
        for i, t in enumerate(tokens(24)):
            scaled_backward(m, t, s, of=4)
            if i % 4 == 3:
                step(o, s)
            else:
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
            step(og, sg)


@fault("missing-scaler-update", "scaler.update")
def update_only_on_log_steps(into):
    m = RNN()
    o, s = (adam(m), scaler())
    with contextlib.suppress(RuntimeError), watched(m, o, into, s):
        for i, b in enumerate(series(10)):
            o.zero_grad()
            scaled_backward(m, b, s)
            s.step(o)
            if i % 5 == 0:
                s.update()


@fault("update-without-step", "scaler.update")
def update_on_every_micro_batch(into):
    m = CNN()
    o, s = (adam(m), scaler())
    with contextlib.suppress(AssertionError), watched(m, o, into, s):
        for i, b in enumerate(images(12)):
            scaled_backward(m, b, s, of=2)
            if i % 2:
                s.step(o)
                o.zero_grad()
            s.update()


@fault("optimizer-step-bypasses-scaler", "optimizer.step")
def rnn_manual_unscale_and_step(into):
    m = RNN()
    o, s = (adam(m), scaler())
    with watched(m, o, into, s):
        for b in series(10):
            scaled_backward(m, b, s)
            s.unscale_(o)
            o.step()
            s.update()
            o.zero_grad()


@fault("optimizer-step-bypasses-scaler", "optimizer.step")
def closure_step_scaled(into):
    m = CNN()
    o, s = (sgd(m, 1e-05), scaler())
    with watched(m, o, into, s):
        for b in images(8):

            def closure(b=b):
                o.zero_grad()
                return scaled_backward(m, b, s)

            o.step(closure)


@fault("unscaled-loss-term", "backward")
def moe_aux_unscaled(into):
    m = GPT(mlp=MoE)
    o, s = (adam(m), scaler())
    with watched(m, o, into, s):
        for t in tokens(8):
            with amp():
                value = lm_loss(m, t)
                aux = sum(b.mlp.aux for b in m.blocks)
            s.scale(value).backward(retain_graph=True)
            (0.01 * aux).backward()
            step(o, s)


@fault("unscaled-loss-term", "backward")
def vae_kl_unscaled_list(into):
    enc, dec = (nn.Linear(64, 16), nn.Linear(8, 64))
    m = nn.ModuleList([enc, dec])
    o, s = (adam(m), scaler())
    with watched(m, o, into, s):
        for x, _ in vectors(8):
            with amp():
                mu, lv = enc(x).chunk(2, -1)
                r = F.mse_loss(dec(mu + torch.randn_like(mu) * (lv / 2).exp()).float(), x)
            kl = -0.5 * (1 + lv.float() - mu.float() ** 2 - lv.float().exp()).mean()
            torch.autograd.backward([s.scale(r), kl])
            step(o, s)


@fault("unscaled-loss-term", each_time=True)
def l2_by_grad_add(into):
    m = CNN()

    def add_penalty(i):
        ps = list(m.parameters())
        for p, g in zip(ps, torch.autograd.grad(0.1 * sum((p**2).sum() for p in ps), ps), strict=True):
            p.grad.add_(g)

    fp16(m, images(8), into, before=add_penalty)


@fault("logged-scaled-values", "loss")
def trainer_logs_scaled(into):
    m = RNN()
    o, s = (adam(m), scaler())
    with watched(m, o, into, s) as rec:
        for x, y in series(8):
            with amp():
                loss = ce(m(x), y)
            loss = s.scale(loss)
            loss.backward()
            step(o, s)
            rec.log(loss=loss.item())


@fault("logged-scaled-values", "grad_norm")
def logs_scaled_norm_own(into):
    m = CNN()

    def log(rec, loss):
        rec.log(grad_norm=math.sqrt(sum(float(p.grad.norm()) ** 2 for p in m.parameters())))

    fp16(m, images(8), into, log=log)


@fault("fp16-without-scaler", "GradScaler")
def decorated_forward_fp16(into):
    m = decorated_cnn("cpu", H)
    pure(m, adam(m), images(6), into)


@fault("fp16-without-scaler", "GradScaler")
def gpt_fp16_scaler_scale_one(into):
    fp16(GPT(), tokens(6), into, s=scaler(1.0, growth_interval=10**9))


@fault("scaler-with-bf16", "GradScaler")
def bf16_decorated_step_scaler(into):
    m = RNN()
    o, s = (adam(m), torch.amp.GradScaler("cpu"))

    @torch.autocast("cpu", dtype=BF)
    def loss(x, y):
        return ce(m(x), y)

    with watched(m, o, into, s):
        for x, y in series(6):
            s.scale(loss(x, y)).backward()
            step(o, s)


@fault("no-gradients")
def zero_grad_before_step(into):
    m = CNN()
    o = adam(m)
    with contextlib.suppress(AssertionError):
        fp16(m, images(4), into, o, before=lambda i: o.zero_grad())


@fault("no-gradients", each_time=True)
def head_replaced_after_optimizer(into):
    m = CNN()
    o = adam(m)
    m.fc = nn.Linear(256, 10)
    fp16(m, images(6), into, o)


@fault("no-gradients")
def loss_rebuilt_from_item(into):
    with contextlib.suppress(AssertionError):
        fp16(CNN(), images(4), into, loss=lambda m, b: torch.tensor(ce(m(b[0]), b[1]).item(), requires_grad=True))


@fault("scheduler-steps-on-skip", "scheduler")
def one_cycle_in_trainer(into):
    m = RNN()
    o = adam(m)
    schedule = torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=30)
    fp16(m, series(14), into, o, scaler(2.0**24), after=lambda i: schedule.step())


@fault("scheduler-steps-on-skip", "scheduler")
def own_lambda_schedule_on_skip(into):
    m = CNN()
    o = adam(m)
    lr = torch.optim.lr_scheduler
    schedule = lr.SequentialLR(o, [lr.LinearLR(o, 0.1, total_iters=5), lr.CosineAnnealingLR(o, 20)], [5])
    fp16(m, images(16), into, o, scaler(2.0**26), after=lambda i: schedule.step())


@fault("scaler-state-not-restored", "GradScaler")
def checkpoint_file_without_scaler(into):
    m = CNN()
    o, s = (adam(m), scaler())
    for b in images(5):
        scaled_backward(m, b, s)
        step(o, s)
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
        ce(m(x), y).backward()
        step(o)
    m2 = RNN()
    m2.load_state_dict(m.state_dict())
    o2 = sgd(m2, 0.05, momentum=0.9)
    o2.load_state_dict(o.state_dict())
    Trainer(m2, o2, torch.amp.GradScaler("cpu")).fit(series(10), into)


@fault("scaler-state-not-restored", "GradScaler", each_time=True)
def new_scaler_in_a_second_phase(into):
    second_phase(into, 2.0**40)


@healthy(each_time=True)
def new_scaler_with_the_scale_of_the_first_phase(into):
    second_phase(into, 2.0**10)


def second_phase(into, first_scale):
    m = CNN()
    o = adam(m)
    s = scaler(2.0**10)
    with watched(m, o, into, s):
        for i, b in enumerate(images(16)):
            if i == 8:
                s = scaler(first_scale)
            scaled_backward(m, b, s)
            step(o, s)


@fault("shared-backoff", "scaler.update")
def gan_update_twice(into):
    gan(into, True)


@fault("shared-backoff")
def actor_critic_one_inf(into):
    a, c = (nn.Linear(64, 10), nn.Linear(64, 1))
    m = nn.ModuleDict({"actor": a, "critic": c})
    oa, oc, s = (adam(a), adam(c), scaler())
    with watched(m, [oa, oc], into, s):
        for i, (x, y) in enumerate(vectors(60)):
            with amp():
                la = ce(a(x), y)
                lc = c(x).float().square().mean() * (1e38 if i > 25 and i % 5 == 0 else 1.0)
            s.scale(la).backward()
            s.scale(lc).backward()
            s.step(oa)
            step(oc, s)
            oa.zero_grad()


@fault("scaled-gradient-penalty")
def wgan_gp_scaled(into):
    def gp(s, *samples):
        return ((gradient_norm(s, *samples) - 1) ** 2).mean() * 0.0001

    gan(into, False, gp)


@fault("scaled-gradient-penalty")
def r1_penalty_backward_create_graph(into):
    m = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    o, s = (adam(m), scaler())
    with watched(m, o, into, s):
        for x, y in vectors(6):
            x.requires_grad_()
            with amp():
                value = ce(m(x), y)
            s.scale(value).backward(create_graph=True)
            pen = x.grad.pow(2).sum() * 1e-08
            s.scale(pen).backward()
            x.grad = None
            step(o, s)


@fault("scale-unbounded", "loss scale")
def all_masked_loss(into):
    def loss(m, t):
        each = F.cross_entropy(m(t[:, :-1]).float().flatten(0, 1), t[:, 1:].flatten(), reduction="none")
        return (each * 0.0).sum()

    fp16(GPT(), tokens(14), into, s=scaler(2.0**16, growth_interval=1), loss=loss)


@fault("frequent-skips|calibration-skips")
def scale_set_each_epoch(into):
    s = scaler()

    def after(i):
        if i % 15 == 14:
            s.update(2.0**30)

    fp16(CNN(), (b for _ in range(8) for b in images(15)), into, s=s, after=after)


@fault("calibration-skips", "loss scale", each_time=True)
def growth_after_each_clean_step(into):
    fp16(GPT(), tokens(90), into, s=scaler(2.0**24, growth_interval=1))


@fault("frequent-skips|calibration-skips")
def growth_every_three(into):
    fp16(GPT(), tokens(90), into, s=scaler(2.0**24, growth_interval=3))


@fault("frequent-skips|branch-always-skipped")
def outlier_batches(into):
    m = RNN()

    def loss(m, b):
        i, (x, y) = b
        return F.mse_loss(m(x).float(), F.one_hot(y, 8) * (100000000.0 if i % 11 == 10 else 1.0))

    fp16(m, enumerate(series(140)), into, sgd(m, 0.001), loss=loss)


@fault("calibration-skips", "loss scale")
def init_scale_huge(into):
    fp16(CNN(), images(50), into, s=scaler(2.0**60))


@fault("anomaly-mode-with-scaler", "anomaly")
def detect_anomaly_context(into):
    m = CNN()
    o, s = (adam(m), scaler())
    with watched(m, o, into, s):
        for b in images(4):
            with torch.autograd.detect_anomaly(check_nan=False):
                scaled_backward(m, b, s)
            step(o, s)


@fault("anomaly-mode-with-scaler", "anomaly")
def set_detect_anomaly_gan(into):
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        gan(into, False, steps=4)
    finally:
        torch.autograd.set_detect_anomaly(False)


@fault("branch-always-skipped", "aux")
def rare_aux_head(into):
    m = CNN()
    m.aux = nn.Linear(64, 10)

    def loss(m, b):
        i, (x, y) = b
        z = m(x)
        return ce(z + m.aux(x.flatten(1)).float() ** 2 * 1e30 if i % 10 == 9 else z, y)

    fp16(m, enumerate(images(40)), into, loss=loss)


@fault("branch-always-skipped", "ex")
def rare_expert_overflows(into):
    def mixed(m, x, rare):
        z = m.main(x)
        return z + (m.ex(x).float() * 1e25) ** 2 if rare else z

    def loss(m, b):
        i, (x, y) = b
        return ce(m(x, i % 8 == 7), y)

    fp16(Net(mixed, main=nn.Linear(64, 10), ex=nn.Linear(64, 10)), enumerate(vectors(45)), into, loss=loss)


@fault("optimizer-step-bypasses-scaler", "optimizer 1", each_time=True)
def critic_steps_outside_the_scaler(into):
    m = nn.ModuleDict({"actor": nn.Linear(64, 10), "critic": nn.Linear(64, 1)})
    a, c, s = (adam(m["actor"]), adam(m["critic"]), scaler())
    with watched(m, [a, c], into, s):
        for x, y in vectors(8):
            with amp():
                value = ce(m["actor"](x), y) + m["critic"](x).float().square().mean()
            s.scale(value).backward()
            c.step()
            step(a, s)
            c.zero_grad()


def _changed_gradients(into, change, s=None, unscaled=False, n=12):
    """A training in FP16 whose loop calls `change(parameter)` before `scaler.step`."""
    m, s = CNN(), s or scaler()
    o = sgd(m, 0.05)

    def before(i):
        if unscaled:
            s.unscale_(o)
        with torch.no_grad():
            for p in m.parameters():
                change(p)

    fp16(m, images(n), into, o, s, before=before)


@fault("unscaled-loss-term", "gradients", each_time=True)
def noise_on_scaled_gradients(into):
    _changed_gradients(into, lambda p: p.grad.add_(0.01 * torch.randn_like(p)))


@fault("unscaled-loss-term", "gradients")
def decay_on_scaled_gradients(into):
    _changed_gradients(into, lambda p: setattr(p, "grad", p.grad + 1e-2 * p), scaler(2.0**14))


@healthy(each_time=True)
def noise_on_unscaled_gradients(into):
    _changed_gradients(into, lambda p: p.grad.add_(0.01 * torch.randn_like(p)), unscaled=True)


@healthy(each_time=True)
def scaled_gradients_rounded_to_half(into):
    _changed_gradients(into, lambda p: setattr(p, "grad", p.grad.half().float()), scaler(2.0**7))


@healthy()
def scaled_gradients_centred(into):
    _changed_gradients(into, lambda p: p.dim() > 1 and p.grad.sub_(p.grad.mean(1, keepdim=True)))


@healthy()
def noise_multiplied_by_the_scale(into):
    s = scaler()
    _changed_gradients(into, lambda p: p.grad.add_(0.01 * s.get_scale() * torch.randn_like(p)), s)


@fault("hidden-overflow", "gradients", each_time=True)
def infinite_gradients_set_to_zero(into):
    def clear(p):
        p.grad[~p.grad.isfinite()] = 0.0

    _changed_gradients(into, clear, scaler(2.0**22))


@fault("hidden-overflow", "gradients")
def infinite_gradients_clamped(into):
    _changed_gradients(into, lambda p: p.grad.nan_to_num_(0.0).clamp_(-1e4, 1e4), scaler(2.0**22))


@healthy()
def infinite_gradients_replaced_after_unscaling(into):
    _changed_gradients(into, lambda p: p.grad.nan_to_num_(0.0, 0.0, 0.0), scaler(2.0**22), unscaled=True)


@fault("calibration-skips", "loss scale", each_time=True)
def scale_that_hardly_falls(into):
    _changed_gradients(into, lambda p: None, scaler(2.0**26, backoff_factor=0.98), n=40)


def _margin(into, steps, s, noise):
    """A hinge loss on data that are easy to separate: soon no sample is within the margin, if `noise` is 0."""
    m = nn.Linear(8, 1)
    o = sgd(m, lr=0.5)
    g = torch.Generator().manual_seed(2)
    with watched(m, o, into, s):
        for _ in range(steps):
            x = torch.randn(64, 8, generator=g)
            y = x[:, :1].sign()
            x[:, :1] += 2 * y
            y = torch.where(torch.rand(64, 1, generator=g) < noise, -y, y)
            with amp():
                out = m(x)
            s.scale(F.relu(0.2 - out.float() * y).mean()).backward()
            step(o, s)


@fault("scale-unbounded", "loss scale", each_time=True)
def hinge_that_is_satisfied(into):
    _margin(into, 80, scaler(growth_interval=2), noise=0)


@healthy(each_time=True)
def hinge_with_wrong_labels(into):
    _margin(into, 80, scaler(growth_interval=20), noise=0.1)


def _norm_logged(into, first):
    """The norm of all gradients by a clip with an infinite threshold; `first(scaler, optimizer)` comes before it."""
    m, s = CNN(), scaler()
    o = adam(m)
    norms = []
    with watched(m, o, into, s):
        for b in images(8):
            scaled_backward(m, b, s)
            first(s, o)
            norms.append(float(nn.utils.clip_grad_norm_(m.parameters(), math.inf)))
            step(o, s)


@fault("logged-scaled-values", "clip_grad_norm_", each_time=True)
def norm_by_a_clip_without_threshold(into):
    _norm_logged(into, lambda s, o: None)


@healthy(each_time=True)
def norm_by_a_clip_without_threshold_unscaled(into):
    _norm_logged(into, lambda s, o: s.unscale_(o))


@healthy()
def norm_by_a_clip_without_threshold_that_is_divided(into):
    _norm_logged(into, lambda s, o: s.get_scale())


def _losses_of_two_sizes(into, ratio, own):
    a, b = (nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)) for _ in range(2))
    m, oa, ob, sa = nn.ModuleDict({"a": a, "b": b}), adam(a), adam(b), scaler(2.0**17)
    sb = scaler(2.0**30) if own else sa
    with watched(m, [oa, ob], into, sa):
        for x, y in vectors(24):
            with amp():
                first, second = ce(a(x), y), ce(b(x), y) * ratio
            sa.scale(first).backward()
            sb.scale(second).backward()
            sa.step(oa)
            sb.step(ob)
            for s in {sa, sb}:
                s.update()
            oa.zero_grad()
            ob.zero_grad()


@fault("shared-backoff", "optimizer 1", each_time=True)
def tiny_loss_with_the_scaler_of_another(into):
    _losses_of_two_sizes(into, 1e-10, False)


@healthy(each_time=True)
def tiny_loss_with_a_scaler_of_its_own(into):
    _losses_of_two_sizes(into, 1e-10, True)


@healthy()
def small_loss_that_the_scaler_of_another_serves(into):
    _losses_of_two_sizes(into, 1e-4, False)


def _scaled_by_hand(into, clip):
    """`clip(parameters, loss scale, unscale)` clips and unscales the gradients of a scale that doubles now and then."""
    m = CNN()
    o, scale = adam(m), 1024.0
    ps = list(m.parameters())
    with watched(m, o, into):
        for i, (x, y) in enumerate(images(10)):
            with amp():
                value = ce(m(x), y)
            (value * scale).backward()
            clip(ps, scale, lambda s=scale: [p.grad.div_(s) for p in ps])
            if all(p.grad.isfinite().all() for p in ps):
                o.step()
            o.zero_grad()
            scale *= 1 + (i % 4 == 3)


@fault("clip-before-unscale", "clip_grad_norm_", each_time=True)
def clipped_before_a_division_by_hand(into):
    _scaled_by_hand(into, lambda ps, scale, unscale: (nn.utils.clip_grad_norm_(ps, 1.0), unscale()))


@healthy(each_time=True)
def clipped_after_a_division_by_hand(into):
    _scaled_by_hand(into, lambda ps, scale, unscale: (unscale(), nn.utils.clip_grad_norm_(ps, 1.0)))


@healthy()
def clipped_to_a_scaled_limit_before_a_division_by_hand(into):
    _scaled_by_hand(into, lambda ps, scale, unscale: (nn.utils.clip_grad_norm_(ps, 1.0 * scale), unscale()))


def _adversarial(into, change):
    """The model trains on inputs that are moved by `change(gradient, scaler)`."""
    m, s = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)), scaler()
    o = adam(m)
    with watched(m, o, into, s):
        for x, y in vectors(10):
            x.requires_grad_()
            with amp():
                value = ce(m(x), y)
            (g,) = torch.autograd.grad(s.scale(value), x)
            scaled_backward(m, ((x + change(g, s)).detach(), y), s)
            step(o, s)


@fault("scaled-gradient-penalty", "torch.autograd.grad", each_time=True)
def input_moved_along_its_scaled_gradient(into):
    _adversarial(into, lambda g, s: 10 * g)


@healthy(each_time=True)
def input_moved_along_its_unscaled_gradient(into):
    _adversarial(into, lambda g, s: 10 * g / s.get_scale())


@healthy()
def input_moved_along_the_sign_of_its_scaled_gradient(into):
    _adversarial(into, lambda g, s: 2 * g.sign())


def _gan_watched_by_parts(into, scales_critic, critic_steps=1, shared=False):
    """A GAN whose generator and critic have a run each; the critic's comes to `into`."""
    gen = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
    dis = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    og, od, sg = adam(gen), sgd(dis), scaler()
    sd = (sg if shared else scaler()) if scales_critic else None
    with watched(dis, od, into, sd), watched(gen, og, into.with_name("generator"), sg):
        for i, (real, _) in enumerate(vectors(24)):
            with amp():
                fake = gen(torch.randn(len(real), 8))
                value = F.softplus(-dis(real).float()).mean() + F.softplus(dis(fake.detach()).float()).mean()
            od.zero_grad()
            (sd.scale(value) if sd else value).backward()
            if sd:
                sd.step(od)
                sd.update()
            else:
                od.step()
            if i % critic_steps == 0:
                og.zero_grad()
                with amp():
                    value = F.softplus(-dis(fake).float()).mean()
                sg.scale(value).backward()
                sg.step(og)
                sg.update()


@fault("fp16-without-scaler", "SGD", each_time=True)
def critic_without_the_scaler_of_its_generator(into):
    _gan_watched_by_parts(into, scales_critic=False)


@healthy(each_time=True)
def critic_with_a_scaler_beside_its_generator(into):
    _gan_watched_by_parts(into, scales_critic=True)


@healthy()
def critic_that_steps_thrice_as_often_as_its_generator(into):
    _gan_watched_by_parts(into, scales_critic=True, critic_steps=3)


@healthy()
def critic_that_shares_the_scaler_of_its_generator(into):
    _gan_watched_by_parts(into, scales_critic=True, critic_steps=2, shared=True)
