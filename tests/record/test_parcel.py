"""What a step measured arrives as it was put in, wherever it was."""

import pytest
import torch

from amp_core.record.parcel import Parcel


class Elsewhere(torch.Tensor):
    """Says that it is on a device."""

    is_cpu = False


@pytest.fixture(params=[torch.Tensor, Elsewhere])
def given(request):
    """Makes tensors on the host, or such as have to be sent there."""
    return lambda values, dtype=torch.float64: torch.tensor(values, dtype=dtype).as_subclass(request.param)


def test_numbers_and_tensors_arrive_by_their_names(given):
    parcel = Parcel()
    parcel.put("loss", given(2.5, torch.bfloat16))
    parcel.put("flag", given([True], torch.bool))
    parcel.put("grads", given([[1.0, float("inf")], [-0.0, float("nan")]], torch.float32))
    parcel.put("scale", 65536.0)
    parcel.send()
    assert parcel.ready()
    assert (parcel.value("loss"), parcel.value("flag"), parcel.value("scale")) == (2.5, 1.0, 65536.0)
    assert [str(v) for v in parcel.values("grads")] == ["1.0", "inf", "-0.0", "nan"]
    assert parcel.values("scale").tolist() == [65536.0] and parcel.values("loss").dtype == "float64"
    assert parcel.value("norm") is None and not parcel.has("norm") and parcel.has("flag")


def test_tensors_are_joined_in_the_order_asked_for(given):
    parcel = Parcel()
    for name, values in (("a", [1.0, 2.0]), ("b", [3.0]), ("c", [4.0, 5.0])):
        parcel.put(name, given(values))
    parcel.send()
    assert parcel.joined(["a", "b"]).tolist() == [1, 2, 3]
    assert parcel.joined(["c", "a"]).tolist() == [4, 5, 1, 2]
    assert parcel.joined(["b"]).tolist() == [3]


def test_a_number_may_be_one_that_backward_needs():
    parcel = Parcel()
    parcel.put("loss", torch.ones((), requires_grad=True) * 3)
    parcel.put("row", torch.ones(2, requires_grad=True))
    parcel.send()
    assert parcel.value("loss") == 3 and parcel.values("row").tolist() == [1, 1]
