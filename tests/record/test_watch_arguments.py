"""The arguments of `watch`: the steps, kinds and tensors that are measured, the settings in the head, and errors."""

import importlib
import sys

import numpy as np
import pytest
import torch
from torch import nn

from amp_core import RunError, load_run
from amp_core.record import watch
from amp_core.record.model.parameters import unwrapped
from tests.record.loops import small_model, train


def test_sampled_steps_are_every_nth(tmp_path):
    train(tmp_path / "run", every=5)
    assert sorted(load_run(tmp_path / "run").tensors().step.unique()) == [0, 5, 10]


def test_level_full_measures_every_kind(tmp_path):
    train(tmp_path / "run", torch.bfloat16, every=5, level="full")
    assert set(load_run(tmp_path / "run").tensors().kind) == {"weight_grad", "output_grad", "activation", "weight"}


def test_a_budget_stretches_the_interval_and_the_run_reports_it(tmp_path):
    """A step of this model is faster than watching it, so sampling becomes rare at once."""
    train(tmp_path / "run", torch.bfloat16, every=1, steps=40, budget=0.01)
    run = load_run(tmp_path / "run")
    changes = run.events[run.events.name == "sampling interval"]
    assert len(changes) and changes.detail.iloc[0].startswith("every 1 → every ")
    assert run.tensors().step.nunique() < 10 and len(run.steps) == 40
    assert run.head.config["budget"] == 0.01


def test_include_and_exclude_choose_tensors(tmp_path):
    train(tmp_path / "run", include=["*.weight"], exclude="3.*")
    assert set(load_run(tmp_path / "run").tensors().name) == {"0.weight", "2.weight", "5.weight"}


@pytest.mark.parametrize(
    "names", [{"include": "zzz"}, {"exclude": "*"}, {"include": "*.weight", "kinds": "activation"}]
)
def test_patterns_that_leave_nothing_to_measure_are_reported(tmp_path, caplog, names):
    train(tmp_path / "run", **names)
    run = load_run(tmp_path / "run")
    reports = run.events[(run.events.kind == "warning") & (run.events.name == "include")]
    assert reports.detail.iloc[0].endswith("leave no tensor to measure") and reports.detail.iloc[0] in caplog.text
    assert run.tensors().empty


def test_patterns_that_leave_something_are_not_reported(tmp_path):
    train(tmp_path / "run", include=["3"], kinds="output_grad")
    run = load_run(tmp_path / "run")
    assert set(run.tensors().name) == {"3"} and "include" not in set(run.events.name)


def test_the_head_has_settings_and_model(tmp_path):
    train(tmp_path / "run", torch.float16, growth_interval=7)
    head = load_run(tmp_path / "run").head
    assert head.config["scaler"] == {
        "enabled": True, "init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7,
    }  # fmt: skip
    assert head.config["autocast_dtype"] == "float16" and head.config["device"] == "cpu"
    assert head.model["class"] == "Sequential"
    assert head.model["parameters"] == sum(p.numel() for p in small_model().parameters())
    assert head.environment["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"every": 0}, "every=0 is not a whole number from 1"),
        ({"every": 2.5}, "every=2.5 is not a whole number from 1"),
        ({"kinds": ("gradients",)}, "kinds='gradients' cannot be recorded; choose from weight_grad"),
        ({"kinds": None}, "kinds=None is neither a string nor a list of strings"),
        ({"include": 5}, "include=5 is neither a string nor a list of strings"),
        ({"exclude": [5]}, "exclude=[5] is neither a string nor a list of strings"),
        ({"into": None}, "into=None is not a path; give the folder of the run"),
        ({"level": "fullest"}, "level='fullest' is unknown; choose one of standard, full"),
        ({"budget": 3}, "budget=3 is not a share between 0 and 1"),
        ({"profile": (3, 3)}, "profile=(3, 3) is not a window of steps; profile=(50, 53) profiles steps 50, 51 and 52"),
        ({"profile": 50}, "profile=50 is not a window of steps"),
        ({"trace_ops": -2}, "trace_ops=-2 is not the number of a step"),
        ({"model": "net"}, "model=str is not a torch.nn.Module"),
        ({"optimizer": []}, "optimizer=[] is empty"),
        ({"optimizer": [3]}, "optimizer=int is not a torch.optim.Optimizer"),
        ({"scaler": 65536}, "scaler=int is not a GradScaler"),
    ],
)
def test_invalid_arguments_raise_one_sentence_and_leave_nothing(tmp_path, arguments, sentence):
    model = small_model()
    accepted = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "into": tmp_path / "run"}
    accepted |= arguments
    with pytest.raises(RunError) as caught:
        watch(accepted.pop("model"), accepted.pop("optimizer"), **accepted)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_log_refuses_unknown_names_and_values_that_are_not_numbers(tmp_path):
    model = small_model()
    with watch(model, torch.optim.SGD(model.parameters(), lr=0.1), into=tmp_path / "run") as rec:
        with pytest.raises(RunError, match="perplexity=3 cannot be logged; choose from loss, lr, samples, grad_norm"):
            rec.log(perplexity=3)
        with pytest.raises(RunError, match="loss is a tensor of shape"):
            rec.log(loss=torch.ones(3))
        for nothing in ("4.0", np.ones(2), [1.0], 10**400):
            with pytest.raises(RunError, match="is not a number; log one number per step"):
                rec.log(loss=nothing)


def test_numpy_numbers_are_logged_and_nan_is_refused_as_samples(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run") as rec:
        for loss, samples in ((np.array([1.5]), float("nan")), (np.float32(2.5), torch.tensor(float("nan")))):
            model(torch.randn(4, 24)).sum().backward()
            rec.log(loss=loss, samples=samples)
            optimizer.step()
    assert load_run(tmp_path / "run").steps["loss"].tolist() == [1.5, 2.5]


def test_unwrapped_returns_the_users_module():
    model = small_model()
    assert unwrapped(torch.compile(nn.DataParallel(model), backend="eager")) is model


@pytest.mark.parametrize("framework", ["transformers", "lightning", "keras"])
def test_without_the_framework_its_callback_names_the_extra(monkeypatch, framework):
    monkeypatch.setitem(sys.modules, framework, None)
    for name in (framework, f"frameworks.{framework}", "frameworks.keras_run", "frameworks.keras_values"):
        monkeypatch.delitem(sys.modules, f"amp_core.record.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"^{framework} is not installed; .*\[{framework}\]"):
        importlib.import_module(f"amp_core.record.{framework}")
