"""Recording on CUDA devices, on a machine without any: `tests.fake_cuda.plugin` gives a process two of them.

The tests run in a process of their own, because torch keeps a device type until the process ends. The `cases_…` files
are about CUDA alone. The other files are written for the CPU, and a device must not change what they promise.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compilers import needs_cxx
from tests.fake_cuda import machine

pytestmark = needs_cxx

ROOT = Path(__file__).parents[2]
CASES = sorted(path.relative_to(ROOT).as_posix() for path in Path(__file__).parent.glob("cases_*.py"))
RECORDING = (
    "tests/record/test_watch.py",
    "tests/record/test_watch_skips.py",
    "tests/record/stats/test_module_outputs.py",
)
"""Files about what a device computes: losses, statistics, skipped steps, times."""
BOOKKEEPING = ("tests/record/loop/test_losses.py", "tests/record/loop/test_loss_and_samples.py")
"""Files about which tensors belong to the loss. A device changes only when their values arrive."""
LAYERS_OF_THE_CPU = "created before the fake machine is installed"
CPU_ONLY = {
    "tests/record/test_watch.py": {"test_memory_of_a_cpu_run_is_the_resident_set": "about the CPU"},
    "tests/record/stats/test_module_outputs.py": {
        "test_the_output_and_states_of_an_lstm_are_measured": "CUDA's LSTM has no kernel on a CPU",
        "test_a_compiled_model_reports_once_which_kinds_are_missing": "the fake tensors are not compiled",
        "test_a_weight_gradient_is_capped_by_its_channels_output_gradients": LAYERS_OF_THE_CPU,
        "test_an_output_gradient_is_measured_alike_whether_its_sort_is_known_or_not": "plans are for the CPU's kernel",
        "test_a_sampled_step_allocates_few_objects_per_output": "counts objects, and the fake creates many",
        "test_a_sampled_step_leaves_no_tensor_for_each_layer": "counts tensors, and the fake creates two for each",
    },
}
"""Tests that cannot run on the fake machine, with the reason."""
RUNS = [
    pytest.param(CASES, id="cases"),
    pytest.param(["--whole", "-m", "whole", *CASES, *RECORDING, *BOOKKEEPING], marks=pytest.mark.whole, id="whole"),
]
"""One process for each, since its start takes as long as many cases. The plugin marks what is written for the CPU."""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled machine."""
    into = tmp_path_factory.mktemp("fake-cuda") / "machine.so"
    machine.build(into)
    return into


@pytest.mark.parametrize("arguments", RUNS)
def test_recording_on_cuda(arguments: list[str], built: Path) -> None:
    deselected = [f"--deselect={file}::{name}" for file, names in CPU_ONLY.items() for name in names]
    command = [sys.executable, "-m", "pytest", "-p", "tests.fake_cuda.plugin", "-p", "no:cacheprovider", "-q"]
    environment = os.environ | {"AMPSCOPE_FAKE_CUDA": str(built), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *deselected, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
