"""The library lists runs of several roots, one of them an object store."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from amp_core import RunError
from amp_core.store.remote import runs_below
from amp_core.store.urls import Address
from tests.paths import SAMPLE_RUNS
from tests.remote.test_remote_runs import filesystem, uploaded

pytest.importorskip("streamlit", reason="the app needs streamlit")

from pages.parts import picker
from pages.parts.library import remote_runs, run_list


@pytest.fixture(autouse=True)
def empty_caches() -> None:
    remote_runs.forget()


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder with one run, and another folder, `team`, with two, one of them a level deeper."""
    for name, into in (("fp32", "own/a"), ("bf16", "team/b"), ("fp16-healthy", "team/cmp/c")):
        shutil.copytree(SAMPLE_RUNS / name, tmp_path / into)
    monkeypatch.setattr(run_list, "SAMPLES", tmp_path / "no samples")
    return tmp_path


def test_runs_of_all_roots_are_listed(places: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded("fp16-overflow", f"{memory}/fleet")
    uploaded("fp16-underflow", f"{memory}/fleet/sweep")
    roots = [str(places / "own"), str(places / "team"), f"{memory}/fleet"]
    monkeypatch.setenv("AMPSCOPE_RUNS", os.pathsep.join(roots))
    assert run_list.runs_dir() == places / "own"
    entries = run_list.listing()
    assert set(entries) == {
        "run/a", "team/b", "team/cmp/c", "fleet/fp16-overflow", "fleet/sweep/fp16-underflow",
    }  # fmt: skip
    # Only the user's runs may be deleted in the app.
    assert [key for key, entry in entries.items() if entry.mine] == ["run/a"]
    assert all(entry.status == "finished" for entry in entries.values())
    labels = {picker.label(entry) for entry in entries.values()}
    assert len(labels) == 5 and "fp16-overflow (fleet/fp16-overflow)" not in labels and "fleet/fp16-overflow" in labels


def test_the_first_local_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPSCOPE_RUNS", "s3://bucket/runs\nmine\ntheirs\nmine\n/data/theirs")
    assert run_list.runs_dir() == Path("mine")
    assert run_list.other_roots() == {
        "runs": Address("s3://bucket/runs"),
        "theirs": Path("theirs"),
        "theirs-2": Path("/data/theirs"),
    }
    monkeypatch.setenv("AMPSCOPE_RUNS", "s3://bucket/sample")
    assert run_list.runs_dir() == Path("runs") and list(run_list.other_roots()) == ["sample-2"]


def test_an_unreachable_address_is_reported_and_hides_nothing(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.setenv("AMPSCOPE_RUNS", f"{places / 'own'}\nnope://bucket/runs")
    entries = run_list.listing()
    assert list(entries) == ["run/a", "runs"]
    assert entries["runs"].status == "damaged" and "nope" in entries["runs"].sentence


def test_a_root_that_does_not_respond_does_not_delay_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Address] = []
    answers = threading.Event()

    def slow(root: Address) -> list[object]:
        looked.append(root)
        answers.wait(300)
        return []

    monkeypatch.setattr(remote_runs, "runs_below", slow)
    monkeypatch.setattr(remote_runs, "LISTING_TIMEOUT_S", 0.01)
    root = Address("s3://slow/runs")
    for _ in range(3):
        with pytest.raises(RunError, match="has not answered yet"):
            remote_runs.runs_at(root)
    monkeypatch.setattr(remote_runs, "LISTING_TIMEOUT_S", 300.0)
    answers.set()
    assert remote_runs.runs_at(root) == remote_runs.runs_at(root) == [] and looked == [root]


@pytest.mark.parametrize("store", ["memory", "s3"])
def test_runs_below_an_address_are_listed(store: str, request: pytest.FixtureRequest) -> None:
    root = Address(f"{request.getfixturevalue(store)}/fleet")
    assert runs_below(root) == []
    uploaded("fp32", str(root))
    uploaded("bf16", f"{root}/sweep")
    fs, path = filesystem(str(root))
    fs.pipe_file(f"{path}/broken/run.json", b"{}")
    fs.pipe_file(f"{path}/notes/readme.txt", b"hello")
    result = {str(run.path).removeprefix(f"{root}/"): run for run in runs_below(root)}
    assert set(result) == {"fp32", "sweep/bf16", "broken"}
    assert result["fp32"].status == "finished" and result["fp32"].head is not None
    assert result["broken"].status == "damaged" and "schema" in result["broken"].sentence


def test_pages_open_a_run_at_an_address(places: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.app_test import app_test

    uploaded("fp16-overflow", f"{memory}/fleet")
    monkeypatch.setenv("AMPSCOPE_RUNS", f"{places / 'own'}\n{memory}/fleet")
    app = app_test(run="fleet/fp16-overflow").run()
    assert not app.exception and app.session_state["run"] == "fleet/fp16-overflow"
    app.switch_page("pages/loss_scale.py").run()
    assert not app.exception and app.metric
    app.switch_page("pages/run_library.py").run()
    assert not app.exception
    rows = app.dataframe[0].value
    assert rows["Kind"].tolist() == ["own run", "another place"]
    assert app.button[[b.label for b in app.button].index("Delete")].disabled
