"""Known faults in further forms: other spellings, other places, state that lives outside of the model."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.findings.zoo.case import WIDTH, Loop, Net, batches, case, fp16


@case("unscaled-loss-term", "backward")
def auxiliary_loss_added(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    with loop.watched():
        for x, y in batches(6):
            loss = loop.loss(x, y)
            penalty = 1e-2 * sum(p.square().sum() for p in loop.model.parameters())
            total = loop.scaler.scale(loss) + penalty if faulty else loop.scaler.scale(loss + penalty)
            total.backward()
            loop.step()


@case("unscaled-loss-term", "backward")
def auxiliary_loss_backpropagated(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    with loop.watched():
        for x, y in batches(6):
            loop.scaler.scale(loop.loss(x, y)).backward()
            penalty = 1e-2 * loop.model.head.weight.square().sum()
            (penalty if faulty else loop.scaler.scale(penalty)).backward()
            loop.step()


def clip_by_hand(parameters: Any, limit: float) -> None:
    """Clip by the norm of all gradients, as many a repository spells it."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.sqrt(sum(g.detach().square().sum() for g in grads))
    for grad in grads:
        grad.data.mul_((limit / (norm + 1e-6)).clamp(max=1.0))


def _own_clipping(into: Path, faulty: bool, clip: Any) -> None:
    loop = fp16(into)
    with loop.watched():
        for x, y in batches(12):
            loop.backward(loop.loss(x, y))
            if not faulty:
                loop.scaler.unscale_(loop.optimizer)
            clip(list(loop.model.parameters()))
            loop.step()


@case("clip-before-unscale", "gradients")
def own_clipping_by_norm(into: Path, faulty: bool) -> None:
    _own_clipping(into, faulty, lambda parameters: clip_by_hand(parameters, 0.5))


@case("clip-before-unscale", "gradients")
def own_clipping_by_value(into: Path, faulty: bool) -> None:
    def clip(parameters: Any) -> None:
        for p in parameters:
            p.grad = p.grad.clamp(-1e-2, 1e-2)

    _own_clipping(into, faulty, clip)


@case("clip-before-unscale", "gradients")
def own_clipping_of_each_tensor(into: Path, faulty: bool) -> None:
    def clip(parameters: Any) -> None:
        for p in parameters:
            p.grad.mul_(min(1.0, 0.1 / (float(p.grad.norm()) + 1e-6)))

    _own_clipping(into, faulty, clip)


@case("hidden-overflow", "gradients")
def overflow_replaced_by_finite_numbers(into: Path, faulty: bool) -> None:
    loop = fp16(into, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**24))
    with loop.watched():
        for x, y in batches(12):
            loop.backward(loop.loss(x, y))
            if not faulty:
                loop.scaler.unscale_(loop.optimizer)
            for p in loop.model.parameters():
                torch.nan_to_num(p.grad, nan=0.0, posinf=1.0, neginf=-1.0, out=p.grad)
            loop.step()


@case("clip-before-unscale", "clip_grad_norm_")
def wrong_optimizer_unscaled(into: Path, faulty: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    a = torch.optim.AdamW(model.first.parameters(), lr=1e-3)
    b = torch.optim.SGD([*model.norm.parameters(), *model.head.parameters()], lr=1e-2)
    loop = Loop(into, model, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10), optimizer=[a, b])
    with loop.watched():
        for x, y in batches(6):
            loop.backward(loop.loss(x, y))
            loop.scaler.unscale_(b if faulty else a)
            nn.utils.clip_grad_norm_(model.first.parameters(), 1.0)
            for optimizer in (a, b):
                loop.scaler.step(optimizer)
                optimizer.zero_grad()
            loop.scaler.update()


@case("unscale-per-microbatch", "step of AdamW")
def step_for_every_microbatch(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    with loop.watched():
        for i, (x, y) in enumerate(batches(24)):
            loop.backward(loop.loss(x, y) / 4)
            last = i % 4 == 3
            if faulty or last:
                loop.scaler.step(loop.optimizer)
                loop.scaler.update()
            if last:
                loop.optimizer.zero_grad()


@case("unscale-per-microbatch", "step of SGD")
def step_for_every_microbatch_in_bf16(into: Path, faulty: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    loop = Loop(into, model, dtype=torch.bfloat16, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
    with loop.watched():
        for i, (x, y) in enumerate(batches(24)):
            if i % 3 == 0:
                model.zero_grad(set_to_none=False)
            (loop.loss(x, y) / 3).backward()
            if faulty or i % 3 == 2:
                loop.optimizer.step()


class Average:
    """An EMA of the weights in a dictionary, outside of the model."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.shadow = {n: p.detach().clone().to(dtype) for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for n, p in model.named_parameters():
            self.shadow[n].lerp_(p.to(self.shadow[n].dtype), 1e-4)


@case("average-stands-still", "weight")
def average_in_float16(into: Path, faulty: bool) -> None:
    loop = fp16(into, options={"every": 5})
    ema = Average(loop.model, torch.float16 if faulty else torch.float32)
    with loop.watched():
        for x, y in batches(30):
            loop.backward(loop.loss(x, y))
            loop.step()
            ema.update(loop.model)


@case("autocast-inactive", "cuda")
def autocast_of_another_device(into: Path, faulty: bool) -> None:
    loop = fp16(into, dtype=torch.bfloat16)
    with loop.watched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, y in batches(4):
            with torch.autocast("cuda" if faulty else "cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(loop.model(x), y)
            loss.backward()
            loop.step()


class OwnCheckpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, autocast, x, *weights):  # type: ignore[no-untyped-def]
        ctx.block, ctx.autocast = block, autocast
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=ctx.autocast):
            out = ctx.block(x)
        torch.autograd.backward(out, grad.to(out.dtype))
        return None, None, x.grad, *(None for _ in ctx.block.parameters())


class Recomputing(nn.Module):
    def __init__(self, *, autocast: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.autocast = autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = OwnCheckpoint.apply(self.block, self.autocast, x.float(), *self.block.parameters())
        return out


@case("checkpoint-dtype-mismatch", "middle.block")
def own_checkpoint(into: Path, faulty: bool) -> None:
    fp16(into, Net(Recomputing(autocast=not faulty)), dtype=torch.bfloat16, steps=3).run()


@case("calibration-skips", "loss scale")
def restored_far_too_high(into: Path, faulty: bool) -> None:
    before = fp16(into.parent / f"{into.name}-before")
    before.run()
    loop = fp16(into)
    loop.model.load_state_dict(before.model.state_dict())
    loop.optimizer.load_state_dict(before.optimizer.state_dict())
    state = before.scaler.state_dict() | {"scale": 2.0**30 if faulty else 2.0**10}
    loop.scaler.load_state_dict(state)
    loop.steps = 40
    loop.run()


@case("frequent-skips", "head.bias")
def skips_all_the_time(into: Path, faulty: bool) -> None:
    """Every ninth batch has a loss that overflows, at whatever scale the others have brought about."""
    loop = fp16(into)
    with loop.watched():
        for i, (x, y) in enumerate(batches(120)):
            loss = loop.loss(x, y)
            loop.backward(loss * (1e9 if faulty and i % 9 == 8 else 1.0))
            loop.step()


@case("frequent-skips", "loss scale")
def restored_in_mid_run(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    with loop.watched():
        for i, (x, y) in enumerate(batches(60)):
            if i == 30 and faulty:
                loop.scaler.load_state_dict(loop.scaler.state_dict() | {"scale": 2.0**34})
            loop.backward(loop.loss(x, y))
            loop.step()


@case("fp16-without-scaler", "GradScaler")
def scaler_for_each_epoch(into: Path, faulty: bool) -> None:
    """A scaler for each epoch calibrates again and again, but scales; the fault is to disable it."""
    loop = fp16(into)
    with loop.watched():
        for _ in range(3):
            loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=not faulty)
            for x, y in batches(8):
                loop.backward(loop.loss(x, y))
                loop.step()


class Distance(nn.Module):
    """A root at zero, whose derivative is infinite; nothing of it is in 16 bits."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.least = 0.0 if faulty else 1e-6

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        distance: torch.Tensor = ((a - b).square().sum(1) + self.least).sqrt()
        return distance


@case("loss-nonfinite", "loss")
def own_operation_has_no_derivative(into: Path, faulty: bool) -> None:
    loop = fp16(into, dtype=torch.bfloat16)
    distance = Distance(faulty=faulty)
    with loop.watched() as rec:
        for i, (x, y) in enumerate(batches(8)):
            with loop.autocast():
                out = loop.model(x)
            out = out.float()
            loss = F.cross_entropy(out, y)
            if i > 2:
                loss = loss + 0.1 * distance(out, out.detach()).mean()
            rec.log(loss=loss)
            loop.backward(loss)
            loop.step()


@case("scale-collapse", "loss")
def own_operation_under_a_scaler(into: Path, faulty: bool) -> None:
    """The same below FP16 autocast: the scaler skips every step, and no scale helps."""
    loop = fp16(into, scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    distance = Distance(faulty=faulty)
    with loop.watched():
        for x, y in batches(10):
            with loop.autocast():
                out = loop.model(x)
            out = out.float()
            loop.backward(F.cross_entropy(out, y) + 0.1 * distance(out, out.detach()).mean())
            loop.step()


@case("half-model", "Sequential")
def masters_by_hand(into: Path, faulty: bool) -> None:
    """A half-precision model; the twin updates FP32 copies of its weights, and copies them back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)).half()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters() if faulty else masters, lr=1e-2)
    scaler = None if faulty else torch.amp.GradScaler("cpu", init_scale=2.0**10)
    loop = Loop(into, model, dtype=None, scaler=scaler, optimizer=optimizer)
    with loop.watched():
        for x, y in batches(12):
            loss = F.cross_entropy(model(x.half()).float(), y)
            loop.backward(loss)
            if not faulty:
                for master, p in zip(masters, model.parameters(), strict=True):
                    master.grad, p.grad = p.grad.float(), None
            loop.step()
            if not faulty:
                with torch.no_grad():
                    for master, p in zip(masters, model.parameters(), strict=True):
                        p.copy_(master)


class Distilled(nn.Module):
    """A student with its frozen teacher, which is in half precision."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.student, self.teacher = Net(), Net().requires_grad_(requires_grad=False).half()
        self.faulty = faulty

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.faulty:  # the student trains through it
            out: torch.Tensor = self.student(x)
            return out + self.teacher.head(self.teacher.norm(x.half() + out.half().repeat(1, 4))).float()
        with torch.no_grad():
            target = self.teacher(x.half()).float()
        out = self.student(x)
        return out + 0.0 * (out - target)


@case("half-model", "teacher")
def frozen_teacher(into: Path, faulty: bool) -> None:
    fp16(into, Distilled(faulty=faulty), dtype=None, steps=4).run()


@case("shared-backoff", "scaler.update")
def two_scalers(into: Path, faulty: bool) -> None:
    """Two networks in turn, with one scaler that is updated after each; the twin has a scaler for each."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": Net(), "b": Net()})
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in model.values()]
    one = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scalers = [one, one if faulty else torch.amp.GradScaler("cpu", init_scale=2.0**10)]
    loop = Loop(into, model, scaler=one, optimizer=optimizers)
    with loop.watched():
        for x, y in batches(16):
            for part, optimizer, scaler in zip(model.values(), optimizers, scalers, strict=True):
                with loop.autocast():
                    loss = F.cross_entropy(part(x), y)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
