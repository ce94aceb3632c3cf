"""The command that runs the GPU checks, on a machine without a GPU."""

import json
import subprocess
import sys
import time
import zipfile

import pytest
import torch

from tests.gpu import __main__ as command
from tests.gpu import checks, runner
from tests.gpu.checks import Check, Place, Row
from tests.paths import ROOT

CPU = torch.device("cpu")


ABSENT = ("pytest", "hypothesis", "streamlit", "plotly")
"""Packages that a machine with a GPU may lack."""
PROGRAM = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({ABSENT}))
runpy.run_module("tests.gpu", run_name="__main__", alter_sys=True)
"""


def run_command(*arguments, **options):
    line = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, **options)


@pytest.mark.whole
def test_it_runs_on_a_cpu_and_writes_its_table_and_a_run(tmp_path):
    out = tmp_path / "out"
    only = "kernel-exact,watch-waits,samples"
    done = run_command("--device", "cpu", "--quick", "--out", str(out), "--only", only, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((out / "results.json").read_text())
    verdicts = {row["check"]: row["verdict"] for row in results["rows"]}
    assert verdicts["kernel exact, float16"] == verdicts["sample run gpt2-small-bf16"] == "pass"
    assert verdicts["watch-waits"] == "skipped"
    assert results["machine"]["torch"] == torch.__version__
    assert (out / "results.md").read_text() in done.stdout
    assert (out / "runs" / "gpt2-small-bf16" / "run.json").is_file()
    assert not list(out.glob("worker-*"))
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        names = set(archive.namelist())
    assert names == {f"out/{p.relative_to(out).as_posix()}" for p in out.rglob("*") if p.is_file()}


def test_it_says_what_is_missing_for_want_of_a_package(monkeypatch):
    monkeypatch.setattr(command, "OPTIONAL", {"no_such_module": "no counters", "json": "nothing"})
    monkeypatch.setenv("CC", sys.executable)
    assert command.missing() == ["no_such_module: no counters"]


def refusal(monkeypatch, capsys, *arguments):
    """What the command prints, in this process, before it refuses these arguments."""
    monkeypatch.setattr(sys, "argv", ["tests.gpu", *arguments])
    assert command.main() == 2
    return capsys.readouterr().out


def test_a_folder_with_runs_is_refused(monkeypatch, capsys, tmp_path):
    (tmp_path / "runs").mkdir()
    assert "holds runs already" in refusal(monkeypatch, capsys, "--device", "cpu", "--quick", "--out", str(tmp_path))


@pytest.mark.parametrize("part", checks.PARTS)
def test_every_check_of_a_part_has_its_time_within_nine_minutes(part):
    reserved = [check.seconds for check in checks.all_checks() if check.part == part]
    assert reserved and sum(reserved) <= 9 * 60 - 5


def test_checks_are_of_one_part_each():
    assert {check.part for check in checks.all_checks()} == set(checks.PARTS)
    assert len({check.name for check in checks.all_checks()}) == len(checks.all_checks())


def test_a_check_that_does_not_exist_is_refused(monkeypatch, capsys):
    assert "kernel-exat is not a check" in refusal(monkeypatch, capsys, "--device", "cpu", "--only", "kernel-exat")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    assert "finds no CUDA device" in refusal(monkeypatch, capsys)


def good(place):
    yield Row("good", "", "fine", "pass")


def raises(place):
    yield Row("before", "", "kept", "pass")
    raise ValueError("a check's own mistake")


def test_a_check_that_raises_is_reported_and_the_rest_goes_on(tmp_path, capsys):
    wanted = [Check("raises", raises, 5, 1), Check("cuda", good, 5, 1, cuda_only=True), Check("good", good, 5, 1)]
    runner.work(wanted, CPU, True, tmp_path, tmp_path / "lines", time.time() + 60)
    rows = [Row(**r) for r in map(json.loads, (tmp_path / "lines").read_text().splitlines()) if "check" in r]
    assert [(r.check, r.verdict) for r in rows] == [
        ("before", "pass"),
        ("raises", "error"),
        ("cuda", "skipped"),
        ("good", "pass"),
    ]
    assert rows[1].measured == "ValueError: a check's own mistake"
    assert "test_command.py" in capsys.readouterr().err


def test_a_check_gets_what_others_left_over_and_never_what_later_ones_need(tmp_path):
    wanted = [Check("first", good, 10, 1), Check("second", good, 20, 1), Check("third", good, 5, 1)]
    runner.work(wanted, CPU, True, tmp_path, tmp_path / "lines", time.time() + 100)
    given = [r["seconds"] for r in map(json.loads, (tmp_path / "lines").read_text().splitlines()) if "begin" in r]
    at_most = [75, 95, 100 - runner.MARGIN_S]  # less the time that passed until then
    assert all(most - 20 < seconds <= most for seconds, most in zip(given, at_most, strict=True))


DYING = """
import json, os, sys, time
names = sys.argv[sys.argv.index("--worker") + 1].split(",")
file = open(sys.argv[sys.argv.index("--results") + 1], "a")
for name in names:
    print(json.dumps({"begin": name, "seconds": 1 if name == "hangs" else 30}), file=file, flush=True)
    if name == "dies":
        print("a last word", flush=True)
        os._exit(9)
    if name == "hangs":
        time.sleep(60)
    print(json.dumps({"check": name, "asked": "", "measured": "", "verdict": "pass"}), file=file, flush=True)
    print(json.dumps({"end": name}), file=file, flush=True)
    if name == "last of its process":
        break
"""


def test_a_process_that_dies_or_hangs_costs_one_check(tmp_path, monkeypatch):
    class Fake(runner._Worker):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self._command = [sys.executable, "-c", DYING]

    monkeypatch.setattr(runner, "_Worker", Fake)
    monkeypatch.setattr(runner, "MARGIN_S", 0.2)
    names = ["one", "dies", "two", "last of its process", "hangs", "three"]
    messages = []
    rows = runner.run_checks([Check(name, good, 5, 1) for name in names], CPU, True, tmp_path, 60, messages.append)
    assert [(r.check, r.verdict) for r in rows] == [
        ("one", "pass"),
        ("dies", "error"),
        ("two", "pass"),
        ("last of its process", "pass"),
        ("hangs", "error"),
        ("three", "pass"),
    ]
    assert rows[1].measured == "the process ended with 9: a last word"
    assert "exceeded its time limit" in rows[4].measured
    assert any("hangs" in line for line in messages)


def test_checks_for_which_no_time_is_left_are_named(tmp_path):
    rows = runner.run_checks([Check("good", good, 5, 1)], CPU, True, tmp_path, 1, print)
    assert [(r.check, r.measured, r.verdict) for r in rows] == [("good", "no time left", "skipped")]


def test_times_are_judged_on_a_gpu_at_full_length_only(tmp_path):
    assert Place(CPU, False, tmp_path, 10).judged(False) == "shown"
    assert Place(torch.device("cuda"), True, tmp_path, 10).judged(False) == "shown"
    assert Place(torch.device("cuda"), False, tmp_path, 10).judged(False) == "FAIL"
    assert Place(torch.device("cuda"), False, tmp_path, 10).judged(True) == "pass"


def test_the_table_says_what_was_asked_and_how_many_of_each_verdict_there_are():
    rows = [Row("a", "≤ 1 | 2", "0.5", "pass"), Row("b", "", "no", "error")]
    assert command.table(rows).splitlines()[2] == "| a | ≤ 1 \\| 2 | 0.5 | pass |"
    assert command.summary(rows) == "1 pass, 1 error"
