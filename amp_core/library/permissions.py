"""The permissions of a served app: `ampscope serve` sets the rules once, and every function that changes something
checks them.

    >>> rules = Rules(read_only=True)
    >>> os.environ.update(rules.environment())      # `ampscope serve` does this for the server that it starts
    >>> current().check_change("start a run")
    Traceback (most recent call last):
    amp_core.schema.RunError: this server is read-only: it does not start a run

Pages hide what is not allowed, but enforcement is here: `jobs`, uploads and deletion check these rules in the server's
process. Without `ampscope serve` only scripts are refused: the app runs no script that the owner has not allowed.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig

VARIABLE = "AMPSCOPE_SERVE"
"""Environment variable that carries the rules from `ampscope serve` to the server."""

MAX_NAMED = 10
"""Files listed in the error for a missing one."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Host names of this machine to its own browsers."""

KEEP_FREE_BYTES = 2**30
"""Disk space that a server leaves free for other programs."""

HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
}
"""Environment of the server that configures glibc's heap, mallopt(3), and Arrow's pool before the first thread starts.
If set later, the arenas of existing threads stay, each fragmented, and Arrow still decodes and computes in mimalloc
despite `pyarrow.set_memory_pool`, which grew by 30 MiB while a live run was displayed."""


@dataclass(frozen=True)
class Rules:
    """What is allowed. The defaults are those of a local app."""

    read_only: bool = False
    """No Start, Stop, upload or delete."""
    scripts: tuple[str, ...] = ()
    """Absolute folders whose scripts may be run as workloads; none unless the owner lists them."""
    hosts: tuple[str, ...] = LOOPBACK
    """Host names that requests may use; `*.example.org` matches every name below that one."""
    origins: tuple[str, ...] = ()
    """Further origins, such as `https://amp.example.org`, whose pages may talk to the server."""
    most_jobs: int | None = None
    """Limit of trainings that run or wait at one time."""
    most_sessions: int | None = None
    """Limit of connected browser tabs."""
    most_upload_bytes: int | None = None
    """Limit of one upload, all files together."""
    most_disk_bytes: int | None = None
    """Limit of the size of the runs folder."""

    def environment(self) -> dict[str, str]:
        """The rules as an environment variable of the server's process."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    def check_change(self, what: str) -> None:
        """Raise `RunError` on a read-only server; `what` is the action, e.g. `start a run`."""
        if self.read_only:
            raise RunError(f"this server is read-only: it does not {what}")

    def check_start(self, config: TrainConfig, runs_dir: Path, alive: int, together: int = 1) -> None:
        """Raise `RunError` if the training of `config`, one of `together` that are started at once, may not be started
        while `alive` others run or wait."""
        self.check_change("start a run")
        if config.own is not None:
            self._check_script(config.own[0])
        if self.most_jobs is not None and alive + together > self.most_jobs:
            raise RunError(
                f"{alive} trainings are already running or queued, and this server allows {self.most_jobs}; wait for "
                "one to end, or stop one"
            )
        self.check_room(runs_dir)

    def check_upload(self, runs_dir: Path, size_bytes: int) -> None:
        """Raise `RunError` if an upload of this size is not allowed into `runs_dir`."""
        self.check_change("accept uploads")
        if self.most_upload_bytes is not None and size_bytes > self.most_upload_bytes:
            raise RunError(
                f"the upload is {size_bytes / 2**20:.1f} MiB, but this server accepts at most "
                f"{self.most_upload_bytes / 2**20:.0f} MiB"
            )
        self.check_room(runs_dir, size_bytes)

    def check_room(self, runs_dir: Path, more_bytes: int = 0) -> None:
        """Raise `RunError` if `more_bytes` would exceed the limit of `runs_dir` or fill its disk."""
        if self.most_disk_bytes is None:
            return
        held = folder_bytes(runs_dir) + more_bytes
        if held > self.most_disk_bytes:
            raise RunError(
                f"the runs take {held / 2**30:.2f} GiB, and this server allows at most "
                f"{self.most_disk_bytes / 2**30:.2f} GiB; delete some"
            )
        there = next((p for p in (runs_dir, *runs_dir.absolute().parents) if p.exists()), Path("/"))
        free = shutil.disk_usage(there).free - more_bytes
        if free < KEEP_FREE_BYTES:
            raise RunError(f"the disk of the runs has {max(free, 0) / 2**30:.2f} GiB left; free some space first")

    def _check_script(self, file: Path) -> None:
        real = file.resolve()  # a link in an allowed folder may point outside
        if not any(real.is_relative_to(Path(folder).resolve()) for folder in self.scripts):
            allowed = ", ".join(self.scripts) or "none"
            raise RunError(
                f"workload={str(file)!r} is a script that the app may not run; folders allowed with `ampscope serve "
                f"--scripts`: {allowed}"
            )
        if not real.is_file():  # before the job waits for its turn
            others = ", ".join(sorted(path.name for path in real.parent.glob("*.py"))[:MAX_NAMED]) or "none"
            raise RunError(f"workload={str(file)!r} does not exist; Python files in its folder: {others}")

    def host_allowed(self, host: str | None) -> bool:
        """Whether a request with this Host header is meant for this server: refuses DNS rebinding."""
        name = host_name(host)
        if name is None:
            return False
        return any(name.endswith(known[1:]) if known.startswith("*.") else name == known for known in self.hosts)

    def origin_allowed(self, origin: str | None, host: str | None) -> bool:
        """Whether a page of `origin` may talk to the server that it calls `host`: the server's own pages only.

        A request without an origin is allowed: browsers send one with every WebSocket and every upload.
        """
        if origin is None or origin in self.origins:
            return True
        scheme, _, rest = origin.partition("://")
        return scheme in ("http", "https") and rest.lower() == (host or "").lower()


def current() -> Rules:
    """The rules of this process. Raises `RunError` if the environment variable is invalid."""
    return _parsed(os.environ.get(VARIABLE))


def _parsed(text: str | None) -> Rules:
    if not text:
        return Rules()
    try:
        record = json.loads(text)
        lists = {name: tuple(record[name]) for name in ("scripts", "hosts", "origins") if record.get(name) is not None}
        return Rules(**record | lists)
    except (ValueError, TypeError, AttributeError):
        raise RunError(f"{VARIABLE} does not hold valid server rules; only `ampscope serve` sets it") from None


def host_name(host: str | None) -> str | None:
    """The name in a Host header, without its port, in lower case; None if the header is invalid."""
    if not host or any(c in host for c in "/\\@?#, \t"):
        return None
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port  # raises ValueError if it is not a number
    except ValueError:
        return None
    return parts.hostname.rstrip(".").lower() if parts.hostname else None


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`, links not followed; 0 if it does not exist yet."""
    total = 0
    waiting = [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:  # removed or sealed meanwhile
            continue
    return total


def has_sign_in(secrets: Mapping[str, object]) -> bool:
    """Whether Streamlit's secrets set up a sign-in (section `[auth]`, OpenID Connect)."""
    return isinstance(secrets.get("auth"), Mapping)


def user_allowed(email: object, verified: object, allowed: object) -> bool:
    """Whether an account may come in: `allowed` lists addresses and `*@domain`; None lets every account in.

    An address that the provider marks as unverified is refused.
    """
    if allowed is None:
        return True
    if not isinstance(email, str) or verified is False or not isinstance(allowed, list):
        return False
    known = email.lower()
    patterns = [a.lower() for a in allowed if isinstance(a, str)]
    return known in patterns or any(a.startswith("*@") and known.endswith(a[1:]) for a in patterns)
