"""Faults of sharded trainings, of ranks and of compiled models, in forms that the zoo does not have."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from amp_core.store.writer import RunWriter
from tests.findings.other_forms.form import fault, healthy
from tests.findings.other_forms.loops import BF, adam, amp, bf16, ce, lm_loss, sgd, step, watched
from tests.findings.other_forms.models import CNN, GPT, images, tokens, vectors
from tests.findings.zoo.jobs import ended_by_a_scheduler
from tests.record.sharded import one_process

FP32 = torch.float32


def _replicated(into, hook):
    """A CNN under DDP with this communication hook."""
    with one_process():
        m = nn.parallel.DistributedDataParallel(CNN(bn=False))
        m.register_comm_hook(None, hook)
        o = adam(m)
        with watched(m, o, into):
            for x, y in images(4):
                ce(m(x), y).backward()
                step(o)


@fault("half-reduction", "summed", each_time=True)
def hook_of_the_loop_reduces_in_half(into):
    def summed(state, bucket):
        narrow = bucket.buffer().half()
        work = torch.distributed.all_reduce(narrow, async_op=True)
        return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))

    _replicated(into, summed)


@healthy()
def hook_of_the_loop_reduces_in_fp32(into):
    def summed(state, bucket):
        work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    _replicated(into, summed)


def _reduced_by_hand(into, dtype):
    with one_process():
        m = GPT()
        o = adam(m)
        with watched(m, o, into):
            for t in tokens(5):
                with amp(BF):
                    value = lm_loss(m, t)
                value.backward()
                for p in m.parameters():
                    narrow = p.grad.to(dtype)
                    torch.distributed.all_reduce(narrow)
                    p.grad = narrow.float()
                reported = value.detach().to(BF)
                torch.distributed.all_reduce(reported)  # a number for the log is no gradient
                step(o)


@fault("half-reduction", "all_reduce", each_time=True)
def gradients_reduced_by_hand_in_bf16(into):
    _reduced_by_hand(into, BF)


@healthy(each_time=True)
def gradients_reduced_by_hand_in_fp32(into):
    _reduced_by_hand(into, FP32)


def _sharded(into, model, data, loss, outer, parts=()):
    """Under FSDP2, with a policy of its own for the outermost module."""
    with one_process() as mesh:
        for part in parts:
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(BF, FP32))
        fully_shard(model, mesh=mesh, mp_policy=outer)
        o = sgd(model, 0.05)
        with watched(model, o, into):
            for b in data:
                loss(model, b).backward()
                step(o)


@fault("half-output-policy", "output_dtype")
def language_model_with_blocks_of_its_own_policy(into):
    def loss(m, t):
        return F.cross_entropy(m(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())

    m = GPT()
    _sharded(into, m, tokens(4), loss, MixedPrecisionPolicy(BF, FP32, output_dtype=BF), m.blocks)


def _reducing_block(into, reduced):
    """Under FSDP2, with a policy of its own for the blocks."""
    with one_process() as mesh:
        m = GPT()
        for block in m.blocks:
            fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(BF, reduced))
        fully_shard(m, mesh=mesh, mp_policy=MixedPrecisionPolicy(BF, FP32))
        o = sgd(m, 0.05)
        with watched(m, o, into):
            for t in tokens(4):
                lm_loss(m, t).backward()
                step(o)


@fault("half-reduction", "reduce_dtype", each_time=True)
def blocks_alone_reduced_in_bf16(into):
    _reducing_block(into, BF)


@healthy(each_time=True)
def blocks_reduced_in_fp32(into):
    _reducing_block(into, FP32)


@fault("half-output-policy", "output_dtype")
def regression_with_a_mean_squared_error(into):
    def loss(m, b):
        out = m(b[0])
        return F.mse_loss(out, b[0][:, :10].to(out.dtype))

    m = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))
    _sharded(into, m, vectors(4), loss, MixedPrecisionPolicy(BF, FP32, output_dtype=BF))


def _ranks(into, steps=(), tensors=(), ends=()):
    """A run of as many ranks as there are tables: columns of `steps` and `tensors`, and how each rank ended."""
    count = max(len(steps), len(tensors), len(ends))
    writers = [RunWriter(into, rank=r, world_size=count) for r in range(count)]
    for rank, writer in reversed(list(enumerate(writers))):
        number = 6
        writer.event("started", value=1000.0 + rank)
        writer.append("steps", {"step": range(number), "loss": [1.0] * number} | (dict(steps[rank]) if steps else {}))
        if tensors:
            numbers = {"numel": [8], "normal": [8], "absmax": [1.0], "exp_min": [0], "exp_counts": [[8]]}
            rest = {c: [0] for c in ("zero", "subnormal", "inf", "nan")}
            writer.append("tensors", {"step": [3]} | numbers | rest | {k: [v] for k, v in tensors[rank].items()})
        writer.close(*(ends[rank] if ends else ("finished", None)))


@fault("rank-dtype-mismatch", "rank 2")
def third_rank_with_weight_gradients_in_half(into):
    def rows(dtype):
        return {"name": "blocks.0.mlp.weight", "kind": "weight_grad", "dtype": dtype}

    _ranks(into, tensors=[rows("float32"), rows("float32"), rows("float16")])


@fault("rank-dtype-mismatch", "rank 1")
def activations_of_one_rank_in_fp32(into):
    def rows(dtype):
        return {"name": "encoder.conv", "kind": "activation", "dtype": dtype}

    _ranks(into, tensors=[rows("bfloat16"), rows("float32")])


@fault("rank-scale-desync", "rank 1")
def rank_that_grew_its_scale_alone(into):
    grown = [{"loss_scale": [1024.0] * 6}, {"loss_scale": [1024.0] * 3 + [2048.0] * 3}]
    _ranks(into, steps=[s | {"skipped": [False] * 6} for s in grown])


@fault("rank-scale-desync", "rank 2")
def rank_that_skips_what_others_make(into):
    made = {"loss_scale": [1024.0] * 6, "skipped": [False] * 6}
    _ranks(into, steps=[made, made, made | {"skipped": [False] * 5 + [True]}])


@fault("rank-ended", "rank 2")
def rank_of_four_out_of_memory(into):
    lost = ("failed", "RuntimeError: Connection reset by peer")
    _ranks(into, ends=[lost, lost, ("failed", "OutOfMemoryError: out of memory"), lost])


@fault("rank-ended", "rank 1")
def rank_with_an_error_in_its_data(into):
    lost = ("failed", "RuntimeError: [../gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]")
    _ranks(into, ends=[lost, ("failed", "KeyError: 'label'")])


@fault("compile-elides-casts", "torch.compile")
def compiled_cnn(into):
    m = CNN(bn=False)
    bf16(torch.compile(m), images(3), into, adam(m))


@fault("compile-elides-casts", "torch.compile")
def compiled_block_of_a_language_model(into):
    m = GPT(depth=1)
    m.blocks[0] = torch.compile(m.blocks[0])
    bf16(m, tokens(3), into, adam(m))


@fault("compile-autocast-mismatch|backward-under-autocast", "compile")
def compiled_language_model_backward_inside(into):
    m = torch.compile(GPT(depth=1), backend="aot_eager")
    o = adam(m)
    with watched(m, o, into):
        for t in tokens(3):
            with amp(BF):
                lm_loss(m, t).backward()
            step(o)


@fault("scaler-with-bf16", "GradScaler", each_time=True)
def scaler_beside_bf16_and_clipping(into):
    m = CNN()
    o, s = (adam(m), torch.amp.GradScaler("cpu"))
    with watched(m, o, into, s):
        for x, y in images(4):
            with amp(BF):
                value = ce(m(x), y)
            s.scale(value).backward()
            s.unscale_(o)
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            step(o, s)


@fault("fp16-parameters")
def model_in_half_with_a_scaler(into):
    m = CNN(bn=False).half()
    o, s = (adam(m, eps=1e-4), torch.amp.GradScaler("cpu"))
    with contextlib.suppress(ValueError), watched(m, o, into, s):
        for x, y in images(3):
            s.scale(ce(m(x.half()), y)).backward()
            step(o, s)


@fault("update-without-step", "scaler.update", each_time=True)
def update_before_the_step(into):
    m = CNN()
    o, s = (adam(m), torch.amp.GradScaler("cpu"))
    with contextlib.suppress(AssertionError), watched(m, o, into, s):
        for x, y in images(3):
            with amp():
                value = ce(m(x), y)
            s.scale(value).backward()
            s.update()
            s.step(o)


@fault("optimizer-eps-rounds-to-zero", "eps")
def radam_fp16(into):
    m = CNN(bn=False).half()
    o = torch.optim.RAdam(m.parameters(), lr=1e-3)
    with watched(m, o, into):
        for x, y in images(3):
            ce(m(x.half()), y).backward()
            step(o)


@fault("lost-weight-decay")
def coupled_decay_of_sgd_in_bf16(into):
    m = CNN(bn=False).to(BF)
    o = sgd(m, 0.5, weight_decay=1e-4)
    with watched(m, o, into):
        for x, y in images(12):
            ce(m(x.to(BF)), y).backward()
            step(o)


@fault("autocast-not-in-thread", "second")
def second_encoder_in_a_thread_pool(into):
    from concurrent.futures import ThreadPoolExecutor

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = (nn.Linear(64, 16), nn.Linear(64, 16), nn.Linear(32, 10))

        def forward(self, x):
            with ThreadPoolExecutor(1) as pool:
                later = pool.submit(self.second, x)
                now = self.first(x)
            return self.head(torch.cat([now.float(), later.result().float()], -1))

    bf16(Two(), vectors(4), into)


@fault("killed-by-scheduler", "slurm job 12")
def job_that_another_took_the_place_of(into):
    ended_by_a_scheduler(into, "preemption", "PREEMPTED")


@fault("killed-by-scheduler", "slurm job 12")
def job_whose_node_failed(into):
    ended_by_a_scheduler(into, "node failure", "NODE_FAIL")
