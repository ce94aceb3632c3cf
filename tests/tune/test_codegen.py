"""The generated code of a recipe trains like the engine: the program of each framework is executed.

The losses equal those of the engine at each step, within the rounding of the precision: weights, batches and operators
are the same, but a framework may sum and cast elsewhere. Accelerate and the Trainer silently train in FP32 on a CPU
when FP16 is requested; their programs report that instead, and with autocast and a scaler, as on a GPU, they train like
the engine too.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from amp_core import load_run
from amp_core.schema import RunError
from amp_core.train import TrainConfig, train
from amp_core.train.workloads import build
from amp_core.tune.codegen import FRAMEWORKS, SUPPORTED_PRECISIONS, code_for
from tests.paths import ROOT

NEEDS = {"plain": (), "accelerate": ("accelerate",), "transformers": ("transformers", "accelerate")}
NEEDS |= {"lightning": ("lightning",)}
RECIPES = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16", "fused": True},
    "fp16": {"precision": "fp16", "init_scale": 2.0**22, "growth_interval": 10},
    "fp16-static": {"precision": "fp16", "loss_scale": 2.0**22},
    "fp16-islands": {"precision": "fp16", "islands": ("head",), "pad_to": 16, "clip_norm": 0.5},
    "bf16-all": {"precision": "bf16", "channels_last": True, "accumulate": 2, "optimizer": "sgd", "lr": 0.05},
}
CLOSE = {"float16": 2e-3, "bfloat16": 2e-2, None: 1e-5}
"""Relative difference that losses may have: some units of the format's rounding (2^-11, 2^-8, 2^-24)."""
STEPS = 16


def recipe(name):
    workload = "text-gpt" if "islands" in name else "digits-cnn"
    return TrainConfig(workload=workload, steps=STEPS, device="cpu", evaluate=False, seed=3, **RECIPES[name])


def program(config, framework):
    """The program's names, without its main part."""
    for package in NEEDS[framework]:
        pytest.importorskip(package)
    names = {"__name__": "emitted"}
    exec(compile(code_for(config, framework), f"train_{framework}.py", "exec"), names)
    return names


def run(config, framework, names=None):
    names = names or program(config, framework)
    task = build(config.resolved())
    return np.array(names["train"](task.model, task.batches, task.loss_fn, config.steps))


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    """Use a temporary working directory, into which frameworks write, and reset the global settings of Accelerate."""
    monkeypatch.chdir(tmp_path)
    if find_spec("accelerate") is None:
        yield
        return
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The losses of the engine; each recipe is trained once."""
    cache = {}

    def losses(name):
        if name not in cache:
            folder = tmp_path_factory.mktemp("engine") / name
            train(recipe(name), folder)
            cache[name] = load_run(folder).steps
        return cache[name]

    return losses


def half_on_cpu(framework, names, monkeypatch):
    """Give the framework autocast and a scaler for FP16 on the CPU, as it has on a GPU."""
    import accelerate

    class Half(accelerate.Accelerator):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.native_amp = True
            handler = self.scaler_handler
            self.scaler = torch.amp.GradScaler("cpu", **(handler.to_kwargs() if handler is not None else {}))

    if framework == "accelerate":
        names["Accelerator"] = Half
    else:
        monkeypatch.setattr("transformers.trainer.Accelerator", Half)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", RECIPES)
def test_the_program_reaches_the_engines_losses(framework, name, engine, monkeypatch):
    config = recipe(name)
    names = program(config, framework)
    if config.recipe.scaler and framework in ("accelerate", "transformers"):
        half_on_cpu(framework, names, monkeypatch)
    expected = engine(name)
    losses = run(config, framework, names)
    assert len(losses) == STEPS and (losses[-1] < losses[0] or name == "fp16-static")
    np.testing.assert_allclose(losses, expected["loss"], rtol=CLOSE[config.recipe.autocast])
    if name in ("fp16", "fp16-static"):
        assert expected["skipped"].sum() >= 2  # the requested loss scale is in effect: these steps changed nothing


@pytest.mark.parametrize("framework", ["accelerate", "transformers"])
def test_fp16_that_the_framework_would_train_in_fp32_is_noted(framework):
    with pytest.raises(RuntimeError, match="trains in FP32 on a CPU when it is asked for FP16"):
        run(recipe("fp16"), framework)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bf16_and_fp32_have_different_losses(framework, engine):
    """This shows that the comparison above is meaningful: a program without its precision would differ from the
    engine."""
    config = recipe("bf16")
    assert np.abs(run(config, framework) / engine("fp32")["loss"] - 1).max() > 1e-4


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("precision", SUPPORTED_PRECISIONS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_program_passes_lint_and_format(framework, precision, device, tmp_path):
    every = {"channels_last": True, "compile": True, "pad_to": 8, "clip_norm": 1.0, "accumulate": 4, "optimizer": "sgd"}
    islands = {"islands": ("a.b", "c")} if precision in ("fp16", "bf16") else {}
    scale = {"loss_scale": 65536.0} if precision == "fp16" else {}
    config = TrainConfig(precision=precision, fused=True, workload="my task.py:build", **every, **islands, **scale)
    text = code_for(dataclasses.replace(config, device=device), framework, "2 × faster")
    compile(text, "emitted", "exec")
    assert "2 × faster" in text and "model.compile()" in text and '"my task.py"' in text
    if shutil.which("ruff"):
        (tmp_path / "emitted.py").write_text(text)
        chosen = ["ruff", "check", "--isolated", "--select", "E,F,I,W,B,UP", "--line-length", "120", "emitted.py"]
        done = subprocess.run(chosen, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        done = subprocess.run(
            ["ruff", "format", "--isolated", "--line-length", "120", "--check", "emitted.py"], check=False
        )
        assert done.returncode == 0


def test_a_program_runs_as_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef task():\n    batches = [(torch.ones(4, 8), torch.zeros(4, 2))] * 3\n"
        "    return torch.nn.Linear(8, 2), batches, lambda m, b: torch.nn.functional.mse_loss(m(b[0]), b[1])\n"
    )
    config = TrainConfig(workload="mine.py:task", precision="bf16", steps=5, device="cpu")
    names = {"__name__": "__main__"}
    exec(compile(code_for(config, "plain"), "emitted", "exec"), names)
    assert len(names["losses"]) == 5 and names["losses"][-1] < names["losses"][0]


LSTM = """
import torch
from torch import nn

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, num_layers=2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.lstm(x)[0]
        assert torch.is_autocast_enabled("cpu")
        return self.head(hidden)

def tagger():
    data = [(torch.randn(6, 5, 4), torch.randint(0, 2, (6, 5))) for _ in range(2)]
    return Tagger(), data, lambda model, batch: nn.functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])
"""


@pytest.mark.whole
def test_lstm_programs_run_without_avx512(tmp_path):
    """With AVX2, oneDNN has no LSTM in BF16 or FP16. The built-in workload has its own fallback."""
    (tmp_path / "mine.py").write_text(LSTM)
    tagger = f"{tmp_path / 'mine.py'}:tagger"
    programs = [(framework, "bf16", tagger) for framework in FRAMEWORKS if all(map(find_spec, NEEDS[framework]))]
    refusing = ("accelerate", "transformers")  # FP16 on a CPU
    programs += [(framework, "fp16", tagger) for framework, _, _ in programs if framework not in refusing]
    programs += [("plain", precision, "text-lstm") for precision in ("bf16", "fp16")]
    for framework, precision, workload in programs:
        config = TrainConfig(workload=workload, precision=precision, steps=2, device="cpu")
        name = f"{framework}_{precision}_{Path(workload).stem}.py"
        (tmp_path / name).write_text(code_for(config, framework))
    files = sorted(path.name for path in tmp_path.glob("*_*.py"))
    assert len(files) == len(programs) >= 4
    # All in one process: most of the time is taken by imports of torch and of the frameworks.
    every = "import runpy, sys\nfor file in sys.argv[1:]: runpy.run_path(file, run_name='__main__'); print('ran', file)"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": os.fspath(ROOT)}
    line = [sys.executable, "-c", every, *files]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr
    for file, output in zip(files, done.stdout.split("ran ")[:-1], strict=True):
        assert "loss " in output, file


def test_the_lstm_fallback_leaves_random_numbers_and_fp32_alone(tmp_path):
    config = TrainConfig(workload=f"{tmp_path / 'mine.py'}:tagger", precision="bf16", device="cpu")
    names = program(config, "plain")
    torch.manual_seed(5)
    expected = torch.rand(3)
    model = torch.nn.LSTM(4, 4)
    torch.manual_seed(5)
    names["prepare"](model)
    assert torch.equal(torch.rand(3), expected)
    for other in ({"precision": "fp32"}, {"device": "cuda"}):
        assert "make_lstms_portable" not in code_for(TrainConfig(**(config.__dict__ | other)), "plain")


def test_an_unsupported_framework_or_precision_is_refused():
    with pytest.raises(
        RunError, match="precision='fp16-pure' has no generated code; choose one of fp32, tf32, bf16, fp16"
    ):
        code_for(TrainConfig(precision="fp16-pure"), "plain")
    with pytest.raises(RunError, match="framework='jax' is unknown; choose one of plain"):
        code_for(TrainConfig(), "jax")
