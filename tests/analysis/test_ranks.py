"""Analyses of ranks, also if a run does not begin at step 0."""

from pathlib import Path

import numpy as np
import pytest

from amp_core import load_run
from amp_core.analysis import rank_ends, rank_table, ranks
from amp_core.findings import diagnose
from amp_core.store.writer import RunWriter


@pytest.mark.parametrize("begin", [0, 5000])
def test_the_warm_up_is_excluded_for_any_first_step(tmp_path: Path, begin: int) -> None:
    writers = [RunWriter(tmp_path / "run", rank=rank, world_size=2) for rank in range(2)]
    for writer in writers:
        writer.append("steps", {"step": range(begin, begin + 20), "step_ms": np.arange(20.0)})
    for writer in reversed(writers):
        writer.close()
    table = rank_table(load_run(tmp_path / "run"))
    assert table["step_ms"].tolist() == [11.5, 11.5]  # the median of 4 to 19
    assert table["steps"].tolist() == [20, 20]


def test_the_ends_of_ranks_are_analysed_once_for_all_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunWriter(tmp_path / "run", world_size=1000) as writer:
        writer.append("steps", {"step": range(3)})
    calls, really = [], ranks.rank_ends
    monkeypatch.setattr(ranks, "rank_ends", lambda run: calls.append(run) or really(run))
    run = load_run(tmp_path / "run")
    diagnose(run)
    cause = ranks.rank_cause(run)
    assert cause is not None and (cause.status, cause.rank, len(calls)) == ("gone", 1, 1)


def test_ranks_that_differ_only_in_skips_have_no_ratio_of_scales(tmp_path: Path) -> None:
    writers = [RunWriter(tmp_path / "run", rank=rank, world_size=2) for rank in range(2)]
    for writer in writers:
        writer.append("steps", {"step": range(3), "skipped": [False, writer.rank == 1, False]})
    for writer in reversed(writers):
        writer.close()
    (finding,) = [f for f in diagnose(load_run(tmp_path / "run")) if f.code == "rank-scale-desync"]
    assert (finding.steps, finding.value, "at 1 step," in finding.title) == ((1, 1), None, True)


def test_a_head_may_announce_more_processes_than_ever_started(tmp_path: Path) -> None:
    """A damaged or hostile head: each rank that never started is listed without a search."""
    with RunWriter(tmp_path / "run", world_size=100_000) as writer:
        writer.append("steps", {"step": range(3)})
    ends = rank_ends(load_run(tmp_path / "run"))
    assert [end.status for end in ends[:2]] == ["finished", "gone"] and len(ends) == 100_000
    assert ends[0].last_step == 2 and ends[-1].last_step is None
