"""One trial of `max_batch` in its own process: train the few steps that standard input describes, and write the result.

    {"config": {…}, "limit_bytes": 2147483648, "folder": "…"}   →   folder/result.json

The result holds `fits`, with `why` if it does not, and `failed` if torch raised an error that does not name memory; or
`refused` for settings that are not possible, or `error` for any other failure. Without a result the process was killed.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig
from amp_core.store.run import load_run
from amp_core.train.engine.importing import collecting_later

with collecting_later():
    import torch
    import torch._dynamo  # which the first optimizer imports

    from amp_core.record.backends import backend_of
    from amp_core.train.engine.training import choose_device, train

_MESSAGES = (
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
    return isinstance(error, RuntimeError | OSError) and any(sign in str(error).lower() for sign in _MESSAGES)


def first_sentence(error: BaseException) -> str:
    """The error on one line, cut where it becomes long."""
    return " ".join(str(error).split())[:200]


def limit_memory(device: torch.device, limit_bytes: int | None) -> None:
    """Enforce the memory limit; on Linux let the out-of-memory killer choose this process first."""
    if device.type != "cpu":
        if limit_bytes is not None:
            backend_of(device).limit_memory(limit_bytes)
        return
    if not sys.platform.startswith("linux"):
        return
    import resource

    Path("/proc/self/oom_score_adj").write_text("1000")
    if limit_bytes is not None:
        # One allocation far beyond the limit is refused at once, instead of growing until the next poll.
        page = os.sysconf("SC_PAGE_SIZE")
        data = int(Path("/proc/self/statm").read_text().split()[5]) * page
        resource.setrlimit(resource.RLIMIT_DATA, (data + limit_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def run_trial(config: TrainConfig, limit_bytes: int | None, folder: Path) -> dict[str, Any]:
    """Train, and return whether it fitted."""
    try:
        limit_memory(choose_device(config.device), limit_bytes)
        train(config, folder / "run", stop=lambda: None)
    except RunError as error:
        return {"refused": str(error)}
    except Exception as error:
        if out_of_memory(error):
            return {"fits": False, "why": first_sentence(error) or "out of memory"}
        if isinstance(error, RuntimeError):  # of torch: perhaps a limit of its kernels
            return {"fits": False, "failed": True, "why": first_sentence(error)}
        return {"error": f"{type(error).__name__}: {error}"}
    steps = load_run(folder / "run").table("steps")
    times_ms = [ms for ms in steps["step_ms"].to_pylist()[1:] if ms is not None]  # the first one warms up
    step_ms = min(times_ms) if times_ms else None
    samples = config.batch_size * config.accumulate if config.batch_size is not None else None
    peaks = [peak for peak in steps["memory_peak_bytes"].to_pylist() if peak is not None]
    return {
        "fits": True,
        "peak_bytes": max([*peaks, *peak_resident_bytes(config)], default=None),
        "step_ms": step_ms,
        "samples_per_s": 1e3 * samples / step_ms if step_ms and samples else None,
    }


def peak_resident_bytes(config: TrainConfig) -> list[int]:
    """The highest resident set of this process so far, on a CPU under Linux; else empty.

    A run samples memory only at the end of each step, and the peak of `getrusage` includes the parent process.
    """
    status = Path("/proc/self/status")
    if config.device != "cpu" or not status.is_file():
        return []
    return [int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM:")]


def main() -> None:
    """Run the trial that standard input describes."""
    task = json.load(sys.stdin)
    folder = Path(task["folder"])
    result = run_trial(TrainConfig.from_dict(task["config"]), task["limit_bytes"], folder)
    aside = folder / "result.tmp"
    aside.write_text(json.dumps(result), encoding="utf-8")
    aside.replace(folder / "result.json")


if __name__ == "__main__":
    main()
