"""The examples of the long form, `python -m tests.record.frameworks.long`, for a few steps."""

import os
from importlib.util import find_spec

import pytest

from tests.record.frameworks import long
from tests.record.frameworks.examples import EXAMPLES

BACKEND = os.environ.get("KERAS_BACKEND", "torch")
STEPS = 12


@pytest.fixture(autouse=True)
def settings_are_restored():
    """Restore the settings that some frameworks keep for the life of a process."""
    yield
    if find_spec("accelerate") is not None:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_unchanged_complete_and_healthy_and_a_fault_is_detected(name, tmp_path):
    if find_spec(name) is None or find_spec("sklearn") is None:
        pytest.skip(f"{name} or scikit-learn is not installed")
    if name == "keras":
        os.environ.setdefault("KERAS_BACKEND", "torch")
        import keras

        policy = keras.mixed_precision.dtype_policy()
    try:
        well, row = long.healthy(name, "bf16", STEPS, tmp_path / "run")
        assert well, row
        fault = next(iter(EXAMPLES[name].faults))
        detected, row = long.faulty(name, fault, STEPS, tmp_path / "fault")
        assert detected, row
    finally:
        if name == "keras":
            keras.mixed_precision.set_global_policy(policy)
