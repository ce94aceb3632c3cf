"""`watch(…, blocks=True)`: which operands are recorded, on which steps, and that the training stays as it was."""

import numpy as np
import pytest
import torch
from torch import nn

from amp_core import RunError, load_run
from amp_core.quantization import scalings
from amp_core.record import watch


class Conv1D(nn.Module):
    """GPT-2's layer in transformers: its weight is [inputs, outputs]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 48), nn.GELU(), nn.Dropout(0.1), Conv1D(48, 16), nn.LayerNorm(16), nn.Linear(16, 5)
    )


def train(net: nn.Module, steps: int = 5, into=None, **options) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    recorder = watch(net, optimizer, into=into, **options) if into is not None else None
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = net(torch.randn(4, 9, 24)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if recorder is not None:
        recorder.close()
    return losses


def test_the_operands_of_each_linear_layer_are_recorded_on_sampled_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("amp_core.record.observers.time_cap.time.thread_time", lambda: 0.0)  # on a busy machine too
    train(model(), into=tmp_path / "run", every=2, blocks=True)
    blocks = load_run(tmp_path / "run").blocks
    assert sorted(blocks["step"].unique()) == [0, 2, 4]
    found = {(r.name, r.kind) for r in blocks.itertuples()}
    assert found == {
        (name if kind != "weight" else f"{name}.weight", kind)
        for name in ("0", "3", "5")
        for kind in ("weight", "activation", "output_grad")
    }
    first = blocks[blocks["step"] == 0]
    assert len(first) == sum(
        3 * sum(1 if block in ("tensor", "128x128", "16x16") else 2 for block, _ in scalings(kind))
        for kind in ("weight", "activation", "output_grad")
    )
    numel = {"0.weight": 24 * 48, "3.weight": 48 * 16, "0": 36 * 24}
    for name, number in numel.items():
        rows = first[(first["name"] == name) & first["kind"].isin(["weight", "activation"])]
        assert (rows["nonzero"] == number).all()
    assert (blocks["counts"].map(sum) == blocks["nonzero"]).all()
    assert all(len(r.top_sums) == len(r.counts) == len(r.top_squares) for r in blocks.itertuples())


def test_the_weight_of_conv1d_lies_as_that_of_a_linear_layer(tmp_path):
    net = model()
    weight = net[3].weight.detach().clone()
    train(net, 1, into=tmp_path / "run", every=1, blocks=True)
    blocks = load_run(tmp_path / "run").blocks
    row = blocks[(blocks["name"] == "3.weight") & (blocks["block"] == "row") & (blocks["product"] == "forward")].iloc[0]
    largest = weight.abs().amax(0).double() / 1.75  # of each output, over the inputs: the contraction of forward
    assert row["top_squares"].sum() == pytest.approx(float((largest.square() * 48).sum()), rel=1e-5)


def test_losses_are_the_same_bit_for_bit_and_no_hook_stays(tmp_path):
    bare = train(model())
    net = model()
    assert train(net, into=tmp_path / "run", every=1, blocks=True) == bare
    assert all(not m._forward_hooks and not m._backward_hooks for m in net.modules())


def test_nothing_is_recorded_unless_asked_for(tmp_path):
    train(model(), 1, into=tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.blocks.empty and run.head.config["blocks"] is False


def test_only_wanted_layers_are_measured(tmp_path):
    train(model(), 1, into=tmp_path / "run", blocks=True, include=["0", "0.*"])
    assert set(load_run(tmp_path / "run").blocks["name"]) == {"0", "0.weight"}


def test_the_first_of_several_micro_batches_is_measured(tmp_path):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with watch(net, optimizer, into=tmp_path / "run", every=1, blocks=True):
        for _ in range(2):
            net(torch.randn(3, 24)).sum().backward()
        optimizer.step()
    blocks = load_run(tmp_path / "run").blocks
    assert (blocks[(blocks["kind"] == "activation") & (blocks["name"] == "0")]["nonzero"] == 72).all()
    assert not blocks.duplicated(["step", "name", "kind", "product", "block", "scaling"]).any()


def test_under_autocast_16_bit_operands_are_recorded_as_they_are(tmp_path):
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    wrapped = nn.Sequential(nn.Identity(), net, nn.Identity())
    with watch(wrapped, optimizer, into=tmp_path / "run", blocks=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = wrapped(torch.randn(4, 8)).float().sum()
        loss.backward()
        optimizer.step()
    dtypes = load_run(tmp_path / "run").blocks.groupby("kind")["dtype"].unique().map(list).to_dict()
    assert dtypes == {"activation": ["float32"], "output_grad": ["bfloat16"], "weight": ["float32"]}


def test_a_model_without_linear_layers_says_so(tmp_path):
    net = nn.Sequential(nn.Conv1d(3, 4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with watch(net, optimizer, into=tmp_path / "run", blocks=True):
        net(torch.randn(2, 3, 7)).sum().backward()
        optimizer.step()
    events = load_run(tmp_path / "run").events
    assert "blocks: the model has no linear layer" in set(events["detail"])


def test_a_device_without_a_kernel_says_that_plain_torch_measures(tmp_path, monkeypatch):
    from amp_core.record.stats import dispatch

    monkeypatch.setitem(dispatch._kernels, "cpu", {})
    train(model(), 1, into=tmp_path / "run", blocks=True)
    run = load_run(tmp_path / "run")
    assert "no kernel measures blocks on cpu; plain torch is used, which is slower" in set(run.events["detail"])
    assert len(run.blocks)


@pytest.mark.parametrize("wrong", [1, "yes", None])
def test_another_value_is_one_sentence(tmp_path, wrong):
    with pytest.raises(RunError, match=rf"^blocks={wrong!r} is not True or False; blocks=True records"):
        train(model(), 1, into=tmp_path / "run", blocks=wrong)


def test_a_failure_within_is_an_event_and_the_training_goes_on(tmp_path, monkeypatch):
    bare = train(model())
    made = iter(range(10**6))

    def fails(matrix: torch.Tensor, kind: str) -> list:
        if next(made):
            raise ValueError("broken")
        return []

    monkeypatch.setattr("amp_core.record.observers.blocks.measure_blocks", fails)
    assert train(model(), into=tmp_path / "run", every=1, blocks=True) == bare
    assert load_run(tmp_path / "run").events["detail"].str.contains("broken").any()


def test_the_scale_of_the_loss_changes_no_distance(tmp_path):
    """Output gradients are recorded as they are, times the loss scale."""
    rows = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        with watch(net, optimizer, scaler=scaler, into=tmp_path / str(scale), blocks=True):
            torch.manual_seed(2)
            scaler.scale(net(torch.randn(6, 8)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        frame = load_run(tmp_path / str(scale)).blocks
        rows.append(frame[frame["kind"] == "output_grad"].reset_index(drop=True))
    for one, other in zip(rows[0]["counts"], rows[1]["counts"], strict=True):
        assert np.array_equal(one, other)
    assert np.allclose(rows[1]["absmax"], 1024 * rows[0]["absmax"])


@pytest.mark.parametrize("every", [1, 2])
def test_sampled_steps_are_left_out_where_recording_takes_too_much_of_the_time(tmp_path, monkeypatch, every):
    from amp_core.record.observers import time_cap

    clock = iter(range(10**9))  # each look at the clock takes a second, so that recording is almost all there is
    monkeypatch.setattr(time_cap.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(time_cap.time, "thread_time", lambda: float(next(clock)))
    train(model(), 20, into=tmp_path / "run", every=every, blocks=True)
    monkeypatch.undo()
    run = load_run(tmp_path / "run")
    events = run.events[run.events["name"] == "blocks"]["detail"].tolist()
    if every == 1:
        assert sorted(run.blocks["step"].unique()) == list(range(20)) and not events
        return
    assert sorted(run.blocks["step"].unique()) == [0]
    assert events[0].endswith("stay within 1% of the time; every=1 records all")
    assert events[1:] == ["recorded on 1 of 10 sampled steps"]


def test_left_out_steps_are_measured_again_once_there_was_time(tmp_path, monkeypatch):
    from amp_core.record.observers import time_cap

    class Clock:
        now = 0.0

        def __call__(self):
            self.now += 0.001
            return self.now

    clock = Clock()
    monkeypatch.setattr(time_cap.time, "perf_counter", clock)
    monkeypatch.setattr(time_cap.time, "thread_time", clock)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with watch(net, optimizer, into=tmp_path / "run", every=2, blocks=True):
        for _ in range(60):
            net(torch.randn(4, 9, 24)).square().mean().backward()
            optimizer.step()
            clock.now += 0.2
    monkeypatch.undo()
    recorded = load_run(tmp_path / "run").blocks["step"].nunique()
    assert 2 < recorded < 30
