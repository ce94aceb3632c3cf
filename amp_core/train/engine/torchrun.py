"""Start torchrun for a training of several processes on this machine, and record how it ended.

    >>> launch(4, ["train", "--precision", "fp16", "--out", "runs/a"], "runs/a")
    (0, None)

torchrun (`torch.distributed.run`, standalone) starts the processes, gives each its rank, and stops all when one dies.
They communicate over the loopback interface only. torchrun knows which process died first and why; that is added to
what the ranks themselves wrote into `run.json`.
"""

import contextlib
import ctypes
import dataclasses
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import psutil

from amp_core.analysis.ranks import end_in_words
from amp_core.schema import RunError
from amp_core.store.atomic import replace_file
from amp_core.store.run import load_run
from amp_core.store.writer import RunWriter

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

LAUNCHED = "AMPSCOPE_LAUNCHED"
"""Environment variable set in processes that `launch` starts."""


def launch(processes: int, command: Sequence[str], folder: str | os.PathLike[str]) -> tuple[int, str | None]:
    """Run `python -m amp_core COMMAND` in `processes` processes.

    Returns an exit code (0, 1 if a process failed, 130 if stopped) and which rank failed and why, or None. Raises
    `RunError` with a process's own message for bad input.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    os.environ[LAUNCHED] = "1"
    if "lo" in psutil.net_if_addrs():  # by default gloo resolves the host name and listens on that address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    given = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(processes), "-m", "amp_core"]
    try:
        run(parse_args([*given, *command]))
    except ChildFailedError as error:
        first, failure = error.get_first_failure()
        payload = failure.error_file_data.get("message")
        message = str(payload.get("message") if isinstance(payload, dict) else payload)
        if failure.exitcode == 2 and message.startswith("RunError: "):
            raise RunError(re.sub("^into=", "out=", message.removeprefix("RunError: "))) from None
        if failure.exitcode == 130:
            return 130, None
        killed = {rank: f.signal_name() for rank, f in error.failures.items() if f.exitcode < 0}
        how = f"exit code {failure.exitcode}" if first not in killed else f"killed by {killed[first]}"
        return 1, _end(Path(folder), killed) or f"rank {first} ended with {how}"
    except (SignalException, KeyboardInterrupt):
        return 130, None
    return 0, None


def torchrun_worker(train: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`train` wrapped for a process of torchrun, which then receives the error that ended the process.

    A process that `launch` started dies with the launcher and leaves Ctrl-C to it. torchrun starts its processes in
    their own sessions, so nothing else would end them if torchrun itself is killed.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    if os.environ.get(LAUNCHED) == "1":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with contextlib.suppress(OSError, AttributeError):  # only Linux has prctl
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return cast(Callable[Arguments, Result], record(train))


def _end(folder: Path, killed: Mapping[int, str]) -> str | None:
    """Write the end of killed ranks, with the signal, and into `run.json` which rank was the cause."""
    try:
        run = load_run(folder)
        head = run.head
        if head.status == "finished":
            return None
        for rank, name in killed.items():
            if rank or head.status == "running":
                writer = RunWriter(
                    folder,
                    config=head.config,
                    environment=head.environment,
                    model=head.model,
                    rank=rank,
                    world_size=head.world_size,
                    resume=True,
                )
                writer.close("failed", f"killed by {name}")
        run = load_run(folder)
    except RunError:  # no rank had started, or the run is not ours: the console shows the error
        return None
    reason = end_in_words(run)
    ended = dataclasses.replace(run.head, status="failed", end_reason=reason)
    replace_file(folder / "run.json", ended.to_json().encode())
    return reason


_PR_SET_PDEATHSIG = 1
