"""A run is closed however the process exits, and the process is left unchanged."""

import atexit
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from amp_core import load_run
from amp_core.store import shutdown
from amp_core.store.run import Run
from amp_core.store.writer import RunWriter
from tests.paths import ROOT

OPENED = "writer = RunWriter(sys.argv[1])\nwriter.append('steps', {'step': [0]})\n"


def begin(body: str, folder: Path) -> "subprocess.Popen[str]":
    """Start `body` in a new process; if it does not open a run itself, `writer` is one with one step."""
    before = "import os, signal, sys, threading, time\nfrom amp_core.store.writer import RunWriter\n"
    opened = "" if "RunWriter(" in body else OPENED
    line = [sys.executable, "-u", "-c", before + opened + textwrap.dedent(body), str(folder)]
    return subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_program(
    body: str, folder: Path, signal_after: str | None = None, number: int = signal.SIGTERM
) -> tuple[int, Run]:
    """Run `body` as `begin` does, to its end; send the signal once it has printed `signal_after`."""
    child = begin(body, folder)
    if signal_after is not None:
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip() == signal_after:
                child.send_signal(number)
                break
    out, err = child.communicate(timeout=300)
    (folder.parent / f"{folder.name}.txt").write_text(f"{out}\n{err}")
    return child.returncode, load_run(folder)


@pytest.mark.parametrize(
    ("body", "code", "status", "reason"),
    [
        ("with writer: pass", 0, "finished", None),
        ("writer.close()", 0, "finished", None),
        ("writer.close('stopped', 'early enough')", 0, "stopped", "early enough"),
        ("pass", 0, "finished", "the program ended"),
        ("with writer: raise ValueError('loss is NaN')", 1, "failed", "ValueError: loss is NaN"),
        ("raise ValueError('loss is NaN')", 1, "failed", "ValueError: loss is NaN"),
        ("raise MemoryError", 1, "failed", "MemoryError"),
        ("with writer: sys.exit(3)", 3, "stopped", "the program exited with 3"),
        ("with writer: sys.exit()", 0, "finished", "the program exited"),
        ("sys.exit(3)", 3, "finished", "the program ended"),  # Python does not expose its exit code
        ("with writer: raise KeyboardInterrupt", -signal.SIGINT, "stopped", "interrupted from the keyboard"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "stopped", "interrupted from the keyboard"),
        ("threading.Thread(target=writer.close).start()", 0, "finished", None),
    ],
)
def test_the_end_of_a_program_is_recorded_with_its_reason(
    tmp_path: Path, body: str, code: int, status: str, reason: str | None
) -> None:
    got, run = run_program(body, tmp_path / "a")
    assert (got, run.head.status, run.end_reason) == (code, status, reason)
    assert run.steps["step"].tolist() == [0]
    (ended,) = run.events[run.events["kind"] == "ended"].to_dict("records")
    assert (ended["name"], ended["detail"]) == (status, reason or "")
    assert not list((tmp_path / "a").rglob("*.arrows"))  # everything is sealed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_idle_ends_the_run(tmp_path: Path, number: int) -> None:
    code, run = run_program("print('ready')\ntime.sleep(600)", tmp_path / "a", "ready", number)
    message = (
        "interrupted from the keyboard" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
    )
    assert (code, run.head.status, run.end_reason) == (-number, "stopped", message)


def test_a_signal_during_a_write_waits_for_the_write(tmp_path: Path) -> None:
    body = """
        segment = writer._segments.of_table("steps")
        put = segment._put
        def slow(data):
            half = len(data) // 2
            segment._file.write(data[:half])
            os.kill(os.getpid(), signal.SIGTERM)      # Python runs the handler before the next line
            print("still here")
            segment._file.write(data[half:])
            segment._size += len(data)
        segment._put = lambda data: (setattr(segment, "_put", put), slow(data))
        writer.append("steps", {"step": [1]})
        print("not reached")
    """
    code, run = run_program(body, tmp_path / "a")
    assert (code, run.head.status, run.end_reason) == (-signal.SIGTERM, "stopped", "stopped by SIGTERM")
    assert run.steps["step"].tolist() == [0, 1]
    assert (tmp_path / "a.txt").read_text().split("\n")[0] == "still here"
    assert "not reached" not in (tmp_path / "a.txt").read_text()


def test_a_signal_during_the_end_waits_for_the_end(tmp_path: Path) -> None:
    body = """
        def hold():
            os.kill(os.getpid(), signal.SIGTERM)
            writer.append("steps", {"step": [1]})     # what was held back is written all the same
        writer.before_end = hold
        writer.close("finished", "as planned")
        print("not reached")
    """
    code, run = run_program(body, tmp_path / "a")
    assert (code, run.head.status, run.end_reason) == (-signal.SIGTERM, "finished", "as planned")
    assert run.steps["step"].tolist() == [0, 1] and "not reached" not in (tmp_path / "a.txt").read_text()


def test_signals_at_any_moment_leave_a_complete_run(tmp_path: Path) -> None:
    body = """
        print("ready")
        for step in range(1, 10**9):
            writer.append("steps", {"step": [step]})
            os.write(1, b"%d\\n" % step)
    """
    for i, pause in enumerate((0.0, 0.002, 0.005, 0.011, 0.02, 0.05)):
        child = begin(body, tmp_path / str(i))
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(pause)  # at any moment
        child.terminate()
        printed = child.stdout.read().split()
        child.communicate(timeout=300)
        assert child.returncode == -signal.SIGTERM
        run = load_run(tmp_path / str(i))
        assert run.head.status == "stopped"
        assert len(run.steps) in (len(printed) + 1, len(printed) + 2)


def test_the_programs_own_handler_decides(tmp_path: Path) -> None:
    body = """
        def mine(number, frame):
            print("mine")
            sys.exit(5)
        signal.signal(signal.SIGTERM, mine)
        writer = RunWriter(sys.argv[1])
        writer.append("steps", {"step": [0]})
        print("ready")
        time.sleep(600)
    """
    code, run = run_program(body, tmp_path / "a", "ready")
    assert (code, run.head.status, run.end_reason) == (5, "stopped", "stopped by SIGTERM")
    assert "mine" in (tmp_path / "a.txt").read_text()


def test_the_programs_own_handler_may_continue(tmp_path: Path) -> None:
    body = """
        asked = []
        signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
        writer = RunWriter(sys.argv[1])
        writer.append("steps", {"step": [0]})
        print("ready")
        while not asked:
            time.sleep(0.01)
        writer.close("finished", "after the last step")
    """
    code, run = run_program(body, tmp_path / "a", "ready")
    assert (code, run.head.status, run.end_reason) == (0, "finished", "after the last step")


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    body = """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)   # what nohup does
        writer = RunWriter(sys.argv[1])
        writer.append("steps", {"step": [0]})
        os.kill(os.getpid(), signal.SIGHUP)
        writer.close("finished", "went on")
    """
    code, run = run_program(body, tmp_path / "a")
    assert (code, run.head.status, run.end_reason) == (0, "finished", "went on")


def test_a_forked_child_leaves_its_parents_run_alone(tmp_path: Path) -> None:
    body = """
        for way in ("return", "exit", "raise", "signal", "close"):
            pid = os.fork()
            if pid == 0:
                writer.append("steps", {"step": [99]})
                writer.event("warning", detail="from the child")
                writer.update_head(name="child")
                if way == "exit":
                    sys.exit(1)
                if way == "raise":
                    raise ValueError("in the child")
                if way == "signal":
                    os.kill(os.getpid(), signal.SIGTERM)
                if way == "close":
                    writer.close("failed", "by the child")
                os._exit(0)
            print(way, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        writer.append("steps", {"step": [1]})
        writer.close("finished", "by the parent")
    """
    code, run = run_program(body, tmp_path / "a")
    out = (tmp_path / "a.txt").read_text().split("\n")
    assert out[:5] == ["return 0", "exit 1", "raise 1", f"signal {-signal.SIGTERM}", "close 0"]
    assert (code, run.head.status, run.end_reason, run.name) == (0, "finished", "by the parent", "a")
    assert run.steps["step"].tolist() == [0, 1] and run.events["kind"].tolist() == ["ended"]


@pytest.mark.parametrize("way", ["raise ValueError('of the child')", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_a_forked_child_may_have_its_own_run(tmp_path: Path, way: str) -> None:
    body = f"""
        pid = os.fork()
        if pid == 0:
            own = RunWriter(sys.argv[1] + "-child")
            own.append("steps", {{"step": [7]}})
            {way}
        else:
            os.waitpid(pid, 0)
            writer.close("finished", "by the parent")
    """
    code, run = run_program(OPENED + textwrap.dedent(body), tmp_path / "a")
    assert (code, run.end_reason, run.steps["step"].tolist()) == (0, "by the parent", [0])
    child = load_run(tmp_path / "a-child")
    expected = {"r": ("failed", "ValueError: of the child"), "o": ("stopped", "stopped by SIGTERM")}[way[0]]
    assert (child.head.status, child.end_reason, child.steps["step"].tolist()) == (*expected, [7])
    assert "RecursionError" not in (tmp_path / "a.txt").read_text()


def test_all_runs_are_closed_even_if_one_fails(tmp_path: Path) -> None:
    body = """
        first = RunWriter(sys.argv[1] + "-first")
        first.before_end = lambda: 1 / 0
        writer = RunWriter(sys.argv[1])
        writer.append("steps", {"step": [0]})
        print("ready")
        time.sleep(600)
    """
    code, run = run_program(body, tmp_path / "a", "ready")
    assert (code, run.head.status) == (-signal.SIGTERM, "stopped")
    assert load_run(tmp_path / "a-first").head.status == "stopped"


# ---- no trace is left -----------------------------------------------------------------------------------------------


def installed_hooks() -> tuple[object, ...]:
    return (sys.excepthook, *(signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)))


@pytest.fixture(autouse=True)
def _no_hooks_left() -> Iterator[None]:
    before = installed_hooks()
    yield
    assert installed_hooks() == before and shutdown._open == [] and shutdown._installed is None


def test_closed_runs_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", registered.remove)
    before = installed_hooks()
    first, second = RunWriter(tmp_path / "a"), RunWriter(tmp_path / "b")
    assert installed_hooks() != before and len(registered) == 1
    first.close()
    assert installed_hooks() != before  # the second is still open
    second.close()
    assert installed_hooks() == before and registered == []


def test_hooks_installed_over_ours_stay_and_may_call_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = installed_hooks()
    called = []
    first = RunWriter(tmp_path / "a")
    ours_hook, ours_handler = sys.excepthook, signal.getsignal(signal.SIGTERM)
    assert callable(ours_handler)

    def hook(*args: object) -> None:
        called.append("hook")
        ours_hook(*args)  # type: ignore[arg-type]

    def handler(number: int, frame: object) -> None:
        called.append("handler")

    sys.excepthook = hook
    signal.signal(signal.SIGTERM, handler)
    try:
        first.close()
        assert sys.excepthook is hook and signal.getsignal(signal.SIGTERM) is handler
        second = RunWriter(tmp_path / "b")  # installed over theirs, which calls our old one: must not recurse
        os.kill(os.getpid(), signal.SIGTERM)
        sys.excepthook(ValueError, ValueError("shown once"), None)
        assert capsys.readouterr().err.count("shown once") == 1
        second.close()
        assert called == ["handler", "hook"]
        assert sys.excepthook is hook and signal.getsignal(signal.SIGTERM) is handler
    finally:
        sys.excepthook = original[0]  # type: ignore[assignment]
        signal.signal(signal.SIGTERM, original[1])  # type: ignore[arg-type]


def test_run_closed_by_another_thread_does_not_disturb_the_next(tmp_path: Path) -> None:
    before = installed_hooks()
    writer = RunWriter(tmp_path / "a")
    thread = threading.Thread(target=writer.close)
    thread.start()
    thread.join()
    assert load_run(tmp_path / "a").head.status == "finished"
    for number, handler in zip((signal.SIGTERM, signal.SIGHUP), before[1:3], strict=True):
        signal.signal(number, handler)  # type: ignore[arg-type]  # only the main thread may put them back


def test_run_opened_by_another_thread_ends_with_the_interpreter(tmp_path: Path) -> None:
    body = """
        def open_run():
            global writer
            writer = RunWriter(sys.argv[1])
            writer.append("steps", {"step": [0]})
        thread = threading.Thread(target=open_run)
        thread.start()
        thread.join()
    """
    code, run = run_program(body, tmp_path / "a")
    assert (code, run.head.status, run.end_reason) == (0, "finished", "the program ended")
