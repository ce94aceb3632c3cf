"""`ampscope train --nproc` starts torchrun, and records the failure that torchrun reports in the run."""

import json
import subprocess
import sys

import pytest
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from amp_core import RunError, load_run
from amp_core.__main__ import main
from amp_core.analysis import rank_table
from amp_core.store.writer import RunWriter
from amp_core.train import TrainConfig
from amp_core.train.engine.torchrun import launch


def broken_off(folder):
    """A run of two ranks, the second of which was killed without recording an end."""
    writers = [RunWriter(folder, rank=rank, world_size=2, config={"precision": "fp16"}) for rank in (0, 1)]
    for writer in writers:
        writer.event("started", value=1000.0)
        writer.append("steps", {"step": [0, 1, 2], "loss": [1.0] * 3})
    writers[0].close("failed", "RuntimeError: Connection reset by peer")
    return writers[1]


@pytest.fixture
def torchrun_ends(monkeypatch, tmp_path):
    """Make torchrun end with this failure of rank 1."""

    def set_failure(exitcode, message=None):
        file = tmp_path / "error.json"
        if message is not None:
            file.write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": "1"}}}))

        def run(args):
            failure = ProcessFailure(local_rank=1, pid=1, exitcode=exitcode, error_file=str(file))
            raise ChildFailedError("train", {1: failure})

        monkeypatch.setattr(torchrun, "run", run)
        for name in ("AMPSCOPE_LAUNCHED", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
            monkeypatch.setenv(name, "1")

    return set_failure


def test_a_signal_that_only_torchrun_observed_is_recorded_in_the_run(tmp_path, torchrun_ends):
    killed = broken_off(tmp_path / "run")
    torchrun_ends(-9)
    code, reason = launch(2, ["train"], tmp_path / "run")
    assert code == 1 and reason == "rank 1 failed after step 2: killed by SIGKILL. Then rank 0 failed too"
    run = load_run(tmp_path / "run")
    assert (run.status, run.end_reason) == ("failed", reason)
    assert run.head.config["precision"] == "fp16"
    assert rank_table(run)["reason"].tolist()[1] == "killed by SIGKILL"
    killed.close()


def test_bad_input_is_reported_once_for_all_ranks(tmp_path, torchrun_ends):
    torchrun_ends(2, "RunError: into='x' already holds a run; give another")
    with pytest.raises(RunError, match=r"^out='x' already holds a run; give another$"):
        launch(2, ["train"], tmp_path / "run")


def test_a_stopped_launch_has_not_failed(tmp_path, torchrun_ends):
    torchrun_ends(130)
    assert launch(2, ["train"], tmp_path / "run") == (130, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nproc": 0}, "nproc=0 is not possible"),
        ({"nproc": 2, "device": "cuda:1"}, "needs one device each; choose cuda"),
    ],
)
def test_invalid_numbers_of_processes_are_refused(settings, message):
    with pytest.raises(RunError, match=message):
        TrainConfig(**settings)


def test_two_processes_train_from_the_command_line(tmp_path):
    command = "train --workload digits-cnn --precision fp16 --steps 6 --nproc 2 --device cpu --no-evaluate --every 2"
    done = subprocess.run(
        [sys.executable, "-m", "amp_core", *command.split(), "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finished after 6 steps") == 1, "only rank 0 prints"
    run = load_run(tmp_path / "run")
    assert run.head.config["parallel"] == "ddp" and run.status == "finished"
    assert run.steps[["step", "rank"]].to_numpy().tolist() == [[s, r] for s in range(6) for r in (0, 1)]
    losses = run.steps.pivot(index="step", columns="rank", values="loss")
    assert (losses[0] != losses[1]).any(), "each rank has its own batches"
    assert (run.steps.groupby("step")["grad_norm"].nunique() == 1).all(), "all ranks have the same gradient"


def test_several_processes_do_not_share_the_memory_of_one(capsys):
    command = ["train", "--workload", "digits-cnn", "--precision", "fp32", "--nproc", "2", "--out", "memory://x/a"]
    assert main(command) == 2
    assert "memory of one process, but nproc=2" in capsys.readouterr().err
