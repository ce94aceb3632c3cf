"""The script that a scheduler runs: it records starts and ends, and resumes a run whose node failed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from amp_core import load_run
from amp_core.jobs import job_file
from amp_core.jobs.backends import job_script
from amp_core.settings.resources import Resources
from tests.run_folders import HEAD
from tests.waiting import DEADLINE_S, wait_for


def run(folder: Path, command: str, resources: Resources, **environment: str) -> str:
    """What job.sh prints."""
    record = job_file.Record((sys.executable, "-c", command), "slurm", 1, resources=resources.to_dict())
    job_file.write(folder, record)
    restarts = '"${SLURM_RESTART_COUNT:-0}"'
    script = job_script.write(folder, record, job_id='"$SLURM_JOB_ID"', restarts=restarts, requeue="false")
    line, env = ["bash", str(script)], os.environ | environment
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=DEADLINE_S).stdout


@pytest.mark.parametrize(("command", "code"), [("", 0), ("raise SystemExit(3)", 3), ("import os; os.abort()", -6)])
def test_start_and_end_are_recorded_with_the_exit_code(tmp_path: Path, command: str, code: int) -> None:
    folder = tmp_path / "a run's folder $HOME"
    folder.mkdir()
    run(folder, command, Resources(on="slurm"), SLURM_JOB_ID="7")
    attempt = job_script.last_attempt(folder)
    assert attempt is not None and (attempt.id, attempt.restarts, attempt.returncode) == ("7", 0, code)


def test_set_up_lines_come_first_and_choose_the_interpreter(tmp_path: Path) -> None:
    own = tmp_path / "bin" / "python"
    own.parent.mkdir()
    own.write_text("#!/bin/sh\necho own python, $ANSWER\n")
    own.chmod(0o755)
    lines = ("export ANSWER=42", f"export PATH={own.parent}:$PATH")
    assert run(tmp_path, "", Resources(on="slurm", setup=lines), SLURM_JOB_ID="7") == "own python, 42\n"


def test_a_restarted_job_ends_the_attempt_whose_node_failed_and_resumes(tmp_path: Path) -> None:
    process = {"machine": "elsewhere", "pid": 2, "started_s": 1.0}
    (tmp_path / "run.json").write_text(json.dumps(HEAD | {"status": "running", "process": process}))
    requeue = Resources(on="slurm", requeue=True)
    printed = run(tmp_path, "import sys; print(sys.argv[1:])", requeue, SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
    assert printed == "['--resume']\n"
    head = load_run(tmp_path).head
    assert (head.status, head.end_reason) == ("stopped", "its job was queued again")


def test_neither_another_process_nor_one_of_the_set_up_lines_keeps_the_script(tmp_path: Path) -> None:
    reused = 'kill() { builtin kill "$@" || [ "$1" = -0 ]; }'  # as if every pid were that of some process
    own = f"sleep 600 >/dev/null 2>&1 & echo $! > {tmp_path}/monitor"
    resources = Resources(on="slurm", requeue=True, setup=(reused, own))
    run(tmp_path, "raise SystemExit(3)", resources, SLURM_JOB_ID="7")
    os.kill(int((tmp_path / "monitor").read_text()), signal.SIGKILL)
    attempt = job_script.last_attempt(tmp_path)
    assert attempt is not None and attempt.returncode == 3


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("import time; time.sleep(600)", 124),
        ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)", -9),
    ],
)
def test_a_time_limit_of_the_script_ends_the_training_and_shows_in_the_log(
    tmp_path: Path, command: str, code: int
) -> None:
    record = job_file.Record((sys.executable, "-S", "-E", "-c", command), "ray", 1)
    script = job_script.write(tmp_path, record, job_id="7", command=job_script.timed(record, 1, 1))
    subprocess.run(["bash", str(script)], stderr=subprocess.DEVNULL, timeout=DEADLINE_S)
    attempt = job_script.last_attempt(tmp_path)
    assert attempt is not None and attempt.returncode == code
    assert attempt.reached(1) and not attempt.reached(None) and not attempt.reached(600)


@pytest.mark.parametrize("code", [0, 1, 124, 130])
def test_a_training_that_ended_before_its_limit_did_not_reach_it(tmp_path: Path, code: int) -> None:
    record = job_file.Record((sys.executable, "-c", f"raise SystemExit({code})"), "ray", 1)
    script = job_script.write(tmp_path, record, job_id="7", command=job_script.timed(record, 600, 1))
    subprocess.run(["bash", str(script)], timeout=DEADLINE_S)
    attempt = job_script.last_attempt(tmp_path)
    assert attempt is not None and attempt.returncode == code and not attempt.reached(600)


def test_a_stop_reaches_a_training_with_a_time_limit(tmp_path: Path) -> None:
    code = (  # the signal comes twice, from this test and from `timeout`
        "import signal, sys, time; "
        "signal.signal(signal.SIGTERM, lambda *_: (signal.signal(signal.SIGTERM, signal.SIG_IGN), sys.exit(3))); "
        "print(flush=True); time.sleep(600)"
    )
    record = job_file.Record((sys.executable, "-S", "-E", "-c", code), "ray", 1)
    script = job_script.write(tmp_path, record, job_id="7", command=job_script.timed(record, 600, 30))
    with open(tmp_path / "printed", "wb") as printed:
        job = subprocess.Popen(["bash", str(script)], stdout=printed, start_new_session=True)
    wait_for(lambda: (tmp_path / "printed").stat().st_size)
    os.killpg(job.pid, signal.SIGTERM)
    job.wait(DEADLINE_S)
    attempt = job_script.last_attempt(tmp_path)
    assert attempt is not None and attempt.returncode == 3


def test_half_a_line_of_the_log_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("start 7 0 n1 1790000000\nend 7 0 0 1790000009\nstart 7 1 n2 1790000010\nend 7")
    attempt = job_script.last_attempt(tmp_path)
    assert attempt is not None and (attempt.restarts, attempt.node, attempt.returncode) == (1, "n2", None)
