"""`ampscope pack` and `ampscope unpack`: a run folder to one zip file, and back."""

import argparse

from amp_core.cli.untrusted import reading_untrusted
from amp_core.store.packing import pack, unpack


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare both commands."""
    command = subparsers.add_parser("pack", help="pack a run folder into one zip", allow_abbrev=False)
    command.add_argument("folder", metavar="RUN", help="run folder")
    command.add_argument("--out", metavar="FILE", help="the zip to write (default: beside the folder)")
    command.set_defaults(run=run_pack)

    command = subparsers.add_parser(
        "unpack", help="unpack a packed run after checking it completely", allow_abbrev=False
    )
    command.add_argument("file", metavar="FILE", help="packed run (.zip)")
    command.add_argument("--out", metavar="DIR", required=True, help="folder to create")
    command.set_defaults(run=run_unpack)


def run_pack(arguments: argparse.Namespace) -> int:
    """Pack, and print the path."""
    print(pack(arguments.folder, arguments.out))
    return 0


def run_unpack(arguments: argparse.Namespace) -> int:
    """Unpack, and print the path. The file is untrusted, so its memory is bounded."""
    with reading_untrusted(f"file={arguments.file!r}"):
        print(unpack(arguments.file, arguments.out))
    return 0
