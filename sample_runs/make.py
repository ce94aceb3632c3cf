"""Make the sample runs again: `python sample_runs/make.py [NAME …]`, about a minute on a CPU.

Each is a real training of the same tiny GPT on the bytes of Python's standard library, from the same seed, with the
same initial weights and batches. They differ in precision and in what is done with the loss scale.
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
from amp_core.runlog import replace_file  # noqa: E402

COMMON = "--workload text-gpt --size tiny --steps 400 --every 10 --seed 1 --device cpu"

SAMPLES = {
    # The reference.
    "fp32": "--precision fp32",
    # The range of FP32 with 8 bits of precision: no scaler, nothing to lose to range.
    "bf16": "--precision bf16",
    # A loss scale that grows until a gradient overflows, backs off once, and goes on: as it should be.
    "fp16-healthy": "--precision fp16 --init-scale 65536 --growth-interval 150",
    # Begun far too high and grown far too often: a run of skips, then one step in about twenty thrown away.
    "fp16-overflow": "--precision fp16 --init-scale 17179869184 --growth-interval 12",
    # A constant scale of 1: nothing overflows, and small gradients lose bits or vanish.
    "fp16-underflow": "--precision fp16 --loss-scale 1",
}


def make(name: str) -> None:
    """Train one sample in a process of its own, as anybody would on the command line."""
    folder = HERE / name
    if folder.exists():
        shutil.rmtree(folder)
    command = [sys.executable, "-m", "amp_core", "train", "--out", str(folder), *COMMON.split(), *SAMPLES[name].split()]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    # A sample is about the training, not about the process that happened to record it.
    head = dataclasses.replace(load_run(folder).head, process={})
    replace_file(folder / "run.json", head.to_json().encode())


if __name__ == "__main__":
    for sample in sys.argv[1:] or SAMPLES:
        make(sample)
