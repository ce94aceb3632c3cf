"""Upload of a run that is written at an address: segments are written locally and sent once they are sealed.

    >>> shipment = Shipment(Address("s3://bucket/runs/a"))
    >>> # the writer's folder is shipment.staging; its background thread calls
    >>> shipment.send("steps/00000.parquet")      # uploaded, and removed from the local folder
    >>> shipment.finish()                         # retries failed uploads; removes the local folder

Objects appear whole or not at all, and none but `run.json` is ever changed. Training continues whatever the network
does: files that cannot be sent stay in the local folder, which is itself a run folder, and are tried again with the
next segment and at the end.
"""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

from amp_core.hardware.child_environment import python_path
from amp_core.schema import RunError
from amp_core.store.urls import Address, errors_as_run_error, filesystem

WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"})
"""Stores in which a file appears once it is complete. Elsewhere it is written aside and renamed."""
PAUSES_S = (1.0, 3.0)
"""How long to wait before each further try at the end, seconds."""
MAX_LAST_S = 120.0
"""How long a process that sends what is left may take when this one is ending, seconds."""


def seal_age_s(run_age_s: float) -> float:
    """The age in seconds at which a segment is sealed and sent: short at first, so that a run is visible soon after it
    begins, and five minutes later on, so that a week's run is a few thousand files, not a million."""
    return min(300.0, max(10.0, run_age_s / 10))


class Shipment:
    """Sends the files of one run, or of one process's part of it, to an address.

    Raises `RunError` if the address cannot be reached.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self._fs, self._root = filesystem(address, "into")
        protocol = self._fs.protocol
        self._whole = bool(WHOLE & ({protocol} if isinstance(protocol, str) else set(protocol)))
        self._unsent: dict[str, bytes | None] = {}
        self._error: Exception | None = None

    @functools.cached_property
    def staging(self) -> Path:
        """The local folder of the files that are not sent yet."""
        return Path(tempfile.mkdtemp(prefix=f"ampscope-{self.address.name}-"))

    def names(self) -> set[str]:
        """Names of the objects that the address already holds."""
        try:
            with errors_as_run_error(self.address, "into"):
                paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return set()
        return {path.rstrip("/").rpartition("/")[2] for path in paths} - {"", self._root.rpartition("/")[2]}

    def begin(self, head: bytes) -> None:
        """Write the first `run.json`. Raises `RunError` if the address cannot be written."""
        try:
            with errors_as_run_error(self.address, "into", "cannot be written"):
                self._put("run.json", head)
        except FileNotFoundError:  # buckets are not created: the name may be mistyped
            raise RunError(f"into={str(self.address)!r} cannot be written: the bucket does not exist") from None

    def send(self, name: str, data: bytes | None = None) -> None:
        """Send the file `name` of the folder, or `data` under that name; never raises."""
        self._unsent.pop(name, None)  # it replaces an older upload of the same name
        self._unsent[name] = data
        for each in list(self._unsent):
            try:
                content = self._unsent[each]
                self._put(each, (self.staging / each).read_bytes() if content is None else content)
            except Exception as error:  # each store has its own errors; the next segment tries again
                self._error = error
                return
            if self._unsent.pop(each) is None:
                (self.staging / each).unlink(missing_ok=True)

    def finish(self) -> None:
        """Retry unsent files a few times; then remove the local folder, or log why it is kept."""
        if self._unsent and not threading.main_thread().is_alive():
            self._leave_to_another()
        for pause in PAUSES_S:
            if not self._unsent:
                break
            time.sleep(pause)
            name, data = next(iter(self._unsent.items()))
            self.send(name, data)
        if not self._unsent:
            shutil.rmtree(self.staging, ignore_errors=True)
            return
        self._keep_data()
        warnings.warn(
            f"into={str(self.address)!r}: {len(self._unsent)} files of the run could not be sent "
            f"({type(self._error).__name__}: {self._error}); they are kept in {self.staging}",
            RuntimeWarning,
            stacklevel=2,
        )

    def _leave_to_another(self) -> None:
        """Send the rest from another process: network clients need threads, and an interpreter that is exiting starts
        none."""
        self._keep_data()
        command = [sys.executable, "-m", "amp_core.store.upload", str(self.staging), str(self.address), *self._unsent]
        try:
            done = subprocess.run(
                command, timeout=MAX_LAST_S, check=False, capture_output=True, env=os.environ | python_path()
            )
        except (OSError, subprocess.SubprocessError) as error:
            self._error = error
            return
        if done.returncode == 0:
            self._unsent.clear()

    def _keep_data(self) -> None:
        for name, data in self._unsent.items():
            if data is not None:
                (self.staging / name).write_bytes(data)

    def _put(self, name: str, data: bytes) -> None:
        folder, _, file = f"{self._root}/{name}".rpartition("/")
        target = f"{folder}/{file}" if self._whole else f"{folder}/.{file}.tmp"
        if self._whole:
            self._fs.pipe_file(target, data)
            return
        self._fs.makedirs(folder, exist_ok=True)
        self._fs.pipe_file(target, data)
        self._fs.mv(target, f"{folder}/{file}")


def main(staging: str, address: str, *names: str) -> int:
    """Send the files `names` of the folder `staging`; `Shipment` starts this process at interpreter exit."""
    shipment = Shipment(Address(address))
    for name in names:
        with errors_as_run_error(shipment.address, "into", "cannot be written"):
            shipment._put(name, (Path(staging) / name).read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
