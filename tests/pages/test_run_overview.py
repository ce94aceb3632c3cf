"""Overview: the headline, the cards, the charts, and the end of a run that did not finish."""

import shutil

import pytest

from amp_core import load_run
from amp_core.analysis import overview
from amp_core.store.writer import RunWriter
from amp_core.traces import import_traces
from pages.parts import cards
from tests.pages.conftest import metric, titles, words
from tests.synthetic import SCENARIOS, live, write
from tests.synthetic_kernels import add_window
from tests.traces import made
from tests.traces.test_recorded import FOLDER


def test_a_healthy_run_is_called_healthy_with_its_numbers(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app(run="run/a")
    last = load_run(home.runs / "a").steps["loss"].iloc[-12:].mean()  # smoothed over a tenth, as on Compare
    assert "Nothing wrong was found" in words(app) and "120 of 120 steps" in words(app)
    assert metric(app, "Loss").value == f"{last:.2f}"
    assert metric(app, "Loss scale").value == "2¹⁸"  # it grew twice: after 40 and after 80 clean steps
    assert metric(app, "Loss scale").delta == "2 up, 0 down"
    assert metric(app, "Skipped steps").value == "0"
    assert metric(app, "Step time").value.endswith(" ms")
    assert metric(app, "Samples/s").value == "805"
    assert metric(app, "Peak memory").value == "148 MiB"  # in tensors; the process held 299 MiB
    assert metric(app, "Peak memory").delta == "in tensors; process 299 MiB"
    assert len(titles(app)) == 3


def test_the_step_times_curve_and_quartiles_are_of_the_same_steps(tmp_path):
    times = [900.0, 400.0] + [216.0 + step % 5 / 10 for step in range(8)]  # after the warm-up the same to three digits
    with RunWriter(tmp_path / "a") as writer:
        writer.append("steps", {"step": range(10), "step_ms": times, "samples": [8] * 10})
    run = load_run(tmp_path / "a")
    step_time, rate = cards._speed(run, overview(run))
    assert (step_time.value, step_time.beside) == ("216 ms", "216.1–216.2 ms")
    assert max(step_time.course) < 217 and min(rate.course) > 36


def test_the_step_time_of_a_trace_is_a_mean_without_quartiles(tmp_path):
    run = load_run(import_traces([FOLDER / "mi250-training.json.gz"], tmp_path / "a"))
    step_time, _ = cards._speed(run, overview(run))
    assert step_time.beside == "of one step"
    several = load_run(import_traces([made.write(tmp_path / "trace.json", made.training(steps=3))], tmp_path / "b"))
    assert cards._speed(several, overview(several))[0].beside == "mean of 3 steps"


def test_findings_come_first_with_evidence_and_advice(home, open_app):
    write(home.runs / "a", "collapsing")
    app = open_app(run="run/a")
    assert "Nothing wrong" not in words(app)
    assert app.error
    assert ":red-badge[" in "\n".join(m.value for m in app.markdown)
    assert metric(app, "Loss").value == "NaN"
    assert metric(app, "Skipped steps").value == "70"


def test_a_failed_run_shows_the_reason_and_its_last_lines(home, open_app):
    folder = write(home.runs / "a", "healthy", status="failed", end_reason="RuntimeError: out of memory")
    (folder / "console.log").write_text("step 119\nRuntimeError: out of memory\n")
    app = open_app(run="run/a")
    assert "Failed: RuntimeError: out of memory." in words(app)
    assert "step 119\nRuntimeError: out of memory" in [c.value for c in app.code]
    assert not app.success


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("stopped by SIGTERM", "Stopped by SIGTERM."),
        ("stopped on request", "Stopped on request."),
        ("killed: it did not end in time", "Stopped: killed: it did not end in time."),
    ],
)
def test_a_stopped_run_is_called_stopped_once(home, open_app, reason, expected):
    write(home.runs / "a", "healthy", status="stopped", end_reason=reason)
    assert [warning.value.replace("\\", "") for warning in open_app(run="run/a").warning] == [expected]


def test_lost_run_is_called_lost(home, open_app):
    writer = RunWriter(home.runs / "a", config={"steps": 5})
    writer.append("steps", {"step": [0, 1], "loss": [2.0, 1.9]})
    head = home.runs / "a" / "run.json"
    head.write_text(head.read_text().replace(f'"pid": {writer.head.process["pid"]}', '"pid": 999999999'))
    app = open_app(run="run/a")
    writer.close()
    assert "lost" in words(app) and "Lost: its process is gone" in words(app)


def test_a_live_run_is_refreshed_until_it_ends(home, open_app):
    with live(home.runs / "a", SCENARIOS["healthy"], steps=50) as run:
        run.advance(3)
        app = open_app(run="run/a")
        assert "step 3 of 50" in app.get("progress")[0].proto.text
        assert any(t.label == "Pause" for t in app.toggle)
        before = metric(app, "Loss").value
        run.advance(30)
        app.run()
        assert "step 33 of 50" in app.get("progress")[0].proto.text
        assert metric(app, "Loss").value != before
    app.run()
    assert not app.get("progress") and "Pause" not in [t.label for t in app.toggle]
    assert "33 of 50 steps" in words(app)


def test_a_live_run_without_steps_yet_has_a_sentence(home, open_app):
    with live(home.runs / "a"):
        app = open_app(run="run/a")
        assert not app.exception
        assert "The first step is under way. It takes longest" in words(app)


def test_a_profile_without_steps_names_its_contents_and_links_to_them(home, open_app):
    with RunWriter(home.runs / "a", config={"device": "cuda:0"}) as writer:
        add_window(writer, "fp16")
    app = open_app(run="run/a")
    assert not app.exception
    assert "of kernels" in words(app) and "on tensor cores. No training steps were recorded." in words(app)
    assert {"Tensor cores", "Step cost"} <= {p.proto.label for p in app.get("page_link")}


def test_a_run_that_failed_before_its_first_step_shows_the_reason(home, open_app):
    folder = write(home.runs / "a", "empty", status="failed", end_reason="ImportError: no module named x")
    (folder / "console.log").write_text("Traceback\nImportError: no module named x\n")
    app = open_app(run="run/a")
    assert "Failed: ImportError: no module named x." in words(app) and "This run has no steps." in words(app)
    assert any("Traceback" in c.value for c in app.code)


def test_the_verdict_is_shown_once_and_its_patch_as_code(home, open_app):
    write(home.runs / "a", "underflowing")
    app = open_app(run="run/a")
    patch, *_ = (shown.value for shown in app.code)
    assert patch.startswith("scaler = torch.amp.GradScaler(")
    text, verdict = words(app), "Training in float16 without loss scaling"
    assert text.count(verdict) == 1 and text.index("1 error found. **") < text.index(verdict)


def test_configuration_and_environment_are_rendered_only_once_opened(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app(run="run/a")
    assert not app.json
    app.session_state["overview.details"] = True
    app.run()
    assert any('"precision": "fp16"' in shown.value for shown in app.json)
    assert not app.exception


def test_a_training_whose_steps_are_missing_is_not_called_healthy(home, open_app):
    shutil.rmtree(write(home.runs / "a", "profiled-cpu") / "steps")
    app = open_app(run="run/a")
    assert not app.exception and not app.success
    assert "60 steps were planned and none is here" in words(app) and "No training steps were recorded." in words(app)
