"""A model that is run once more keeps its buffers, counters and random numbers."""

import torch
from torch import nn

from amp_core.record.model.unchanged import unchanged


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.calls, self.last = nn.BatchNorm1d(4), nn.Dropout(0.5), 0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.last = (x.shape[0],)
        return self.dropout(self.norm(x))


def test_a_run_in_between_leaves_no_trace() -> None:
    model, x = Counting(), torch.randn(8, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with unchanged(model, torch.device("cpu")):
        model(x)
    assert torch.equal(torch.rand(3), expected)
    assert (model.calls, model.last) == (0, None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
