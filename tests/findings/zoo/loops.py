"""Faults in the order of a loop's calls, in its scaler and its schedule."""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from amp_core.store.writer import RunWriter
from tests.findings.zoo.case import WIDTH, Loop, Net, batches, case, fp16


@case("calibration-skips", "loss scale", benign=True)
def calibration(into: Path, faulty: bool) -> None:
    fp16(into, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**22 if faulty else 2.0**10)).run()


@case("fp16-without-scaler", "GradScaler")
def no_scaler(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    if faulty:
        loop.scaler = None
    loop.run()


@case("scaler-with-bf16", "GradScaler")
def scaled_bf16(into: Path, faulty: bool) -> None:
    fp16(into, dtype=torch.bfloat16, scaler=torch.amp.GradScaler("cpu", enabled=faulty)).run()


@case("scale-unbounded", "loss scale")
def zero_gradients(into: Path, faulty: bool) -> None:
    loop = fp16(into, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4))
    with loop.watched():
        for x, y in batches(12):
            loop.backward(loop.loss(x, y) * (0.0 if faulty else 1.0))
            loop.step()


@case("scale-unbounded", "loss scale")
def tiny_gradients(into: Path, faulty: bool) -> None:
    loop = fp16(into, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**20 if faulty else 2.0**8, growth_interval=1))
    with loop.watched():
        for x, y in batches(10):
            loop.backward(loop.loss(x, y) * (1e-16 if faulty else 1.0))
            loop.step()


def _clipped(into: Path, faulty: bool, clip: Callable[[Iterable[nn.Parameter], float], object], limit: float) -> None:
    loop = fp16(into)
    with loop.watched():
        for x, y in batches(8):
            loop.backward(loop.loss(x, y))
            if not faulty:
                loop.scaler.unscale_(loop.optimizer)
            clip(loop.model.parameters(), limit)
            loop.step()


@case("clip-before-unscale", "clip_grad_norm_")
def clip_scaled(into: Path, faulty: bool) -> None:
    _clipped(into, faulty, nn.utils.clip_grad_norm_, 1.0)


@case("clip-before-unscale", "clip_grad_value_")
def clip_scaled_by_value(into: Path, faulty: bool) -> None:
    _clipped(into, faulty, nn.utils.clip_grad_value_, 0.1)


@case("logged-scaled-values", "loss")
def log_scaled_loss(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    with loop.watched() as rec:
        for x, y in batches(6):
            loss = loop.loss(x, y)
            scaled = loop.scaler.scale(loss)
            scaled.backward()
            rec.log(loss=scaled if faulty else loss)
            loop.step()


@case("logged-scaled-values", "grad_norm")
def log_scaled_norm(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    with loop.watched() as rec:
        for x, y in batches(6):
            loop.backward(loop.loss(x, y))
            if not faulty:
                loop.scaler.unscale_(loop.optimizer)
            rec.log(grad_norm=nn.utils.get_total_norm([p.grad for p in loop.model.parameters()]))
            loop.step()


@case("unscale-per-microbatch", "unscale_")
def unscale_each(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    with loop.watched(), contextlib.suppress(RuntimeError):
        for i, (x, y) in enumerate(batches(12)):
            loop.backward(loop.loss(x, y) / 3)
            if faulty or i % 3 == 2:
                loop.scaler.unscale_(loop.optimizer)
            if i % 3 == 2:
                loop.step()


@case("unscale-per-microbatch", "unscale_")
def update_each(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    with loop.watched():
        for i, (x, y) in enumerate(batches(12)):
            loop.backward(loop.loss(x, y) / 3)
            if faulty and i % 3 != 2:
                loop.scaler.unscale_(loop.optimizer)
                loop.scaler.update()
            if i % 3 == 2:
                loop.step()


@case("unscale-per-microbatch", "zero_grad of AdamW")
def never_cleared(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    loop.dtype = torch.bfloat16
    loop.scaler = None
    with loop.watched():
        for i, (x, y) in enumerate(batches(24)):  # the twin accumulates gradients of two batches on purpose
            loop.backward(loop.loss(x, y))
            if i % 2:
                loop.optimizer.step()
                if not faulty:
                    loop.optimizer.zero_grad()


@case("missing-scaler-update", "scaler.update")
def no_update(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    with contextlib.suppress(RuntimeError), loop.watched():
        for i, (x, y) in enumerate(batches(6)):
            loop.backward(loop.loss(x, y))
            loop.scaler.unscale_(loop.optimizer)
            loop.scaler.step(loop.optimizer)
            if not faulty or i < 3:
                loop.scaler.update()
            loop.optimizer.zero_grad()


@case("optimizer-step-bypasses-scaler", "optimizer.step of AdamW")
def bypass(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    with loop.watched():
        for x, y in batches(6):
            loop.backward(loop.loss(x, y))
            if faulty:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
            else:
                loop.step()


@case("optimizer-step-bypasses-scaler", "optimizer.step of AdamW")
def step_twice(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    with loop.watched():
        for x, y in batches(6):
            loop.backward(loop.loss(x, y))
            loop.scaler.step(loop.optimizer)
            if faulty:
                loop.optimizer.step()
            loop.scaler.update()
            loop.optimizer.zero_grad()


@case("scheduler-steps-on-skip", "scheduler.step")
def schedule(into: Path, faulty: bool) -> None:
    loop = fp16(into, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**21))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 20)
    with loop.watched():
        for x, y in batches(12):
            loop.backward(loop.loss(x, y))
            before = loop.scaler.get_scale()
            loop.step()
            if faulty or loop.scaler.get_scale() >= before:
                scheduler.step()


@case("update-without-step", "scaler.update")
def update_twice(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    with contextlib.suppress(AssertionError), loop.watched():
        for x, y in batches(6):
            loop.backward(loop.loss(x, y))
            loop.step()
            if faulty:
                loop.scaler.update()


def _write_run(into: Path, steps: int, calls: str, warning: str = "") -> None:
    """A run as `watch` writes it, with `steps` steps and then these calls."""
    with RunWriter(into) as writer:
        writer.event("started", detail="watching Net")
        writer.event("calls", "zero_grad backward optimizer.step", step=0)
        if steps:
            writer.append("steps", {"step": range(steps), "loss": [1.0] * steps})
        writer.event("calls", calls, step=steps)
        if warning:
            writer.event("warning", "not recorded", warning, steps)


@case("recording-incomplete", "steps")
def no_steps(into: Path, faulty: bool) -> None:
    _write_run(into, 0 if faulty else 3, " ".join(["backward"] * (40 if faulty else 1)))


@case("recording-incomplete", "steps")
def steps_of_another_optimizer(into: Path, faulty: bool) -> None:
    _write_run(into, 8, " ".join(["backward zero_grad"] * (40 if faulty else 1)))


@case("recording-incomplete", "watch")
def watching_stops(into: Path, faulty: bool) -> None:
    text = "watching failed, and nothing is recorded; training continues: ValueError: no"
    _write_run(into, 8, "backward", text if faulty else "output_grad: hooks do not reach into a compiled graph")


def _two_networks(
    into: Path, scaler: torch.amp.GradScaler
) -> tuple[Loop, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    a = torch.optim.AdamW(model.first.parameters(), lr=1e-3)
    b = torch.optim.SGD([*model.norm.parameters(), *model.head.parameters()], lr=1e-2)
    return Loop(into, model, scaler=scaler, optimizer=[a, b]), a, b


@case("shared-backoff", "SGD (optimizer 1)")
def one_for_all(into: Path, faulty: bool) -> None:
    loop, a, b = _two_networks(into, torch.amp.GradScaler("cpu", init_scale=2.0**10))
    with loop.watched():
        for i, (x, y) in enumerate(batches(40)):
            loop.backward(loop.loss(x, y))
            if faulty and i > 26 and i % 4 == 0:
                loop.model.head.weight.grad[0, 0] = float("inf")
            loop.scaler.step(a)
            loop.scaler.step(b)
            loop.scaler.update()
            a.zero_grad()
            b.zero_grad()


@case("shared-backoff", "scaler.update")
def update_after_each(into: Path, faulty: bool) -> None:
    loop, a, b = _two_networks(into, torch.amp.GradScaler("cpu", init_scale=2.0**10))
    with loop.watched():
        for x, y in batches(8):
            for optimizer in (a, b):
                loop.backward(loop.loss(x, y))
                loop.scaler.step(optimizer)
                if faulty or optimizer is b:
                    loop.scaler.update()
                a.zero_grad()
                b.zero_grad()


@case("no-gradients", "AdamW")
def other_model(into: Path, faulty: bool) -> None:
    loop = fp16(into)
    called = Net() if faulty else loop.model
    with contextlib.suppress(AssertionError), loop.watched():
        for x, y in batches(3):
            with loop.autocast():
                loss = F.cross_entropy(called(x), y)
            loop.backward(loss)
            loop.step()


@case("no-gradients", "loss")
def detached(into: Path, faulty: bool) -> None:
    loop = fp16(into, dtype=None)
    with contextlib.suppress(RuntimeError), loop.watched():
        for x, y in batches(3):
            loss = loop.loss(x, y)
            loop.backward(loss.detach() if faulty else loss)
            loop.step()


@case("scaler-state-not-restored", "GradScaler")
def resume(into: Path, faulty: bool) -> None:
    before = fp16(into.parent / f"{into.name}-before")
    before.run()
    loop = fp16(into)
    loop.model.load_state_dict(before.model.state_dict())
    loop.optimizer.load_state_dict(before.optimizer.state_dict())
    if not faulty:
        loop.scaler.load_state_dict(before.scaler.state_dict())
    loop.run()


@case("rank-scale-desync", "rank 1")
def ranks(into: Path, faulty: bool) -> None:
    steps = list(range(8))
    writers = [RunWriter(into, rank=r, world_size=2, config={"scaler": {"enabled": True}}) for r in (0, 1)]
    for rank, writer in reversed(list(enumerate(writers))):
        skips = [faulty and rank == 1 and s == 5 for s in steps]
        scales = [2.0**16 if not (faulty and rank == 1 and s > 5) else 2.0**15 for s in steps]
        writer.append("steps", {"step": steps, "loss": [1.0] * 8, "loss_scale": scales, "skipped": skips})
        writer.close()


@case("rank-ended", "rank 1")
def rank_dies(into: Path, faulty: bool) -> None:
    writers = [RunWriter(into, rank=r, world_size=2) for r in (0, 1)]
    for rank, writer in enumerate(writers):
        writer.event("started", value=1000.0 + rank)
        writer.append("steps", {"step": [0, 1, 2], "loss": [1.0] * 3})
        ended = ("failed", "ValueError: boom") if rank else ("failed", "RuntimeError: Connection closed by peer")
        writer.close(*(ended if faulty else ("finished", None)))


class Branched(Net):
    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, rare: float = 0.0) -> torch.Tensor:
        out = super().forward(x)
        return out + rare * self.rare(x).float().square() if rare else out


@case("branch-always-skipped", "rare")
def branch(into: Path, faulty: bool) -> None:
    loop = fp16(into, Branched())
    with loop.watched():
        for i, (x, y) in enumerate(batches(32)):
            rare = (1e30 if faulty else 1.0) if i % 8 == 7 else 0.0
            with loop.autocast():
                loss = F.cross_entropy(loop.model(x, rare) if rare else loop.model(x), y)
            loop.backward(loss)
            loop.step()


@case("anomaly-mode-with-scaler", "set_detect_anomaly")
def anomaly(into: Path, faulty: bool) -> None:
    with torch.autograd.set_detect_anomaly(faulty):
        fp16(into, steps=3).run()


@case("scaled-gradient-penalty", "torch.autograd.grad")
def penalty(into: Path, faulty: bool) -> None:
    loop = fp16(into, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8)))
    with loop.watched():
        for x, y in batches(4):
            loss = loop.loss(x, y)
            scaled = torch.autograd.grad(loop.scaler.scale(loss), list(loop.model.parameters()), create_graph=True)
            grads = scaled if faulty else [g / loop.scaler.get_scale() for g in scaled]
            loop.backward(loss + 1e-3 * sum(g.square().sum() for g in grads).sqrt())
            loop.step()


@case("watch-overhead", "watch", benign=True)
def watching(into: Path, faulty: bool) -> None:
    with RunWriter(into) as writer:
        steps = list(range(40))
        writer.append("steps", {"step": steps, "step_ms": [10.0] * 40, "watch_ms": [2.0 if faulty else 0.1] * 40})
