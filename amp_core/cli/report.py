"""`ampscope report RUN…`: one HTML file about the runs, or about traces, to send or to print."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from amp_core.cli.import_trace import TRACE_HELP, is_trace, runs_and_traces
from amp_core.cli.untrusted import RUN_HELP
from amp_core.schema import RunError
from amp_core.store.atomic import check_outside_runs
from amp_core.store.run import load_run

if TYPE_CHECKING:
    from amp_core.store.run import Run


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "report",
        help="write a self-contained HTML report on a run, or on several side by side",
        description="The first of several runs is the baseline. The file works offline and can be printed.",
        allow_abbrev=False,
    )
    command.add_argument("folders", metavar="RUN", nargs="+", help=RUN_HELP + TRACE_HELP)
    command.add_argument("--out", metavar="FILE", default="report.html", help="file to write (default %(default)s)")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the file, and print its path and size."""
    out = Path(arguments.out)
    if out.is_dir() or not out.parent.is_dir():
        raise RunError(f"out={arguments.out!r} cannot be written; give a file in a folder that exists")
    if out.suffix.lower() not in (".html", ".htm"):  # an HTML file cannot overwrite a run's tables
        check_outside_runs(out)
    if out.is_file() and not _is_html(out):
        raise RunError(
            f"out={arguments.out!r} is a different kind of file; give an HTML file, or one that does not exist yet"
        )
    if any(map(is_trace, arguments.folders)):
        with runs_and_traces(arguments.folders) as imported:
            _write(imported, out)
    else:
        _write([load_run(folder) for folder in arguments.folders], out)
    return 0


def _write(read: "Sequence[Run]", out: Path) -> None:
    runs = [opened.salvaged() for opened in read]
    for opened in runs:
        opened.validate(full=not opened.is_live)

    from amp_core.report import report_html

    text = report_html(runs)
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(out)  # atomic: a reader never sees half a file
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise RunError(f"out={str(out)!r} cannot be written: {error.strerror}") from None
    print(f"{out}: {len(runs)} run{'s' * (len(runs) > 1)}, {out.stat().st_size / 1e6:.1f} MB")


def _is_html(file: Path) -> bool:
    """Whether the file may be an earlier report; an empty file, as from mktemp, may be overwritten too."""
    with file.open("rb") as opened:
        begin = opened.read(100).lstrip().lower()
    return not begin or begin.startswith((b"<!doctype html", b"<html"))
