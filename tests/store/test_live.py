"""A run that is read while another process writes it: no read fails, and rows never disappear."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from amp_core import load_run
from amp_core.store.segment_writer import Sealer
from amp_core.store.sources import FolderSource
from amp_core.store.writer import RunWriter
from tests.paths import ROOT
from tests.waiting import wait_for

LIVE = """
import pathlib, sys, time
from amp_core.store.segment_writer import Sealer
from amp_core.store.writer import RunWriter
enough = pathlib.Path(sys.argv[2])
with RunWriter(sys.argv[1], seal_bytes=20_000) as writer:
    step = 0
    while step < 1500 or not enough.exists():
        writer.append("steps", {"step": [step], "loss": [step / 8]})
        writer.append("tensors", {"step": [step], "name": ["a"], "exp_counts": [[step]]})
        step += 1
        if step % 10 == 0:
            time.sleep(0.02)  # a reader on a busy machine is to keep up
print(step)
"""


def test_reading_never_fails_while_the_run_is_written_and_sealed(tmp_path: Path) -> None:
    folder, enough = tmp_path / "a", tmp_path / "enough"
    command = [sys.executable, "-c", LIVE, str(folder), str(enough)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        wait_for((folder / "run.json").exists)
        followed = load_run(folder)
        rows: list[int] = [0]
        while child.poll() is None:
            followed.fingerprint()
            followed.refresh()
            for run in (followed, load_run(folder)):
                steps = run.table("steps").column("step").to_numpy()
                assert (steps == np.arange(len(steps))).all()
                tensors = run.table("tensors").column("exp_counts").combine_chunks().flatten().to_numpy()
                assert (tensors == np.arange(len(tensors))).all()
            rows.append(len(steps))
            if len(set(rows)) > 5:
                enough.touch()
        assert rows == sorted(rows) and enough.exists()  # it grew while it was read, and never shrank
        followed.refresh()
        assert len(followed.steps) == int(child.communicate()[0]) and followed.status == "finished"
        assert child.returncode == 0
    finally:
        child.kill()
        child.wait()


def test_a_segment_that_is_sealed_while_its_folder_is_listed_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunWriter(tmp_path / "a", seal_bytes=1) as writer:
        for step in range(5):
            writer.append("steps", {"step": [step]})
    scan, missed = os.scandir, []

    def listing(folder: Path) -> list[os.DirEntry[str]]:
        result = list(scan(folder))
        if folder.name != "steps" or missed:
            return result
        missed.extend(
            entry for entry in result if entry.name.startswith("00001.")
        )  # the stream was already removed, the file not yet listed
        return [entry for entry in result if entry not in missed]

    monkeypatch.setattr(os, "scandir", listing)
    assert load_run(tmp_path / "a").steps["step"].tolist() == list(range(5)) and missed


@pytest.mark.parametrize("is_sealed", [False, True])
def test_rows_that_come_before_a_new_segment_is_listed_are_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_sealed: bool
) -> None:
    """The first listing has the size of a stream; then it gets more rows, and the next segment is begun."""
    scan, written = os.scandir, []
    segments = tmp_path / "a" / "steps"
    with RunWriter(tmp_path / "a", seal_bytes=2000) as writer:

        def append() -> None:
            writer.append("steps", {"step": [len(written)]})
            written.append(len(written))

        def next_segment_begins() -> bool:
            append()
            return (segments / "00001.arrows").exists()

        def listing(folder: Path) -> list[os.DirEntry[str]]:
            if folder != segments:
                return list(scan(folder))
            listings.append(folder)
            if len(listings) == 2:
                wait_for(next_segment_begins)
                if is_sealed:
                    wait_for((segments / "00000.parquet").exists)
            result = list(scan(folder))
            for entry in result:
                entry.stat(follow_symlinks=False)  # kept by the entry
            return result

        if not is_sealed:
            monkeypatch.setattr(Sealer, "put", lambda sealer, stream: None)
        append()
        listings: list[Path] = []
        monkeypatch.setattr(os, "scandir", listing)
        listed = FolderSource(tmp_path / "a").segments("steps")
        monkeypatch.undo()
        assert len(listings) > 1 and sorted(listed) == ["steps/00000", "steps/00001"]
        for file in listed.values():  # by its size a reader that follows the run knows whether a file has new rows
            assert file.size == (tmp_path / "a" / file.name).stat().st_size
