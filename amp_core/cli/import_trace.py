"""`ampscope import-trace`: a run folder from traces that torch.profiler exported."""

import argparse
import contextlib
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from amp_core.cli.untrusted import add_run_output, printable, reading_untrusted
from amp_core.text import formatting

if TYPE_CHECKING:
    from amp_core.store.run import Run

PROGRESS_EVERY_S = 2.0
"""Seconds between two lines of progress."""


class Progress:
    """Prints how much of each of `traces` has been read, every two seconds."""

    def __init__(self, traces: Sequence[str]) -> None:
        self._last = time.monotonic()
        self._sizes = {path.name: path.stat().st_size for path in map(Path, traces) if path.is_file()}

    def __call__(self, name: str, frac: float) -> None:
        """Print the share, 0–1, of the trace `name` that has been read."""
        now = time.monotonic()
        if now - self._last >= PROGRESS_EVERY_S:
            self._last = now
            size = self._sizes.get(name)
            of = f" of {formatting.size(size)}" if size else ""
            then = "; linking operators and kernels" if frac >= 1 else ""
            print(printable(f"reading {name}: {frac:.0%}{of}{then}"), file=sys.stderr, flush=True)


TRACE_HELP = "; or a trace of torch.profiler (.json, .json.gz)"
"""Help, after that for a run, where a trace may be given too."""


def is_trace(path: str) -> bool:
    """Whether `path` is a file with the name of a trace, as `a.json` and `a.pt.trace.json.gz`."""
    return Path(path).is_file() and ".json" in Path(path).suffixes


@contextlib.contextmanager
def runs_and_traces(paths: Sequence[str]) -> "Iterator[list[Run]]":
    """The runs at `paths`. Traces among them are imported into a folder that is removed at the end."""
    from amp_core.store.run import load_run
    from amp_core.traces import import_traces

    with reading_untrusted(f"traces={list(paths)!r:.200}"), tempfile.TemporaryDirectory() as folder:
        progress = Progress(paths)
        yield [
            load_run(import_traces([path], Path(folder) / str(place), Path(path).name, progress))
            if Path(path).is_file() and not path.endswith(".zip") and not zipfile.is_zipfile(path)
            else load_run(path)
            for place, path in enumerate(paths)
        ]


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "import-trace", help="import torch.profiler traces (.json, .json.gz) as a run", allow_abbrev=False
    )
    command.add_argument("traces", metavar="TRACE", nargs="+", help="Chrome trace; one per rank")
    add_run_output(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Import, and print a summary. The files are untrusted, so their memory is bounded."""
    from amp_core.traces import import_notes, import_traces

    with reading_untrusted(f"traces={arguments.traces!r:.200}"):
        folder = import_traces(arguments.traces, arguments.out, arguments.name, Progress(arguments.traces))
    print(folder)
    from amp_core.analysis import tensor_core_use  # only now: 50 MB beside those of a large trace
    from amp_core.analysis.performance.kernels import kernel_rows, without_ranges
    from amp_core.hardware.gpus import core_names
    from amp_core.store.run import load_run

    imported = load_run(folder)
    for note in import_notes(imported):
        print(printable(f"note: {note}"))
    kernels = imported.kernels
    if "launches_without_kernels" in imported.head.config:
        lacks = "kernels of the device" if "timed_op" in imported.head.config else "device activity"
        print(f"the trace has no {lacks}; ampscope diagnose explains how to record it")
        return 0
    use = tensor_core_use(imported)
    cores, _ = core_names(use.device_name)
    if use.tensor_frac is not None and use.unknown_frac is not None:
        print(
            f"{formatting.number(use.kernel_us / 1e3, 'ms')} of kernels: {use.tensor_frac:.1%} on {cores}, "
            f"{1 - use.tensor_frac - use.unknown_frac:.1%} without, {use.unknown_frac:.1%} unclassified"
        )
    else:
        on_cpu = kernels["device"].str.startswith("cpu").all()
        kernels = without_ranges(kernel_rows(imported, everything=True)) if on_cpu else kernels
        what = "operators on the CPU" if on_cpu else "copies and fills"
        print(f"no kernels of a GPU; {formatting.number(float(kernels['total_us'].sum()) / 1e3, 'ms')} of {what}")
    return 0
