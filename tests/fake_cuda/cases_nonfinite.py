"""The module with the first non-finite output is named on devices too, where outputs are measured together."""

from pathlib import Path

import pytest
import torch
from torch import nn

from amp_core import load_run
from amp_core.findings import diagnose
from amp_core.record import watch
from amp_core.record.stats import holding
from tests.fake_cuda import kernels
from tests.fake_cuda.loops import Split


@pytest.mark.parametrize(("bound", "missing"), [(2**26, False), (1, False), (2**26, True)])
@pytest.mark.parametrize(("first", "second"), [("cuda:0", "cuda:1"), ("cuda:1", "cuda:1")])
def test_the_first_module_that_overflows_is_named(
    first: str, second: str, bound: int, missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "MIN_BYTES", bound)
    if missing:
        kernels.failing["largest"] = RuntimeError("no compiler")
    torch.manual_seed(0)
    model = Split(first, second)
    large = model.second[0]
    assert isinstance(large, nn.Linear)
    x = torch.randn(4, 6).to(first)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run", every=100):
        for step in range(2):
            with torch.no_grad():
                large.weight.fill_(1e6 if step else 0.1)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    events = load_run(tmp_path / "run").events
    found = events[events.kind == "non-finite output"].iloc[0]
    assert (found["name"], found["step"], found["dtype"], found["op"]) == ("second.0", 1, "float16", "Linear")


@pytest.mark.parametrize("late", [0, 3])
def test_the_operator_that_makes_the_loss_non_finite_is_named_once_its_row_has_arrived(
    late: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Split("cuda:0", "cuda:0")
    x = torch.randn(4, 6).to("cuda:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run", every=100):
        for step in range(late + 12):
            with torch.autocast("cuda", dtype=torch.float16):
                output = model(x).float()
            loss = ((output + 2).abs() * (400 if step >= late else 1)).exp().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    operators = run.events[run.events.kind == "non-finite operator"]
    assert operators["op"].tolist() == ["exp"] and operators["step"].iloc[0] > late
    outputs = run.events[run.events.kind == "non-finite output"]
    assert outputs[["step", "op", "name"]].values.tolist() == [[late, "loss", ""]]
    (finding,) = [f for f in diagnose(run) if f.code == "loss-nonfinite"]
    assert finding.steps[0] == late and "exp" in f"{finding.title} {finding.advice}"
