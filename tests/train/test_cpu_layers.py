"""Layers for which oneDNN has no 16-bit kernel on this CPU still work, or are refused before the training starts."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from amp_core import load_run
from amp_core.__main__ import main
from amp_core.train import TrainConfig, cpu_layers
from amp_core.train.engine.recipes import Precision
from amp_core.train.workloads import build
from tests.paths import ROOT

OWN = """
import torch
from torch import nn

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, num_layers=2, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.lstm(x)[0]
        wanted = torch.get_autocast_dtype("cpu")
        assert torch.is_autocast_enabled("cpu") and torch.mm(x[0], x[0].T).dtype == wanted
        return self.head(hidden)

def tagger():
    data = [(torch.randn(6, 5, 4), torch.randint(0, 2, (6, 5))) for _ in range(2)]
    return Tagger(), data, lambda model, batch: nn.functional.cross_entropy(model(batch[0]).transpose(1, 2), batch[1])
"""

TRAIN_BOTH = """
import sys
from amp_core.train import TrainConfig, train

for precision in ("bf16", "fp16"):
    for name, workload in (("own", sys.argv[1]), ("builtin", "text-lstm")):
        settings = {"workload": workload, "precision": precision, "steps": 2, "batch_size": None, "device": "cpu"}
        train(TrainConfig(**settings, trace_ops=1, evaluate=False), f"{sys.argv[2]}/{name}-{precision}")
"""


@pytest.fixture
def fresh_probes():
    cpu_layers.runs.cache_clear()
    yield
    cpu_layers.runs.cache_clear()


def test_lstms_train_in_16_bits_without_avx512(tmp_path):
    """oneDNN with AVX2 has no LSTM in BF16 or FP16; autocast still computes these layers in 16 bits."""
    own = tmp_path / "own_lstm.py"
    own.write_text(OWN)
    line = [sys.executable, "-c", TRAIN_BOTH, f"{own}:tagger", os.fspath(tmp_path)]
    narrow = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=narrow, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("own", "builtin"):
        for precision, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
            run = load_run(tmp_path / f"{name}-{precision}")
            assert run.status == "finished" and run.steps["loss"].notna().all()
            ops = run.ops
            products = ops[(ops["module"] == "lstm") & ops["op"].isin(["aten::mm", "aten::addmm", "aten::linear"])]
            assert set(products["out_dtype"]) == {dtype}, (name, precision)


def no_16_bit_convolution(monkeypatch):
    works = nn.Conv2d._conv_forward

    def only_fp32(self, x, weight, bias):
        if torch.is_autocast_enabled("cpu") or weight.dtype != torch.float32:
            raise RuntimeError("could not create a primitive")
        return works(self, x, weight, bias)

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", only_fp32)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16-pure", "float16")])
def test_a_layer_without_a_kernel_is_refused_before_the_start(
    tmp_path, monkeypatch, capsys, fresh_probes, precision, dtype
):
    no_16_bit_convolution(monkeypatch)
    line = ["train", "--workload", "digits-cnn", "--device", "cpu", "--steps", "2", "--no-evaluate"]
    assert main([*line, "--precision", precision, "--out", os.fspath(tmp_path / "r")]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert f"precision='{precision}' cannot run here: torch has no Conv2d in {dtype} for this CPU" in message
    assert message.rstrip().endswith("choose fp32")
    assert not (tmp_path / "r").exists()
    assert main([*line, "--precision", "fp32", "--out", os.fspath(tmp_path / "r")]) == 0


def test_a_module_that_computes_in_fp32_needs_no_16_bit_kernel(monkeypatch, fresh_probes):
    no_16_bit_convolution(monkeypatch)
    model = nn.ModuleDict({"body": nn.Sequential(nn.Conv2d(1, 1, 3)), "head": nn.Linear(2, 2)})
    precision = Precision(TrainConfig(precision="bf16"), torch.device("cpu"))
    cpu_layers.prepare_layers(model, precision, islands=("body",))
    with pytest.raises(cpu_layers.RunError, match=r"which the module 'body\.0' needs"):
        cpu_layers.prepare_layers(model, precision, islands=("head", "bod"))


def test_layer_probes_are_not_counted_in_a_step_and_fake_tensors_run_none(fresh_probes):
    model = build(TrainConfig(workload="text-lstm").resolved()).model
    tokens = torch.randint(0, 256, (2, 4))

    def operators():
        with FlopCounterMode(display=False) as counter, torch.autocast("cpu", dtype=torch.bfloat16):
            model(tokens)
        return counter.get_total_flops()

    assert operators() == operators()
    cpu_layers.runs.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cpu", dtype=torch.bfloat16):
        fake = build(TrainConfig(workload="text-lstm").resolved()).model
        fake(torch.zeros(2, 4, dtype=torch.int64))
    assert cpu_layers.runs.cache_info().currsize == 0


def test_probing_leaves_random_state_and_onednn_unchanged(fresh_probes):
    before = torch.get_rng_state(), torch.backends.mkldnn.enabled
    for kind in cpu_layers.PROBES:
        cpu_layers.runs(kind, torch.float16, torch.float32)
        cpu_layers.runs(kind, None, torch.bfloat16, onednn=False)
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.backends.mkldnn.enabled is before[1]
