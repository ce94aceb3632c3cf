"""Many sessions at once: fifty on one live run, twenty on separate runs.

    python -m tests.serve.many_eyes                             # 8 and 4, a few seconds
    python -m tests.serve.many_eyes --live 50 --own 20 --rounds 2        # the long form, some minutes

Each session is a separate WebSocket client. Those on the live run refresh once a second; the others open the pages of
their run, whose name is unique: another run's name on a page is cross-talk. Then all sessions close, and the server's
remaining sessions and threads are counted; a second round shows whether anything accumulates.
"""

import argparse
import asyncio
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests import synthetic
from tests.serve.running import Server, run_async, serving
from tests.serve.viewer import Seen, Viewer

PATIENCE_S = 600.0
"""A machine that is busy with other things makes pages late: what they took is printed, and no reason to break off."""
POOL_THREADS = 4
"""Of the pool that all sessions share: these stay."""

PAGES = ("", "loss-scale", "number-ranges", "layer-detail", "memory")


def name_of(number: int) -> str:
    """A run's name that is part of no other."""
    return f"owner-{number:03d}-of-it"


@dataclass
class Round:
    """Measurements while all sessions were open, and after they had closed."""

    opening_s: list[float] = field(default_factory=list)
    looks_s: list[float] = field(default_factory=list)
    pages_s: list[float] = field(default_factory=list)
    crossed: int = 0
    errors: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    left_bytes: int = 0
    left_threads: int = 0
    left_sessions: int = 0


async def watcher(server: Server, seconds: float, result: Round) -> None:
    """One session on the live run."""
    async with Viewer(server.base, patience_s=PATIENCE_S) as viewer:
        shown = await viewer.open("", run="run/live")
        result.opening_s.append(shown.seconds)
        check(shown, None, result)
        until = time.monotonic() + seconds
        while time.monotonic() < until and viewer.fragments:
            began = time.monotonic()
            shown = await viewer.tick()
            result.looks_s.append(shown.seconds)
            check(shown, None, result)
            await asyncio.sleep(max(0.0, 1 - (time.monotonic() - began)))


async def owner(server: Server, number: int, seconds: float, result: Round) -> None:
    """One session on its own run."""
    async with Viewer(server.base, patience_s=PATIENCE_S) as viewer:
        until, first = time.monotonic() + seconds, True
        while time.monotonic() < until or first:
            for page in PAGES:
                shown = await viewer.open(page, run=f"run/{name_of(number)}")
                result.pages_s.append(shown.seconds)
                check(shown, number, result)
            first = False


def check(shown: Seen, number: int | None, result: Round) -> None:
    """Check that a session was shown its own run and nothing of another."""
    result.errors += shown.errors
    message = shown.words + "".join(chart.spec for chart in shown.of("plotly_chart"))
    others = message if number is None else message.replace(name_of(number), "")
    result.crossed += "owner-" in others or (number is not None and name_of(number) not in message)


async def one_round(server: Server, live: int, own: int, seconds: float) -> Round:
    result = Round()
    tasks = [asyncio.create_task(watcher(server, seconds, result)) for _ in range(live)]
    tasks += [asyncio.create_task(owner(server, i, seconds, result)) for i in range(own)]
    while not all(t.done() for t in tasks):
        result.peak_bytes = max(result.peak_bytes, server.rss_bytes())
        await asyncio.sleep(0.25)
    await asyncio.gather(*tasks)
    return result


def sessions(server: Server) -> int:
    """The number of sessions that the server reports as open."""
    with urllib.request.urlopen(f"{server.base}/_stcore/metrics", timeout=300) as answer:
        lines = answer.read().decode().splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("active_sessions")))


def settle(server: Server, result: Round, most_threads: int, patience_s: float) -> None:
    """Wait until the closed sessions have ended and at most `most_threads` threads remain."""
    give_up = time.monotonic() + patience_s
    while time.monotonic() < give_up and (sessions(server) > 0 or server.threads() > most_threads):
        time.sleep(0.5)
    result.left_sessions, result.left_threads = sessions(server), server.threads()
    result.left_bytes = server.rss_bytes()


def rounds(home: Path, live: int, own: int, seconds: float, number: int) -> tuple[int, list[Round]]:
    """Run all rounds; returns the server's threads after one closed session, and the result of each round."""
    runs = home / "runs"
    for i in range(own):
        synthetic.write(runs / name_of(i), "healthy", steps=60, seed=i)
    result = []
    with synthetic.live(runs / "live") as run, serving(runs) as server:
        run.advance(30)
        run_async(one_round(server, 1, 1, 0))
        settle(server, Round(), 0, 5)
        threads = server.threads()
        for _ in range(number):
            stop = threading.Event()
            pace = threading.Thread(target=train, args=(run, stop))
            pace.start()
            try:
                result.append(run_async(one_round(server, live, own, seconds)))
            finally:
                stop.set()
                pace.join()
            settle(server, result[-1], threads + POOL_THREADS, 300)
    return threads, result


def train(run: synthetic.SyntheticRun, stop: threading.Event) -> None:
    """Let the live run grow until `stop` is set."""
    while not stop.wait(0.25):
        run.advance(1)


def say(threads: int, result: list[Round]) -> None:
    print(f"threads with nobody connected: {threads}")
    for number, r in enumerate(result, 1):
        print(f"round {number}: {len(r.looks_s)} live looks, {len(r.pages_s)} pages, {r.crossed} of them crossed")
        for label, values in (("opening live", r.opening_s), ("live look", r.looks_s), ("page", r.pages_s)):
            if values:
                half, most = np.percentile(values, [50, 95])
                print(f"  {label}: median {half:.2f} s, 95 % within {most:.2f} s")
        print(f"  server: {r.peak_bytes / 2**20:.0f} MiB at most; after all had closed {r.left_bytes / 2**20:.0f} MiB,")
        print(f"  {r.left_sessions} sessions, {r.left_threads} threads; exceptions shown: {len(r.errors)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--live", type=int, default=8)
    parser.add_argument("--own", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ampscope-eyes-") as home:
        say(*rounds(Path(home), arguments.live, arguments.own, arguments.seconds, arguments.rounds))


if __name__ == "__main__":
    main()
