"""Invalid settings are refused at construction, with a sentence that names the argument, its value and what would be
right."""

import json
import subprocess
import sys

import pytest

from amp_core.schema import RunError
from amp_core.settings.training import RECIPES, WORKLOADS, TrainConfig


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workload": "text-gtp"}, "workload='text-gtp' is unknown; choose one of digits-cnn, text-lstm, text-gpt"),
        ({"workload": "text-gtp"}, "did you mean text-gpt?"),
        ({"workload": ["text-gpt"]}, "workload=['text-gpt'] is unknown"),
        ({"size": "huge"}, "size='huge' is unknown; choose one of tiny, mini, small, medium"),
        ({"workload": "digits-cnn", "size": "medium"}, "choose one of tiny, small (sizes of digits-cnn)"),
        ({"workload": "mine.py:make", "size": "tiny"}, "size='tiny' cannot be set for mine.py:make"),
        ({"workload": "mine.py:make", "batch_size": 4}, "batch_size=4 cannot be set for mine.py:make"),
        ({"precision": "fp12"}, "precision='fp12' is unknown; choose one of fp32, tf32, fp16"),
        ({"precision": None}, "precision=None is unknown"),
        ({"optimizer": "lion"}, "optimizer='lion' is unknown; choose one of adamw, adam, sgd"),
        ({"steps": 0}, "steps=0 is not possible; give a whole number of 1 or more"),
        ({"steps": "ten"}, "steps='ten' is not possible"),
        ({"steps": True}, "steps=True is not possible"),
        ({"batch_size": -4}, "batch_size=-4 is not possible; give a whole number of 1 or more"),
        ({"accumulate": 1.5}, "accumulate=1.5 is not possible"),
        ({"every": 0}, "every=0 is not possible"),
        ({"seed": -1}, "seed=-1 is not possible; give a whole number from 0 to"),
        ({"lr": 0}, "lr=0 is not possible; give a number above 0"),
        ({"lr": float("nan")}, "lr=nan is not possible"),
        ({"clip_norm": float("inf")}, "clip_norm=inf is not possible"),
        ({"init_scale": None}, "init_scale=None is not possible"),
        ({"init_scale": 1e39}, "init_scale=1e+39 is not possible"),
        ({"init_scale": 10**400}, "is not possible; give a number above 0"),
        ({"growth_factor": 1}, "growth_factor=1.0 would not grow the loss scale; give more than 1"),
        ({"backoff_factor": 2}, "backoff_factor=2.0 would not lower the loss scale; give less than 1"),
        ({"growth_interval": 0}, "growth_interval=0 is not possible"),
        ({"loss_scale": "static"}, "loss_scale='static' is unknown; give dynamic or a positive number"),
        ({"loss_scale": -1.0}, "loss_scale=-1.0 is not possible"),
        ({"loss_scale": 128, "precision": "bf16"}, "loss_scale=128.0 has no effect with precision='bf16'"),
        ({"device": "gpu"}, "device='gpu' is unknown; choose auto, cpu, cuda or cuda:N"),
        ({"device": 0}, "device=0 is unknown"),
        ({"compile": "yes"}, "compile='yes' is not a switch; give true or false"),
        ({"tf32": 1}, "tf32=1 is not a switch"),
        ({"profile": "53:50"}, "profile='53:50' is not a window of steps; 50:53 profiles steps 50, 51 and 52"),
        ({"profile": [1, 2, 3]}, "profile=[1, 2, 3] is not a window"),
        ({"profile": 50}, "profile=50 is not a window"),
        ({"profile": "a:b"}, "profile='a:b' is not a window"),
        ({"profile": (-1, 3)}, "profile=(-1, 3) is not a window"),
        ({"trace_ops": -1}, "trace_ops=-1 is not possible"),
        ({"trace_ops": True}, "trace_ops=True is not possible"),
        ({"deterministic": True, "cudnn_benchmark": True}, "turn it off with deterministic=True"),
    ],
)
def test_an_invalid_setting_is_refused_by_name(wrong, message):
    with pytest.raises(RunError) as error:
        TrainConfig(**wrong)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_setting_is_refused():
    with pytest.raises(RunError, match=r"setting='stepz' is unknown.*did you mean steps"):
        TrainConfig.from_dict({"stepz": 3})


def test_a_dict_round_trip_keeps_every_setting():
    config = TrainConfig(precision="fp16", loss_scale=128, clip_norm=1, tf32=False, seed=7)
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert config.loss_scale == 128.0 and isinstance(config.loss_scale, float)


@pytest.mark.parametrize("window", ["50:53", [50, 53], (50, 53)])
def test_a_profiler_window_is_accepted_in_every_notation(window):
    config = TrainConfig(profile=window, trace_ops=0)
    assert config.profile == (50, 53)
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("workload", WORKLOADS)
def test_default_size_batch_and_lr_are_those_of_the_smallest_size(workload):
    resolved = TrainConfig(workload=workload).resolved()
    smallest = next(iter(WORKLOADS[workload].sizes.values()))
    assert (resolved.size, resolved.batch_size, resolved.lr) == ("tiny", smallest.batch_size, smallest.lr)
    assert TrainConfig(workload=workload, batch_size=3, lr=0.5).resolved().batch_size == 3


def test_only_recipes_with_a_scaler_take_a_fixed_loss_scale():
    for name, recipe in RECIPES.items():
        if recipe.scaler:
            assert TrainConfig(precision=name, loss_scale=8).loss_scale == 8
        else:
            with pytest.raises(RunError):
                TrainConfig(precision=name, loss_scale=8)


def test_config_and_its_package_do_not_import_torch():
    code = "import sys, amp_core.settings.training, amp_core.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_explicit_window_after_the_last_step_is_refused():
    TrainConfig(profile="199:203", steps=200).check_profile()  # the training may end within the window
    message = "profile='200:203' starts at step 200, but steps=200 ends with step 199; start it earlier or leave it out"
    with pytest.raises(RunError) as refused:
        TrainConfig(profile=(200, 203), steps=200).check_profile()
    assert str(refused.value) == message
