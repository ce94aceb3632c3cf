"""What a training would take, the presets, and the label that is given before it starts."""

import json

from amp_core.labels import label_of
from tests.pages.conftest import words
from tests.pages.test_start_run import START, field, started, submit  # noqa: F401 - a fixture
from tests.synthetic import write


def test_time_is_that_of_runs_alike_and_memory_that_of_the_size(home, open_app):
    assert "FP16 AMP: time not known, nothing like it was trained here" in words(open_app(START))
    folder = write(home.runs / "a", "healthy")
    head = json.loads((folder / "run.json").read_text())
    alike = {"workload": "text-gpt", "size": "tiny", "batch_size": 8, "precision": "fp16", "device": "cpu"}
    (folder / "run.json").write_text(json.dumps(head | {"config": head["config"] | alike}))
    app = open_app(START)
    said = words(app)
    assert "Estimate: about" in said and " for FP32 with Adam" in said
    assert "ms a step, 299 MiB at its peak, as measured here" in said
    field(app, "batch_size").set_value(4).run()
    assert "time not known" in words(app)
    field(app, "batch_size").set_value(0).run()
    assert "Estimate" not in words(app)


def test_a_preset_fills_the_form(home, open_app):
    app = open_app(START)
    next(b for b in app.button if b.key == "preset.against").click().run()
    assert not app.exception and not app.warning
    assert field(app, "steps").value == 200 and field(app, "audit_every").value == 100
    assert field(app, "precisions").value == ["fp32", "bf16", "fp16"]


def test_tags_and_note_go_with_the_run(started, home, open_app):  # noqa: F811 - the fixture
    app = open_app(START)
    field(app, "tags").set_value("paper, lstm")
    field(app, "note").set_value("as in table 2")
    submit(app)
    label = label_of(home.runs / "text-gpt-tiny-fp16-1")
    assert (label.tags, label.note) == (("paper", "lstm"), "as in table 2")
