"""Make the sample runs again: `python sample_runs/make.py [NAME …]`, some minutes on a CPU that does nothing else.

Each is a real training on the bytes of Python's standard library. The first six train the same tiny GPT, from the same
seed, with the same initial weights and batches; they differ in precision and in what is done with the loss scale, and
one has the blocks of its operands recorded, on two steps: they are most of its size. The four of the ablation train an
LSTM whose gradients FP16 cannot hold without one.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from amp_core import load_run  # noqa: E402
from amp_core.store.atomic import replace_file  # noqa: E402

GPT = "--workload text-gpt --size tiny --steps 400 --every 10 --audit-every 200 --trace-ops 20 --profile 30:33 --seed 1"
BLOCKS = f"{GPT.replace('--every 10', '--every 200')} --blocks"
LSTM = "--workload text-lstm --size logistic --steps 120 --every 10 --seed 0"

SAMPLES = {
    # The reference.
    "fp32": f"{GPT} --precision fp32",
    # The range of FP32 with 8 bits of precision: no scaler, nothing to lose to range.
    "bf16": f"{GPT} --precision bf16",
    # A loss scale that grows until a gradient overflows, backs off once, and goes on: as it should be.
    "fp16-healthy": f"{GPT} --precision fp16 --init-scale 65536 --growth-interval 150",
    # Begun far too high and grown far too often: a run of skips, then 22 of 375 steps skipped.
    "fp16-overflow": f"{GPT} --precision fp16 --init-scale 17179869184 --growth-interval 12",
    # A constant scale of 1: nothing overflows, and small gradients lose bits or vanish.
    "fp16-underflow": f"{GPT} --precision fp16 --loss-scale 1",
    # What 8 and 4 bits would lose: from how the operands of linear layers lie in their blocks.
    "bf16-blocks": f"{BLOCKS} --precision bf16",
    # Micikevicius et al. 2017: without scaling it fails to train, with either scale it follows FP32.
    "ablation/fp32": f"{LSTM} --precision fp32",
    "ablation/fp16-unscaled": f"{LSTM} --precision fp16-unscaled",
    "ablation/fp16-static-128": f"{LSTM} --precision fp16 --loss-scale 128",
    "ablation/fp16-dynamic": f"{LSTM} --precision fp16",
}


def make(name: str) -> None:
    """Train one sample in a process of its own, as anybody would on the command line."""
    folder = HERE / name
    if folder.exists():
        shutil.rmtree(folder)
    command = [sys.executable, "-m", "amp_core", "train", "--out", str(folder), "--device", "cpu"]
    command += SAMPLES[name].split()
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    # A sample is about the training, not about the process that happened to record it.
    head = dataclasses.replace(load_run(folder).head, process={})
    replace_file(folder / "run.json", head.to_json().encode())


if __name__ == "__main__":
    for sample in sys.argv[1:] or SAMPLES:
        make(sample)
