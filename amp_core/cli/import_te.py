"""`ampscope import-te`: a run folder from the debug logs of Transformer Engine."""

import argparse

from amp_core.cli.untrusted import add_run_output, printable, reading_untrusted
from amp_core.text import formatting

MAX_NAMES = 12
"""Statistics named in the output; the run's head keeps more."""


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "import-te",
        help="make a run of Transformer Engine's debug logs (nvdlfw-inspect), text or TensorBoard",
        allow_abbrev=False,
    )
    command.add_argument(
        "logs", metavar="LOGDIR", nargs="+", help="the log_dir of nvdlfw-inspect, its files, or TensorBoard's folder"
    )
    add_run_output(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Import, and print what was imported and what was left out."""
    from amp_core.interop import import_te

    with reading_untrusted(f"logdir={arguments.logs[0]!r}"):
        imported = import_te(arguments.logs, arguments.out, arguments.name)
    print(imported.folder)
    print(f"{formatting.plural(imported.layers, 'layer')}, recipe: {imported.recipe or 'not told by the logs'}")
    for table, rows in imported.rows.items():
        print(f"{table}: {rows:,} rows")
    if imported.left_out:
        names = ", ".join(printable(name)[:80] for name in imported.left_out[:MAX_NAMES])
        more = f", and {len(imported.left_out) - MAX_NAMES} more" if len(imported.left_out) > MAX_NAMES else ""
        print(f"left out: {names}{more}")
    return 0
