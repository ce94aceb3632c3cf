"""CUDA's autocast, traced without a GPU on fake tensors, which have a device and dtypes but no memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_core import Run, load_run
from amp_core.analysis import precision_map
from amp_core.record.op_trace.op_counter import OpCounter, OpCounterMode
from amp_core.store.writer import RunWriter


class Model(nn.Module):
    """Operators that the autocast lists of the two devices treat differently."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.fc(x))
        return self.head(self.norm(x) + x.softmax(-1) + x.pow(2) + x.cumsum(-1))


@contextmanager
def autocast_on(device: str) -> Iterator[None]:
    """Autocast to float16 on any device; `torch.autocast` refuses a missing one."""
    torch.set_autocast_dtype(device, torch.float16)
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)
        torch.clear_autocast_cache()


def traced(device: str, into: Path) -> Run:
    """A forward of the model and a loss, under autocast on that device."""
    writer = RunWriter(into)
    with FakeTensorMode(), torch.no_grad():
        model = Model()
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                module._parameters[name] = nn.Parameter(
                    torch.empty(parameter.shape, device=device), requires_grad=False
                )
        x, labels = torch.empty(2, 8, device=device), torch.empty(2, dtype=torch.long, device=device)
        tally = OpCounter(model, ("cuda", "cpu"))
        tally.attach()
        with OpCounterMode(tally), autocast_on(device):
            F.cross_entropy(model(x), labels)
        tally.detach()
    assert tally.error is None
    rows = tally.rows()
    writer.append("ops", {"step": [0] * len(rows["op"])} | rows)
    writer.event("traced", name="ops", step=0)
    writer.close()
    return load_run(into)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The same forward on either device."""
    return {device: traced(device, tmp_path_factory.mktemp("traced") / device) for device in ("cpu", "cuda")}


def decided(run: Run) -> dict[str, tuple[Any, Any]]:
    """Policy and result dtype of each operator that is not a cast."""
    ops = run.ops[run.ops["cast_by"].isna()]
    return {o.op.removeprefix("aten::"): (o.policy, o.out_dtype) for o in ops.itertuples()}


def test_policies_on_cuda_are_those_of_cuda(both: dict[str, Run]) -> None:
    decisions = decided(both["cuda"])
    assert decisions["addmm"] == ("lower_precision_fp", "float16")
    assert decisions["native_layer_norm"] == ("fp32", "float32")
    assert decisions["_softmax"] == decisions["cumsum"] == ("fp32_set_opt_dtype", "float32")
    assert decisions["pow"] == ("fp32", "float32")
    assert decisions["gelu"] == ("none", "float16")
    assert decisions["nll_loss_forward"] == ("fp32", "float32")
    assert decisions["_log_softmax"] == ("not applied", "float16")  # cross_entropy requires the dtype of its logits
    assert set(both["cuda"].ops["device"]) == {"cuda:0"}
    view = precision_map(both["cuda"])
    assert (view.device, view.autocast, view.elsewhere.empty) == ("cuda", "fp16", True)


def test_casts_on_cuda_are_made_by_autocast(both: dict[str, Run]) -> None:
    casts = both["cuda"].ops[both["cuda"].ops["cast_by"].notna()]
    assert set(casts["cast_by"]) == {"autocast"}
    norm = both["cuda"].ops.query("op == 'aten::native_layer_norm'").iloc[0]
    assert (norm["casts"], norm["cast_bytes"]) == (1, 2 * 8 * 4)


def test_the_prediction_for_cuda_from_a_cpu_trace_matches_cuda(both: dict[str, Run]) -> None:
    here, there = decided(both["cpu"]), decided(both["cuda"])
    predicted = precision_map(both["cpu"]).elsewhere.set_index("op")
    labels = {"float16": "fp16", "float32": "fp32"}
    differ = {op for op, (policy, dtype) in here.items() if there[op][1] != dtype and there[op][0] != "none"}
    assert set(predicted.index) == differ == {"native_layer_norm", "_softmax", "pow", "cumsum", "_log_softmax"}
    for op in differ:
        assert predicted.loc[op, "would_run"] == labels[there[op][1]], op
        assert predicted.loc[op, "ran"] == labels[here[op][1]], op
    assert isinstance(predicted, pd.DataFrame)
