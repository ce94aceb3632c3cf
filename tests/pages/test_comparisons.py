"""A comparison in turns, started from the app: one job, its runs below its folder, and the link to Compare."""

import pytest

from amp_core import jobs, load_run
from amp_core.analysis import compare
from amp_core.library.labels import Label, label_of
from amp_core.schema import RunError
from amp_core.settings.training import TrainConfig
from pages.parts.start import asked as form
from pages.parts.start import comparisons
from tests.pages.conftest import words
from tests.pages.start_form import field
from tests.waiting import wait_for

START = "pages/start_run.py"
QUICK = {"workload": "digits-cnn", "device": "cpu", "steps": 4, "evaluate": False}


def test_start_in_turns_queues_one_job_for_all_precisions(home, open_app, monkeypatch):
    started = []

    def start(config, runs_dir, name, *, command, makes, resources):
        started.append((config, name, command, makes))
        return type("Started", (), {"name": name})

    monkeypatch.setattr(jobs, "start", start)
    app = open_app(START)
    field(app, "precisions").set_value(["fp32", "bf16"]).run()
    next(b for b in app.button if b.key == "start.turns").click().run()
    assert not app.exception and not app.error
    ((config, name, command, makes),) = started
    assert command[-3:] == ["compare", "--precisions", "fp32,bf16"] and makes == "runs"
    assert name == "compare-text-gpt-tiny" and config.steps == 200


def test_a_single_precision_cannot_be_compared(home, open_app):
    assert next(b for b in open_app(START).button if b.key == "start.turns").disabled
    with pytest.raises(RunError, match="alone is no comparison; choose two or more"):
        comparisons.begin([TrainConfig()], None)


def test_a_fixed_scale_is_passed_on_from_the_recipe_with_a_scaler(monkeypatch):
    started = []
    monkeypatch.setattr(
        jobs, "start", lambda config, *rest, **more: started.append(config) or type("J", (), {"name": "x"})
    )
    comparisons.begin([TrainConfig(precision="fp32"), TrainConfig(precision="fp16", loss_scale=128)], None)
    assert started[0].loss_scale == 128


def test_what_only_one_precision_takes_is_passed_on_for_it(home, open_app, monkeypatch):
    started = []
    monkeypatch.setattr(
        jobs, "start", lambda config, *rest, command, **more: started.append(command) or type("J", (), {"name": "x"})
    )
    app = open_app(START)
    field(app, "precisions").set_value(["fp16", "bf16", "nvfp4"]).run()
    field(app, "scaling").set_value("static").run()
    for name in ("stochastic_rounding", "hadamard"):
        next(t for t in app.toggle if t.key == f"start.{name}").set_value(True).run()
    next(b for b in app.button if b.key == "start.turns").click().run()
    assert not app.exception and not app.error
    given = ["--loss-scale", "65536", "--stochastic-rounding", "--hadamard"]
    assert started[0][3:] == ["compare", "--precisions", "fp16,bf16,nvfp4", *given]
    assert " ".join(given) in next(code.value for code in app.code if "interleaved" in code.value).splitlines()[-1]


@pytest.mark.whole
def test_a_queued_comparison_trains_in_turns_and_is_listed_in_the_library(home, open_app):
    configs = [TrainConfig(precision=name, **QUICK) for name in ("fp32", "bf16")]
    name = comparisons.begin(configs, "mine")
    job = jobs.find(home.runs / name)
    form.label(job.folder / "bf16", {"tags": "turns", "note": "before it started"})
    assert job.state in ("running", "queued")
    wait_for(lambda: not jobs.find(job.folder).alive)
    done = jobs.find(job.folder)
    assert done.state == "finished", done.console()
    runs = [load_run(job.folder / precision) for precision in ("fp32", "bf16")]
    assert label_of(runs[1].path) == Label(tags=("turns",), note="before it started")
    assert "products_seen" not in set(compare(runs).differences["setting"])  # derived, not set
    assert {run.status for run in runs} == {"finished"}
    assert runs[0].head.config["comparison"] == runs[1].head.config["comparison"]
    app = open_app("pages/run_library.py")
    assert not app.exception and "damaged" not in words(app)
    assert {key for key in app.session_state["entries"] if key.startswith("run/")} == {"run/mine/fp32", "run/mine/bf16"}
    app.session_state["start.comparison"] = name
    app.switch_page(START).run()
    assert not app.exception
    links = [link.proto.label for link in app.get("page_link")]
    assert "Compare the runs" in links
