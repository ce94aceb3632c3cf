"""Buffers outside of the heap are used again, and never while something is on them."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from amp_core.record import watch
from amp_core.record.stats import host_buffers
from amp_core.record.stats.host_buffers import MIN_BYTES, host_buffer

LARGE = MIN_BYTES // 8


@pytest.fixture(autouse=True)
def _no_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffers, "_buffers", [])


def test_a_buffer_is_used_again_once_no_tensor_and_no_array_is_on_it() -> None:
    first = host_buffer(2 * LARGE)
    address, view = first.data_ptr(), first[3:].numpy()
    assert host_buffer(2 * LARGE).data_ptr() != address
    del first
    second = host_buffer(2 * LARGE)
    assert second.data_ptr() != address
    view[0] = 7.0
    del view
    again = host_buffer(LARGE)
    assert again.data_ptr() == address and again[3] == 7.0 and len(again) == LARGE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_does_not_write_to_its_parents_buffers() -> None:
    buffer = host_buffer(LARGE).fill_(1.0)
    child = os.fork()
    if not child:
        buffer.fill_(2.0)
        os._exit(0)
    os.waitpid(child, 0)
    assert (buffer == 1.0).all()


def test_a_small_one_is_an_ordinary_tensor() -> None:
    assert len(host_buffer(LARGE - 1)) == LARGE - 1 and not host_buffers._buffers


def test_free_buffers_that_are_too_small_are_given_back() -> None:
    held = host_buffer(LARGE)
    host_buffer(2 * LARGE)
    host_buffer(4 * LARGE)
    assert [len(buffer) // 8 >= 4 * LARGE for buffer in host_buffers._buffers] == [False, True]
    assert len(held) == LARGE


def test_recording_takes_a_few_buffers_however_many_steps_it_samples(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(100)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run", every=1):
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
    assert 1 <= len(host_buffers._buffers) <= 4
