"""The recipe in the head of a run depends on the dtype that forward computes in and that of the updated weights."""

import copy

import pytest
import torch
from torch import nn

from amp_core import load_run, watch

STEPS = 3


def with_masters(into, dtype, *, scaler=None):
    """A 16-bit model, updated through FP32 copies of its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(dtype)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-3)
    with watch(model, optimizer, scaler=scaler, into=into):
        for _ in range(STEPS):
            loss = model(torch.randn(4, 8, dtype=dtype)).float().square().mean()
            (scaler.scale(loss) if scaler else loss).backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.float()
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
            model.zero_grad()
    return load_run(into)


@pytest.mark.parametrize(
    ("dtype", "scaled", "recipe"),
    [
        (torch.float16, False, "fp16-unscaled"),
        (torch.float16, True, "fp16"),
        (torch.bfloat16, False, "bf16"),
        (torch.float32, False, "fp32"),
    ],
)
def test_a_half_model_with_fp32_master_weights_computes_in_16_bits(tmp_path, dtype, scaled, recipe):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    run = with_masters(tmp_path / "run", dtype, scaler=scaler)
    assert run.head.config["precision"] == recipe and run.head.config["autocast_dtype"] is None
    assert len(run.steps) == STEPS and run.steps.loss.notna().all() and run.steps.grad_norm.notna().all()


def go(into, model, parameters=None):
    optimizer = torch.optim.SGD(model.parameters() if parameters is None else parameters, lr=1e-3)
    dtype = next(model.parameters()).dtype
    with watch(model, optimizer, into=into):
        for _ in range(STEPS):
            model(torch.randn(4, 8, dtype=dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return load_run(into).head.config["precision"]


class Adapted(nn.Module):
    """A frozen 16-bit base with FP32 adapters."""

    def __init__(self, dtype):
        super().__init__()
        self.base = nn.Linear(8, 64, dtype=dtype).requires_grad_(False)
        self.adapter = nn.Linear(8, 64, bias=False)

    def forward(self, x):
        return self.base(x).float() + self.adapter(x.float())


def test_the_recipe_follows_from_the_dtypes_of_the_model_and_the_updated_weights(tmp_path):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    assert go(tmp_path / "fp32", copy.deepcopy(model)) == "fp32"
    assert go(tmp_path / "fp16-pure", copy.deepcopy(model).half()) == "fp16-pure"
    assert go(tmp_path / "bf16-pure", copy.deepcopy(model).bfloat16()) == "bf16-pure"
    adapted = Adapted(torch.bfloat16)
    assert go(tmp_path / "adapted", adapted, adapted.adapter.parameters()) == "bf16"


def test_the_recipe_of_a_model_that_is_cast_after_watch_follows_from_its_new_dtype(tmp_path):
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, into=tmp_path / "run"):
        model.bfloat16()
        model(torch.randn(4, 8, dtype=torch.bfloat16)).float().mean().backward()
        optimizer.step()
    assert load_run(tmp_path / "run").head.config["precision"] == "bf16-pure"
