"""The estimate of a training's time and memory, the presets, and labels set before the start."""

import json

import pytest

from amp_core.library.labels import label_of
from tests.pages.conftest import words
from tests.pages.start_form import START, field, submit
from tests.synthetic import write


def test_time_is_estimated_from_similar_runs_and_memory_from_the_size(home, open_app):
    assert "Time: FP16 AMP: unknown, because nothing similar was trained here yet." in words(open_app(START))
    folder = write(home.runs / "a", "healthy")
    head = json.loads((folder / "run.json").read_text())
    settings = {"workload": "text-gpt", "size": "tiny", "batch_size": 8, "precision": "fp16", "device": "cpu"}
    (folder / "run.json").write_text(json.dumps(head | {"config": head["config"] | settings}))
    app = open_app(START)
    page_text = words(app)
    assert "Memory: about" in page_text and " in FP32 with Adam" in page_text
    assert "At the peak, as measured here: FP16 AMP 299 MiB (resident set of the process)" in page_text
    assert "ms a step, as measured here" in page_text
    field(app, "batch_size").set_value(4).run()
    assert "unknown, because nothing similar" in words(app)
    field(app, "batch_size").set_value(0).run()
    assert "Memory: about" not in words(app)


def test_a_preset_fills_the_form(home, open_app):
    app = open_app(START)
    next(b for b in app.button if b.key == "preset.against").click().run()
    assert not app.exception and not app.warning
    assert field(app, "steps").value == 200 and field(app, "audit_every").value == 100
    assert field(app, "precisions").value == ["fp32", "bf16", "fp16"]


def test_tags_and_note_are_attached_to_the_run(started, home, open_app):
    app = open_app(START)
    field(app, "tags").set_value("paper, lstm")
    field(app, "note").set_value("as in table 2")
    submit(app)
    label = label_of(home.runs / "text-gpt-tiny-fp16-1")
    assert (label.tags, label.note) == (("paper", "lstm"), "as in table 2")


def test_the_form_shows_the_equivalent_command(home, open_app):
    app = open_app(START)
    field(app, "steps").set_value(30)
    field(app, "precisions").set_value(["fp32", "fp16"]).run()
    lines = next(code.value for code in app.code if "--out" in code.value and "my_task" not in code.value).splitlines()
    folders = [f"{home.runs}/text-gpt-tiny-{name}" for name in ("fp32", "fp16")]
    *lines, _, turns = lines
    assert turns.startswith("ampscope compare --precisions fp32,fp16 --workload text-gpt --size tiny")
    assert "--precision " not in turns and turns.endswith(f"--out {home.runs}/compare-text-gpt-tiny")
    assert [line.split(" --out ")[1] for line in lines] == folders
    assert all("--workload text-gpt" in line and "--size tiny" in line and "--steps 30" in line for line in lines)
    field(app, "steps").set_value(-1).run()
    assert not any("--size" in code.value for code in app.code)


@pytest.mark.parametrize(("typed", "folder"), [("../../a/b ?", "a-b"), ("my first/ run?", "my-first-run")])
def test_the_command_uses_the_folder_that_start_uses(home, open_app, typed, folder):
    app = open_app(START)
    field(app, "name").set_value(typed)
    field(app, "precisions").set_value(["fp16", "bf16"]).run()
    lines = next(code.value for code in app.code if "--out" in code.value and "my_task" not in code.value).splitlines()
    outs = [line.split(" --out ")[1] for line in lines if " --out " in line]
    assert outs == [f"{home.runs}/{folder}-fp16", f"{home.runs}/{folder}-bf16", f"{home.runs}/{folder}"]
