"""The code for each framework in docs/frameworks.md, verbatim, on a small training."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from amp_core import load_run

ROOT = Path(__file__).resolve().parents[3]
SETUP = {
    "accelerate": """
import torch
from accelerate import Accelerator
from amp_core import watch
accelerator = Accelerator(mixed_precision="bf16", cpu=True)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=4)
""",
    "transformers": """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
sizes = dict(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(GPT2Config(**sizes))
args = TrainingArguments("out", max_steps=6, use_cpu=True, bf16=True, report_to=[], save_strategy="no")
data = [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 16
""",
    "lightning": """
import torch
from lightning import LightningModule, Trainer
class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
module, loader = Module(), torch.utils.data.DataLoader(torch.randn(80, 4), batch_size=4)
""",
    "keras": """
import keras, numpy
keras.mixed_precision.set_global_policy("mixed_float16")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
x, y = numpy.ones((192, 4)), numpy.ones((192, 2))
""",
}
AFTER = {
    "accelerate": """
for x in loader:
    accelerator.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""
}


@pytest.mark.parametrize("framework", SETUP)
def test_the_lines_for_a_framework_run(framework, tmp_path):
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    page = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (lines,) = [b for b in blocks if f'"runs/{framework}"' in b]
    assert len([line for line in lines.splitlines() if line]) <= 6
    if framework == "lightning":  # no folders for checkpoints and logs
        lines = lines.replace("Trainer(", "Trainer(logger=False, enable_checkpointing=False, accelerator='cpu', ")
    program = SETUP[framework] + lines + AFTER.get(framework, "")
    environment = os.environ | {"KERAS_BACKEND": "torch", "PYTHONPATH": str(ROOT)}
    # A framework in this process may have changed the locale, which `text=True` would decode by.
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "runs" / framework)
    assert run.status == "finished" and len(run.steps) >= 6
    assert run.head.config["precision"] in ("bf16", "fp16") and run.steps.loss.notna().all()
