"""A long watched training of a tiny model, to detect resources that grow.

    python -m tests.serve.soak                                    # 20 seconds, 2,000 steps
    python -m tests.serve.soak --minutes 31 --steps 210000        # the long form

A process trains and watches; a server shows the run to a session that follows it live and to one that opens page after
page. Resident memory, file handles and threads of both processes are sampled throughout. The script prints their slope
after the first third and over the last half, by least squares; their values by tenths of the time (a leak raises the
minimum of a tenth, unlike the temporary memory of a page); and the cost of watching per step in the first and the last
tenth. `--out FILE` keeps every sample.
"""

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from tests.serve.running import ROOT, Server, run_async, serving
from tests.serve.viewer import Viewer

PAGES = ("", "loss-scale", "number-ranges", "layer-detail", "memory", "library")


def train(folder: Path, steps: int, seconds: float) -> None:
    """Train for `steps`, spread over `seconds`, and print the resources of the process regularly."""
    import torch

    from amp_core.record import watch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    me, began = psutil.Process(), time.monotonic()
    with watch(model, optimizer, scaler=scaler, into=folder, every=10):
        for step in range(steps):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = torch.nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            ahead = (step + 1) * seconds / steps - (time.monotonic() - began)
            if ahead > 0:
                time.sleep(ahead)
            if step % max(1, steps // 400) == 0:
                held = {"s": time.monotonic() - began, "rss": me.memory_info().rss, "handles": me.num_fds()}
                print(json.dumps(held | {"threads": me.num_threads()}), flush=True)


PATIENCE_S = 600.0
"""A machine that is busy with other things makes pages late; that is none of what is measured here."""


async def follow(server: Server, done: asyncio.Event) -> int:
    """Refresh the live run once a second; returns how often."""
    ticks = 0
    async with Viewer(server.base, patience_s=PATIENCE_S) as viewer:
        await viewer.open("", run="run/soak")
        while not done.is_set() and viewer.fragments:
            await asyncio.sleep(1)
            await viewer.tick()
            ticks += 1
    return ticks


async def walk(server: Server, done: asyncio.Event) -> int:
    """Open one page after another, each in a new session; returns how many."""
    opened = 0
    while not done.is_set():
        async with Viewer(server.base, patience_s=PATIENCE_S) as viewer:
            shown = await viewer.open(PAGES[opened % len(PAGES)], run="run/soak")
            assert not shown.errors, shown.errors
        opened += 1
        await asyncio.sleep(5)
    return opened


async def sample(server: Server, done: asyncio.Event, every_s: float) -> list[dict[str, float]]:
    """Samples of the server's resources."""
    measurements, began = [], time.monotonic()
    while not done.is_set():
        measurements.append(
            {
                "s": time.monotonic() - began,
                "rss": server.rss_bytes(),
                "handles": server.handles(),
                "threads": server.threads(),
            }
        )
        await asyncio.sleep(every_s)
    return measurements


def slope(rows: list[dict[str, float]], column: str, since: float = 1 / 3) -> tuple[float, float]:
    """Growth per hour of `column` after the fraction `since` of the time, and its value at the end (median of the last
    tenth)."""
    kept = [r for r in rows if r["s"] >= rows[-1]["s"] * since]
    times, values = np.array([r["s"] for r in kept]), np.array([r[column] for r in kept])
    return float(np.polyfit(times, values, 1)[0]) * 3600, float(np.median(values[-max(1, len(values) // 10) :]))


async def soak(steps: int, seconds: float, home: Path) -> dict[str, object]:
    """Run the soak test; returns its measurements."""
    runs = home / "runs"
    runs.mkdir(parents=True)
    log_file = home / "trainer.jsonl"
    command = [sys.executable, "-m", "tests.serve.soak", "--train", str(runs / "soak")]
    with serving(runs) as server, open(log_file, "wb") as out:
        trainer = subprocess.Popen(
            [*command, "--steps", str(steps), "--minutes", str(seconds / 60)], cwd=ROOT, stdout=out
        )
        try:
            while not (runs / "soak" / "run.json").exists():
                assert trainer.poll() is None, "the trainer ended before its run began"
                await asyncio.sleep(0.2)
            done = asyncio.Event()
            tasks = [
                asyncio.create_task(task)
                for task in (follow(server, done), walk(server, done), sample(server, done, seconds / 200))
            ]
            while trainer.poll() is None and not any(t.done() for t in tasks):
                await asyncio.sleep(0.5)
            done.set()
            state = "is at work still" if trainer.poll() is None else f"ended with {trainer.poll()}"
            print(f"the trainer {state} after {len(rows_of(log_file))} samples", flush=True)
            ticks, opened, app = await asyncio.gather(*tasks)
            code = trainer.wait(60)
        finally:
            if trainer.poll() is None:
                trainer.terminate()
    return {
        "code": code,
        "ticks": ticks,
        "opened": opened,
        "app": app,
        "trainer": rows_of(log_file),
        "run": runs / "soak",
    }


def rows_of(log_file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in log_file.read_text().splitlines() if line.startswith("{")]


def watching_ms(run: Path) -> tuple[float, float]:
    """Median cost of watching a step, ms, in the first and in the last tenth, without the first 100 steps."""
    from amp_core import load_run

    cost = load_run(run).steps["watch_ms"].to_numpy()[100:]
    tenth = max(1, len(cost) // 10)
    return float(np.median(cost[:tenth])), float(np.median(cost[-tenth:]))


def say(measurements: dict[str, object]) -> None:
    """Print the measurements."""
    print(
        f"trainer ended with {measurements['code']}; {measurements['ticks']} refreshes, "
        f"{measurements['opened']} sessions opened and closed"
    )
    for who in ("trainer", "app"):
        rows = measurements[who]
        assert isinstance(rows, list)
        grown, last = slope(rows, "rss")
        print(
            f"{who}: resident {last / 2**20:.1f} MiB, slope {grown / 2**20:+.2f} MiB/h over {rows[-1]['s'] / 60:.1f}"
            f" minutes, {slope(rows, 'rss', 1 / 2)[0] / 2**20:+.2f} over the last half"
        )
        tenths = np.array_split([r["rss"] / 2**20 for r in rows], 10)
        print("  by tenths, median MiB: " + " ".join(f"{np.median(part):.0f}" for part in tenths))
        print("  by tenths, least MiB: " + " ".join(f"{part.min():.0f}" for part in tenths))
        for column in ("handles", "threads"):
            kept = [r[column] for r in rows if r["s"] >= rows[-1]["s"] / 3]
            print(f"  {column}: {min(kept):.0f} to {max(kept):.0f}, slope {slope(rows, column)[0]:+.2f} per hour")
    first, last_ms = watching_ms(Path(str(measurements["run"])))
    print(f"watching a step: {first:.3f} ms in the first tenth, {last_ms:.3f} ms in the last")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1 / 3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="keep the samples there, as JSON")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(arguments.train, arguments.steps, arguments.minutes * 60)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with tempfile.TemporaryDirectory(prefix="ampscope-soak-") as home:
        measurements = run_async(soak(arguments.steps, arguments.minutes * 60, Path(home)))
        say(measurements)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps({who: measurements[who] for who in ("trainer", "app")}))


if __name__ == "__main__":
    main()
