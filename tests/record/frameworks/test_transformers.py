"""A stock Trainer is unchanged by the callback, and its run is correct."""

import numpy as np
import pytest
import torch

from amp_core import RunError, diagnose, load_run
from amp_core.record.torch_internals.module_calls import listeners
from tests.record.frameworks.healthy import assert_complete, warning_codes

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from amp_core.record.transformers import WatchCallback  # noqa: E402

STEPS = 30


def texts(number, length=16):
    """Counting modulo 32 from random starts, which a model can learn."""
    starts = torch.randint(0, 32, (number, 1), generator=torch.Generator().manual_seed(0))
    rows = (starts + torch.arange(length)) % 32
    return [{"input_ids": row, "labels": row} for row in rows]


class HalfOnCpu(transformers.Trainer):
    """FP16 as on a GPU: the Trainer's own code path with autocast and a scaler, which a CPU has too."""

    init_scale = 2.0**12

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.native_amp = True
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=self.init_scale, growth_interval=10)


def train(tmp_path, callbacks, trainer=transformers.Trainer, data=None, **options):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    settings = {
        "output_dir": str(tmp_path / "out"),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 10,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    made = trainer(
        transformers.GPT2LMHeadModel(config),
        transformers.TrainingArguments(**settings | options),
        train_dataset=data or texts(64),
        eval_dataset=texts(8),
        callbacks=callbacks,
    )
    made.train()
    return made


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


WAYS = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "trainer": HalfOnCpu},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_stock_training_is_unchanged_and_its_run_complete_and_healthy(tmp_path, way):
    plain = train(tmp_path, [], **WAYS[way])
    watched = train(tmp_path, [WatchCallback(tmp_path / "run", every=5)], **WAYS[way])
    assert logged(plain, "loss") == logged(watched, "loss")
    for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(a, b)
    run = load_run(tmp_path / "run")
    assert_complete(run, STEPS, 5, {n for n, _ in watched.model.named_parameters()})
    assert np.allclose(run.steps.loss, logged(watched, "loss"), rtol=1e-5)
    assert np.allclose(run.steps.grad_norm, logged(watched, "grad_norm"), rtol=1e-4), "before clipping"
    assert (run.steps.samples == 8).all() and (run.steps.lr == 1e-3).all()
    assert run.head.config["precision"] == way and run.head.config["gradient_accumulation_steps"] == 2
    evaluated = run.events[run.events.kind == "evaluated"]
    assert evaluated.step.tolist() == [9, 19, 29]
    assert run.head.results == {"eval_loss": logged(watched, "eval_loss")[-1]}
    assert warning_codes(run) == []
    if way == "fp16":
        assert run.head.config["scaler"]["enabled"] and run.steps.loss_scale.iloc[-1] >= 2.0**13
        assert run.steps.growth_tracker.notna().all()
        order = run.events[run.events.kind == "calls"].name.iloc[1]

        assert "scale backward scale backward unscale_ clip scaler.step update" in order


def test_requested_fp16_without_scaler_and_autocast_is_reported(tmp_path):
    train(tmp_path, [WatchCallback(tmp_path / "run")], fp16=True, max_steps=3)
    run = load_run(tmp_path / "run")
    assert run.head.config["requested_precision"] == "fp16" and run.head.config["precision"] == "fp32"
    (finding,) = [f for f in diagnose(run) if f.severity != "info"]
    assert finding.code == "autocast-inactive"
    assert "fp16 was requested" in finding.title and "without a GradScaler" in finding.title


def test_a_planted_fault_is_detected(tmp_path):
    class Useless(HalfOnCpu):
        init_scale = 1.0

        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler.set_growth_interval(10**6)

    train(tmp_path, [WatchCallback(tmp_path / "run")], Useless, fp16=True, max_steps=12)
    assert "fp16-without-scaler" in warning_codes(load_run(tmp_path / "run"))


@pytest.mark.parametrize("later", [False, True])
def test_an_exception_ends_the_run_and_removes_the_hooks(tmp_path, later):
    class Failing(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == 3:
                raise ValueError("no more")
            return super().training_step(*args, **kwargs)

    class Add(transformers.TrainerCallback):
        def on_init_end(self, args, state, control, **kwargs):
            self.model = kwargs["model"]

    seen, callback = Add(), WatchCallback(tmp_path / "run")
    with pytest.raises(ValueError, match="no more"):
        if later:
            torch.manual_seed(0)
            made = train(tmp_path, [seen], Failing, max_steps=1)
            made.add_callback(callback)
            made.args.max_steps = 8
            made.train()
        else:
            train(tmp_path, [seen, callback], Failing)
    run = load_run(tmp_path / "run")
    assert (run.status, run.end_reason, len(run.steps)) == ("failed", "ValueError: no more", 3)
    assert not any(listeners(m) or m._forward_hooks for m in seen.model.modules())


def test_a_second_training_has_its_own_folder_and_the_same_tracker(tmp_path):
    class Tracker(list):
        def log(self, row, step):
            self.append(step)

    tracker, callback = Tracker(), WatchCallback(tmp_path / "run")
    callback.mirror(tracker)
    trainer = train(tmp_path, [callback], max_steps=2)
    trainer.train()
    assert [len(load_run(tmp_path / name).steps) for name in ("run", "run-2")] == [2, 2]
    assert tracker == [0, 1, 0, 1]


def test_arguments_that_the_trainer_provides_are_refused(tmp_path):
    with pytest.raises(RunError, match="scaler cannot be given to a callback"):
        WatchCallback(tmp_path / "run", scaler=None)
