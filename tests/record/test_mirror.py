"""`rec.mirror`: another tracker gets the headline numbers, and cannot harm the training."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_core import RunError, load_run, watch
from amp_core.record import mirror as mirroring


class Tracker:
    """A tracker with only the required method."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows[step] = values


def trained(into: Path, tracker: Any, steps: int = 12) -> list[float]:
    """Train shortly in FP16; returns the losses."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    with watch(model, optimizer, scaler=scaler, into=into, every=5) as rec:
        if tracker is not None:
            rec.mirror(tracker)
        for step in range(steps):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(4, 8)).float().square().mean()
            if step == 7:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_a_tracker_receives_the_headline_numbers_of_every_step(tmp_path: Path) -> None:
    tracker = Tracker()
    trained(tmp_path / "a", tracker)
    steps = load_run(tmp_path / "a").steps
    assert list(tracker.rows) == steps.step.tolist() == list(range(12))
    for column in ("loss", "loss_scale", "grad_norm", "lr", "skipped", "step_ms", "memory_peak_bytes"):
        sent = [tracker.rows[step][f"amp/{column}"] for step in steps.step]
        assert sent == pytest.approx(steps[column].astype(float).tolist(), nan_ok=True), column
    assert [s for s, row in tracker.rows.items() if row["amp/skipped"]] == [7]


def test_values_that_were_not_measured_are_not_sent() -> None:
    row = {"step": 3, "rank": 1, "optimizer": 0, "loss": None, "lr": 0.5, "skipped": False}
    assert mirroring.headlines(row) == {"amp/lr/rank1": 0.5, "amp/skipped/rank1": 0.0}


@pytest.mark.parametrize("error", [ConnectionError("no route to host"), SystemExit(3), KeyboardInterrupt()])
def test_a_tracker_that_fails_ends_the_mirroring_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    class Failing(Tracker):
        def log(self, values: dict[str, float], step: int) -> None:
            super().log(values, step)
            if step == 2:
                raise error

    alone, tracker = trained(tmp_path / "alone", None), Failing()
    assert repr(trained(tmp_path / "a", tracker)) == repr(alone)  # bit for bit; every NaN is formatted alike
    run = load_run(tmp_path / "a")
    assert run.status == "finished" and len(run.steps) == 12 and list(tracker.rows) == [0, 1, 2]
    reports = run.events[run.events.name == "mirror"]
    assert len(reports) == 1 and type(error).__name__ in reports.detail.iloc[0]


def test_a_tracker_that_hangs_delays_neither_steps_nor_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirroring, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(mirroring, "MAX_WAITING", 4)
    release = threading.Event()

    class Hanging(Tracker):
        def log(self, values: dict[str, float], step: int) -> None:
            release.wait(600)

    try:
        trained(tmp_path / "a", Hanging())
        run = load_run(tmp_path / "a")
        assert run.status == "finished" and len(run.steps) == 12
        assert "too slow" in run.events[run.events.name == "mirror"].detail.iloc[0]
    finally:
        release.set()


def test_an_object_without_a_log_method_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    rec = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), into=tmp_path / "a")
    with rec, pytest.raises(RunError, match=r"^tracker=str has no log\(\); give a wandb run"):
        rec.mirror("wandb")


def test_wandb_receives_the_numbers_in_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="test", mode="offline", dir=str(tmp_path))
    try:
        trained(tmp_path / "a", run)
        assert run.summary["amp/loss_scale"] == load_run(tmp_path / "a").steps.loss_scale.iloc[-1]
        assert run.step == 11  # the last values that it received
    finally:
        run.finish()
    assert load_run(tmp_path / "a").events.name.tolist().count("mirror") == 0
