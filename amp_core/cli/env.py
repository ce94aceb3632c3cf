"""`ampscope env`: versions, processor, GPUs, and which precision recipes run here."""

import argparse
import json
from collections.abc import Mapping
from typing import Any


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser("env", help="what this machine has and can run", allow_abbrev=False)
    command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the environment."""
    from amp_core.train.environment import environment

    found = environment()
    print(json.dumps(found, indent=1, allow_nan=False) if arguments.json else in_words(found))
    return 0


def in_words(found: Mapping[str, Any]) -> str:
    """The environment for people."""
    versions = {"python": found["python"]} | found["packages"]
    lines = [f"{name:<14}{version or 'not installed'}" for name, version in versions.items()]
    cpu = found["cpu"]
    lines.append(
        f"{'CPU':<14}{cpu['name']}, {cpu['cores']} cores, {cpu['threads'] or '?'} torch threads, "
        f"{cpu['memory_bytes'] / 2**30:.1f} GiB"
    )
    for gpu in found["gpus"]:
        capability = f", compute capability {gpu['capability']}" if gpu["capability"] else ""
        usable = "" if gpu["usable"] else " (torch cannot use it)"
        lines.append(f"{gpu['device']:<14}{gpu['name']}, {gpu['memory_bytes'] / 2**30:.1f} GiB{capability}{usable}")
    if not found["gpus"]:
        lines.append(f"{'GPU':<14}none")
    lines += ["", f"precision recipes on {found['device'] or 'no device'}:"]
    for name, recipe in found["recipes"].items():
        lines.append(f"{name:<14}{'yes' if recipe['runs'] else 'no':<4} {recipe['note']}")
    return "\n".join(lines)
