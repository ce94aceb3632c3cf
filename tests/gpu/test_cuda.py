"""Device clocks, pinned copies, CUDA memory, and that watching never synchronizes. Skipped without CUDA.

python -m pytest tests/gpu
"""

import numpy as np
import pytest
import torch
from torch import nn

from amp_core import load_run
from amp_core.record import watch
from amp_core.record.stats import measure as measuring
from amp_core.record.stats.cuda.measure import measure_cuda
from amp_core.record.stats.plain import measure_plain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def train(into, dtype, *, steps=12, fused=False, every=3, init_scale=2.0**16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 10))
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=init_scale) if dtype == torch.float16 else None
    rec = watch(model, optimizer, scaler=scaler, into=into, every=every) if into is not None else None
    data = torch.Generator(device="cuda").manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(128, 64, generator=data, device="cuda")
        y = torch.randint(0, 10, (128,), generator=data, device="cuda")
        with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(x), y)
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
            if rec:
                rec.log(loss=loss)
        optimizer.zero_grad()
        losses.append(loss.detach())
    if rec:
        rec.close()
    return torch.stack(losses).tolist()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fused", [False, True])
def test_losses_are_the_same_bit_for_bit(tmp_path, dtype, fused):
    assert train(None, dtype, fused=fused) == train(tmp_path / "run", dtype, fused=fused)


@pytest.mark.parametrize("fused", [False, True])
def test_skips_and_scale(tmp_path, fused):
    train(tmp_path / "run", torch.float16, fused=fused, init_scale=2.0**40)
    steps = load_run(tmp_path / "run").steps
    assert steps.skipped.iloc[0] and steps.loss_scale.iloc[0] == 2.0**40
    assert (steps.loss_scale.shift(-1)[steps.skipped].dropna() == steps.loss_scale[steps.skipped][:-1] / 2).all()


def test_phases_are_device_times_that_add_up(tmp_path):
    train(tmp_path / "run", torch.bfloat16)
    steps = load_run(tmp_path / "run").steps
    phases = steps[["data_ms", "forward_ms", "backward_ms", "optimizer_ms", "watch_ms"]]
    assert np.allclose(phases.sum(axis=1), steps.step_ms, rtol=1e-3)
    assert (steps.memory_allocated_bytes > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_measure_agrees_with_the_cpu(dtype):
    torch.manual_seed(0)
    values = (torch.randn(100_003) * torch.exp2(torch.randint(-40, 20, (100_003,)).float())).to(dtype)
    values[:4] = torch.tensor([0.0, float("inf"), -float("inf"), float("nan")])
    on_cpu, on_gpu = measuring.measure([values])[0], measuring.measure([values.cuda()])[0].cpu()
    assert torch.equal(on_cpu[:5], on_gpu[:5]) and torch.equal(on_cpu[7:], on_gpu[7:])
    assert torch.allclose(on_cpu[5:7], on_gpu[5:7], rtol=1e-9)


def test_an_unsampled_step_waits_for_nothing(tmp_path):
    """PyTorch raises on any synchronising call while this mode is on."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    x = torch.randn(32, 64, device="cuda")
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run", every=2):
        for _ in range(6):
            torch.cuda.set_sync_debug_mode("error")
            try:
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = model(x).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert len(load_run(tmp_path / "run").steps) == 6


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_the_kernel_agrees_with_the_specification(dtype):
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (1_000_003 * dtype.itemsize,), dtype=torch.uint8, generator=draw).view(dtype)
    if dtype == torch.float64:  # whose squares are finite, so that sums can be compared
        bits = torch.where(bits.isfinite() & (bits.abs() > 1e150), bits.sign(), bits)
    normal = torch.randn(3_000_000, generator=draw).to(dtype)
    tensors = [bits, normal, normal[3:], normal[:200_000].reshape(400, 500).t(), normal[:0], torch.zeros(70).to(dtype)]
    on_gpu = [t.cuda() for t in tensors]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = measure_cuda(on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    parts = packed.cpu().split([measuring.packed_size(t.dtype) for t in tensors])
    for tensor, got in zip(tensors, parts, strict=True):
        plain = measure_plain(tensor)
        assert torch.equal(got[:5], plain[:5]) and torch.equal(got[7:], plain[7:])
        assert torch.allclose(got[5:7], plain[5:7], rtol=1e-12)
