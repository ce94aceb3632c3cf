"""The largest batch that fits: each trial is a training of a few steps in its own process, within a memory limit.

    >>> result = largest_batch(TrainConfig(workload="text-gpt", precision="bf16", device="cpu"), limit_bytes=2 * 2**30)
    >>> result.largest, result.trials[-1].why
    (1216, 'its resident set passed 2.00 GiB')

The batch is doubled until it does not fit. Then the search narrows the interval: by bisection, or by extrapolating
memory linearly from the last two batches that fitted. If a trial runs out of memory or is killed for it, the search
continues. If one takes too long, the search ends, since time says nothing about memory. On a CPU this process polls the
trial's memory and kills it above the limit, so that the machine stays usable. This module imports no torch.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from amp_core.hardware.child_environment import python_path
from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig
from amp_core.text import formatting

FILE = "max_batch.json"
"""The result, in the folder of the search."""
STEPS = 3
"""Steps of a trial: the first creates the optimizer's state, the others reach the peak of every later step."""
MAX_BATCH_SIZE = 65536
"""No larger batch is tried by default."""
TIMEOUT_S = 300.0
FREE_MEMORY_FRAC = 0.8
"""Share of the free memory that a trial on a CPU may take if no limit is given."""
_POLL_INTERVAL_S = 0.03  # at some 5 GB/s of fresh pages a trial exceeds its limit by at most 150 MB


@dataclass(frozen=True)
class Trial:
    """The trial of one batch size."""

    batch_size: int
    fits: bool
    why: str
    """Why it does not fit; empty if it does."""
    peak_bytes: int | None
    """CUDA: peak memory allocated by torch; CPU: peak resident set of the process. None if no step was completed."""
    step_ms: float | None
    samples_per_s: float | None
    seconds: float
    """Duration of the trial, including the start of its process."""
    too_slow: bool = False
    """Whether it was killed at the timeout, which says nothing about memory."""
    failed: bool = False
    """Whether torch raised an error that does not name memory: a limit of its kernels, or a fault of the workload."""


@dataclass(frozen=True)
class MaxBatch:
    """The result of the search."""

    largest: int | None
    """The largest batch that fits; None if not even one sample does."""
    next_larger: int | None
    """The smallest batch tried that does not fit; None if all fitted."""
    limit_bytes: int | None
    """The limit that was enforced; None on CUDA without one: the device is the limit."""
    on_cpu: bool
    trials: tuple[Trial, ...]

    def in_words(self) -> str:
        """The result in one line."""
        if self.largest is None:
            return f"not even a batch of 1 fits: {self.trials[-1].why}"
        best = next(t for t in self.trials if t.fits and t.batch_size == self.largest)
        text = f"largest batch that fits: {self.largest:,}"
        if best.peak_bytes is not None:
            what = "resident set of the process" if self.on_cpu else "allocated by torch"
            text += f", with {formatting.size(best.peak_bytes)} {what}"
        if self.next_larger is None:
            return f"{text}; larger ones were not tried"
        first = next(t for t in self.trials if t.batch_size == self.next_larger)
        if first.too_slow:
            return f"{text}; at {self.next_larger:,} its {first.why}, so larger ones were not tried"
        return f"{text}; at {self.next_larger:,} {first.why}"


def largest_batch(
    config: TrainConfig,
    *,
    limit_bytes: int | None = None,
    most: int = MAX_BATCH_SIZE,
    timeout_s: float = TIMEOUT_S,
    on_trial: Callable[[Trial], None] | None = None,
    attempt: "Callable[[TrainConfig, int | None, float], Trial] | None" = None,
) -> MaxBatch:
    """Search the largest `batch_size` with which `config` trains, up to `most`.

    `limit_bytes` limits the resident set of the process on a CPU, and torch's memory on CUDA. Without it a trial on a
    CPU may take a share of what is free. `on_trial` is called after each trial. A batch with which torch raises any
    other error does not fit if a smaller one does: many kernels index with 32 bits. Raises `RunError` for a workload
    whose batches cannot be sized, for what `train` refuses, and if not even a batch of 1 trains for a reason other than
    memory.
    """
    check(config, limit_bytes=limit_bytes, most=most, timeout_s=timeout_s)
    limit_bytes = effective_limit(config, limit_bytes)
    spec = config.spec
    assert spec is not None
    attempt = attempt or try_batch
    trials: list[Trial] = []
    fits, fails = 0, most + 1  # the largest known to fit, the smallest known or assumed not to
    batch_size = min(config.batch_size or spec.batch_size, most)
    while fails - fits > 1:
        short = dataclasses.replace(config, batch_size=batch_size, steps=STEPS, profile=None, evaluate=False)
        trial = attempt(short, limit_bytes, timeout_s)
        trials.append(trial)
        if on_trial is not None:
            on_trial(trial)
        if trial.too_slow and fits:  # bisecting by time would take hours without an answer
            break
        if trial.fits:
            fits = batch_size
        else:
            fails = batch_size
        if trial.failed and fails == 1:
            raise RunError(f"a training with batch_size=1 fails for a reason other than memory: {trial.why}")
        batch_size = _next(fits, fails, most, trials, limit_bytes)
    tried = [t.batch_size for t in trials if not t.fits]
    return MaxBatch(
        largest=fits or None,
        next_larger=min(tried) if tried else None,
        limit_bytes=limit_bytes,
        on_cpu=config.device == "cpu",
        trials=tuple(trials),
    )


def check(config: TrainConfig, *, limit_bytes: int | None, most: int, timeout_s: float) -> None:
    """Raise `RunError` for arguments with which no search is possible."""
    if config.spec is None:
        raise RunError(
            f"workload={config.workload!r} makes its own batches; give a built-in workload to search its batch size"
        )
    if config.device == "auto":
        raise RunError("device='auto' does not say whose memory is limited; give cpu, cuda or cuda:N")
    for name, value in (("most", most), ("memory_limit", limit_bytes if limit_bytes is not None else 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RunError(f"{name}={value!r} is not possible; give a whole number of 1 or more")
    seconds: object = timeout_s
    if not isinstance(seconds, int | float) or not seconds > 0:
        raise RunError(f"timeout={timeout_s!r} is not possible; give seconds above 0")


def effective_limit(config: TrainConfig, given: int | None) -> int | None:
    """The limit to enforce: `given`, else on a CPU `FREE_MEMORY_FRAC` of the free memory, else None."""
    return int(FREE_MEMORY_FRAC * free_bytes()) if given is None and config.device == "cpu" else given


def _next(fits: int, fails: int, most: int, trials: list[Trial], limit_bytes: int | None) -> int:
    """The next batch to try: twice what fits, half of what does not, or between the two."""
    if fails > most and not any(not t.fits for t in trials):
        return min(2 * fits, most)
    if fits == 0:
        return 1 if trials[-1].failed else max(1, fails // 2)  # a faulty workload fails at every size
    middle = (fits + fails) // 2
    known = sorted((t.batch_size, t.peak_bytes) for t in trials if t.fits and t.peak_bytes is not None)
    halving = len(trials) % 2 == 0  # every other time, so that nonlinear growth costs little
    if limit_bytes is None or len(known) < 2 or halving:
        return middle
    (b1, m1), (b2, m2) = known[-2:]
    if m2 <= m1:
        return middle
    guess = b2 + int((limit_bytes - m2) * (b2 - b1) / (m2 - m1))
    return min(max(guess, fits + 1), fails - 1)


def try_batch(config: TrainConfig, limit_bytes: int | None, timeout_s: float) -> Trial:
    """Train a few steps in a new process, and return whether that fitted."""
    assert config.batch_size is not None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ampscope-trial-") as folder:
        task = {"config": config.to_dict(), "limit_bytes": limit_bytes, "folder": folder}
        command = [sys.executable, "-m", "amp_core.tune.batch_trial"]
        # In its own session Ctrl-C reaches it through us alone. Its output is read if it fails.
        with (
            open(Path(folder) / "output", "wb") as output,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | python_path() | {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")},
            ) as child,
        ):
            try:
                killed = _watch_over(child, json.dumps(task).encode(), config, limit_bytes, timeout_s)
            except BaseException:  # on any error, Ctrl-C above all: no process stays behind
                child.kill()
                child.wait()
                raise
        result = _result(Path(folder), child.returncode, killed)
    if "error" in result:
        raise RunError(
            f"a training with batch_size={config.batch_size} fails for a reason other than memory: {result['error']}"
        )
    if "refused" in result:
        raise RunError(str(result["refused"]))
    return Trial(
        batch_size=config.batch_size,
        fits=bool(result["fits"]),
        why=str(result.get("why", "")),
        peak_bytes=result.get("peak_bytes"),  # type: ignore[arg-type]
        step_ms=result.get("step_ms"),  # type: ignore[arg-type]
        samples_per_s=result.get("samples_per_s"),  # type: ignore[arg-type]
        seconds=time.monotonic() - began,
        too_slow=killed == _too_slow(timeout_s),
        failed=bool(result.get("failed")),
    )


def _too_slow(timeout_s: float) -> str:
    return f"{STEPS} steps took longer than {timeout_s:g} s"


def _watch_over(
    child: "subprocess.Popen[bytes]", task: bytes, config: TrainConfig, limit_bytes: int | None, timeout_s: float
) -> str | None:
    """Send the child its task and wait for its end; returns why it was killed, or None."""
    assert child.stdin is not None
    try:
        with child.stdin:
            child.stdin.write(task)
    except BrokenPipeError:  # it ended before reading; its output holds the error
        child.wait()
        return None
    until = time.monotonic() + timeout_s
    watched = psutil.Process(child.pid) if config.device == "cpu" and limit_bytes is not None else None
    while child.poll() is None:
        try:
            if watched is not None and limit_bytes is not None and watched.memory_info().rss > limit_bytes:
                child.kill()
                return f"its resident set exceeded {formatting.size(limit_bytes)}"
        except psutil.NoSuchProcess:
            continue
        if time.monotonic() > until:
            child.kill()
            return _too_slow(timeout_s)
        time.sleep(_POLL_INTERVAL_S)
    return None


def _result(folder: Path, code: int, killed: str | None) -> dict[str, object]:
    """The result that a trial wrote, or one made from how its process ended."""
    if killed is not None:
        return {"fits": False, "why": killed}
    file = folder / "result.json"
    if file.is_file():
        record: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
        return record
    if code == -signal.SIGKILL:
        return {"fits": False, "why": "the system killed it, as it does when memory runs out"}
    text = (folder / "output").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return {"error": f"its process exited with code {code}{': ' + text[-1] if text else ''}"}


def free_bytes() -> int:
    """Memory that a process on this machine, or in this container, could still take."""
    free = int(psutil.virtual_memory().available)
    for most, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, int(Path(most).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such file, or `max`: no limit here
            continue
    return max(free, 0)
