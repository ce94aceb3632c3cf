"""Run the checks in a worker process, and continue in another one if that dies or exceeds its time limit.

The worker writes each row to a file at once, so that its rows survive it.
"""

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from tests.gpu.checks import Check, Place, Row
from tests.paths import ROOT

POLL_S = 0.1
MARGIN_S = 3.0
"""Seconds by which a check's own time limit is shorter, so that it can end by itself."""


def run_checks(
    checks: list[Check], device: torch.device, quick: bool, out: Path, seconds: float, say: Callable[[str], None]
) -> list[Row]:
    """All rows of all checks, in order, within `seconds`. Checks that are not reached are reported as skipped."""
    deadline = time.monotonic() + seconds
    rows: list[Row] = []
    left = list(checks)
    number = 0
    while left and time.monotonic() < deadline - 2 * MARGIN_S:
        number += 1
        left = _Worker(left, device, quick, out, deadline, number).work(rows, say)
    rows += [Row(check.name, "", "no time left", "skipped") for check in left]
    return rows


class _Worker:
    """A process that runs checks one after another until it finishes, dies, or is ended."""

    def __init__(
        self, checks: list[Check], device: torch.device, quick: bool, out: Path, deadline: float, number: int
    ) -> None:
        self._checks = checks
        self._deadline = deadline
        self._file = out / f"worker-{number}.jsonl"
        self._log = out / f"worker-{number}.log"
        self._command = [sys.executable, "-m", "tests.gpu", "--device", str(device), "--out", str(out)]
        self._command += ["--quick"] if quick else []

    def work(self, rows: list[Row], say: Callable[[str], None]) -> list[Check]:
        """Append the results to `rows`; returns the checks that remain."""
        self._file.touch()
        names = [check.name for check in self._checks]
        arguments = ["--worker", ",".join(names), "--results", str(self._file)]
        arguments += ["--until", str(time.time() + self._deadline - time.monotonic())]
        begun: str | None = None
        limit = self._deadline
        ended: list[str] = []
        failed = False
        with self._log.open("wb") as log, self._file.open() as results:
            process = subprocess.Popen(self._command + arguments, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            try:
                while True:
                    over = process.poll() is not None  # polled first: after the end the file is complete
                    for line in iter(results.readline, ""):
                        record = json.loads(line)
                        if "begin" in record:
                            begun = record["begin"]
                            limit = time.monotonic() + record["seconds"] + MARGIN_S
                            say(f"{begun} (has {record['seconds']:.0f} s)")
                        elif "end" in record:
                            ended.append(record["end"])
                            begun = None
                            limit = self._deadline
                        else:
                            rows.append(Row(**record))
                            failed = failed or rows[-1].verdict in ("FAIL", "error")
                            say(f"    {rows[-1].verdict}: {rows[-1].check}: {rows[-1].measured}")
                    if over or time.monotonic() > min(limit, self._deadline):
                        break
                    time.sleep(POLL_S)
            finally:
                died = process.poll()
                if died is None:
                    process.kill()
                    process.wait()
        remaining = names[len(ended) :]
        handed_over = died == 0 and begun is None and bool(ended)  # the next check needs a fresh process
        if remaining and not handed_over:
            why = f"exceeded its time limit and was ended; see {self._log.name}" if died is None else ""
            why = why or f"the process ended with {died}: {_last_line(self._log)}"
            rows.append(Row(remaining[0], "", why, "error"))
            say(f"    error: {remaining[0]}: {why}")
            remaining = remaining[1:]
        if not failed and not remaining:
            self._log.unlink()
        self._file.unlink()
        return [check for check in self._checks if check.name in remaining]


def work(checks: list[Check], device: torch.device, quick: bool, out: Path, results: Path, until: float) -> None:
    """The worker: run each check and write its rows. `until` is a time of `time.time`."""
    with results.open("a") as file:

        def write(record: object) -> None:
            print(json.dumps(record, default=float), file=file, flush=True)

        for number, check in enumerate(checks):
            if number and (check.alone or checks[number - 1].alone):
                return
            later = sum(c.seconds for c in checks[number + 1 :] if device.type == "cuda" or not c.cuda_only)
            left = until - time.time()
            if left < 2 * MARGIN_S:
                return
            seconds = min(max(check.seconds, left - later), left - MARGIN_S)
            write({"begin": check.name, "seconds": seconds})
            place = Place(device, quick, out, seconds - MARGIN_S)
            try:
                if check.cuda_only and not place.cuda:
                    write(Row(check.name, "", f"needs CUDA, and this is {device}", "skipped").to_dict())
                else:
                    for row in check.run(place):
                        write(row.to_dict())
            except Exception as error:
                traceback.print_exc()
                write(Row(check.name, "", f"{type(error).__name__}: {error}".splitlines()[0], "error").to_dict())
            place.free()
            write({"end": check.name})


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
