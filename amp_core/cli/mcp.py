"""`ampscope mcp`: read-only tools for coding assistants, over standard input and output."""

import argparse
from pathlib import Path

from amp_core.schema import RunError


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "mcp",
        help="let a coding assistant read runs (Model Context Protocol)",
        description="Serves read-only tools over standard input and output: list runs, diagnose, compare, what-if, "
        "safe loss scales, worst layers, kernels off tensor cores, the guide. Register the command with the assistant, "
        "for instance: claude mcp add ampscope -- ampscope mcp --runs runs",
        allow_abbrev=False,
    )
    command.add_argument(
        "--runs",
        metavar="DIR",
        action="append",
        default=[],
        help="folder of runs (default runs); repeatable",
    )
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until the assistant closes the connection."""
    from amp_core.assistants.server import make_server

    roots = [Path(folder) for folder in arguments.runs or ["runs"]]
    for root in roots:
        if not root.is_dir():
            raise RunError(f"runs={str(root)!r} is not a folder; give the folder that contains the runs")
    make_server(roots).run("stdio")
    return 0
