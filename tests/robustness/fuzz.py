"""Feed hostile inputs to all code that reads untrusted files, and count failures.

    python -m tests.robustness.fuzz --inputs 100000            # the long form; the suite has 200, with --whole 3,400
    python -m tests.robustness.fuzz --only 4711                # repeat one, with its traceback

Each input is a packed run, run folder or profiler trace, made from its number (see `inputs`). It is opened, validated
in full and unpacked or imported, like an upload, or converted in a sandbox, like a folder of another machine; one valid
input of six is diagnosed too. Success and a `RunError` of one line are allowed. A worker process reads one input after
another; its parent detects crashes and hangs. Memory is limited to `MAX_MEMORY`, and nothing may be written outside the
target.
"""

import argparse
import collections
import faulthandler
import json
import os
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from amp_core import RunError, diagnose, load_run
from amp_core.store.long_runs.extract import Extract
from amp_core.store.packing import unpack
from amp_core.store.untrusted.converted_source import ConvertedSource
from amp_core.store.untrusted.sandbox import Sandbox
from amp_core.traces import import_traces
from tests.robustness.inputs import hostile

LONGEST_S = 5.0
"""Of processor time, the sandbox's included: other programs make the clock's go by."""
MAX_MEMORY = 4 * 2**30
"""Of address space, in bytes; a quarter of it is libraries."""
SANDBOX = Sandbox()
ROOM = Path("/dev/shm") if Path("/dev/shm").is_dir() else None  # a file system in memory


@dataclass
class Results:
    """The results of the inputs."""

    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    """How many were refused, and how many passed, by kind."""
    wrong: list[str] = field(default_factory=list)
    """What must not happen: crashes, hangs, other exceptions, files outside of the target."""
    longest_s: float = 0.0
    memory_bytes: int = 0
    """Most that a worker held."""


def read(path: Path, number: int) -> str:
    """Read one input as the app and the commands do, and return the result. Raises if an unexpected error is raised."""
    out = path.parent / "out"
    try:
        if path.suffix == ".json":
            import_traces([path], out)
        elif path.suffix == ".zip":
            unpack(path, out)
        else:
            out = path
            run = Extract(path, most_rows=4)
            run._source = ConvertedSource(run._source, SANDBOX)  # like a folder of another machine
            run.fingerprint(), run.status, run.end_reason, run.console(5)
            run.validate(full=True)
            run.of_tensor("weight_grad", "w", ["step", "absmax"])
        run = load_run(out)
        run.validate(full=True)
        if number % 6 == 0:  # takes ten times as long as the rest
            diagnose(run)
    except RunError as error:
        if "\n" in str(error) or len(str(error)) > 1000:
            raise ValueError(f"a refusal of more than one line: {str(error)[:300]!r}") from error
        return "refused"
    return "passed"


def try_one(number: int, parent: Path) -> tuple[str, str, str | None]:
    """The kind of the input, its result, and its failure."""
    room = parent / "room"
    room.mkdir()
    kind, write = hostile(number)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = write(room)
            before = {p.name for p in room.iterdir()} | {"out"}
            became, wrong = read(path, number), None
    except Exception:
        became, wrong = "failed", traceback.format_exc().strip().replace("\n", " | ")[-900:]
    outside = {p.name for p in parent.iterdir()} - {"room"} | ({p.name for p in room.iterdir()} - before)
    if outside:
        wrong = f"appeared outside of the target: {sorted(outside)}"
    shutil.rmtree(room)
    return kind, became, wrong


def work(first: int, stop: int) -> None:
    """In the worker: report each input to the parent once it is read."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    with tempfile.TemporaryDirectory(dir=ROOM) as parent:
        for number in range(first, stop):
            began = _spent_s()
            kind, became, wrong = try_one(number, Path(parent))
            took = _spent_s() - began
            held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps([number, kind, became, wrong, took, held]), flush=True)


def _spent_s() -> float:
    """Processor time of this process and its children: those that have ended, and the sandbox's."""
    child = SANDBOX._child  # to list all children would read a file of each process on the machine
    running = sum(psutil.Process(child.pid).cpu_times()[:2]) if child is not None and child.poll() is None else 0.0
    return sum(os.times()[:4]) + running


def fuzz(first: int, inputs: int, every: int = 0) -> Results:
    """Read `inputs` inputs from number `first` on; with `every`, print progress after that many."""
    results, number, stop = Results(), first, first + inputs
    while number < stop:
        line = [sys.executable, "-m", "tests.robustness.fuzz", "--work", str(number), str(stop)]
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the worker ends
        worker = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert worker.stdout is not None
        while number < stop:
            patience = 300  # wall-clock seconds, which include other programs; only a hang takes this long
            if not select.select([worker.stdout], [], [], patience)[0]:
                results.wrong.append(f"input {number}: hangs")
                break
            message = worker.stdout.readline()
            if not message:
                results.wrong.append(f"input {number}: its reader died with {worker.wait()}: {_last_words(errors)}")
                break
            number, kind, became, wrong, took, held = json.loads(message)
            results.kinds[f"{kind} {became}"] += 1
            results.longest_s, results.memory_bytes = max(results.longest_s, took), max(results.memory_bytes, held)
            if wrong or took > LONGEST_S:
                results.wrong.append(f"input {number} ({kind}): {wrong or f'took {took:.1f} s'}")
            number += 1
            if every and (wrong or took > LONGEST_S):
                print(results.wrong[-1], flush=True)
            if every and (number - first) % every == 0:
                print(f"{number - first} inputs, {len(results.wrong)} went wrong", flush=True)
        if number < stop:  # it died or hangs: the next worker continues after that input
            number += 1
            worker.kill()
            if every:
                print(results.wrong[-1], flush=True)
        worker.communicate()
        errors.close()
    return results


def _last_words(errors: IO[bytes]) -> str:
    """The last output of a worker that died: its stack from `faulthandler`, or the message of `std::terminate`."""
    errors.seek(0)
    return " | ".join(errors.read().decode("utf-8", "replace").strip().splitlines()[:12])[:900]


def main() -> int:
    """Run the long form; the exit code is 1 if any input failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", type=int, help="read this one here, with its traceback")
    parser.add_argument("--work", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(*arguments.work)
        return 0
    if arguments.only is not None:
        with tempfile.TemporaryDirectory(dir=ROOM) as parent:
            print(*try_one(arguments.only, Path(parent)), sep="\n")
        return 0
    results = fuzz(arguments.first, arguments.inputs, every=1_000)
    for kind, count in sorted(results.kinds.items()):
        print(f"{count:8,} {kind}")
    print(*results.wrong, sep="\n")
    print(
        f"{sum(results.kinds.values()):,} inputs, {len(results.wrong)} went wrong; "
        f"the longest took {results.longest_s:.2f} s, most memory {results.memory_bytes / 2**20:.0f} MiB"
    )
    return 1 if results.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
