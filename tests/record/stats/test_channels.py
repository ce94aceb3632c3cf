"""The largest value of each channel, and measuring with it as a cap, compared with plain torch."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_core.record.stats import channels, dispatch, layout, plain
from amp_core.record.stats import measure as measuring
from amp_core.record.stats.channels import Rows, cap_for, channel_largest
from amp_core.record.stats.layout import Cap
from amp_core.record.stats.numba import measure
from amp_core.record.stats.plain import measure_plain

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SPECIAL = [0.0, -0.0, 1e-45, 2.0**-24, -(2.0**-130), 1.0, -3.0, 65504.0, math.inf, -math.inf, math.nan]


@pytest.fixture(params=["kernel", "plain"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(dispatch, "_kernels", {"cpu": {}})
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 7), (1, 1), (2, 3, 4), (3, 5, 6, 2), (300, 9), (4, 700)])
def test_the_largest_value_of_each_channel_is_that_of_plain_torch(
    path: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    values = torch.randn(shape).to(dtype)
    values.view(-1)[:: max(1, values.numel() // 5)] = torch.tensor(SPECIAL[2:4] * 9, dtype=dtype)[
        : len(values.view(-1)[:: max(1, values.numel() // 5)])
    ]
    for channel in range(len(shape)):
        expected = values.abs().amax([d for d in range(len(shape)) if d != channel])
        assert torch.equal(channel_largest(values, channel), expected)
        turned = values.transpose(0, -1)
        expected = turned.abs().amax([d for d in range(len(shape)) if d != channel])
        assert torch.equal(channel_largest(turned, channel), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nans_count_as_largest(path: str, dtype: torch.dtype) -> None:
    values = torch.tensor([[1.0, math.inf, math.nan], [-2.0, math.nan, -math.inf]], dtype=dtype)
    largest = channel_largest(values, 1)
    assert largest[0] == 2 and largest[1].isnan() and largest[2].isnan()


@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("channel", [0, 1, 2, 3])
def test_a_channels_last_gradient_is_read_where_it_lies(
    dtype: torch.dtype, channel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    grad = torch.randn(3, 8, 5, 4).to(dtype).to(memory_format=torch.channels_last)
    wanted = grad.abs().amax([d for d in range(4) if d != channel])
    read = []
    by_kernel = dispatch.by_kernel

    def noted(name: str, device: str, values: torch.Tensor, *args: Any) -> Any:
        read.append(values)
        return by_kernel(name, device, values, *args)

    monkeypatch.setattr(channels, "by_kernel", noted)
    assert torch.equal(channel_largest(grad, channel), wanted)
    assert [values.data_ptr() for values in read] == [grad.data_ptr()] and read[0].is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (7, 30), (30, 7)])
def test_what_is_measured_in_parts_is_what_is_measured_at_once(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.tensor(SPECIAL * 20, dtype=dtype)[: math.prod(shape)].reshape(shape)
    cap = Cap(torch.tensor([1.0, 0.0, 2.0**-25, math.nan, math.inf], dtype=dtype), 3)
    whole = measure_plain(values), measure_plain(values, cap)
    monkeypatch.setattr(plain, "CHUNK", 32)
    for one, other in zip(whole, (measure_plain(values), measure_plain(values, cap)), strict=True):
        assert torch.allclose(one, other, rtol=1e-12) and flat(one) == flat(other)


def flat(packed: torch.Tensor) -> list[float]:
    return [*packed[:5].tolist(), *packed[7:].tolist()]


def exponents(packed: torch.Tensor) -> list[float]:
    return packed[layout.LEADING :].tolist()


@settings(deadline=None)  # the first example compiles the kernel
@given(st.data())
def test_capped_measurements_are_those_of_capped_values(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    outer, count, inner = (data.draw(st.integers(1, most)) for most in (5, 9, 6))
    numbers = st.sampled_from(SPECIAL) | st.floats(width=16)
    size = outer * count * inner
    values = torch.tensor(data.draw(st.lists(numbers, min_size=size, max_size=size)), dtype=dtype)
    most = torch.tensor(data.draw(st.lists(numbers.map(abs), min_size=count, max_size=count)), dtype=dtype)
    cap = Cap(most, inner)
    got = measuring.measure_together([values.view(outer, count, inner)], [cap])
    wide = most.repeat_interleave(inner).repeat(outer)
    expected = [
        min(abs(v), c) if not math.isnan(c) and not math.isnan(v) else abs(v)
        for v, c in zip(values.tolist(), wide.tolist(), strict=True)
    ]
    whole, capped_alone = got.split([layout.packed_size(dtype)] * 2)
    assert flat(whole) == flat(measure_plain(values))
    assert exponents(capped_alone) == exponents(measure_plain(torch.tensor(expected, dtype=dtype)))
    assert exponents(capped_alone) == exponents(measure_plain(values, cap))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "row"), [((300, 700), 0), ((300, 700), 1), ((40, 30, 3, 3), 0), ((5000, 41), 1)])
def test_tensors_split_between_threads_keep_their_caps(
    dtype: torch.dtype, shape: tuple[int, ...], row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "SHARE", 1 << 13)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    torch.manual_seed(0)
    grad = torch.randn(shape).to(dtype)
    cap = cap_for(grad, torch.rand(shape[row]).to(dtype), row, grad.dim())
    assert cap is not None
    other = torch.randn(3, 20_000).to(dtype)
    got = measuring.measure_together([other, grad], [None, cap])
    first, second, third = got.split([layout.packed_size(dtype)] * 3)
    view = [1] * len(shape)
    view[row] = -1
    assert flat(first) == flat(measure_plain(other))
    assert flat(second) == flat(measure_plain(grad))
    assert exponents(third) == exponents(measure_plain(torch.minimum(grad.abs(), cap.largest.view(view))))


def test_a_cap_below_the_smallest_value_of_the_dtype_is_zero() -> None:
    grad = torch.ones(2, 3, dtype=torch.float16)
    cap = cap_for(grad, torch.tensor([2.0**-40, 1e30], dtype=torch.bfloat16), 0, 2)
    assert cap is not None
    _, second = measuring.measure_together([grad], [cap]).split([layout.packed_size(grad.dtype)] * 2)
    assert sum(exponents(second)) == 3


@pytest.mark.parametrize(
    "largest", [torch.ones(4), torch.ones(3, device="meta")], ids=["another length", "another device"]
)
def test_what_does_not_fit_is_no_cap(largest: Any) -> None:
    assert cap_for(torch.ones(3, 5), largest, 0, 2) is None
    assert cap_for(torch.ones(3), torch.ones(3), 0, 2) is None
    assert cap_for(torch.ones(3, 2).to(torch.float8_e5m2), torch.ones(3), 0, 2) is None


def test_rows_of_any_number_and_dtype_are_zeros_that_hold_what_is_written() -> None:
    rows = Rows()
    added = [rows.add(count, dtype) for dtype in (torch.float32, torch.float16) for count in (3, 70_000, 5, 1)]
    for number, row in enumerate(added):
        assert not rows.values(row).any() and row.address == rows.values(row).data_ptr()
        rows.values(row).fill_(number)
    every = rows.all_values()
    for number, row in enumerate(added):
        held = every[row.dtype][row.index]
        assert len(held) == row.count and held.dtype is row.dtype and (held == number).all()
    rows.clear()
    assert not any(rows.values(row).any() for row in added)
