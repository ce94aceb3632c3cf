"""The Tune page: the result of a search and its code, a running search, and the form that starts one."""

import dataclasses
import json
import sys

from amp_core import jobs
from amp_core.settings.training import TrainConfig
from amp_core.tune.result import Tried, Tuned
from tests.pages.conftest import words
from tests.waiting import wait_for

PAGE = "pages/tune_recipe.py"
BF16 = Tried(
    "bf16",
    "confirm",
    "fp32",
    ("confirm/bf16/bf16-seed0",),
    60,
    2.5,
    2.4,
    2.6,
    "faster",
    0.7,
    "within noise (…)",
    "2.5 ×",
)
FOUND = Tuned(
    status="finished",
    workload="text-gpt",
    size="tiny",
    device="cpu",
    budget_s=300.0,
    seconds=124.0,
    chosen="bf16",
    config=TrainConfig(precision="bf16", device="cpu").to_dict(),
    answer="BF16: 2.5 × faster, 30 % less memory, same loss within noise",
    why="The fastest recipe with convergence parity: within noise.",
    tried=(
        dataclasses.replace(BF16, stage="race", parity=""),
        Tried("fp16", "race", "fp32", (), 0, out="the loss is not finite in its last 20 steps"),
        BF16,
    ),
    left_out=(("tf32", "needs an NVIDIA GPU of compute capability 8.0 or newer"),),
)


def write(home, name, result=FOUND):
    folder = home.runs / name
    folder.mkdir(parents=True)
    result.save(folder)
    return folder


def test_a_search_shows_answer_evidence_and_code_for_each_framework(home, open_app):
    write(home, "tune-1")
    app = open_app(PAGE)
    assert not app.exception and not app.error
    page_text = words(app)
    assert "BF16: 2.5 × faster, 30 % less memory, same loss within noise" in page_text
    assert "needs an NVIDIA GPU of compute capability 8.0" in page_text
    assert [tab.label for tab in app.tabs] == ["PyTorch", "Accelerate", "Transformers", "Lightning"]
    texts = [block.value for block in app.code]
    assert len(texts) == 4 and all("bf16" in text or "bfloat16" in text for text in texts)
    race = app.dataframe[0].value
    assert race["speed"].tolist() == ["2.50 × (2.40–2.60)", "–"]
    assert race["out"].tolist()[1] == "the loss is not finite in its last 20 steps"
    assert app.dataframe[1].value["learns"].tolist() == ["within noise (…)"]


def test_the_address_selects_the_search(home, open_app):
    write(home, "tune-1", dataclasses.replace(FOUND, answer="Stay with FP32", chosen="fp32"))
    write(home, "tune-2")
    app = open_app(PAGE, search="tune-1")
    assert "Stay with FP32" in words(app)
    app.selectbox(key="tune.search").select("tune-2").run()
    assert "BF16: 2.5" in words(app) and app.query_params["search"] == "tune-2"


def test_an_unmeasured_outcome_is_not_called_a_result(home, open_app):
    answer = "BF16 looks fastest, 2.5 × FP32's speed, but its convergence parity is undecided: run with --budget 240"
    write(home, "tune-1", dataclasses.replace(FOUND, answer=answer, confirmed=False, needs_s=240.0))
    write(home, "tune-2")
    app = open_app(PAGE, search="tune-1")
    assert not app.exception and answer.partition(",")[0] in words(app)
    assert ["Not confirmed" in warning.value for warning in app.warning] == [True]
    app.selectbox(key="tune.search").select("tune-2").run()
    assert not app.warning


def test_without_a_search_the_page_says_how_to_start_one(home, open_app):
    app = open_app(PAGE)
    assert not app.exception and "ampscope tune my_task.py:build" in words(app) and "No searches yet" in words(app)


def test_a_damaged_search_has_one_sentence(home, open_app):
    folder = write(home, "tune-1")
    (folder / "tune.json").write_text("{")
    app = open_app(PAGE)
    assert not app.exception and len(app.error) == 1 and "was not written by ampscope tune" in app.error[0].value


def test_a_search_of_another_version_has_one_sentence(home, open_app):
    folder = write(home, "tune-1")
    record = json.loads((folder / "tune.json").read_text())
    (folder / "tune.json").write_text(json.dumps(record | {"schema": 9}))
    app = open_app(PAGE)
    assert not app.exception and "has schema 9" in app.error[0].value


def test_a_running_search_shows_its_progress(home, open_app):
    write(home, "tune-1", dataclasses.replace(FOUND, status="running", chosen="", config={}, answer="", why=""))
    app = open_app(PAGE)
    assert not app.exception and not app.code
    assert "running" in words(app) or app.get("progress")


def test_the_form_queues_a_search_with_its_budget(home, open_app, monkeypatch):
    started = {}

    def start(config, runs_dir, name, *, command, makes, resources):
        started.update(config=config, name=name, command=command, makes=makes)
        return type("Started", (), {"name": name})

    monkeypatch.setattr(jobs, "start", start)
    app = open_app(PAGE)
    app.number_input(key="tune.budget").set_value(60)
    app.button(key="tune.go").click().run()
    assert not app.exception
    assert started["command"][-3:] == ["tune", "--budget", "60"] and started["makes"] == "runs"
    assert started["config"].precision == "fp32" and started["name"] == "tune-digits-cnn-tiny"


def test_a_search_without_a_record_yet_is_distinguished_from_none(home, open_app):
    command = [sys.executable, "-c", "import time; time.sleep(1200)"]
    job = jobs.start(TrainConfig(device="cpu"), home.runs, "tune-x", command=command, makes="runs")
    try:
        app = open_app(PAGE)
        assert (
            not app.exception and "has not written a result yet" in words(app) and "No searches yet" not in words(app)
        )
    finally:
        job.request_stop()
        wait_for(lambda: not jobs.find(job.folder).alive)


def test_a_job_that_makes_runs_is_not_a_damaged_run(home, open_app):
    command = [sys.executable, "-c", "import sys; print('searching'); sys.exit(0)"]
    job = jobs.start(TrainConfig(device="cpu"), home.runs, "tune-x", command=command, makes="runs")
    wait_for(lambda: not jobs.find(job.folder).alive)
    assert jobs.find(job.folder).state == "finished"
    assert not (job.folder / "run.json").exists()
    app = open_app("pages/run_library.py")
    assert not app.exception and "damaged" not in words(app)


def test_a_sample_search_shows_what_a_search_finds_and_comes_after_the_users_own(home, open_app):
    folder = home.samples / "tune-digits"
    folder.mkdir(parents=True)
    dataclasses.replace(FOUND, answer="FP32: no recipe is faster").save(folder)
    app = open_app(PAGE)
    assert not app.exception and "FP32: no recipe is faster" in words(app)
    assert app.selectbox(key="tune.search").value == "tune-digits · sample"
    assert next(e for e in app.expander if e.label == "Start a search").proto.expanded  # no search of one's own yet
    write(home, "tune-1")
    mine = open_app(PAGE)
    assert mine.selectbox(key="tune.search").options == ["tune-1", "tune-digits · sample"]
    assert "BF16: 2.5" in words(mine)
