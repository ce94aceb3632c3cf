"""Training processes: started, named, listed, and queued one per device."""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from amp_core import RunError, load_run
from amp_core.jobs import find, listing, queue, start
from amp_core.jobs.backends import local
from amp_core.settings.training import TrainConfig
from tests.jobs.job_states import CPU, has_ended, steps_recorded, wait_for_state
from tests.waiting import wait_for


def test_a_job_runs_to_its_end(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    before = time.time_ns()
    job = start(CPU, runs, command=stand_in("short"))
    assert job.state in ("starting", "running") and job.queue_position is None and not job.stop_requested
    assert job.name == "digits-cnn-tiny-fp16-1" and job.device == "cpu" and before < job.created_ns < time.time_ns()
    job = wait_for_state(job.folder, "finished")
    assert steps_recorded(job.folder) == 3 and job.pid is not None
    wait_for(lambda: has_ended(job.pid))
    assert job.console()[-1] == "bye"  # output without a newline from an ended process is kept
    assert TrainConfig.from_dict(job.config) == CPU
    config_file = job.console()[0].split("config ")[1]
    assert TrainConfig.from_dict(json.loads(Path(config_file).read_text())) == CPU


def test_names_are_readable_unique_and_never_paths(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    command = stand_in("short")
    names = [
        start(CPU, runs, name, command=command).name for name in (None, None, "my run", "my run", "../../x/é", "..")
    ]
    assert names == [
        "digits-cnn-tiny-fp16-1",
        "digits-cnn-tiny-fp16-2",
        "my-run",
        "my-run-2",
        "x-é",
        "digits-cnn-tiny-fp16-3",
    ]
    assert sorted(p.name for p in runs.iterdir()) == sorted(names)
    long = queue.folder_name("n" * 500)
    assert len(long) == 60
    own = dataclasses.replace(CPU, workload="some where/my file.py:make", precision="bf16")
    assert queue.folder_name(f"{own.task}-{own.precision}") == "my-file-make-bf16"


def test_the_listing_is_newest_first_and_empty_without_a_folder(
    runs: Path, stand_in: Callable[[str], list[str]]
) -> None:
    assert listing(runs) == []
    names = [start(CPU, runs, command=stand_in("short")).name for _ in range(3)]
    (runs / "no-job").mkdir()
    (runs / "damaged").mkdir()
    (runs / "damaged" / "job.json").write_text('{"argv": []')
    assert [j.name for j in listing(runs)] == names[::-1]
    with pytest.raises(RunError, match=r"job\.json is missing"):
        find(runs / "no-job")
    with pytest.raises(RunError, match="does not hold JSON"):
        find(runs / "damaged")


def test_an_unwritable_runs_folder_raises_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"runs_dir='.*file' cannot be written"):
        start(CPU, tmp_path / "file")


def test_one_job_runs_per_device_and_the_others_wait_in_order(runs: Path, stand_in: Callable[[str], list[str]]) -> None:
    first = start(CPU, runs, "a", command=stand_in("endless"))
    second = start(CPU, runs, "b", command=stand_in("endless"))
    third = start(CPU, runs, "c", command=stand_in("short"))
    other = start(dataclasses.replace(CPU, device="cuda:1"), runs, "d", command=stand_in("short"))
    wait_for_state(first.folder, "running")
    wait_for_state(other.folder, "finished")  # another device does not wait
    assert (find(second.folder).state, find(second.folder).queue_position) == ("queued", 1)
    job = find(third.folder)
    assert (job.state, job.queue_position, job.reason) == ("queued", 2, "waiting for cpu: behind b")

    first.stop()
    pid = find(second.folder).pid
    assert wait_for_state(second.folder, "running").pid == pid  # the process that waited becomes the training
    assert find(third.folder).queue_position == 1
    second.stop()
    assert wait_for_state(third.folder, "finished").console()[0] == "waiting for cpu: behind b"
    assert steps_recorded(third.folder) == 3


def test_device_auto_is_resolved_by_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {d: queue.device_of(TrainConfig(device=d)) for d in ("cpu", "cuda", "cuda:1")}
    assert devices == {"cpu": "cpu", "cuda": "cuda:0", "cuda:1": "cuda:1"}
    for has_cuda, device in ((True, "cuda:0"), (False, "cpu")):
        monkeypatch.setattr(local, "_has_cuda", lambda has_cuda=has_cuda: has_cuda)
        assert queue.device_of(TrainConfig(device="auto")) == device
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local._has_cuda() is False


def test_a_child_imports_the_package_from_a_checkout(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    script = tmp_path / "where.py"
    script.write_text("import amp_core, os, sys; print(amp_core.__file__, os.environ['PYTHONUNBUFFERED'])")
    job = wait_for_state(start(CPU, runs, command=[sys.executable, str(script)]).folder, "failed")
    import amp_core

    assert job.console()[-1] == f"{amp_core.__file__} 1"


@pytest.mark.whole
def test_a_real_training_runs_and_stops_and_a_missing_device_is_refused(runs: Path) -> None:
    config = TrainConfig(workload="digits-cnn", precision="fp16", steps=10**6, every=2, device="cpu")
    training = start(config, runs)
    refused = start(dataclasses.replace(config, device="cuda:99"), runs)
    assert (training.state, refused.device) == ("starting", "cuda:99")
    wait_for_state(training.folder, "running")
    wait_for(lambda: steps_recorded(training.folder) > 3)
    job = training.stop()
    run = load_run(training.folder)
    assert (job.state, run.status, job.reason) == ("stopped", "stopped", "stopped by SIGTERM")
    assert run.head.config["precision"] == "fp16" and len(run.tensors()) > 0
    assert len(run.steps) > 3 and run.steps["loss"].notna().all()
    job = wait_for_state(refused.folder, "failed")
    assert job.reason is not None and job.reason.startswith("device='cuda:99' is not available")
    assert load_run(refused.folder).end_reason == job.reason
