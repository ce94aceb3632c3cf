"""A device type that torch knows and AMPscope does not, with and without a backend; see `npu`. The tests use separate
processes, because torch cannot unregister a type."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from amp_core import diagnose, load_run
from amp_core.analysis.performance.memory import memory_summary
from amp_core.store.run import Run
from tests.record.backends import npu

pytestmark = pytest.mark.skipif(not npu.SUPPORTED, reason="this torch has no device types in Python")

ROOT = Path(__file__).parents[3]
LOOP = """
import contextlib, json, sys
import torch
from torch import nn
from tests.record.backends.npu import install

kept = install()

def losses(device, into=None):
    from amp_core.record import watch
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).to(device)
    data = torch.randn(4, 6).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    found = []
    with watch(model, optimizer, into=into, every=2) if into else contextlib.nullcontext() as rec:
        for step in range(6):
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            if rec is not None and step == 3:
                rec.audit(lambda: model(data).square().mean())
    return found
"""
BACKEND = """
import torch
from amp_core.record import backends
from amp_core.record.backends.base import Allocated, Backend
from amp_core.record.stats.plain import measure_plain

called = []

class Clock:
    adds_up = False
    def __init__(self): self.marks = 0
    def mark(self):
        self.marks += 1
        return self.marks
    def ms(self, start, stop): return float(stop - start)

class Late:
    def __init__(self): self.asked = 0
    def query(self):
        self.asked += 1
        return self.asked > 2
    def synchronize(self): self.asked = 3

class Npu(Backend):
    type = "npu"
    @staticmethod
    def count(): return 1
    @staticmethod
    def gpus(): return [{"name": "Npu 1", "capability": None, "memory_bytes": 5000, "multiprocessors": None}]
    @staticmethod
    def versions(): return {"npu_driver": "7"}
    @staticmethod
    def flags(): return {"npu_fast": lambda: True}
    @staticmethod
    def kernels():
        def measure(tensors, caps):
            called.append("measure")
            raise RuntimeError("no compiler here\\nand more lines")
        def channels(grad, count, inner):
            called.append("channels")
            return grad.abs().amax([d for d in range(grad.dim()) if grad.shape[d] != count or d != grad.dim() - 1])
        return {"measure": measure, "channels": channels}
    def clock(self): return Clock()
    def copy_to_host(self, parts):
        called.append("copy_to_host")
        return super().copy_to_host(parts)[0], Late()
    def fork_random(self):
        called.append("fork_random")
        return super().fork_random()
    def memory_bytes(self): return 1000, 3000
    def read_allocator(self): return Allocated(1000, 2000, 4000)
    def sample_source(self): return None

backends.BACKENDS["npu"] = Npu
"""


def trained(tmp_path: Path, program: str) -> tuple[dict[str, Any], Run]:
    """The output of the program, and the run that it recorded."""
    folder = tmp_path / "run"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), load_run(folder)


def test_a_type_without_a_backend_is_recorded_by_its_name_alone(tmp_path: Path) -> None:
    printed = "print(json.dumps({'plain': losses('npu'), 'watched': losses('npu', sys.argv[1])}))"
    output, run = trained(tmp_path, LOOP + printed)
    assert output["watched"] == output["plain"]
    assert run.head.config["device"] == "npu:0" and run.steps.loss.tolist() == output["plain"]
    assert (run.steps.step_ms > 0).all() and (run.steps.grad_norm > 0).all()
    assert run.steps[["memory_allocated_bytes", "memory_peak_bytes"]].isna().all().all()
    assert sorted(run.tensors(kind="weight_grad")["step"].unique()) == [0, 2, 4]
    assert len(run.tensors(kind="output_grad")) == 3 * 3 and (run.tensors()["normal"] > 0).all()
    assert run.memory["allocated_bytes"].isna().all() and set(run.memory["device"]) == {"npu:0"}
    assert (run.audits["rel_error"] == 0).all() and len(run.audits) == 4
    missing = run.events[run.events.kind == "warning"].detail.tolist()
    assert missing == ["device samples: no sampler exists for devices of type npu"]
    summary = memory_summary(run)
    assert (summary.what, summary.peak_bytes) == ("allocated by torch on the GPU", None)
    assert diagnose(run) is not None


def test_a_recorder_learns_everything_about_the_device_from_its_backend(tmp_path: Path) -> None:
    printed = "print(json.dumps({'plain': losses('npu'), 'watched': losses('npu', sys.argv[1]), 'called': called}))"
    output, run = trained(tmp_path, LOOP + BACKEND + printed)
    assert output["watched"] == output["plain"] == run.steps.loss.tolist()
    steps = run.steps
    phases = ["data_ms", "forward_ms", "backward_ms", "optimizer_ms", "watch_ms"]
    assert (steps[phases].sum(axis=1) == steps.step_ms).all() and (steps.step_ms % 1 == 0).all()  # marks are numbers
    assert set(steps.memory_allocated_bytes) == {1000} and set(steps.memory_peak_bytes) == {3000}
    held = run.memory[["allocated_bytes", "peak_bytes", "reserved_bytes"]].drop_duplicates()
    assert held.to_numpy().tolist() == [[1000, 2000, 4000]]
    environment = run.head.environment
    assert [gpu["name"] for gpu in environment["gpus"]] == ["Npu 1"]
    assert environment["npu_driver"] == "7" and environment["flags"]["npu_fast"] is True
    assert output["called"].count("measure") == 1  # the kernel failed once; plain torch replaces it from then on
    assert output["called"].count("channels") == 2 * 3 and output["called"].count("copy_to_host") >= 6
    assert output["called"].count("fork_random") == 2
    changed = run.events[run.events["name"] == "statistics"]
    assert changed.detail.tolist() == ["those on npu are computed in plain torch, which is slower: no compiler here"]
    assert (run.events.kind == "warning").sum() == 0
    assert len(run.tensors(kind="weight_grad")) == 3 * 4 and len(run.tensors(kind="output_grad")) == 3 * 3
