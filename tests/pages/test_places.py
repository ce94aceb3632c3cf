"""Where a training runs, on the pages: a scheduler is offered where there is one, and its jobs show why they wait."""

import pytest
import streamlit as st

from amp_core import RunError, diagnose, jobs, load_run
from amp_core.jobs import backends, job_file
from amp_core.jobs.backends import Devices, polled
from amp_core.jobs.backends.polled import SchedulerJob
from amp_core.jobs.backends.slurm import Slurm
from amp_core.settings.resources import Resources
from amp_core.settings.training import TrainConfig
from tests.pages.conftest import words
from tests.pages.start_form import START, field, submit

CPU = TrainConfig(workload="digits-cnn", device="cpu")


class FakeSlurm(Slurm):
    """Slurm without its commands: jobs wait until they are set to another state."""

    def __init__(self):
        self.jobs = {}
        self.asked = 0
        super().__init__()

    def check_available(self):
        pass

    def devices(self):
        return Devices((("gpu", "gpu (8 nodes)"), ("debug", "debug (1 node)")))

    def ask(self):
        self.asked += 1
        return dict(self.jobs)

    def send(self, folder, record, resources):
        if resources.partition == "debug":
            raise RunError("partition='debug' was refused by Slurm: not allowed")
        job_id = str(len(self.jobs) + 1)
        name = f"{folder.name}.{record.token}"
        self.jobs[job_id] = SchedulerJob(
            job_id, name, "PENDING", "waiting", "Resources (waiting for free nodes or GPUs)", "", "gpu", 2
        )
        return job_id


@pytest.fixture
def fake_slurm(monkeypatch):
    monkeypatch.setattr(polled, "FRESH_S", 0.0)
    monkeypatch.setattr(polled, "STALE_S", 0.0)  # each question is answered anew
    fake = FakeSlurm()
    monkeypatch.setitem(backends.BACKENDS, "slurm", fake)
    st.cache_data.clear()
    yield fake
    st.cache_data.clear()


def no_scheduler(self):
    raise RunError("on='slurm' needs Slurm's commands, and sbatch is not on this machine; choose local")


def test_without_a_scheduler_one_sentence_stands_at_the_field(home, open_app, monkeypatch):
    monkeypatch.setattr(Slurm, "check_available", no_scheduler)
    st.cache_data.clear()
    app = open_app(START)
    assert "sbatch is not on this machine" in words(app)
    with pytest.raises(LookupError):
        field(app, "on")
    st.cache_data.clear()


def test_a_training_is_submitted_with_what_the_fields_request(home, open_app, fake_slurm):
    app = open_app(START)
    for name, value in {"on": "slurm", "partition": "gpu", "gpus": 2, "time": "1:00:00", "requeue": True}.items():
        field(app, name).set_value(value).run()
    app = submit(app)
    assert not app.exception
    (folder,) = home.runs.iterdir()
    record = job_file.read(folder)
    assert Resources.from_dict(record.resources) == Resources(
        on="slurm", partition="gpu", gpus=2, time="1:00:00", requeue=True
    )
    assert record.config["device"] == "auto" and record.config["checkpoint_every"] == 10
    assert "Resources (waiting for free nodes or GPUs)" in words(app)


def test_a_refusal_stands_at_the_fields_and_submits_nothing(home, open_app, fake_slurm):
    app = open_app(START)
    for name, value in {"on": "slurm", "partition": "debug"}.items():
        field(app, name).set_value(value).run()
    app = submit(app)
    assert any("partition='debug'" in error.value.replace("\\", "") for error in app.error)
    assert fake_slurm.jobs == {} and list(home.runs.iterdir()) == []
    app = open_app(START)
    for name, value in {"on": "slurm", "time": "soon"}.items():
        field(app, name).set_value(value).run()
    assert any("time='soon'" in error.value.replace("\\", "") for error in submit(app).error)


def test_state_node_and_end_of_a_job_are_shown(home, open_app, fake_slurm):
    job = jobs.start(CPU, home.runs, "far", resources=Resources(on="slurm", partition="gpu", time="60"))
    app = open_app(START, run="run/far")
    assert "umber 2 in the queue" in words(app) and "waiting for free nodes or GPUs" in words(app)
    assert "is queued" in words(open_app("pages/run_library.py"))
    token = job_file.read(job.folder).token
    fake_slurm.jobs["1"] = SchedulerJob("1", f"far.{token}", "RUNNING", "running", "", "n7", "gpu")
    (job.folder / "job.log").write_text("start 1 0 n7 1790000000\n")
    assert "tarting on n7" in words(open_app(START, run="run/far"))
    fake_slurm.jobs["1"] = SchedulerJob("1", f"far.{token}", "TIMEOUT", "ended", "TimeLimit", "n7", "gpu")
    with open(job.folder / "job.log", "a") as log:
        log.write("end 1 0 143 1790003600\n")
    ended = open_app("pages/run_overview.py", run="run/far")
    assert "time limit of 60" in words(ended)
    assert load_run(job.folder).head.job["cause"] == "time limit"
    assert "killed-by-scheduler" in [finding.code for finding in diagnose(load_run(job.folder))]


def test_a_search_is_submitted(home, open_app, fake_slurm):
    app = open_app("pages/tune_recipe.py")
    for element in (*app.selectbox, *app.text_input):
        if element.key in ("tune.on", "tune.partition"):
            element.set_value({"tune.on": "slurm", "tune.partition": "gpu"}[element.key])
    next(b for b in app.button if b.key == "tune.go").click().run()
    (folder,) = home.runs.iterdir()
    assert job_file.read(folder).makes == "runs" and job_file.read(folder).device == "slurm:gpu"


def chosen(app, **values):
    """The form, with these fields under *Where it runs*."""
    for name, value in {"on": "slurm", "partition": "gpu", **values}.items():
        field(app, name).set_value(value).run()
    return app


def press(app, key):
    return next(b for b in app.button if b.key == key).click().run()


def test_the_search_for_a_batch_runs_where_the_fields_say(home, open_app, fake_slurm):
    app = press(chosen(open_app(START)), "batch.go")
    assert not app.exception and not app.error
    (folder,) = home.runs.iterdir()
    record = job_file.read(folder)
    assert (record.device, record.makes, record.config["device"]) == ("slurm:gpu", "runs", "auto")
    assert "--max-batch" in record.argv


@pytest.mark.parametrize(("name", "value"), [("requeue", True), ("nodes", 2)])
def test_a_job_of_several_runs_takes_one_node_and_is_not_requeued(home, open_app, fake_slurm, name, value):
    app = press(chosen(open_app(START), **{name: value}), "batch.go")
    assert any(f"{name}={value}" in error.value.replace("\\", "") for error in app.error)
    assert fake_slurm.jobs == {} and list(home.runs.iterdir()) == []


def test_the_ablation_runs_where_the_fields_say(home, open_app, fake_slurm):
    app = press(chosen(open_app(START), requeue=True), "ablation.go")
    assert not app.exception and not app.error
    records = [job_file.read(folder) for folder in home.runs.iterdir()]
    assert [record.device for record in records] == ["slurm:gpu"] * 4
    assert {(r.config["device"], r.config["checkpoint_every"], r.resources["requeue"]) for r in records} == {
        ("auto", 6, True)
    }


def test_many_jobs_are_one_question_and_few_rows(home, open_app, fake_slurm, monkeypatch):
    for place in range(30):
        jobs.start(CPU, home.runs, f"job-{place}", resources=Resources(on="slurm"))
    monkeypatch.setattr(polled, "FRESH_S", 600.0)
    monkeypatch.setattr(polled, "STALE_S", 15.0)
    app = open_app(START)
    asked = fake_slurm.asked
    assert "10 more jobs wait" in words(app)
    open_app(START)
    assert fake_slurm.asked == asked
