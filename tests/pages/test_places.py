"""Where a training runs, on the pages: a scheduler is offered where there is one, and its jobs show why they wait."""

import dataclasses
import shlex

import pytest
import streamlit as st

from amp_core import RunError, diagnose, jobs, load_run
from amp_core.__main__ import parser
from amp_core.jobs import backends, job_file
from amp_core.jobs.backends import Devices, polled, slurm
from amp_core.jobs.backends.polled import SchedulerJob
from amp_core.jobs.backends.slurm import Slurm
from amp_core.library.labels import label_of
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


class FakeArrays(FakeSlurm):
    """A fake Slurm that takes arrays, whose sbatch is called with the lines in `submitted`."""

    def __init__(self, monkeypatch):
        self.submitted = []
        super().__init__()
        monkeypatch.setattr(slurm, "_run", self.sbatch)

    def sbatch(self, line, timeout_s, cwd=None):
        if "--partition=debug" in line:
            raise slurm._RefusedError("Invalid partition name specified")
        self.submitted.append(line)
        name = next(part for part in line if part.startswith("--job-name=")).partition("=")[2]
        last = next(part for part in line if part.startswith("--array=")).rpartition("-")[2]
        for index in range(int(last) + 1):
            self.jobs[f"9_{index}"] = SchedulerJob(
                f"9_{index}", f"{name}_{index}", "PENDING", "waiting", "Priority", "", "gpu", index
            )
        return "9\n"


@pytest.fixture
def fake_arrays(fake_slurm, monkeypatch):
    fake = FakeArrays(monkeypatch)
    monkeypatch.setitem(backends.BACKENDS, "slurm", fake)
    return fake


def test_several_precisions_are_submitted_once_as_an_array(home, open_app, fake_arrays):
    app = chosen(open_app(START), precisions=["fp32", "bf16"], requeue=True, name="mine")
    assert "One array, a task per run." in words(app)
    shown = next(code.value for code in app.code if "--array" in code.value).splitlines()
    assert shown[0] == "# one array:" and len(shown) == 2 and "--precisions fp32,bf16" in shown[1]
    assert main_takes(shown[1])
    field(app, "tags").set_value("together").run()
    app = submit(app)
    assert not app.exception and not app.error
    (line,) = fake_arrays.submitted
    assert "--array=0-1" in line and "--requeue" in line and "--partition=gpu" in line
    records = {folder.name: job_file.read(folder) for folder in home.runs.iterdir() if not folder.name.startswith(".")}
    assert {name: (r.backend_id, r.makes, r.config["precision"]) for name, r in records.items()} == {
        "mine": ("9_0", "run", "fp32"),
        "mine-2": ("9_1", "run", "bf16"),
    }
    assert {label_of(home.runs / name).tags for name in records} == {("together",)}
    assert app.session_state["start.followed"] == ["run/mine", "run/mine-2"]
    assert "umber 0 in the queue" in words(app) and "job 9_1" in words(app)
    keys = {key for key in app.session_state["entries"] if key.startswith("run/")}
    assert keys == {"run/mine", "run/mine-2"}


def main_takes(command):
    """Whether `ampscope` knows every flag of a command that the page shows."""
    arguments = parser().parse_args(shlex.split(command)[1:])
    return arguments.array and arguments.requeue and arguments.checkpoint_every


def test_one_precision_is_a_job_and_two_are_an_array(home, open_app, fake_arrays):
    app = submit(chosen(open_app(START)))
    assert not app.exception and not app.error and fake_arrays.submitted == []
    (folder,) = home.runs.iterdir()
    assert job_file.read(folder).backend_id == "1"
    submit(chosen(open_app(START), precisions=["fp32", "bf16"]))
    assert len(fake_arrays.submitted) == 1 and set(fake_arrays.jobs) == {"1", "9_0", "9_1"}


def test_a_refused_array_is_shown_at_the_field_and_leaves_nothing(home, open_app, fake_arrays):
    app = submit(chosen(open_app(START), precisions=["fp32", "bf16"], partition="debug"))
    refusal = "partition='debug' was refused by Slurm: Invalid partition name specified"
    assert any(refusal in error.value.replace("\\", "") for error in app.error)
    assert fake_arrays.submitted == [] and list(home.runs.iterdir()) == []


def test_the_tasks_of_two_arrays_below_the_runs_folder_are_listed_as_runs(home, open_app, fake_arrays):
    for out in ("one", "two"):
        configs = dict.fromkeys(("fp32", "bf16"), CPU)
        jobs.submit_array_in(home.runs / out, configs, resources=Resources(on="slurm", partition="gpu"))
        if out == "one":  # an array of an id of its own
            eighth = {f"8_{index}": fake_arrays.jobs.pop(f"9_{index}") for index in range(2)}
            fake_arrays.jobs |= {key: dataclasses.replace(job, id=key) for key, job in eighth.items()}
            for index, name in enumerate(configs):
                record = job_file.read(home.runs / out / name)
                job_file.write(home.runs / out / name, dataclasses.replace(record, backend_id=f"8_{index}"))
    app = open_app(START, run="run/two/fp32")
    assert not app.exception and "umber 0 in the queue" in words(app)
    keys = [f"{out}/{name}" for out in ("one", "two") for name in ("fp32", "bf16")]
    watch = {button.key for button in app.button if button.label == "Watch"}
    assert watch == {f"queue.watch.{key}" for key in keys if key != "two/fp32"}
    next(b for b in app.button if b.key == "queue.watch.two/bf16").click().run()
    assert not app.exception and app.session_state["run"] == "run/two/bf16"
    app = open_app("pages/run_library.py")
    assert not app.exception and "damaged" not in words(app)
    entries = {key: e for key, e in app.session_state["entries"].items() if key.startswith("run/")}
    assert {key: (e.status, e.name, e.group) for key, e in entries.items()} == {
        f"run/{key}": ("queued", key.partition("/")[2], key.partition("/")[0]) for key in keys
    }
