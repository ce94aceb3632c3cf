"""Loops that scale their loss themselves, without a GradScaler."""

from pathlib import Path

from tests.findings.zoo.case import batches, case, fp16

SCALE = 2.0**12


@case("own-loss-scale", "optimizer.step of AdamW")
def own_scale_is_kept(into: Path, faulty: bool) -> None:
    loop = fp16(into, scaler=None)
    with loop.watched():
        for x, y in batches(8):
            (loop.loss(x, y) * SCALE).backward()
            if not faulty:
                for p in loop.model.parameters():
                    assert p.grad is not None
                    p.grad.div_(SCALE)
            loop.optimizer.step()
            loop.optimizer.zero_grad()
