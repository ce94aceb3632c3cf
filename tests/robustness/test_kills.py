"""However a writer ends, all rows that it reported as written are read back: the quick form of `kills`."""

import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from amp_core import RunError
from amp_core.store import writer
from amp_core.store.writer import RunWriter
from tests.paths import ROOT
from tests.robustness.kills import ENDS, KINDS
from tests.waiting import DEADLINE_S

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ends forked children")


PAIRS = range(len(KINDS) * len(ENDS))


@pytest.mark.parametrize(
    "numbers", [PAIRS[:: len(KINDS) + 1], pytest.param(PAIRS, marks=pytest.mark.whole)], ids=["each once", "pairs"]
)
def test_no_row_is_lost_however_a_writer_ends(numbers: range) -> None:
    """In a process of its own: a fork of a test process inherits Hypothesis' callback of the garbage collector, and
    Python ignores an interrupt that comes during one."""
    times = len(numbers)
    program = f"import json; from tests.robustness.kills import end_all; print(json.dumps(end_all({numbers})))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=2 * DEADLINE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ended = json.loads(done.stdout)
    steps = ended.pop("steps")
    firsts = [how for how in ended if "resumed" not in how]
    assert len(firsts) == times and sum(ended.values()) == 2 * times and steps > 10 * times


def test_one_of_two_writers_that_open_a_folder_at_once_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen an empty folder; only one can create the head."""

    def begun_meanwhile(present: Collection[str], into: Any) -> None:
        monkeypatch.undo()
        RunWriter(tmp_path / "a", name="first").close()

    monkeypatch.setattr(writer, "refuse_content", begun_meanwhile)
    with pytest.raises(RunError, match=r"into='.*a' already holds a run; give a folder that does not exist yet"):
        RunWriter(tmp_path / "a")


def test_a_second_writer_of_a_rank_is_refused(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "a", world_size=2), RunWriter(tmp_path / "a", rank=1, world_size=2) as second:
        second.append("steps", {"step": [0]})
        with pytest.raises(RunError, match="already holds rows of rank 1; give a folder that does not exist yet"):
            RunWriter(tmp_path / "a", rank=1, world_size=2)
