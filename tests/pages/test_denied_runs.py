"""A library with folders of another user: each has one sentence, and the other runs are shown."""

import shutil

import psutil
import pytest

from amp_core.jobs import find, job_file
from pages.parts.library import run_list, trash
from tests.file_modes import restricted
from tests.jobs.job_states import CPU
from tests.jobs.test_other_users import own_process
from tests.pages.conftest import words
from tests.synthetic import SAMPLES


@pytest.fixture
def library(home):
    """A run that may be read, folders and files that may not, and a link into a folder that may not be seen."""
    for name in ("mine", "theirs", "head"):
        shutil.copytree(SAMPLES["fp32"], home.runs / name)
    (home.runs / "private").mkdir()
    (home.runs / ".deleted").mkdir()
    (home.runs.parent / "home" / "run").mkdir(parents=True)
    (home.runs / "link").symlink_to(home.runs.parent / "home" / "run")
    denied = [home.runs / "theirs", home.runs / "head/run.json", home.runs / "private", home.runs / ".deleted"]
    denied.append(home.runs.parent / "home")
    for place in denied:
        place.chmod(0)
    with restricted():
        yield home.runs
    for place in denied:
        place.chmod(0o755)


def test_what_may_not_be_read_is_listed_with_the_reason(library):
    entries = {key: (e.status, e.sentence) for key, e in run_list.listing().items()}
    assert {key for key, (status, _) in entries.items() if status == "damaged"} == {
        "run/theirs",
        "run/head",
        "run/private",
        "run/link",
    }
    assert all("Permission denied" in sentence for status, sentence in entries.values() if status == "damaged")
    assert entries["run/mine"][0] == "finished" and trash.deleted_runs() == []


@pytest.mark.parametrize(
    ("page", "run"), [("run_library", None), ("run_overview", "run/theirs"), ("run_overview", "run/head")]
)
def test_pages_of_such_a_library_say_so(library, open_app, page, run):
    app = open_app(f"pages/{page}.py", **({"run": run} if run else {}))
    assert not app.exception
    assert run is None or "Permission denied" in words(app)


def test_a_runs_folder_that_may_not_be_listed_is_an_entry_with_the_reason(home, open_app):
    home.runs.mkdir()
    home.runs.chmod(0)
    with restricted():
        entry = run_list.listing()["run"]
        assert entry.status == "damaged" and "Permission denied" in entry.sentence and not entry.mine
        assert not open_app("pages/start_run.py").exception
    home.runs.chmod(0o755)


def test_stopping_a_job_of_another_user_is_refused_beside_its_button(home, open_app, monkeypatch):
    folder = home.runs / "theirs"
    folder.mkdir(parents=True)
    record = job_file.Record(("x",), "cpu", 1, CPU.to_dict(), process=own_process())
    job_file.write(folder, record)
    before = job_file.read(folder)

    def denied(self):
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "terminate", denied)
    app = open_app("pages/start_run.py")
    next(b for b in app.button if b.label == "Stop").click().run()
    assert not app.exception and any("belongs to another user" in error.value for error in app.error)
    assert job_file.read(folder) == before and not find(folder).stop_requested
