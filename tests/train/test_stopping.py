"""What a training does when it is signalled: one request to stop may arrive as several signals."""

import signal

import pytest

from amp_core.train.engine import stopping
from amp_core.train.engine.stopping import stop_on_signals


def test_a_signal_that_arrives_twice_is_one_request() -> None:
    """Slurm and Ray send SIGTERM to every process of a job, and torchrun passes it on."""
    with stop_on_signals() as stop:
        assert stop() is None
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert stop() == "stopped by SIGTERM"


def test_a_later_signal_interrupts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "REPEAT_S", 0.0)
    with pytest.raises(KeyboardInterrupt), stop_on_signals() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop() == "stopped by SIGTERM"
        signal.raise_signal(signal.SIGINT)
