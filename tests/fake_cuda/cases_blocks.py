"""Block statistics of a model on a device, by a kernel and by plain torch, against those on the CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from amp_core import Run, load_run
from amp_core.record import watch
from tests.fake_cuda import kernels


def trained(device: str, into: Path) -> Run:
    """Two sampled steps of a small model."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(40, 24), nn.GELU(), nn.Linear(24, 3)), torch.randn(50, 40)
    model, x = model.to(device), x.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=into, every=1, blocks=True, kinds=("weight_grad",)):
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return load_run(into)


@pytest.mark.parametrize("missing", [False, True])
def test_blocks_on_a_device_are_those_on_the_cpu(missing: bool, tmp_path: Path) -> None:
    if missing:
        kernels.failing["blocks"] = RuntimeError("no compiler")
    there, here = trained("cuda:1", tmp_path / "cuda"), trained("cpu", tmp_path / "cpu")
    assert len(here.blocks) == len(there.blocks) > 50
    keys = ["step", "name", "kind", "product", "block", "scaling", "numel", "nonzero"]
    assert here.blocks[keys].equals(there.blocks[keys])
    for column in ("counts", "ties", "top_sums", "top_squares"):
        for one, other in zip(here.blocks[column], there.blocks[column], strict=True):
            assert np.allclose(one, other, rtol=1e-5)
    slower = there.events[there.events["name"] == "statistics"]
    assert len(slower) == missing
