"""Faults of weights, updates, averages and optimizer states, in forms that the zoo does not have."""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace

import torch
from torch import nn

from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import (
    BF,
    OwnOptimizer,
    Trainer,
    adam,
    amp,
    bf16,
    ce,
    fp16,
    lm_loss,
    pure,
    scaler,
    sgd,
    step,
    watched,
)
from tests.findings.other_forms.models import CNN, GPT, RNN, Net, images, series, tokens, vectors


@fault("half-model", "GPT")
def gpt_to_half_sgd(into):
    m = GPT().half()
    pure(m, sgd(m, 0.001), tokens(6), into)


@fault("half-model", "Sequential", each_time=True)
def saving_a_checkpoint_in_half_converts_the_model(into):
    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    o = sgd(m, 0.001)
    with watched(m, o, into):
        for i, (x, y) in enumerate(vectors(12)):
            ce(m(x.to(m[0].weight.dtype)), y).backward()
            step(o)
            if i == 5:
                m.half().state_dict()


@fault("missing-fp32-masters", "0.weight")
def saving_a_checkpoint_in_bfloat16_converts_the_model(into):
    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    o = sgd(m, 0.001)
    with watched(m, o, into):
        for i, b in enumerate(vectors(12)):
            with amp(BF):
                loss = ce(m(b[0]), b[1])
            loss.backward()
            step(o)
            if i == 5:
                m.bfloat16().state_dict()


@healthy(each_time=True)
def saving_a_copy_in_half(into):
    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    o = sgd(m, 0.001)
    with watched(m, o, into):
        for i, (x, y) in enumerate(vectors(12)):
            ce(m(x), y).backward()
            step(o)
            if i == 5:
                copy.deepcopy(m).half().state_dict()


@fault("half-model|missing-fp32-masters")
def encoder_half_decoder_float(into):
    m = nn.ModuleDict({"enc": nn.Sequential(nn.Linear(64, 32), nn.ReLU()).half(), "dec": nn.Linear(32, 10)})
    pure(m, sgd(m), vectors(6), into, loss=lambda m, b: ce(m["dec"](m["enc"](b[0]).float()), b[1]))


@fault("lost-weight-updates", each_time=True)
def own_optimizer_bf16_pure(into):
    def lion(p, state, lr):
        m = state.setdefault("m", torch.zeros_like(p))
        p.add_((0.9 * m + 0.1 * p.grad).sign(), alpha=-lr)
        m.lerp_(p.grad, 0.01)

    m = GPT().to(BF)
    pure(m, OwnOptimizer(m, 1e-05, lion), tokens(12), into)


@fault("lost-weight-updates", each_time=True)
def own_sgd_data_write(into):
    def write(p, state, lr):
        p.data.add_(p.grad.data, alpha=-lr)

    m = GPT().to(BF)
    pure(m, OwnOptimizer(m, 0.0001, write), tokens(12), into)


@fault("lost-weight-updates", each_time=True)
def adafactor_bf16_pure(into):
    m = CNN(bn=False).to(BF)
    pure(m, torch.optim.Adafactor(m.parameters(), lr=1e-05), images(12), into)


@fault("lost-weight-updates", each_time=True)
def muon_bf16(into):
    m = nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU(), nn.Linear(32, 10, bias=False)).to(BF)
    pure(m, torch.optim.Muon(m.parameters(), lr=1e-05), vectors(10), into)


@fault("lost-weight-updates")
def optimizer_in_backward_bf16(into):
    m = GPT().to(BF)
    opts = {p: sgd([p], 1e-06) for p in m.parameters()}
    for p in m.parameters():
        p.register_post_accumulate_grad_hook(lambda p: step(opts[p]))
    with watched(m, list(opts.values()), into):
        for t in tokens(10):
            lm_loss(m, t).backward()


@fault("lost-weight-updates")
def lightning_bf16_true(into):
    import lightning as L

    from amp_core.record.lightning import WatchCallback

    class M(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = CNN(bn=False)

        def training_step(self, b, i):
            return ce(self.net(b[0]), b[1])

        def configure_optimizers(self):
            return adam(self, 1e-05)

    rows = [(x[0], y[0]) for x, y in images(48, rows=1)]
    L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        precision="bf16-true",
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
        gradient_clip_val=1.0,
        callbacks=[WatchCallback(into, every=3)],
    ).fit(M(), torch.utils.data.DataLoader(rows, batch_size=4))


@fault("lost-weight-decay|lost-weight-updates")
def bf16_decay_lost_gpt(into):
    m = GPT().to(BF)
    pure(m, adam(m, 0.003, weight_decay=0.1), tokens(12), into)


@fault("missing-fp32-masters|lost-weight-updates")
def bf16_model_autocast_gpt(into):
    m = GPT().to(BF)
    bf16(m, tokens(6), into, adam(m, 0.01))


@fault("missing-fp32-masters|lost-weight-updates")
def accelerate_bf16_weights(into):
    from accelerate import Accelerator

    a = Accelerator(mixed_precision="bf16", cpu=True)
    m = CNN(bn=False).to(BF)
    m, o = a.prepare(m, adam(m, 0.01))
    with watched(m, o, into):
        for x, y in images(6):
            a.backward(ce(m(x), y))
            step(o)


@fault("overwritten-masters", each_time=True)
def evaluated_in_bf16_and_cast_back(into):
    m = CNN(bn=False)

    def after(i):
        if i % 4 == 3:
            m.to(BF)
            with torch.no_grad():
                m(torch.randn(4, 1, 8, 8).to(BF))
            m.float()

    bf16(m, images(14), into, after=after)


@fault("overwritten-masters", each_time=True)
def weights_swapped_for_their_average_with_a_half_backup(into):
    m = RNN()
    average = {k: v.clone() for k, v in m.state_dict().items()}

    def after(i):
        for k, v in m.state_dict().items():
            average[k].lerp_(v, 0.01)
        if i % 5 == 4:
            backup = {k: v.half() for k, v in m.state_dict().items()}
            m.load_state_dict(average)
            m.load_state_dict(backup)

    bf16(m, series(14), into, after=after)


def lookahead(into, dtype):
    """Every third step, the weights are replaced by slow ones, which are kept in `dtype` and have gone half the way."""
    m = CNN(bn=False)
    slow = [p.detach().to(dtype, copy=True) for p in m.parameters()]

    def after(i):
        if i % 3 == 2:
            with torch.no_grad():
                for p, q in zip(m.parameters(), slow, strict=True):
                    q.add_((p - q).to(dtype), alpha=0.5)
                    p.copy_(q)

    bf16(m, images(24), into, o=adam(m, 1e-4), after=after)


@fault("overwritten-masters", each_time=True)
def slow_weights_in_bf16(into):
    lookahead(into, BF)


@healthy(each_time=True)
def slow_weights_in_float32(into):
    lookahead(into, torch.float32)


@healthy()
def float32_weights_rounded_stochastically_by_hand(into):
    m = CNN(bn=False)

    def after(i):
        with torch.no_grad():
            for p in m.parameters():
                noisy = p.view(torch.int32) + torch.randint(0, 1 << 16, p.shape, dtype=torch.int32)
                p.copy_((noisy & -65536).view(torch.float32))

    bf16(m, images(24), into, after=after)


def restored(into, shrink):
    """The optimizer's state is saved and loaded again after six steps; gradients are of the size of 1e-5."""
    m = CNN(bn=False)
    o = adam(m, 0.001)

    def after(i):
        if i == 5:
            state = o.state_dict()
            state["state"] = {p: {k: shrink(k, v) for k, v in s.items()} for p, s in state["state"].items()}
            o.load_state_dict(copy.deepcopy(state))

    bf16(m, images(10), into, o=o, after=after, loss=lambda m, b: 1e-4 * ce(m(b[0]), b[1]))


@fault("vanishing-second-moments")
def second_moments_that_nearly_all_stay_as_they_are(into):
    m = CNN(bn=False).to(BF)
    pure(m, adam(m, 0.001, betas=(0.9, 0.998)), images(6), into)


@fault("vanishing-second-moments", each_time=True)
def optimizer_state_restored_from_float16(into):
    restored(into, lambda key, v: v if key == "step" else v.half())


@healthy(each_time=True)
def optimizer_state_restored_in_float32(into):
    restored(into, lambda key, v: v.clone())


@fault("overwritten-masters", each_time=True)
def masters_of_an_own_optimizer_reloaded_from_the_model(into):
    def update(p, state, lr):
        w = state.setdefault("master", p.detach().float().clone())
        w.add_(p.grad.float(), alpha=-lr)
        p.copy_(w)

    m = GPT().to(BF)
    o = OwnOptimizer(m, 0.001, update)

    def reload(i):
        for p in m.parameters():
            o.state[p]["master"].copy_(p.detach())

    pure(m, o, tokens(8), into, after=reload)


@fault("lost-weight-decay", each_time=True)
def decay_by_hand_of_lists(into):
    m = GPT().to(BF)
    weights = [p.detach() for p in m.parameters() if p.dim() > 1]
    pure(m, sgd(m, 0.5), tokens(8), into, after=lambda i: torch._foreach_mul_(weights, 1 - 1e-4))


@fault("lost-weight-decay", each_time=True)
def decay_of_an_own_optimizer(into):
    def update(p, state, lr):
        p.mul_(1 - lr * 1e-2)
        p.add_(p.grad, alpha=-lr)

    m = CNN(bn=False).to(BF)
    pure(m, OwnOptimizer(m, 0.1, update), images(8), into)


@fault("average-stands-still")
def averaged_model_bf16(into):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    m = CNN(bn=False).to(BF)
    e = AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
    pure(m, sgd(m, 0.5), images(20), into, after=lambda i: e.update_parameters(m))


@fault("average-stands-still", each_time=True)
def ema_foreach_half_list(into):
    m = GPT()
    e = SimpleNamespace(w=[p.detach().clone().to(BF) for p in m.parameters()])

    def update(i):
        torch._foreach_mul_(e.w, 0.9995)
        torch._foreach_add_(e.w, [p.detach().to(BF) for p in m.parameters()], alpha=0.0005)

    bf16(m, tokens(20), into, after=update)


@fault("average-stands-still", each_time=True)
def ema_state_dict_copy(into):
    m = CNN(bn=False)
    sd = {k: v.clone().half() for k, v in m.state_dict().items()}

    def update(i):
        for k, v in m.state_dict().items():
            sd[k] = sd[k] * 0.9999 + v.half() * 0.0001

    bf16(m, images(20), into, after=update)


@fault("average-stands-still")
def trainer_ema_attribute(into):
    class T(Trainer):
        def training_step(self, b):
            super().training_step(b)
            with torch.no_grad():
                for e, p in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                    e.copy_(e * 0.9995 + p.to(BF) * 0.0005)

    m = CNN(bn=False)
    trainer = T(m, adam(m), scaler())
    trainer.ema = copy.deepcopy(m).to(BF)
    trainer.fit(images(24), into)


@fault("average-stands-still", each_time=True)
def ema_kept_in_closure(into):
    m = RNN()

    def make():
        shadow = {n: p.detach().clone().to(BF) for n, p in m.named_parameters()}

        def update(i):
            with torch.no_grad():
                for n, p in m.named_parameters():
                    shadow[n].lerp_(p.to(BF), 0.0005)

        return update

    bf16(m, series(24), into, after=make())


@fault("average-stands-still", each_time=True)
def ema_in_the_closure_of_a_decorated_function(into):
    m = RNN()

    def make():
        shadow = {n: p.detach().clone().to(BF) for n, p in m.named_parameters()}

        @torch.no_grad()
        def update(i):
            for n, p in m.named_parameters():
                shadow[n].lerp_(p.to(BF), 0.0005)

        return update

    bf16(m, series(24), into, after=make())


@fault("average-stands-still", each_time=True)
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
    e = E(m)
    fp16(m, images(24), into, after=lambda i: e.update(m))


@fault("half-accumulation")
def metric_module_bf16_total(into):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = CNN(bn=False)
            self.register_buffer("seen_loss", torch.zeros((), dtype=BF))

        def forward(self, x, y):
            value = ce(self.net(x), y)
            self.seen_loss += value.detach().to(BF)
            return value

    bf16(M(), images(8), into, loss=lambda m, b: m(*b))


@fault("half-accumulation")
def bf16_pure_accumulation(into):
    m = GPT().to(BF)
    o = sgd(m, 0.3)
    with watched(m, o, into):
        for i, t in enumerate(tokens(24)):
            (lm_loss(m, t) / 8).backward()
            if i % 8 == 7:
                step(o)


@fault("half-accumulation", "gradients", each_time=True)
def gradients_summed_in_a_list_of_bf16(into):
    m = GPT()
    o = sgd(m, 0.1)
    bank = [torch.zeros_like(p, dtype=BF) for p in m.parameters()]
    with watched(m, o, into):
        for i, t in enumerate(tokens(16)):
            with amp(BF):
                value = lm_loss(m, t) / 4
            value.backward()
            for total, p in zip(bank, m.parameters(), strict=True):
                total += p.grad.to(BF)
                p.grad = None
            if i % 4 == 3:
                for total, p in zip(bank, m.parameters(), strict=True):
                    p.grad = total.float()
                    total.zero_()
                step(o)


@fault("vanishing-second-moments")
def rmsprop_bf16_moments(into):
    m = GPT().to(BF)
    pure(m, torch.optim.RMSprop(m.parameters(), lr=0.03, alpha=0.999), tokens(10), into)


@fault("vanishing-second-moments")
def foreach_adam_bf16_moments(into):
    m = CNN(bn=False).to(BF)
    pure(m, torch.optim.Adam(m.parameters(), lr=0.03, foreach=True), images(10), into)


@fault("optimizer-eps-rounds-to-zero", "eps")
def nadam_fp16(into):
    m = RNN().half()
    pure(m, torch.optim.NAdam(m.parameters(), lr=0.001), series(3), into)


@fault("bf16-model-in-fp16", "GPT")
def bf16_checkpoint_file_in_fp16(into):
    m = GPT()
    m.load_state_dict({k: v.to(BF) for k, v in m.state_dict().items()})
    fp16(m, tokens(4), into)


@fault("fp16-parameters")
def lora_fp16_params(into):
    def adapted(base):
        a, b = (nn.Parameter(torch.randn(32, 4).half() * 0.1), nn.Parameter(torch.zeros(4, 32).half()))
        return Net(lambda m, x: m.base(x) + x @ m.a @ m.b, base=base.requires_grad_(False), a=a, b=b)

    m = GPT()
    for b in m.blocks:
        b.attn.proj = adapted(b.attn.proj)
    with contextlib.suppress(ValueError):
        fp16(m, tokens(3), into, adam([p for p in m.parameters() if p.requires_grad]))


def _own_rms(into, weights, dtype):
    """RMSprop of the program's own over FP32 masters of `weights`: averages of squared gradients in `dtype`."""

    def update(p, state, lr):
        if not state:
            state |= {"master": p.detach().float(), "square": torch.zeros_like(p, dtype=dtype)}
        g = p.grad.to(dtype)
        state["square"].mul_(0.9).add_(g.square(), alpha=0.1)
        state["master"].sub_((g / (state["square"].sqrt() + 1e-10)).float().clamp(-1, 1), alpha=lr)
        p.copy_(state["master"])

    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(weights)
    pure(m, OwnOptimizer(m, 0.001, update), vectors(12), into, loss=lambda m, b: 0.01 * ce(m(b[0]), b[1]))


@fault("eps-rounds-to-zero", "optimizer.step of OwnOptimizer", each_time=True)
def own_averages_of_squares_in_float16(into):
    _own_rms(into, torch.float16, torch.float16)


@healthy(each_time=True)
def own_averages_of_squares_in_float32(into):
    _own_rms(into, BF, torch.float32)
