"""Bytes of storages, each counted once, and of those that autograd saves."""

import gc
import signal
import threading
import time

import pytest
import torch
from torch import nn

from amp_core.record.observers import storages as module
from amp_core.record.observers.storages import Saved, hooks_are_on, is_cast_of_weight, storage_of, storages

CPU = torch.device("cpu")


def test_a_storage_is_counted_once_however_many_tensors_view_it():
    base = torch.zeros(6, 4)
    assert storages([base, base.t(), base[2:], torch.zeros(0)], CPU) == {base.data_ptr(): 96}
    assert storage_of(base.to("meta"), CPU) is None


def test_saved_tensors_are_subtracted_when_autograd_releases_them(tmp_path):
    saved = Saved(CPU)
    x = torch.randn(8, 8, requires_grad=True)
    assert saved.start(ignored=()) is None
    y = (x.exp() * 2).sin()  # exp keeps its result, sin its input
    assert saved.activations == 2 * 8 * 8 * 4
    del y
    gc.collect()
    assert saved.activations == 0  # no reference cycle keeps freed tensors alive
    y = x.exp()
    saved.stop()
    y.sum().backward()
    assert saved.activations == 0 and torch.equal(x.grad, x.detach().exp())


def test_a_tensor_that_cannot_be_counted_is_still_saved(monkeypatch):

    monkeypatch.setattr(module, "is_cast_of_weight", lambda tensor: 1 / 0)
    saved = Saved(CPU)
    assert saved.start(ignored=()) is None
    x = torch.randn(3, requires_grad=True)
    x.exp().sum().backward()
    saved.stop()
    assert torch.equal(x.grad, x.detach().exp()) and saved.interrupted == "ZeroDivisionError: division by zero"


def test_only_the_thread_that_attached_hooks_detaches_them():
    saved = Saved(CPU)
    assert saved.start(ignored=()) is None
    other = threading.Thread(target=saved.stop)
    other.start()
    other.join()
    assert hooks_are_on()
    saved.stop()
    assert not hooks_are_on()


def test_the_reason_is_reported_if_hooks_are_disabled():
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        reason = Saved(CPU).start(ignored=())
    assert reason is not None and "not here" in reason


@pytest.mark.parametrize("older", [False, True])
def test_hooks_of_others_are_detected_in_every_torch_version(monkeypatch, older):
    if older:
        monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks", raising=False)
    assert not hooks_are_on()
    with torch.autograd.graph.save_on_cpu():
        assert hooks_are_on()
    assert not hooks_are_on()


def test_casts_of_weights_are_distinguished_from_other_casts():
    weight = nn.Parameter(torch.randn(4, 4))
    assert is_cast_of_weight(weight.to(torch.bfloat16)) and is_cast_of_weight(weight.to(torch.bfloat16).t())
    assert not is_cast_of_weight((weight * 2).to(torch.bfloat16))
    assert not is_cast_of_weight(weight.t()) and not is_cast_of_weight(torch.ones(2))


def test_ctrl_c_is_not_lost_while_autograd_releases_tensors():
    """Python drops exceptions in the callback of a weak reference, which updates the count."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted():
        raise KeyboardInterrupt

    saved = Saved(torch.device("cpu"))
    assert saved.start(ignored=[]) is None
    try:
        loss = torch.ones(3, requires_grad=True).exp().sum()
        saved.before_release = interrupted
        with pytest.raises(KeyboardInterrupt):
            del loss
            for _ in range(1000):  # the exception is raised between two bytecodes, not within a call
                time.sleep(0.01)
    finally:
        saved.stop()
        signal.signal(signal.SIGINT, before)
