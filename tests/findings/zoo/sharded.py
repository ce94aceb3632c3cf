"""Faults of sharded training, of ranks, of optimizer states and compiled models."""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from amp_core.store.writer import RunWriter
from tests.findings.zoo.case import WIDTH, Loop, Net, batches, case
from tests.record.sharded import one_process

BF16, FP32 = torch.bfloat16, torch.float32


def _sharded(
    into: Path, policy: MixedPrecisionPolicy, dtype: torch.dtype = FP32, micro: int = 1, steps: int = 6
) -> None:
    """An FSDP2 loop in one process; with `micro`, only the last of so many backward passes of a step reduces."""
    with one_process() as mesh:
        torch.manual_seed(0)
        model = Net().to(dtype)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        loop = Loop(into, model, dtype=None, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
        with loop.watched():
            for i, (x, y) in enumerate(batches(steps * micro)):
                last = i % micro == micro - 1
                model.set_requires_gradient_sync(last)
                out = model(x.to(BF16 if policy.param_dtype else dtype))
                (F.cross_entropy(out if policy.output_dtype == BF16 else out.float(), y) / micro).backward()
                if last:
                    loop.step()


@case("half-reduction", "reduce_dtype")
def reduced_in_bf16(into: Path, faulty: bool) -> None:
    _sharded(into, MixedPrecisionPolicy(BF16, BF16 if faulty else FP32))


@case("half-reduction", "fp16_compress_hook")
def compressing_hook(into: Path, faulty: bool) -> None:
    with one_process():
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(Net())
        model.register_comm_hook(None, default_hooks.fp16_compress_hook if faulty else default_hooks.allreduce_hook)
        Loop(into, model, dtype=None, steps=4).run()


@case("half-accumulation", "gradients")
def accumulated_in_bf16_by_fsdp(into: Path, faulty: bool) -> None:
    _sharded(into, MixedPrecisionPolicy(BF16, BF16 if faulty else FP32), micro=4)


@case("half-accumulation", "gradients")
def megatron_main_grad(into: Path, faulty: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p, dtype=BF16 if faulty else FP32)
    loop = Loop(into, model, dtype=BF16, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
    with loop.watched():
        for i, (x, y) in enumerate(batches(12)):
            loop.backward(loop.loss(x, y) / 3)
            for p in model.parameters():
                p.main_grad += p.grad.to(p.main_grad.dtype)
                p.grad = None
            if i % 3 == 2:
                for p in model.parameters():
                    p.grad = p.main_grad.float()
                    p.main_grad.zero_()
                loop.step()


@case("missing-fp32-masters", "first.weight")
def masters_not_there(into: Path, faulty: bool) -> None:
    _sharded(into, MixedPrecisionPolicy(BF16, FP32), dtype=BF16 if faulty else FP32)


@case("missing-fp32-masters", "first.weight")
def autocast_over_bf16_weights(into: Path, faulty: bool) -> None:
    torch.manual_seed(0)
    model = Net().to(BF16 if faulty else FP32)
    Loop(into, model, dtype=BF16, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), steps=6).run()


@case("half-output-policy", "output_dtype")
def loss_of_a_cast_output(into: Path, faulty: bool) -> None:
    _sharded(into, MixedPrecisionPolicy(BF16, FP32, output_dtype=BF16 if faulty else FP32))


@case("vanishing-second-moments", "weight")
def second_moments_in_bf16(into: Path, faulty: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)).to(BF16)
    betas = (0.9, 0.999 if faulty else 0.95)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, betas=betas, weight_decay=0.0)
    loop = Loop(into, model, dtype=None, optimizer=optimizer)
    with loop.watched():
        for x, y in batches(8):
            loop.backward(F.cross_entropy(model(x.to(BF16)).float(), y))
            loop.step()


@case("rank-dtype-mismatch", "rank 1")
def rank_in_another_dtype(into: Path, faulty: bool) -> None:
    writers = [RunWriter(into, rank=r, world_size=2) for r in (0, 1)]
    for rank, writer in reversed(list(enumerate(writers))):
        dtype = "float32" if faulty and rank == 1 else "bfloat16"
        rows = {"step": [0, 0], "name": ["first", "head"], "kind": ["output_grad"] * 2, "dtype": [dtype] * 2}
        counts = {"numel": [8, 8], "normal": [8, 8], "absmax": [1.0, 1.0], "exp_min": [0, 0], "exp_counts": [[8], [8]]}
        writer.append("steps", {"step": [0, 1], "loss": [1.0, 0.9]})
        writer.append("tensors", rows | counts | {c: [0, 0] for c in ("zero", "subnormal", "inf", "nan")})
        writer.close()


@case("compile-elides-casts", "torch.compile", benign=True)
def casts_left_out(into: Path, faulty: bool) -> None:
    config = {"autocast_dtype": "bfloat16", "inductor_emulates_casts": not faulty}
    with RunWriter(into, config=config) as writer:
        writer.append("steps", {"step": [0, 1], "loss": [1.0, 0.9]})
