"""Fixtures of the tests in this folder."""

import logging

import pytest

from tests.robustness.trained import Disk


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture(autouse=True)
def _log_to_caplog(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="amp_core")
