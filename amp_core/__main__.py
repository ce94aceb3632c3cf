"""The command line: `ampscope …`, or `python -m amp_core …`.

    ampscope train --workload text-gpt --precision fp16 --steps 200 --out runs/a
    ampscope compare --workload text-gpt --precisions fp32,bf16,fp16 --steps 200 --out runs/cmp

Exit codes: 0 fine, 1 findings (or a failed training), 2 bad input (one line on stderr says what would be right), 130
interrupted, 141 the reader of the output has closed it. A subcommand is a module of `amp_core.cli` with
`add(subparsers)` and `run(arguments)`; none of them imports torch before it needs it.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from amp_core._version import __version__
from amp_core.cli import (
    compare,
    diagnose,
    env,
    export,
    forecast,
    import_te,
    import_tensorboard,
    import_trace,
    mcp,
    packing,
    report,
    serve,
    train,
    tune,
    what_if,
)
from amp_core.cli.untrusted import printable
from amp_core.schema import RunError

COMMANDS = (
    train,
    compare,
    tune,
    diagnose,
    report,
    forecast,
    what_if,
    env,
    serve,
    packing,
    import_trace,
    import_te,
    import_tensorboard,
    export,
    mcp,
)

CLOSED = 141
"""The exit code where nobody reads on: that of a program which SIGPIPE ended."""


class _Parser(argparse.ArgumentParser):
    """argparse that reports a mistake in one line, like all errors here."""

    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        arguments = parser().parse_args(argv)
        arguments.argv = list(sys.argv[1:] if argv is None else argv)  # a job runs the same command elsewhere
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # pending output would be written at exit
        return CLOSED
    except RunError as error:
        print(printable(f"ampscope: {' '.join(str(error).split())}"), file=sys.stderr)
        return 2
    except PermissionError as error:
        if not _is_named(error, arguments):  # of a user's own code, whose traceback is needed
            raise
        print(printable(f"ampscope: {error.filename!r} cannot be accessed: {error.strerror}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ampscope: interrupted", file=sys.stderr)
        return 130


def _is_named(error: PermissionError, arguments: argparse.Namespace) -> bool:
    """Whether the file lies in a folder that an argument names, or beside one of that folder's parents."""
    if not isinstance(error.filename, str):
        return False
    file = Path(error.filename).absolute()
    values = [value if isinstance(value, list) else [value] for value in vars(arguments).values()]
    places = [Path(place).absolute() for each in values for place in each if isinstance(place, str) and place]
    return any(place.is_relative_to(file.parent) or file.is_relative_to(place) for place in places)


def parser() -> argparse.ArgumentParser:
    """The parser with all subcommands."""
    whole = _Parser(prog="ampscope", description="Is your mixed-precision training healthy?", allow_abbrev=False)
    whole.add_argument("--version", action="version", version=f"ampscope {__version__}")
    subparsers = whole.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for command in COMMANDS:
        command.add(subparsers)
    return whole


if __name__ == "__main__":
    sys.exit(main())
