"""Resumed runs: in a user's loop with `watch(resume=True)`, and in the engine from its checkpoint."""

import dataclasses

import pytest
import torch

from amp_core import RunError, diagnose, load_run
from amp_core.__main__ import main
from amp_core.record import watch
from amp_core.store.writer import RunWriter
from amp_core.train import TrainConfig
from amp_core.train.engine.training import train
from tests.record.loops import small_model
from tests.synthetic import live

CONFIG = TrainConfig(workload="digits-cnn", precision="fp16", device="cpu", every=3, growth_interval=4, steps=12)


def train_part(into, steps, state=None, *, scaler_too=True):
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", growth_interval=7)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        if scaler_too:
            scaler.load_state_dict(state[2])
    with watch(model, optimizer, scaler=scaler, into=into, every=3, resume=True):
        for _ in range(steps):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(4, 24)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model.state_dict(), optimizer.state_dict(), scaler.state_dict()


def test_a_resumed_run_continues_at_its_next_step(tmp_path):
    state = train_part(tmp_path / "run", 10)
    before = load_run(tmp_path / "run")
    train_part(tmp_path / "run", 6, state)
    run = load_run(tmp_path / "run")
    run.validate(full=True)
    assert (run.head.run_id, run.head.created_at) == (before.head.run_id, before.head.created_at)
    assert run.status == "finished" and run.steps.step.tolist() == list(range(16))
    assert run.steps.time_s.is_monotonic_increasing
    assert run.steps.loss_scale.tolist() == [2.0**16] * 7 + [2.0**17] * 7 + [2.0**18] * 2
    assert sorted(run.tensors().step.unique()) == [0, 3, 6, 9, 10, 12, 15]
    resumed = run.events[run.events.kind == "resumed"]
    assert resumed.step.tolist() == [10] and resumed.value.tolist() == [10.0]
    assert "scaler-state-not-restored" not in {f.code for f in diagnose(run)}
    assert sorted(p.name for p in (tmp_path / "run" / "steps").iterdir()) == ["00000.parquet", "00001.parquet"]


def test_a_scaler_that_was_not_restored_is_detected_at_the_next_steps(tmp_path):
    state = train_part(tmp_path / "run", 10)
    train_part(tmp_path / "run", 6, state, scaler_too=False)
    finding = next(f for f in diagnose(load_run(tmp_path / "run")) if f.code == "scaler-state-not-restored")
    assert finding.steps == (10, 15)


def test_a_killed_run_resumes_after_its_last_row(tmp_path):
    """A killed process leaves an open stream, and a head with status running of a dead process."""
    with RunWriter(tmp_path / "dead") as dead:
        dead.append("steps", {"step": [0, 1, 2], "loss": [1.0] * 3})
        dead_process = dict(dead.head.process) | {"pid": 2**22 - 7}
        dead.update_head(process=dead_process)
        (tmp_path / "run" / "steps").mkdir(parents=True)
        for name in ("run.json", "steps/00000.arrows"):
            (tmp_path / "run" / name).write_bytes((tmp_path / "dead" / name).read_bytes())
    assert load_run(tmp_path / "run").status == "lost"
    train_part(tmp_path / "run", 4)
    assert load_run(tmp_path / "run").steps.step.tolist() == list(range(7))


def test_a_run_that_is_still_being_written_is_not_resumed(tmp_path):
    with live(tmp_path / "run") as run:
        run.advance(3)
        with pytest.raises(RunError, match="still running"):
            train_part(tmp_path / "run", 1)


def test_without_resume_a_folder_with_a_run_is_refused(tmp_path):
    train_part(tmp_path / "run", 2)
    model = small_model()
    with pytest.raises(RunError, match="already holds a run"):
        watch(model, torch.optim.SGD(model.parameters()), into=tmp_path / "run")


def test_the_engine_resumes_bit_for_bit(tmp_path):
    train(CONFIG, tmp_path / "whole")
    asked = iter([None] * 7 + ["enough"])
    early = train(dataclasses.replace(CONFIG, checkpoint_every=5), tmp_path / "run", stop=lambda: next(asked))
    assert (early.status, early.steps) == ("stopped", 7)
    late = train(dataclasses.replace(CONFIG, checkpoint_every=5), tmp_path / "run", resume=True)
    assert (late.status, late.steps) == ("finished", 12)
    whole, parts = (load_run(tmp_path / name).steps for name in ("whole", "run"))
    assert parts.loss.tolist() == whole.loss.tolist()
    assert parts.loss_scale.tolist() == whole.loss_scale.tolist()
    assert load_run(tmp_path / "run").head.results == load_run(tmp_path / "whole").head.results


def test_the_engine_refuses_to_resume_without_a_usable_checkpoint(tmp_path):
    config = dataclasses.replace(CONFIG, steps=2, evaluate=False)
    train(config, tmp_path / "none")
    with pytest.raises(RunError, match="without checkpoint"):
        train(config, tmp_path / "none", resume=True)
    train(dataclasses.replace(config, checkpoint_every=1), tmp_path / "run")
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(RunError, match="not a readable checkpoint"):
        train(config, tmp_path / "run", resume=True)


def command(into, *flags):
    return main(["train", "--out", str(into), *flags])


FIRST = ("--workload", "digits-cnn", "--precision", "fp16", "--device", "cpu", "--no-evaluate", "--clip-norm", "1.5")


def test_the_command_resumes_with_the_settings_of_the_run(tmp_path, capsys):
    into = tmp_path / "run"
    assert command(into, *FIRST, "--steps", "4", "--checkpoint-every", "2") == 0
    assert command(into, "--resume", "--steps", "6") == 0
    assert "finished after 6 steps" in capsys.readouterr().out
    config = load_run(into).head.config
    names = ("workload", "precision", "clip_norm", "checkpoint_every", "evaluate", "steps")
    assert [config[name] for name in names] == ["digits-cnn", "fp16", 1.5, 2, False, 6]
    assert torch.load(into / "checkpoint.pt")["step"] == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--steps", "3"), "steps=3 is the total number of steps, and the run has already made 4; give more"),
        ((), "steps=4 is the total number of steps, and the run has already made 4; give more"),
        (("--steps", "9", "--precision", "bf16"), "precision='bf16' differs from the setting of the run in"),
        (("--steps", "9", "--lr", "5"), "lr=5.0 differs from the setting of the run in"),
    ],
)
def test_a_resume_with_other_settings_or_no_steps_left_is_refused(tmp_path, capsys, flags, message):
    into = tmp_path / "run"
    assert command(into, *FIRST, "--steps", "4", "--checkpoint-every", "2") == 0
    before = (into / "run.json").read_bytes()
    assert command(into, "--resume", *flags) == 2
    assert message in capsys.readouterr().err
    assert (into / "run.json").read_bytes() == before


def test_steps_after_the_checkpoint_are_repeated_and_reported(tmp_path, caplog, capsys):
    """`kill -9` leaves rows beyond the checkpoint, and a head with status running of a dead process."""
    into = tmp_path / "run"
    config = dataclasses.replace(CONFIG, checkpoint_every=5, evaluate=False)
    asked = iter([None] * 8 + ["enough"])
    assert train(config, into, stop=lambda: next(asked)).steps == 8
    state = torch.load(into / "checkpoint.pt")
    early = iter([None] * 5 + ["enough"])
    train(config, tmp_path / "early", stop=lambda: next(early))
    (into / "checkpoint.pt").write_bytes((tmp_path / "early" / "checkpoint.pt").read_bytes())
    assert state["step"] == 8 and torch.load(into / "checkpoint.pt")["step"] == 5
    assert command(into, "--resume") == 0
    run = load_run(into)
    assert run.steps.step.tolist() == list(range(8 + 7))  # no recorded row is lost
    assert run.steps.loss[5:8].tolist() == run.steps.loss[8:11].tolist()
    message = run.events[(run.events.kind == "warning") & (run.events.name == "checkpoint")]
    assert message.step.tolist() == [8] and message.detail.iloc[0].startswith(
        "steps 5 to 7 were recorded after the last"
    )
    out, err = capsys.readouterr()
    assert "finished after 12 steps" in out and "steps 5 to 7 were recorded" in caplog.text
    assert "step 12 of 12" in err and "-" not in err.rpartition("|")[2]


def test_a_missing_run_to_resume_is_reported(tmp_path, caplog):
    train(dataclasses.replace(CONFIG, steps=1, evaluate=False), tmp_path / "new", resume=True)
    assert "nothing to resume in" in caplog.text and "; starting a new run" in caplog.text
