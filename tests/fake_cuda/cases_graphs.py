"""CUDA graphs: watching and `make_graphed_callables` work in either order."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from amp_core import Run, load_run
from amp_core.record import watch
from tests.fake_cuda.runtime import CUDAGraph


@pytest.mark.parametrize("first", ["watch", "graph"])
@pytest.mark.parametrize("whole", [True, False])
def test_graphed_callables_are_made_before_or_after_watch(first: str, whole: bool, tmp_path: Path) -> None:
    def train(into: Path | None) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.LayerNorm(5), nn.GELU()), nn.Linear(5, 1)).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.randn(4, 6)
        recorder: Any = None

        def start() -> None:
            nonlocal recorder
            recorder = watch(model, optimizer, into=into, every=2) if into is not None else None

        if first == "watch":
            start()
        if whole:
            torch.cuda.make_graphed_callables(model, (x,))
        else:
            torch.cuda.make_graphed_callables(model[1], (torch.randn(4, 5, requires_grad=True),))
        if first == "graph":
            start()
        result = []
        for _ in range(4):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result.append(loss.item())
        if recorder is not None:
            recorder.close()
        return result

    CUDAGraph.replays = 0
    bare = train(None)
    assert CUDAGraph.replays == 2 * 4  # forward and backward
    assert train(tmp_path / "run") == bare and CUDAGraph.replays == 2 * 2 * 4
    run = load_run(tmp_path / "run")
    assert run.steps.step.tolist() == [0, 1, 2, 3] and run.steps.loss.tolist() == pytest.approx(bare)
    assert {"0.weight", "0.bias"} <= set(run.tensors(kind="weight_grad")["name"])
    assert not run.events.detail.str.contains("watching failed").any()


def test_gradients_that_the_next_replay_overwrites_are_measured_before(tmp_path: Path) -> None:
    """A graphed module returns the gradients of its inputs in memory that its next backward writes again."""

    def train(into: Path, graphed: bool) -> Run:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.Linear(5, 5), nn.GELU()), nn.Linear(5, 1)).to("cuda")
        model[1].requires_grad_(False)  # else torch itself accumulates into memory that a replay overwrites
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if graphed:
            torch.cuda.make_graphed_callables(model[1], (torch.randn(4, 5, requires_grad=True),))
        batches = [torch.full((4, 6), 4.0**k) for k in range(4)]
        with watch(model, optimizer, into=into, every=1, kinds=("output_grad",)):
            for step in range(2):
                for x in batches[step : step + 3]:
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return load_run(into)

    runs = [train(tmp_path / str(graphed), graphed) for graphed in (False, True)]
    plain, replayed = (run.tensors().query("name == '0'")[["step", "numel", "absmax", "rms"]] for run in runs)
    assert (plain["numel"] == 3 * 20).all() and np.allclose(plain, replayed, rtol=1e-5)


def test_a_loss_that_is_logged_during_a_capture_does_no_harm(tmp_path: Path) -> None:
    model = nn.Linear(6, 1).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=True)
    x = torch.randn(4, 6)
    recorder = watch(model, optimizer, into=tmp_path / "run", every=1)

    def step() -> None:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.log(loss=loss)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    for _ in range(2):
        step()
    recorder.close()
    run = load_run(tmp_path / "run")
    assert run.steps.step.tolist() == [0, 1, 2] and (run.steps.step_ms > 0).all() and run.steps.loss.notna().all()
    assert not run.events.detail.str.contains("watching failed|operation not permitted").any()
