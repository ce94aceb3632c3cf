"""Trainings that take turns: their order, their records, and the effect of a stop or a failure."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from amp_core import load_run
from amp_core.train import TrainConfig, train
from amp_core.train.turns.interleave import Member, default_block, interleave, order_of, turns_of
from amp_core.train.turns.participant import Turns
from tests.waiting import wait_for

OWN = """
import torch
from amp_core.train.workloads import Workload

def plain():
    batches = [(torch.ones(4, 8),)] * 10
    return Workload(torch.nn.Linear(8, 8), batches, lambda model, batch: model(batch[0]).square().mean())

def broken():
    made = plain()
    made.batches = made.batches[:3] + ["no tensor"]
    return made
"""


@pytest.fixture
def quick(tmp_path: Path) -> dict[str, object]:
    """Settings of a very short training that does not need the imports of the built-in workloads."""
    (tmp_path / "own.py").write_text(OWN)
    return {"workload": f"{tmp_path / 'own.py'}:plain", "device": "cpu", "every": 1000, "evaluate": False}


def test_blocks_are_a_twentieth_of_the_run_and_at_most_ten_steps() -> None:
    assert [default_block(steps) for steps in (1, 8, 40, 100, 200, 5000)] == [1, 1, 2, 5, 10, 10]


def test_turns_add_up_to_the_steps() -> None:
    assert turns_of(TrainConfig(steps=25), 10) == [10, 10, 5]
    assert turns_of(TrainConfig(steps=5), 10) == [5]


def test_no_turn_begins_in_profiled_steps() -> None:
    assert turns_of(TrainConfig(steps=40, profile=(20, 23)), 10) == [10, 20, 10]
    assert turns_of(TrainConfig(steps=40, profile=(18, 20)), 10) == [10, 10, 10, 10]
    assert turns_of(TrainConfig(steps=40, profile=(0, 3)), 10) == [10, 10, 10, 10]


def test_every_second_round_is_in_reverse_order() -> None:
    orders = order_of(3, 7, seed=1)
    assert len(orders) == 7 and all(sorted(order) == [0, 1, 2] for order in orders)
    assert all(orders[i + 1] == orders[i][::-1] for i in (0, 2, 4))
    assert orders == order_of(3, 7, seed=1) and len({tuple(o) for o in order_of(3, 40, 0)}) > 3


def test_a_training_requests_its_turn_and_ends_without_a_reply() -> None:
    message, settled = io.StringIO(), []
    turns = Turns(lambda: None, io.StringIO("2\n1\n"), message, lambda: settled.append(1))
    assert [turns(), turns(), turns()] == [None, None, None]
    assert message.getvalue() == "ready\ndone\n"
    assert turns() == "stopped: the comparison it was part of ended"
    assert len(settled) == 3  # the device is idle before the turn of another


def test_a_stopped_training_records_the_reason() -> None:
    turns = Turns(lambda: "stopped by SIGINT", io.StringIO(""), io.StringIO(), lambda: None)
    assert turns() == "stopped by SIGINT"


@pytest.fixture(scope="module")
def three_trainings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[int]]:
    """Two trainings and one that fails in its fourth step, in turns of four steps: their folder, exit codes and
    progress."""
    folder = tmp_path_factory.mktemp("three")
    (folder / "own.py").write_text(OWN)
    members = [
        Member(
            TrainConfig(
                workload=f"{folder / 'own.py'}:{task}",
                precision=precision,
                device="cpu",
                steps=12,
                every=1000,
                evaluate=False,
                seed=3,
            ),
            folder / name,
        )
        for name, task, precision in (
            ("fp32", "plain", "fp32"),
            ("bf16", "plain", "bf16"),
            ("broken", "broken", "fp32"),
        )
    ]
    reported: list[int] = []
    return folder, interleave(members, 4, reported.append), reported


def test_trainings_take_turns_and_waiting_counts_for_no_step(
    three_trainings: tuple[Path, list[int], list[int]],
) -> None:
    folder, codes, reported = three_trainings
    assert codes[:2] == [0, 0] and reported == [4, 8, 12]
    runs = [load_run(folder / name) for name in ("fp32", "bf16")]
    about = [run.head.config["comparison"] for run in runs]
    assert about[0] == about[1] and about[0]["block_steps"] == 4
    assert about[0]["recipes"] == ["fp32", "bf16", "fp32"]
    for run in runs:
        steps = run.steps
        assert steps["step"].tolist() == list(range(12))
        waits_ms = 1e3 * np.diff(steps["time_s"].to_numpy()) - steps["step_ms"].to_numpy()[1:]
        # The second of the three rounds is in reverse order, so each training waits for at least one turn of the other.
        # That time lies between steps 3 and 4 or 7 and 8, outside every step.
        of_the_other = next(r for r in runs if r is not run).steps["step_ms"].to_numpy().reshape(3, 4).sum(axis=1)
        assert waits_ms[3] + waits_ms[7] >= of_the_other.min()
    assert runs[0].steps["loss"].iloc[0] == pytest.approx(runs[1].steps["loss"].iloc[0], rel=2e-2)


def test_the_others_continue_if_a_training_fails(three_trainings: tuple[Path, list[int], list[int]]) -> None:
    folder, codes, _ = three_trainings
    assert codes == [0, 0, 1]
    assert load_run(folder / "fp32").status == load_run(folder / "bf16").status == "finished"
    failed = load_run(folder / "broken")
    assert failed.status == "failed" and len(failed.steps) == 3


def test_settings_that_the_first_member_refuses_end_the_comparison(
    quick: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    members = [Member(TrainConfig(**quick, precision=p), tmp_path / "file" / p) for p in ("fp32", "bf16")]
    (tmp_path / "file").write_text("a file, not a folder")
    assert interleave(members, 2, lambda done: None) == [2]
    assert capfd.readouterr().err.count("ampscope: ") == 1


@pytest.mark.whole
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_all_trainings_cleanly_and_keeps_their_records(
    quick: dict[str, Any], tmp_path: Path, number: int
) -> None:
    command = [sys.executable, "-m", "amp_core", "compare", "--workload", quick["workload"], "--steps", "100000"]
    command += ["--precisions", "fp32,bf16", "--device", "cpu", "--block", "5", "--out", os.fspath(tmp_path / "cmp")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        folders = [tmp_path / "cmp" / name for name in ("fp32", "bf16")]
        try:
            wait_for(lambda: all((f / "run.json").exists() and len(load_run(f).steps) >= 10 for f in folders))
        finally:
            process.send_signal(number)
        assert process.wait(300) == 130
    for folder in folders:
        run = load_run(folder)
        assert run.status == "stopped" and run.end_reason == f"stopped by {signal.Signals(number).name}"
        assert len(run.steps) >= 10


def test_each_seed_is_trained_under_its_own_name(
    quick: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from amp_core.__main__ import main

    def one_after_the_other(members: Sequence[Member], *_: object) -> list[int]:
        return [0 for member in members if train(member.config, member.folder)]

    # In this process, which has already imported torch.
    monkeypatch.setattr("amp_core.cli.compare.interleave", one_after_the_other)
    out = tmp_path / "cmp"
    argv = ["compare", "--workload", quick["workload"], "--steps", "6", "--device", "cpu", "--precisions", "fp32"]
    assert main([*argv, "--seeds", "2", "--seed", "5", "--out", os.fspath(out)]) == 0
    assert sorted(p.name for p in out.iterdir()) == ["fp32", "fp32-seed6"]
    assert [load_run(out / n).head.config["seed"] for n in ("fp32", "fp32-seed6")] == [5, 6]
    assert "fp32-seed6" in capsys.readouterr().out
    for flag in ("--seeds", "--block"):
        assert main([*argv, flag, "0", "--out", os.fspath(tmp_path / "x")]) == 2
        assert f"{flag[2:]}=0 is not possible" in capsys.readouterr().err
