"""`ampscope export RUN --to tensorboard|parquet|csv --out DIR`: export a run for other tools."""

import argparse

from amp_core.cli.untrusted import RUN_HELP
from amp_core.interop.export import FORMS, export
from amp_core.store.run import load_run


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "export", help="export a run as a TensorBoard log, Parquet or CSV files", allow_abbrev=False
    )
    command.add_argument("folder", metavar="RUN", help=RUN_HELP)
    command.add_argument("--to", metavar="FORM", choices=FORMS, required=True, help=", ".join(FORMS))
    command.add_argument("--out", metavar="DIR", required=True, help="new folder for the files")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export, and print what was written."""
    opened = load_run(arguments.folder)
    opened.validate(full=not opened.is_live)
    for file in export(opened, arguments.to, arguments.out):
        print(f"{file}  {file.stat().st_size:,} bytes")
    return 0
