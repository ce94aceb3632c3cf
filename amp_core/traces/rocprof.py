"""Kernels, copies and calls in traces that AMD's `rocprof` writes for Chrome (`results.json`).

    >>> torchs_events({"name": "gemm [clone .kd]", "pid": 7, "args": {"BeginNs": "12345", ...}, ...}, {"7": "GPU1"})
    [{'cat': 'kernel', 'name': 'gemm', 'ts': 12.345, ...}, {'cat': 'hip_runtime', 'name': 'dispatch', ...}]

Its events have no category: the names of their processes tell what they are (`GPU0`, `COPY`, `CPU HIP API`), and their
arguments when they were dispatched, began and ended, in nanoseconds as text. It records no operators of torch.
"""

import re
from collections.abc import Mapping
from typing import Any

_DEVICE = re.compile(r"(?:\d+ )?GPU ?(\d{1,3})$")
_COPIES, _CALLS = re.compile(r"(?:\d+ )?COPY$"), re.compile(r"(?:\d+ )?CPU HIP API$")
_SUFFIX = re.compile(r"(?:\.kd)?(?: \[clone \.kd\])?$")
"""What it adds to the name of a kernel: the symbol of its descriptor."""
_NUMBER = re.compile(r"\d{1,20}", flags=re.ASCII)
_GFX = re.compile(r"gfx(\d{1,2})([0-9a-f])[0-9a-f]$")
AGENTS = "otherData"
"""The key beside the events under which it lists the processors and GPUs of the machine."""
MAX_AGENTS = 256


BEGAN = "BeginNs"
"""The argument in which each of its events tells when it began."""
DISPATCH = "dispatch"
"""The name of the launch of a kernel, of which its arguments tell no more than when."""


def torchs_events(event: Mapping[str, Any], processes: Mapping[str, str]) -> list[dict[str, Any]]:
    """An event as torch.profiler would write it, with the launch of a kernel; none if it is not one of rocprof's.
    `processes`: their names."""
    arguments, name = event.get("args"), event.get("name")
    if not isinstance(arguments, dict) or not isinstance(name, str) or BEGAN not in arguments:
        return []
    began, ended = (_number(arguments.get(key)) for key in (BEGAN, "EndNs"))
    process = processes.get(str(event.get("pid"))[:40], "")
    if began is None or ended is None:
        return []
    made = dict(event) | {"ts": began / 1e3, "dur": (ended - began) / 1e3}
    if (device := _DEVICE.match(process)) is not None:
        stream = {"device": int(device[1]), "stream": _number(arguments.get("queue-id"))}
        kernel = made | {"cat": "kernel", "name": _SUFFIX.sub("", name), "args": stream}
        return (
            [kernel] if (dispatched := _number(arguments.get("DispatchNs"))) is None else _launched(kernel, dispatched)
        )
    if _COPIES.match(process):
        return [made | {"cat": "gpu_memcpy", "args": {"device": _number(arguments.get("dev-id"))}}]
    return [made | {"cat": "hip_runtime", "args": {}}] if _CALLS.match(process) else []


_ONE_NS = 1e-3
"""How long a dispatch lasts, in microseconds: a launch of no length at all is one whose call is not known."""


def _launched(kernel: dict[str, Any], dispatched: int) -> list[dict[str, Any]]:
    """A kernel with its launch. They are linked by when that was, which no two kernels have in common."""
    link = {"correlation": dispatched}
    launch = {"ph": "X", "cat": "hip_runtime", "name": DISPATCH, "pid": DISPATCH, "tid": kernel.get("tid")}
    return [
        launch | {"ts": dispatched / 1e3, "dur": _ONE_NS, "args": link},
        kernel | {"args": kernel["args"] | link},
    ]


def devices(agents: object) -> list[dict[str, Any]]:
    """The GPUs among the `AGENTS` of a trace, as torch.profiler lists them."""
    if not isinstance(agents, dict):
        return []
    found: list[dict[str, Any]] = []
    for number in range(1, MAX_AGENTS):
        if agents.get(f"Agent{number}.DeviceType") == "GPU":
            version = _GFX.match(str(agents.get(f"Agent{number}.Name")))
            found.append(
                {
                    "id": _number(agents.get(f"Agent{number}.Node")),  # a GPU's number counts processors, too
                    "warpSize": _number(str(agents.get(f"Agent{number}.MemoryProperties.WavefrontSize")).split("(")[0]),
                    "computeMajor": int(version[1]) if version else None,
                    "computeMinor": int(version[2], 16) if version else None,
                    "numSms": _number(agents.get(f"Agent{number}.ComputeUnit")),
                }
            )
    return found


def _number(value: object) -> int | None:
    """A number that is written as one or as text."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else None
