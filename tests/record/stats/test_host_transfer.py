"""The measurements of a step arrive unchanged, from any device."""

import pytest
import torch

from amp_core.record.stats.host_transfer import HostTransfer


class OnOtherDevice(torch.Tensor):
    """A tensor that claims to be on another device."""

    is_cpu = False


@pytest.fixture(params=[torch.Tensor, OnOtherDevice])
def make_tensor(request):
    """A function that makes tensors on the host, or tensors that have to be copied there."""
    return lambda values, dtype=torch.float64: torch.tensor(values, dtype=dtype).as_subclass(request.param)


def test_numbers_and_tensors_arrive_by_their_names(make_tensor):
    transfer = HostTransfer()
    transfer.put("loss", make_tensor(2.5, torch.bfloat16))
    transfer.put("flag", make_tensor([True], torch.bool))
    transfer.put("grads", make_tensor([[1.0, float("inf")], [-0.0, float("nan")]], torch.float32))
    transfer.put("scale", 65536.0)
    transfer.send()
    assert transfer.ready()
    assert (transfer.value("loss"), transfer.value("flag"), transfer.value("scale")) == (2.5, 1.0, 65536.0)
    assert [str(v) for v in transfer.values("grads")] == ["1.0", "inf", "-0.0", "nan"]
    assert transfer.values("scale").tolist() == [65536.0] and transfer.values("loss").dtype == "float64"
    assert transfer.value("norm") is None and not transfer.has("norm") and transfer.has("flag")


def test_tensors_are_joined_in_the_requested_order(make_tensor):
    transfer = HostTransfer()
    for name, values in (("a", [1.0, 2.0]), ("b", [3.0]), ("c", [4.0, 5.0])):
        transfer.put(name, make_tensor(values))
    transfer.send()
    assert transfer.joined(["a", "b"]).tolist() == [1, 2, 3]
    assert transfer.joined(["c", "a"]).tolist() == [4, 5, 1, 2]
    assert transfer.joined(["b"]).tolist() == [3]


def test_a_tensor_that_requires_a_gradient_is_accepted():
    transfer = HostTransfer()
    transfer.put("loss", torch.ones((), requires_grad=True) * 3)
    transfer.put("row", torch.ones(2, requires_grad=True))
    transfer.send()
    assert transfer.value("loss") == 3 and transfer.values("row").tolist() == [1, 1]


def test_copies_are_of_the_moment(make_tensor):
    transfer = HostTransfer()
    scale, tracker, flag = make_tensor(512.0, torch.float32), make_tensor(7, torch.int32), make_tensor([0.0])
    transfer.put("row", make_tensor([0.1, 2.0]))
    transfer.put_copies({"scale": scale, "tracker": tracker, "flag": flag})
    for held in (scale, tracker, flag):
        held.add_(1)
    assert transfer.ready() == scale.is_cpu  # on another device not before it is sent
    transfer.send()
    assert [transfer.value(key) for key in ("scale", "tracker", "flag")] == [512, 7, 0]
    assert transfer.values("row").tolist() == [0.1, 2.0]
