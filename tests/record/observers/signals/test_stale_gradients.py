"""Gradients that are never cleared are reported, and every way of clearing them is recognised."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from amp_core import diagnose, load_run
from amp_core.record import watch
from amp_core.record.torch_internals import optimizer_steps
from tests.distributed.conftest import FSDP2_ON_CPU
from tests.record.loops import small_model
from tests.record.sharded import one_process

STEPS = 12


def by_none(model, optimizer):
    optimizer.zero_grad(set_to_none=True)


def by_zeros(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def by_the_model(model, optimizer):
    model.zero_grad()


def by_hand(model, optimizer):
    for p in model.parameters():
        p.grad = None


def through_data(model, optimizer):
    for p in model.parameters():
        p.grad.data.zero_()


def with_new_ones(model, optimizer):
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


def decayed(model, optimizer):
    for p in model.parameters():
        p.grad.mul_(0.9)  # momentum by hand


def never(model, optimizer):
    pass


def train(into, clear, *, scaled=False, micro=1, before=False, fused=False, clip=False):
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    with watch(model, optimizer, scaler=scaler if scaled else None, into=into):
        for step in range(STEPS):
            for i in range(micro):
                loss = model(torch.randn(8, 24)).square().mean()
                if before and i == 0 and step:
                    clear(model, optimizer)
                scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            if not before:
                clear(model, optimizer)
    return load_run(into)


def reports(run):
    return run.events[run.events.kind == "kept gradients"]


@pytest.mark.parametrize(
    ("micro", "scaled"),
    [(1, False), (3, True), *(pytest.param(*both, marks=pytest.mark.whole) for both in ((1, True), (3, False)))],
)
@pytest.mark.parametrize("clear", [by_none, by_zeros, by_the_model, by_hand, through_data, with_new_ones, decayed])
def test_cleared_gradients_are_not_reported(tmp_path, clear, micro, scaled):
    for before in (False, True):
        run = train(tmp_path / f"{before}", clear, scaled=scaled, micro=micro, before=before)
        assert reports(run).empty
        assert "unscale-per-microbatch" not in {f.code for f in diagnose(run)}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_stale_gradients_are_reported_once(tmp_path, scaled, micro, clip, fused):
    run = train(tmp_path / "run", never, scaled=scaled, micro=micro, clip=clip, fused=fused)
    (row,) = reports(run).itertuples()
    assert (row.name, row.optimizer) == ("0.weight", 0) and 5 <= row.count <= row.step < 8
    (finding,) = [f for f in diagnose(run) if f.code == "unscale-per-microbatch"]
    assert finding.where == "zero_grad of AdamW" and finding.severity == "error"


def test_two_networks_that_clear_each_others_gradients_late_are_not_reported(tmp_path):
    """The generator's backward adds to gradients that the discriminator has already used; they are cleared before they
    count."""
    torch.manual_seed(0)
    g, d = nn.Linear(4, 8), nn.Linear(8, 1)
    both = nn.ModuleDict({"g": g, "d": d})
    optimizers = [torch.optim.Adam(m.parameters()) for m in (g, d)]
    for to_none in (False, True):
        with watch(both, optimizers, into=tmp_path / f"{to_none}"):
            for _ in range(STEPS):
                optimizers[1].zero_grad(set_to_none=to_none)
                (d(torch.randn(8, 8)).mean() - d(g(torch.randn(8, 4)).detach()).mean()).backward()
                optimizers[1].step()
                optimizers[0].zero_grad(set_to_none=to_none)
                d(g(torch.randn(8, 4))).mean().backward()
                optimizers[0].step()
        assert reports(load_run(tmp_path / f"{to_none}")).empty


@pytest.mark.skipif(not FSDP2_ON_CPU, reason="FSDP2 of torch 2.6 does not run on a CPU")
@pytest.mark.parametrize("clear", [never, by_none, by_zeros])
def test_the_local_shard_of_sharded_gradients_is_checked(tmp_path, clear):
    torch.manual_seed(0)
    model = small_model()
    with one_process() as mesh:
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with watch(model, optimizer, into=tmp_path / "run"):
            for _ in range(STEPS):
                model(torch.randn(8, 24)).square().mean().backward()
                optimizer.step()
                clear(model, optimizer)
    assert reports(load_run(tmp_path / "run")).name.tolist() == (["0.weight"] if clear is never else [])


def test_the_optimizer_whose_gradients_are_not_cleared_is_named(tmp_path):
    torch.manual_seed(0)
    model = small_model()
    optimizers = [torch.optim.AdamW(model[:3].parameters()), torch.optim.SGD(model[3:].parameters(), lr=1e-3)]
    with watch(model, optimizers, into=tmp_path / "run"):
        for _ in range(STEPS):
            model(torch.randn(8, 24)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            optimizers[0].zero_grad()
    assert reports(load_run(tmp_path / "run")).optimizer.tolist() == [1]


def test_a_closure_and_copied_gradients_are_not_reported(tmp_path):
    """LBFGS clears within its step; FP32 master weights of a 16-bit model get their gradients by hand."""
    torch.manual_seed(0)
    model = small_model()
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    lbfgs, other = torch.optim.LBFGS(model.parameters(), max_iter=3), torch.optim.SGD(masters, lr=1e-3)
    for p in masters:
        p.grad = torch.zeros_like(p)

    def closure():
        lbfgs.zero_grad()
        loss = model(torch.ones(8, 24)).square().mean()
        loss.backward()
        return loss

    with watch(model, [lbfgs, other], into=tmp_path / "run"):
        for _ in range(STEPS):
            lbfgs.step(closure)
            for p, q in zip(masters, model.parameters(), strict=True):
                p.grad.copy_(q.grad)
            other.step()
    assert reports(load_run(tmp_path / "run")).empty


def test_hooks_are_removed_once_the_gradients_were_cleared(tmp_path):
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, into=tmp_path / "run"):
        before = len(optimizer_steps._after._handles)
        for _ in range(2):
            model(torch.randn(8, 24)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(optimizer_steps._after._handles) == before - 1
