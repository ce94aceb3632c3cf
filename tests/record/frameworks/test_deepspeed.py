"""DeepSpeed's engine in ZeRO stages 0 to 3, trained in BF16 in one process on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from amp_core import load_run
from amp_core.analysis import precision_settings

STAGES = range(4)
TRAINING = """\
import sys
import deepspeed
import torch
from amp_core import watch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False   # else it is compiled, for minutes
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
for stage in range(4):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    with watch(engine, optimizer, into=f"{sys.argv[1]}/{stage}", every=1):
        for _ in range(8):
            x = torch.randn(8, 16)
            out = engine(x.bfloat16()).float()
            engine.backward(torch.nn.functional.cross_entropy(out, x[:, :4].argmax(1)))
            engine.step()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs, named by their stage. DeepSpeed patches torch, so they are trained in another process."""
    pytest.importorskip("deepspeed")
    out = tmp_path_factory.mktemp("runs")
    environment = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", TRAINING, out], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_of_zero_is_recorded(stage: int, folder: Path) -> None:
    run = load_run(folder / str(stage))
    assert run.status == "finished"
    assert len(run.steps) == 4 and run.steps["loss"].notna().all()
    assert {"0", "2"} <= set(run.tensors(kind="output_grad")["name"])


@pytest.mark.parametrize("stage", STAGES)
def test_its_json_stands_beside_what_was_seen(stage: int, folder: Path) -> None:
    frame = precision_settings(load_run(folder / str(stage))).set_index("stage")
    assert frame.loc["compute", ["asked", "source"]].tolist() == ["bfloat16", f"DeepSpeed `bf16`, ZeRO {stage}"]
    assert not frame["differs"].any()
    assert frame.loc["accumulation", "seen"] == "bfloat16"
    if stage in (1, 2):  # ZeRO-3 calls a collective that DeepSpeed took from torch when it started
        assert frame.loc["reduction", ["asked", "seen"]].tolist() == ["bfloat16", "bfloat16"]
