"""A loop on several of torch's threads is watched like one on a single thread.

The suite runs with one thread per process. Training uses several, and statistics of large tensors run on torch's
threads.
"""

import pytest
import torch
from torch import nn

from amp_core import load_run
from amp_core.record.stats.numba import measure
from tests.record.loops import train

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def with_a_large_layer(model: nn.Module) -> nn.Module:
    """Add a layer large enough that several threads measure its gradient."""
    assert 3 * measure.SHARE <= 256 * 768
    return nn.Sequential(nn.Linear(24, 256), nn.ReLU(), nn.Linear(256, 768), nn.ReLU(), nn.Linear(768, 24), model)


@pytest.mark.usefixtures("several_threads")
@pytest.mark.parametrize("precision", DTYPES)
def test_losses_and_weights_are_the_same_bit_for_bit(tmp_path, precision):
    assert torch.get_num_threads() == 3
    dtype = DTYPES[precision]
    plain = train(None, dtype, steps=4, wrap=with_a_large_layer)
    watched = train(tmp_path / "run", dtype, steps=4, every=1, wrap=with_a_large_layer)
    assert plain.losses == watched.losses
    for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(a, b)
    rows = load_run(tmp_path / "run").tensors(kind="weight_grad", name="2.weight")
    assert rows["step"].tolist() == [0, 1, 2, 3]
    counted = rows[["zero", "subnormal", "normal", "inf", "nan"]].sum(axis=1)
    assert (counted == 256 * 768).all() and (rows["exp_counts"].map(sum) == rows["subnormal"] + rows["normal"]).all()
