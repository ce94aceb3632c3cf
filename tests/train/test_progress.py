"""Progress is shown when due, with the correct rate and remaining time, and a summary of the run."""

import io
import shutil

import pytest

from amp_core.cli.train import in_words
from amp_core.store.writer import RunWriter
from amp_core.train import TrainConfig, train
from amp_core.train.engine.progress import Progress


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def writer(tmp_path):
    with RunWriter(tmp_path / "r") as writer:
        yield writer


def steps(writer, progress, clock, count, seconds):
    for step in range(count):
        clock.now += seconds
        writer.append(
            "steps", {"step": [step], "loss": [2.0 / (step + 1)], "loss_scale": [65536.0], "skipped": [step % 4 == 3]}
        )
        progress.update(step + 1, last=step + 1 == count)


def test_a_log_gets_a_line_every_two_seconds_and_at_the_last_step(writer):
    clock, log = Clock(), io.StringIO()
    with Progress(writer.folder, 10, log, clock) as progress:
        steps(writer, progress, clock, count=10, seconds=0.5)
    assert log.getvalue().splitlines() == [
        "step 5 of 10 | loss 0.4 | loss scale 65536 | 1 skipped | 2.0 steps/s | 2 s left",
        "step 9 of 10 | loss 0.2222 | loss scale 65536 | 2 skipped | 2.0 steps/s | 0 s left",
        "step 10 of 10 | loss 0.2 | loss scale 65536 | 2 skipped | 2.0 steps/s | 0 s left",
    ]


def test_a_resumed_run_shows_the_rate_of_its_new_steps(writer):
    clock, log = Clock(), io.StringIO()
    with Progress(writer.folder, 1000, log, clock) as progress:
        for done in (901, 902, 903):
            progress.update(done)
            clock.now += 2
    assert [line.split(" | ")[-2:] for line in log.getvalue().splitlines()] == [
        ["0.5 steps/s", "196 s left"],
        ["0.5 steps/s", "194 s left"],
    ]


def test_missing_values_are_shown_as_a_dash(writer):
    clock, log = Clock(), io.StringIO()
    with Progress(writer.folder, 10, log, clock) as progress:
        progress.update(1)
        clock.now += 4
        progress.update(2)
    assert log.getvalue() == "step 2 of 10 | loss – | loss scale – | 0 skipped | 0.2 steps/s | 32 s left\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Full(io.StringIO):
    """A log on a full disk."""

    def write(self, _text):
        raise OSError(28, "No space left on device")


def test_progress_continues_on_a_full_disk_and_without_its_folder(writer):
    clock = Clock()
    with Progress(writer.folder, 10, Full(), clock) as progress:
        steps(writer, progress, clock, count=5, seconds=2.5)
    away = writer.folder.rename(writer.folder.with_name("away"))
    log = io.StringIO()
    with Progress(writer.folder, 10, log, clock) as progress:
        progress.update(5)
        clock.now += 2.5
        progress.update(6)
    away.rename(writer.folder)
    assert log.getvalue() == "step 6 of 10 | loss – | loss scale – | 0 skipped | 0.4 steps/s | 10 s left\n"


@pytest.mark.parametrize("checkpoint_every", [None, 2])
def test_a_removed_folder_loses_the_record_and_not_the_training(tmp_path, caplog, checkpoint_every):
    requested = 0

    def stop():
        nonlocal requested
        requested += 1
        if requested == 3:
            shutil.rmtree(tmp_path / "r")

    config = TrainConfig(device="cpu", steps=6, evaluate=False, precision="fp16", checkpoint_every=checkpoint_every)
    caplog.set_level("WARNING", logger="amp_core")
    with Progress(tmp_path / "r", 6, io.StringIO(), lambda: 0.0) as progress:
        summary = train(config, tmp_path / "r", progress=progress, stop=stop)
    assert (summary.status, summary.steps, summary.loss_last, summary.skipped) == ("finished", 6, None, None)
    assert summary.loss_scale == 65536.0
    assert caplog.text.count("is gone, and with it the recording of this run") == 1
    message = in_words(summary)
    assert (
        message.endswith("the recording was lost with its folder")
        and "load_run" not in message
        and "None" not in message
    )
    assert ("no checkpoint after step 6" in caplog.text) == (checkpoint_every is not None)


def test_the_summary_is_never_that_of_another_run_in_the_same_place(tmp_path):
    def stop():
        if other and (tmp_path / "r").exists():
            shutil.rmtree(tmp_path / "r")
            with RunWriter(tmp_path / "r") as writer:
                writer.append("steps", {"step": [0], "loss": [77.0]})
            other.clear()

    other = [True]
    summary = train(TrainConfig(device="cpu", steps=3, evaluate=False), tmp_path / "r", stop=stop)
    assert (summary.status, summary.steps, summary.loss_last) == ("finished", 3, None)


def test_a_terminal_gets_a_progress_bar_that_reaches_its_end(writer):
    clock, screen = Clock(), Terminal()
    with Progress(writer.folder, 4, screen, clock) as progress:
        steps(writer, progress, clock, count=4, seconds=0.5)
    assert "4/4" in screen.getvalue()
    assert "loss 0.5, scale 65536, 1 skipped" in screen.getvalue()


def test_the_run_folder_is_not_read_between_two_updates(tmp_path):
    clock, log = Clock(), io.StringIO()
    progress = Progress(tmp_path / "not-there", 1000, log, clock)
    for done in range(1, 100):
        clock.now += 0.02
        progress.update(done)  # reading would raise
    assert log.getvalue() == ""
