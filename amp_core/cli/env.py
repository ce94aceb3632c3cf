"""`ampscope env`: versions, processor, GPUs, the formats of their tensor cores, and which precision recipe to try
first."""

import argparse
import json
from collections.abc import Mapping
from typing import Any

from amp_core.schema.documents import versioned
from amp_core.text import formatting


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command."""
    command = subparsers.add_parser(
        "env", help="show this machine's hardware and which precisions it runs", allow_abbrev=False
    )
    command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the environment."""
    from amp_core.train.environment import environment

    facts = environment()
    print(json.dumps(versioned(facts), indent=1, allow_nan=False) if arguments.json else in_words(facts))
    return 0


def in_words(facts: Mapping[str, Any]) -> str:
    """The environment as text."""
    versions = {"python": facts["python"]} | facts["packages"]
    lines = [_line(name, version or "not installed") for name, version in versions.items()]
    if facts["cuda"]:
        lines.append(_line("CUDA", f"{facts['cuda']}, cuDNN {facts['cudnn'] or 'not found'}"))
    if facts["driver"]:
        newest = f", runs CUDA up to {facts['driver_cuda']}" if facts["driver_cuda"] else ""
        lines.append(_line("driver", f"{facts['driver']}{newest}"))
    lines += ["", *_cpu(facts["cpu"]), *_gpus(facts), *_flags(facts)]
    lines += ["", f"precision recipes on {facts['device'] or 'no device'}:"]
    for name, recipe in facts["recipes"].items():
        lines.append(_line(name, f"{'yes' if recipe['runs'] else 'no':<4} {recipe['note']}"))
    lines += ["", f"recommended first: {facts['advice']['recipe']}. {facts['advice']['why']}"]
    return "\n".join(lines)


def _cpu(cpu: Mapping[str, Any]) -> list[str]:
    threads = formatting.plural(cpu["threads"], "torch thread") if cpu["threads"] else "torch threads unknown"
    lines = [_line("CPU", f"{cpu['name']}, {cpu['cores']} cores, {threads}, {cpu['memory_bytes'] / 2**30:.1f} GiB")]
    if cpu["instructions"] is None:
        return [*lines, _line("", "instruction sets unknown")]
    for precision, names in cpu["instructions"].items():
        has = ", ".join(names) if names else "no native instructions: runs, but slowly"
        lines.append(_line("", f"{precision.upper()}: {has}"))
    return lines


def _gpus(facts: Mapping[str, Any]) -> list[str]:
    if not facts["gpus"]:
        return [_line("GPU", f"none: {facts['nvml']}" if facts["nvml"] != "answers" else "none")]
    lines = []
    for gpu in facts["gpus"]:
        memory = f", {gpu['memory_bytes'] / 2**30:.1f} GiB" if gpu["memory_bytes"] else ""
        usable = "" if gpu["usable"] else " (torch cannot use it)"
        lines += [_line(gpu["device"], f"{gpu['name']}{memory}{usable}"), _line("", gpu["says"])]
        if gpu["counts_tensor_use"] is not None:
            counts = "reports tensor-core activity (GPM)" if gpu["counts_tensor_use"] else None
            lines.append(_line("", counts or "does not report tensor-core activity, which needs Hopper or newer"))
    return lines


def _flags(facts: Mapping[str, Any]) -> list[str]:
    if facts["flags"] is None:
        return []
    flag_text = ", ".join(f"{name}={value}" for name, value in facts["flags"].items())
    set_here = [f"{name}={value}" for name, value in facts["overrides"].items()]
    return [_line("flags", flag_text), *([_line("set here", ", ".join(set_here))] if set_here else [])]


def _line(name: str, text: str) -> str:
    return f"{name:<14}{text}"
