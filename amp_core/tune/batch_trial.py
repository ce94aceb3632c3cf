"""One trial of `max_batch`, a program of its own: train a few steps as standard input says, and write what came of it.

    {"config": {…}, "limit_bytes": 2147483648, "folder": "…"}   →   folder/result.json

The result says `fits`, and `why` not; or `refused` for settings that cannot be carried out, or `error` for anything
else that goes wrong. Where there is no result the process was killed.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from amp_core.record.backends import backend_of
from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig
from amp_core.store.run import load_run
from amp_core.train.engine.training import choose_device, train

_SIGNS = (
    "out of memory",
    "can't allocate memory",  # torch's CPU allocator
    "not enough memory",
    "alloc_failed",  # cuBLAS and cuDNN
    "cannot allocate memory",
    "bad_alloc",
    "can't start new thread",  # there is no memory for its stack
)


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and any(sign in str(error).lower() for sign in _SIGNS)


def guard(device: torch.device, limit_bytes: int | None) -> None:
    """Let no more be taken than the limit; on Linux let this process be the first to go if the machine runs out."""
    if device.type != "cpu":
        if limit_bytes is not None:
            backend_of(device).limit_memory(limit_bytes)
        return
    if not sys.platform.startswith("linux"):
        return
    import resource

    Path("/proc/self/oom_score_adj").write_text("1000")
    if limit_bytes is not None:
        # One allocation far beyond the limit is refused at once, instead of being filled until somebody looks.
        page = os.sysconf("SC_PAGE_SIZE")
        data = int(Path("/proc/self/statm").read_text().split()[5]) * page
        resource.setrlimit(resource.RLIMIT_DATA, (data + limit_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def tried(config: TrainConfig, limit_bytes: int | None, folder: Path) -> dict[str, Any]:
    """Train, and say whether it fitted."""
    try:
        guard(choose_device(config.device), limit_bytes)
        train(config, folder / "run", stop=lambda: None)
    except RunError as error:
        return {"refused": str(error)}
    except Exception as error:
        if out_of_memory(error):
            return {"fits": False, "why": " ".join(str(error).split())[:200] or "out of memory"}
        return {"error": f"{type(error).__name__}: {error}"}
    steps = load_run(folder / "run").table("steps")
    step_ms = [ms for ms in steps["step_ms"].to_pylist()[1:] if ms is not None]  # the first one warms up
    usual = min(step_ms) if step_ms else None
    samples = config.batch_size * config.accumulate if config.batch_size is not None else None
    peaks = [peak for peak in steps["memory_peak_bytes"].to_pylist() if peak is not None]
    return {
        "fits": True,
        "peak_bytes": max([*peaks, *highest_resident(config)], default=None),
        "step_ms": usual,
        "samples_per_s": 1e3 * samples / usual if usual and samples else None,
    }


def highest_resident(config: TrainConfig) -> list[int]:
    """The highest resident set of this process so far, on a CPU and where the system tells (Linux).

    A run looks at the end of each step only. Not `getrusage`, whose peak is begun by the process that started this one.
    """
    status = Path("/proc/self/status")
    if config.device != "cpu" or not status.is_file():
        return []
    return [int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM:")]


def main() -> None:
    """Carry out the task on standard input."""
    task = json.load(sys.stdin)
    folder = Path(task["folder"])
    result = tried(TrainConfig.from_dict(task["config"]), task["limit_bytes"], folder)
    aside = folder / "result.tmp"
    aside.write_text(json.dumps(result), encoding="utf-8")
    aside.replace(folder / "result.json")


if __name__ == "__main__":
    main()
