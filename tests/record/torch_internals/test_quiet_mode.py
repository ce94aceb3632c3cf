"""Modes that are entered are left where that is safe, and are not there in other processes."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from amp_core.record.torch_internals.quiet_mode import QuietMode


class Counting(QuietMode):
    count = 0

    def on_op(self, func, args, kwargs, out):
        self.count += 1


@pytest.fixture
def entered() -> Iterator[Counting]:
    mode = Counting()
    mode.__enter__()
    yield mode
    if mode in _get_current_dispatch_mode_stack():
        assert mode.leave()


def test_a_forked_process_has_left_it(entered):
    child = os.fork()
    if child == 0:
        torch.ones(2).add(1)
        os._exit(len(_get_current_dispatch_mode_stack()) + 10 * (entered.count > 0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    torch.ones(2)
    assert entered.count == 1, "here it goes on"


def test_another_thread_does_not_leave_it(entered):
    left = []
    other = threading.Thread(target=lambda: left.append(entered.leave()))
    other.start()
    other.join()
    assert left == [False] and _get_current_dispatch_mode_stack() == [entered]
    assert entered.leave() and not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_evaluates_under_autocast_as_it_would_without_the_mode(norm_first: bool) -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first).eval()
    x = torch.randn(2, 8, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        with Counting():
            observed = layer(x)
    assert observed.dtype == expected.dtype == torch.bfloat16 and torch.equal(observed, expected)
