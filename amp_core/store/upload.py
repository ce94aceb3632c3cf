"""Upload of a run that is written at an address: segments are written here and sent once they are sealed.

    >>> shipment = Shipment(Address("s3://bucket/runs/a"))
    >>> writer's folder is shipment.staging; the writer's background thread calls
    >>> shipment.send("steps/00000.parquet")      # there now, and no longer here
    >>> shipment.finish()                         # tries again what failed; removes the local folder

An object is there whole or not at all, and none is changed once it is there, `run.json` excepted. Whatever the network
does, training goes on: what cannot be sent stays in the folder here, which is itself a run folder, and is tried again
with the next segment and at the end.
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
from amp_core.store.urls import Address, asking, filesystem

WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"})
"""Stores in which a file appears once it is complete. Elsewhere it is written aside and renamed."""
PAUSES_S = (1.0, 3.0)
"""How long to wait before each further try at the end, seconds."""
MAX_LAST_S = 120.0
"""How long a process that sends what is left may take when this one is ending, seconds."""


def seal_age_s(run_age_s: float) -> float:
    """When a segment is old enough to be sealed and sent, seconds: soon at first, so that a run is seen as it begins,
    and every five minutes once it is long, so that a week's run is some thousand files and not a million."""
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
        """The local folder of what is not sent yet."""
        return Path(tempfile.mkdtemp(prefix=f"ampscope-{self.address.name}-"))

    def names(self) -> set[str]:
        """Names that the address holds already."""
        try:
            with asking(self.address, "into"):
                paths = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return set()
        return {path.rstrip("/").rpartition("/")[2] for path in paths} - {"", self._root.rpartition("/")[2]}

    def begin(self, head: bytes) -> None:
        """Write the first `run.json`. Raises `RunError` where the address cannot be written."""
        try:
            with asking(self.address, "into", "cannot be written"):
                self._put("run.json", head)
        except FileNotFoundError:  # no bucket is made: its name may be mistyped
            raise RunError(f"into={str(self.address)!r} cannot be written: there is no such bucket") from None

    def send(self, name: str, data: bytes | None = None) -> None:
        """Send the file `name` of the folder, or `data` under that name; never raises."""
        self._unsent.pop(name, None)  # an older one, of the same name, need not go first
        self._unsent[name] = data
        for each in list(self._unsent):
            try:
                content = self._unsent[each]
                self._put(each, (self.staging / each).read_bytes() if content is None else content)
            except Exception as error:  # of any kind: each store has its own. The next segment brings the next try
                self._error = error
                return
            if self._unsent.pop(each) is None:
                (self.staging / each).unlink(missing_ok=True)

    def finish(self) -> None:
        """Try what is left a few more times; then remove the local folder, or log why it is kept."""
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
        """An interpreter that is exiting starts no threads, which network clients need."""
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
    """Send the files `names` of the folder `staging`; what `Shipment` starts where it cannot any more."""
    shipment = Shipment(Address(address))
    for name in names:
        with asking(shipment.address, "into", "cannot be written"):
            shipment._put(name, (Path(staging) / name).read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
