"""What the casts of an FP8 training lost, beside what a BF16 run of the same model predicts."""

from pathlib import Path

import pytest
import torch
from torch import nn

from amp_core import RunError, load_run, watch
from amp_core.analysis.numerics.casts import cast_losses_by_operand, conversion, measured_and_predicted

torchao = pytest.importorskip("torchao.float8")


def train(into: Path, *, fp8: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 10))
    if fp8:
        model = torchao.convert_to_float8_training(
            model,
            config=torchao.Float8LinearConfig(emulate=True),
            module_filter_fn=lambda module, name: name != "4",
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, into=into, every=1, blocks=not fp8):
        for _ in range(3):
            x = torch.randn(256, 64)
            x[0] *= 3e4  # so that a scale per tensor loses some values
            model(x).exp().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_measured_casts_agree_with_the_prediction_of_another_run(tmp_path: Path) -> None:
    train(tmp_path / "fp8", fp8=True)
    train(tmp_path / "wide", fp8=False)
    run, wide = load_run(tmp_path / "fp8"), load_run(tmp_path / "wide")
    both = measured_and_predicted(run, wide)
    assert len(both) == 2 * 3 * 2  # layers, operands, products of each
    inputs = both[(both["name"] == "0") & (both["kind"] == "activation")]
    assert (inputs["measured_underflow_frac"] > 0.05).all()
    difference = inputs["measured_underflow_frac"] - inputs["predicted_underflow_frac"]
    assert (difference.abs() < 1e-3).all()
    ratio = both["measured_rel_error"] / both["predicted_rel_error"]
    assert ratio.between(0.94, 1.06).all()  # half a dB
    with pytest.raises(RunError, match="recorded without blocks"):
        measured_and_predicted(run, run)


def test_losses_are_averages_over_samples(tmp_path: Path) -> None:
    train(tmp_path / "fp8", fp8=True)
    run = load_run(tmp_path / "fp8")
    frame = cast_losses_by_operand(run)
    assert len(frame) == 6 and set(frame["samples"]) == {3}
    raw = run.quantized.query("name == '0' and kind == 'activation'")
    mine = frame.query("name == '0' and kind == 'activation'").iloc[0]
    assert mine["underflow_frac"] == pytest.approx(raw["underflow_frac"].mean())
    assert mine["scale"] == raw["scale"].iloc[-1]
    seen = conversion(run)
    assert seen is not None and seen.left["name"].tolist() == ["4"]


def test_a_run_without_casts_has_no_conversion(tmp_path: Path) -> None:
    train(tmp_path / "wide", fp8=False)
    run = load_run(tmp_path / "wide")
    assert conversion(run) is None and cast_losses_by_operand(run).empty
