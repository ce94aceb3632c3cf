"""A real server on the loopback address: `with serving(runs) as server: …`; `app(runs)` serves a checkout."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

ROOT = Path(__file__).resolve().parents[2]

T = TypeVar("T")


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in a new thread: after a test in a browser, Playwright's loop keeps running in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


@dataclass
class Server:
    """A running app."""

    port: int
    runs: Path
    process: "subprocess.Popen[bytes]"
    log: Path

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rss_bytes(self) -> int:
        """Resident memory of the server's process."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def threads(self) -> int:
        return int(psutil.Process(self.process.pid).num_threads())

    def handles(self) -> int:
        return int(psutil.Process(self.process.pid).num_fds())


@contextlib.contextmanager
def serving(runs: Path, *flags: str, program: Path | None = None, desktop: Path | None = None) -> Iterator[Server]:
    """Start `ampscope serve` with `flags` on a free port, and stop only that process at the end.

    `program` is an installed `ampscope`, which has to locate everything itself. `desktop` is a folder whose `xdg-open`
    opens browser windows; without one the server gets the flag to open none.
    """
    start = [sys.executable, "-m", "amp_core"] if program is None else [str(program)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | (_path() if program is None else {})
    port = _free_port()
    command = [*start, "serve", "--runs", str(runs), "--port", str(port), *flags]
    command += [] if desktop else ["--no-browser"]
    with _up(command, port, runs, cwd=runs.parent, environment=environment | _shown(desktop)) as server:
        yield server


@contextlib.contextmanager
def app(runs: Path, script: Path = ROOT / "app.py", desktop: Path | None = None) -> Iterator[Server]:
    """The same for `streamlit run app.py` in the checkout, or for another script."""
    port = _free_port()
    command = [sys.executable, "-m", "streamlit", "run", str(script), f"--server.port={port}"]
    command += [] if desktop else ["--server.headless=true"]
    environment = os.environ | {"AMPSCOPE_RUNS": str(runs)} | _shown(desktop)
    with _up(command, port, runs, cwd=ROOT, environment=environment) as server:
        yield server


def _shown(desktop: Path | None) -> dict[str, str]:
    """The environment of a program that opens windows through `desktop`."""
    return {"DISPLAY": ":0", "PATH": f"{desktop}{os.pathsep}{os.environ['PATH']}"} if desktop else {}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def _up(command: list[str], port: int, runs: Path, *, cwd: Path, environment: dict[str, str]) -> Iterator[Server]:
    runs.parent.mkdir(parents=True, exist_ok=True)
    log = runs.parent / f"server-{port}.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=out, stderr=out)
    try:
        give_up = time.monotonic() + 300
        while not answers(f"http://127.0.0.1:{port}/_stcore/health"):
            assert process.poll() is None and time.monotonic() < give_up, log.read_text()
            time.sleep(0.05)
        yield Server(port, runs, process, log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def answers(url: str) -> bool:
    """Whether a server responds at the address."""
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def _path() -> dict[str, str]:
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), known)))}
