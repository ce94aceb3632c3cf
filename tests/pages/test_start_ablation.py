"""Start a run: the four trainings of the loss-scale ablation."""

import json

from pages.parts.start import ablation
from tests.pages.conftest import words
from tests.pages.start_form import START, field, submit
from tests.synthetic import write


def press_ablation(app):
    return next(b for b in app.button if b.key == "ablation.go").click().run()


def test_the_loss_scale_ablation_queues_four_runs_that_differ_only_in_scaling(started, open_app):
    configs, _ = started
    app = press_ablation(open_app(START))
    assert not app.exception
    assert [(c.precision, c.loss_scale) for c in configs] == [
        ("fp32", "dynamic"),
        ("fp16-unscaled", "dynamic"),
        ("fp16", 128.0),
        ("fp16", "dynamic"),
    ]
    settings = [{k: v for k, v in c.to_dict().items() if k not in ("precision", "loss_scale")} for c in configs]
    assert all(s == settings[0] for s in settings)
    assert (settings[0]["workload"], settings[0]["size"]) == ("text-lstm", "logistic")
    names = ["ablation-fp32", "ablation-fp16-unscaled", "ablation-fp16-static-128", "ablation-fp16-dynamic"]
    assert app.session_state["run"] == f"run/{names[0]}"
    assert all(name in words(app) for name in names)
    link = next(p.proto for p in app.get("page_link") if p.proto.label == "Compare the latest four")
    assert link.page == "compare"
    links = [f"run=run%2F{names[0]}", *(f"with=run%2F{name}" for name in names)]
    assert link.query_string == "&".join(links)


def test_a_double_click_queues_the_four_once(started, open_app):
    configs, _ = started
    app = press_ablation(press_ablation(open_app(START)))
    assert not app.exception and len(configs) == len(ablation.FOUR)


def test_the_ablation_uses_the_seed_of_the_form(started, open_app):
    configs, _ = started
    app = open_app(START)
    field(app, "seed").set_value(7)
    field(app, "precisions").set_value([])
    app = submit(app)  # refused, but the typed value counts
    press_ablation(app)
    assert {c.seed for c in configs} == {7} and len(configs) == 4


def test_an_ablation_that_cannot_start_is_a_sentence(home, open_app):
    home.runs.write_text("a file stands where the folder should be")
    app = press_ablation(open_app(START))
    assert not app.exception and app.error[0].value.replace("\\", "").startswith("runs_dir=")


def test_compare_distinguishes_the_four_runs_of_an_ablation(home, open_app):
    names = {"fp32": "fp32", "fp16-unscaled": "underflowing", "fp16-static-128": "static", "fp16-dynamic": "healthy"}
    for name, scenario in names.items():
        write(home.runs / f"ablation-{name}", scenario)
    keys = [f"run/ablation-{name}" for name in names]
    links = {link.proto.label for link in open_app(START, ablation=",".join(keys)).get("page_link")}
    assert "Compare the latest four" in links  # in a new session, as after a reload
    with_missing_run = open_app(START, ablation=",".join([*keys[:3], "run/gone"]))
    assert "Compare the latest four" not in {link.proto.label for link in with_missing_run.get("page_link")}
    app = open_app("pages/compare_runs.py", **{"with": keys})
    curves = json.loads(app.get("plotly_chart")[0].proto.spec)["data"]
    # The other traces are marks.
    curves = [t for t in curves if t.get("showlegend") is not False and t["mode"] == "lines"]
    lines = [(t["line"]["color"], t["line"]["dash"]) for t in curves]
    assert [t["name"] for t in curves] == [f"ablation-{name}" for name in names]
    assert len(set(lines)) == 4
