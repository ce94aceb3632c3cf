"""Start a run: the form, its errors and the queue. No training runs in these tests."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from amp_core.library.permissions import Rules
from amp_core.settings.training import TrainConfig
from pages.parts.library.run_list import Entry
from pages.parts.start import again, devices, fields, form
from tests.pages.conftest import words
from tests.pages.start_form import START, field, submit
from tests.synthetic import write


def test_the_form_starts_with_defaults_for_a_newcomer(home, open_app):
    app = open_app(START)
    assert field(app, "what").value == ("text-gpt", "tiny")
    assert field(app, "precisions").value == ["fp16"]
    assert field(app, "steps").value == 200
    assert field(app, "profile").value == "20:23" and field(app, "trace_ops").value
    assert field(app, "scaling").value == "dynamic" and field(app, "scale").value == 65536


def test_the_absence_of_a_gpu_is_explained(home, open_app, monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: ([("cpu", "CPU")], "no NVIDIA driver is installed"))
    app = open_app(START)
    assert field(app, "device").options == ["CPU"]
    assert "No CUDA: no NVIDIA driver is installed." in words(app)


def test_available_gpus_are_listed_first(home, open_app, monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: ([("cuda:0", "H200 (cuda:0)"), ("cpu", "CPU")], None))
    app = open_app(START)
    assert field(app, "device").value == "cuda:0"
    assert "No CUDA" not in words(app)


def test_sizes_state_the_memory_they_need_and_whether_the_device_has_it(home, open_app, monkeypatch):
    monkeypatch.setattr(devices, "memory_bytes", lambda device: 8 * 2**30)
    labels = field(open_app(START), "what").options
    assert "Text, GPT · tiny (119 k parameters)" in labels
    small = next(label for label in labels if label.startswith("Text, GPT · small"))
    assert small == "Text, GPT · small (124 M parameters, 7.93 GiB)"
    medium = next(label for label in labels if label.startswith("Text, GPT · medium"))
    assert medium == "Text, GPT · medium (355 M; needs 11.3 GiB of 8.00 GiB)"


def test_a_size_that_the_device_cannot_hold_is_refused(started, open_app, monkeypatch):
    configs, _ = started
    monkeypatch.setattr(devices, "memory_bytes", lambda device: 2**30)
    app = open_app(START)
    field(app, "what").set_value(("text-bert", "large"))
    app = submit(app)
    assert not configs
    page_text = app.error[0].value.replace("\\", "")
    assert page_text.startswith("size='large' cannot be trained on") and "choose a smaller size" in page_text


def test_the_form_passes_on_the_recording_settings(started, open_app):
    configs, _ = started
    app = submit(open_app(START))
    assert (configs[0].profile, configs[0].trace_ops, configs[0].audit_every) == ((20, 23), 2, 100)
    field(app, "profile").set_value("")
    field(app, "trace_ops").set_value(False)
    field(app, "audit_every").set_value(50)
    field(app, "name").set_value("another")
    submit(app)
    assert (configs[-1].profile, configs[-1].trace_ops, configs[-1].audit_every) == (None, None, 50)


def test_an_invalid_profile_window_is_refused_beside_its_field(started, open_app):
    configs, _ = started
    app = open_app(START)
    field(app, "profile").set_value("53:50")
    app = submit(app)
    assert not configs
    assert "is not a window of steps" in app.error[0].value


def test_a_profile_window_after_the_last_step_is_refused_beside_its_field(started, open_app):
    configs, _ = started
    app = open_app(START)
    field(app, "profile").set_value("500:503")
    app = submit(app)
    assert not configs
    assert app.error[0].value.replace("\\", "").startswith("profile='500:503' starts at step 500, but steps=200 ends")
    assert app.session_state["start.refused"][0] == "profile"


def test_a_short_training_ignores_the_default_profile_window(started, open_app):
    configs, _ = started
    app = open_app(START)
    field(app, "steps").set_value(12)
    submit(app)
    assert [config.steps for config in configs] == [12]


def test_each_precision_becomes_a_queued_run_and_the_first_is_shown(started, open_app):
    configs, _ = started
    app = open_app(START)
    field(app, "precisions").set_value(["fp16", "bf16", "fp32"])
    field(app, "steps").set_value(30)
    field(app, "seed").set_value(7)
    app = submit(app)
    assert not app.exception
    assert [c.precision for c in configs] == ["fp16", "bf16", "fp32"]
    assert {c.steps for c in configs} == {30} and {c.seed for c in configs} == {7}
    assert app.session_state["run"] == "run/text-gpt-tiny-fp16-1"
    assert app.query_params["run"] == "run/text-gpt-tiny-fp16-1"
    page_text = words(app)
    assert "Number 1 in the queue" in page_text
    assert "number 2 for cpu" in page_text and "number 3 for cpu" in page_text


def test_a_static_scale_applies_to_the_recipes_with_a_scaler(started, open_app):
    configs, _ = started
    app = open_app(START)
    field(app, "precisions").set_value(["fp16", "fp32"])
    field(app, "scaling").set_value("static")
    field(app, "scale").set_value(128.0)
    submit(app)
    assert {c.precision: c.loss_scale for c in configs} == {"fp16": 128.0, "fp32": "dynamic"}


def test_a_dynamic_scale_starts_at_the_value_in_the_form(started, open_app):
    configs, _ = started
    app = open_app(START)
    field(app, "scale").set_value(1024.0)
    submit(app)
    assert configs[0].loss_scale == "dynamic" and configs[0].init_scale == 1024.0


def refusal_of(**settings):
    """The sentence of the command line for the same mistake."""
    try:
        TrainConfig(**settings)
    except ValueError as error:
        return f"{error}."
    raise AssertionError("not refused")


@pytest.mark.parametrize(
    ("name", "value"), [("steps", -4), ("batch_size", 0), ("seed", -1), ("growth_factor", 0.5), ("every", 0)]
)
def test_a_refused_value_shows_the_sentence_of_the_command_line(started, open_app, name, value):
    configs, _ = started
    app = open_app(START)
    field(app, name).set_value(value)
    app = submit(app)
    assert not app.exception and not configs
    assert [e.value.replace("\\", "") for e in app.error] == [refusal_of(**{name: value})]
    field(app, name).set_value(getattr(TrainConfig(), name))
    app = submit(app)
    assert not app.error and len(configs) == 1


def test_no_precision_is_refused(started, open_app):
    app = open_app(START)
    field(app, "precisions").set_value([])
    app = submit(app)
    assert app.error[0].value.replace("\\", "").startswith("precision='' is unknown; choose one of fp32")


def test_fields_without_effect_are_disabled_with_the_reason(started, open_app):
    configs, _ = started
    app = open_app(START)
    field(app, "scaling").set_value("static").run()
    for name in ("growth_interval", "growth_factor", "backoff_factor"):
        assert field(app, name).disabled and field(app, name).help == "A static loss scale never changes."
    field(app, "precisions").set_value(["bf16"]).run()
    for name in ("scaling", "scale", "growth_interval"):
        assert field(app, name).disabled and field(app, name).help.startswith(
            "None of the chosen precisions has a scaler. With one: FP16 AMP"
        )
    submit(app)
    assert [(c.precision, c.loss_scale) for c in configs] == [("bf16", "dynamic")]


def test_8_and_4_bits_are_offered_with_the_switches_of_nvfp4(started, open_app):
    configs, _ = started
    app = open_app(START)
    assert field(app, "hadamard").disabled and field(app, "hadamard").help == "Needs the precision NVFP4."
    assert "emulated: the numerics are valid, times and memory are not" in field(app, "precisions").help
    field(app, "precisions").set_value(["bf16", "mxfp8", "nvfp4"]).run()
    field(app, "hadamard").set_value(True)
    submit(app)
    assert [(c.precision, c.hadamard) for c in configs] == [("bf16", False), ("mxfp8", False), ("nvfp4", True)]


@pytest.mark.parametrize(("capability", "offered"), [((8, 0), True), ((7, 0), False), (None, True)])
def test_tf32_is_offered_only_on_gpus_that_have_it(home, open_app, monkeypatch, capability, offered):
    monkeypatch.setattr(devices, "available", lambda: ([("cuda:0", "Tesla (cuda:0)"), ("cpu", "CPU")], None))
    monkeypatch.setattr(
        devices, "usable_gpus", lambda: [SimpleNamespace(name="Tesla", capability=capability, memory_bytes=2**34)]
    )
    app = open_app(START)
    assert ("TF32" in field(app, "precisions").options) == offered
    assert ("TF32 is not offered on Tesla (cuda:0): only NVIDIA" in words(app)) == (not offered)
    field(app, "precisions").set_value(["fp32"] + ["tf32"] * offered).run()
    field(app, "device").set_value("cpu").run()
    assert not app.exception and field(app, "precisions").value == ["fp32"]


def test_each_process_takes_a_gpu(started, open_app, monkeypatch):
    configs, _ = started
    cards = [(f"cuda:{i}", f"Tesla (cuda:{i})") for i in range(2)]
    monkeypatch.setattr(devices, "usable_gpus", list)
    monkeypatch.setattr(devices, "memory_bytes", lambda device: 2**34)
    monkeypatch.setattr(devices, "available", lambda: (cards[:1], None))
    assert field(open_app(START), "nproc").disabled
    monkeypatch.setattr(devices, "available", lambda: (cards, None))
    app = open_app(START)
    field(app, "nproc").set_value(2).run()
    submit(app)
    assert [(c.nproc, c.device) for c in configs] == [(2, "cuda")]


def test_an_unwritable_runs_folder_is_a_sentence(home, open_app):
    home.runs.write_text("a file stands where the folder should be")
    app = submit(open_app(START))
    assert not app.exception
    assert app.error[0].value.replace("\\", "").startswith("runs_dir=")


def test_pages_never_import_torch():
    code = (
        "import sys, pkgutil, importlib, pages.parts\n"
        "for m in pkgutil.walk_packages(pages.parts.__path__, 'pages.parts.'): importlib.import_module(m.name)\n"
        "import amp_core, amp_core.analysis, amp_core.figures; amp_core.diagnose\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_no_workload_is_selected_beside_the_users_own(home, open_app, monkeypatch, tmp_path):
    for part in (fields, form):
        monkeypatch.setattr(part, "current", lambda: Rules(scripts=(str(tmp_path),)))
    app = open_app(START)
    assert not app.selectbox(key="start.what").disabled
    app.text_input(key="start.own").input("mine.py:build").run()
    assert app.selectbox(key="start.what").disabled
    assert app.selectbox(key="start.what").help == "Your own workload below is trained instead."


def test_a_script_that_the_server_allows_can_be_run_again(monkeypatch, tmp_path):
    def entry(workload, size=None):
        config = {"workload": workload, "size": size, "precision": "bf16"}
        return Entry("run/a", tmp_path / "a", "run", "a", "finished", config=config)

    inside, outside = entry(f"{tmp_path}/deep/mine.py:build"), entry(f"{tmp_path.parent}/other.py:build")
    monkeypatch.setattr(again, "current", lambda: Rules(scripts=(str(tmp_path),)))
    assert again.possible(inside) and not again.possible(outside)
    filled = again.settings(inside.config)
    assert filled["own"] == "deep/mine.py:build" and filled["precisions"] == ["bf16"]
    assert again.settings(entry("text-gpt", "tiny").config)["own"] == ""  # a script that was typed before must not run
    monkeypatch.setattr(again, "current", Rules)
    assert not again.possible(inside)


def test_run_again_names_settings_that_the_form_has_no_field_for(home, open_app):
    folder = write(home.runs / "a", "healthy")
    head = json.loads((folder / "run.json").read_text())
    head["config"] |= {"nproc": 2, "islands": ["blocks.0"], "pad_to": 8, "fp8": False}
    (folder / "run.json").write_text(json.dumps(head))
    app = open_app("pages/run_library.py", run="run/a")
    next(b for b in app.button if b.label == "Run again").click().run()
    assert not app.exception and field(app, "nproc").value == 2
    assert "The form has no islands, pad_to: the run's are left out." in words(app)
