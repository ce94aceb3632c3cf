"""Recording on CUDA devices, on a machine without any: `tests.fake_cuda.plugin` makes a process see two of them.

In processes of their own, for torch cannot be rid of a device type. The `cases_…` files are about CUDA alone; the other
files are those of the CPU, whose tests hold there too.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_cuda import machine

pytestmark = pytest.mark.skipif(machine.WHY_NOT is not None, reason=str(machine.WHY_NOT))

ROOT = Path(__file__).parents[2]
CASES = sorted(path.relative_to(ROOT).as_posix() for path in Path(__file__).parent.glob("cases_*.py"))
LAYERS_OF_THE_CPU = "made before the fake machine is there"
RECORDING: dict[str, dict[str, str]] = {
    "tests/record/test_watch.py": {"test_memory_of_a_cpu_run_is_the_resident_set": "about the CPU"},
    "tests/record/test_watch_skips.py": {},
    "tests/record/loop/test_losses.py": {},
    "tests/record/loop/test_loss_and_samples.py": {},
    "tests/record/stats/test_module_outputs.py": {
        "test_the_output_and_states_of_an_lstm_are_measured": "CUDA's LSTM has no kernel on a CPU",
        "test_a_compiled_model_reports_once_which_kinds_are_missing": "the fake tensors are not compiled",
        "test_a_weight_gradient_is_capped_by_its_channels_output_gradients": LAYERS_OF_THE_CPU,
        "test_a_sampled_step_allocates_few_objects_per_output": "counts objects, of which the fake makes many",
        "test_a_sampled_step_leaves_no_tensor_for_each_layer": "counts tensors, of which the fake makes two for each",
    },
}
"""Files of tests that a device must not change, and the tests in them that cannot run there, with the reason."""


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled machine."""
    into = tmp_path_factory.mktemp("fake-cuda") / "machine.so"
    machine.build(into)
    return into


@pytest.mark.parametrize("file", [*CASES, *RECORDING])
def test_recording_on_cuda(file: str, built: Path) -> None:
    left_out = [f"--deselect={file}::{name}" for name in RECORDING.get(file, {})]
    command = [sys.executable, "-m", "pytest", "-p", "tests.fake_cuda.plugin", "-p", "no:cacheprovider", "-q", file]
    environment = os.environ | {"AMPSCOPE_FAKE_CUDA": str(built), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *left_out], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
