"""`ampscope env`: versions, processor, GPUs, what their tensor cores do, and which precision recipe to try first."""

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
    lines = [_line(name, version or "not installed") for name, version in versions.items()]
    if found["cuda"]:
        lines.append(_line("CUDA", f"{found['cuda']}, cuDNN {found['cudnn'] or 'not found'}"))
    if found["driver"]:
        newest = f", runs CUDA up to {found['driver_cuda']}" if found["driver_cuda"] else ""
        lines.append(_line("driver", f"{found['driver']}{newest}"))
    lines += ["", *_cpu(found["cpu"]), *_gpus(found), *_flags(found)]
    lines += ["", f"precision recipes on {found['device'] or 'no device'}:"]
    for name, recipe in found["recipes"].items():
        lines.append(_line(name, f"{'yes' if recipe['runs'] else 'no':<4} {recipe['note']}"))
    lines += ["", f"try first: {found['advice']['recipe']}. {found['advice']['why']}"]
    return "\n".join(lines)


def _cpu(cpu: Mapping[str, Any]) -> list[str]:
    threads = f"{cpu['threads'] or '?'} torch threads"
    lines = [_line("CPU", f"{cpu['name']}, {cpu['cores']} cores, {threads}, {cpu['memory_bytes'] / 2**30:.1f} GiB")]
    if cpu["instructions"] is None:
        return [*lines, _line("", "its instruction sets are not known")]
    for precision, names in cpu["instructions"].items():
        has = ", ".join(names) if names else "no instructions for it: runs, but slowly"
        lines.append(_line("", f"{precision.upper()}: {has}"))
    return lines


def _gpus(found: Mapping[str, Any]) -> list[str]:
    if not found["gpus"]:
        return [_line("GPU", f"none: {found['nvml']}" if found["nvml"] != "answers" else "none")]
    lines = []
    for gpu in found["gpus"]:
        memory = f", {gpu['memory_bytes'] / 2**30:.1f} GiB" if gpu["memory_bytes"] else ""
        usable = "" if gpu["usable"] else " (torch cannot use it)"
        lines += [_line(gpu["device"], f"{gpu['name']}{memory}{usable}"), _line("", gpu["says"])]
        if gpu["counts_tensor_use"] is not None:
            counts = "counts how busy its tensor cores are (GPM)" if gpu["counts_tensor_use"] else None
            lines.append(_line("", counts or "does not count how busy tensor cores are: that came with Hopper"))
    return lines


def _flags(found: Mapping[str, Any]) -> list[str]:
    if found["flags"] is None:
        return []
    said = ", ".join(f"{name}={value}" for name, value in found["flags"].items())
    set_here = [f"{name}={value}" for name, value in found["overrides"].items()]
    return [_line("flags", said), *([_line("set here", ", ".join(set_here))] if set_here else [])]


def _line(name: str, text: str) -> str:
    return f"{name:<14}{text}"
