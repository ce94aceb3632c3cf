"""`ampscope report RUN…`: one HTML file about the runs, to send or to print."""

import argparse
import os
from pathlib import Path

from amp_core.cli.untrusted import RUN_HELP
from amp_core.schema import RunError
from amp_core.store.atomic import check_outside_runs
from amp_core.store.run import load_run


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "report",
        help="write a self-contained HTML report on a run, or on several side by side",
        description="The first of several runs is the baseline. The file works offline and can be printed.",
        allow_abbrev=False,
    )
    command.add_argument("folders", metavar="RUN", nargs="+", help=RUN_HELP)
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
    runs = [load_run(folder).salvaged() for folder in arguments.folders]
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
        raise RunError(f"out={arguments.out!r} cannot be written: {error.strerror}") from None
    print(f"{out}: {len(runs)} run{'s' * (len(runs) > 1)}, {out.stat().st_size / 1e6:.1f} MB")
    return 0


def _is_html(file: Path) -> bool:
    """Whether the file may be an earlier report; an empty file, as from mktemp, may be overwritten too."""
    with file.open("rb") as opened:
        begin = opened.read(100).lstrip().lower()
    return not begin or begin.startswith((b"<!doctype html", b"<html"))
