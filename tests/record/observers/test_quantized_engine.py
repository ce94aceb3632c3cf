"""The casts of Transformer Engine's modules, read from their own objects: a stand-in runs on the CPU."""

from pathlib import Path

import pytest
import torch
from torch import nn

from amp_core import load_run, watch
from tests.record.transformer_engine_stand_in import DelayedScaling, LayerNormLinear, Linear

GROWTH = (1.0, 1.0, 8.0, 1.0, 1.0, 1.0)


def train(into: Path | None) -> tuple[list[float], list[list[float]], list[float]]:
    """Losses; of each step the scales of input, weight and output gradient; and the amax of the input."""
    torch.manual_seed(0)
    model = nn.Sequential(Linear(16, 32, DelayedScaling(amax_history_len=3)), LayerNormLinear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = watch(model, optimizer, into=into, every=1) if into else None
    losses, scales, largest = [], [], []
    for factor in GROWTH:
        x = torch.randn(4, 16) * factor
        meta = model[0].fp8_meta
        scales.append([*meta["scaling_fwd"].scale[:2].tolist(), meta["scaling_bwd"].scale[0].item()])
        largest.append(x.abs().max().item())
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for layer in model:
            layer.update()
        losses.append(loss.item())
    if recorder:
        recorder.close()
    return losses, scales, largest


def test_scales_in_use_and_their_age_come_from_the_modules(tmp_path: Path) -> None:
    losses, scales, largest = train(tmp_path / "run")
    assert losses == train(None)[0]
    frame = load_run(tmp_path / "run").quantized
    assert set(frame["library"]) == {"transformer_engine"} and set(frame["recipe"]) == {"fp8-delayed"}
    of_first = frame[frame["name"].isin(["0", "0.weight"])]
    for i, kind in enumerate(("activation", "weight", "output_grad")):
        mine = of_first[of_first["kind"] == kind]
        assert mine["scale"].tolist() == [step[i] for step in scales]
    inputs = of_first[of_first["kind"] == "activation"]
    assert inputs["amax"].tolist() == largest
    # The burst of step 2 saturates, and is the amax of the two steps after it.
    saturated = inputs["saturated_frac"].to_numpy()
    assert saturated[2] > 0.1 and saturated[3] == 0
    assert inputs["scale_age"].tolist()[3:5] == [1, 2]
    assert inputs["scale"].tolist()[3] == pytest.approx(448 / largest[2])


def test_an_operand_that_only_a_kernel_sees_has_its_amax_and_scale(tmp_path: Path) -> None:
    train(tmp_path / "run")
    frame = load_run(tmp_path / "run").quantized
    (row,) = frame[(frame["name"] == "1") & (frame["kind"] == "activation") & (frame["step"] == 4)].to_dict("records")
    assert row["amax"] > 1 and row["scale"] > 0
    assert all(row[column] != row[column] for column in ("underflow_frac", "rel_error", "nonzero"))


def test_layers_of_transformer_engine_count_as_converted(tmp_path: Path) -> None:
    train(tmp_path / "run")
    events = load_run(tmp_path / "run").events
    (whole,) = events[events["kind"] == "quantized layers"].to_dict("records")
    assert (whole["value"], whole["count"], whole["limit"]) == (1.0, 2, 2)
