"""The CUDA kernels, run on the host from the same source, against plain torch. `test_measure` has single tensors."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_core.record.stats.channels import ChannelMax
from amp_core.record.stats.cuda import table
from amp_core.record.stats.cuda.batch import Batch
from amp_core.record.stats.cuda.measure import channels_cuda, largest_cuda, measure_cuda, norms_cuda, outputs_cuda
from amp_core.record.stats.layout import LEADING, Cap, packed_size
from amp_core.record.stats.plain import measure_plain
from tests.compilers import needs_cxx
from tests.record.stats.cuda.on_host import on_host

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
CAPPED = DTYPES[:4]
SPECIAL = [0.0, -0.0, 1e-45, 2.0**-24, -(2.0**-130), 1.0, -3.0, 65504.0, math.inf, -math.inf, math.nan]
CPU = torch.device("cpu")

pytestmark = needs_cxx


def random_bits(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Every kind of value; squares of doubles are finite, so that sums can be compared."""
    draw = torch.Generator().manual_seed(count)
    bits = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=draw).view(dtype)
    if dtype == torch.float64:
        bits = torch.where(bits.isfinite() & (bits.abs() > 1e150), bits.sign(), bits)
    return bits


def assert_measured(tensor: torch.Tensor, got: torch.Tensor) -> None:
    plain = measure_plain(tensor)
    assert torch.equal(got[:5], plain[:5]) and torch.equal(got[LEADING:], plain[LEADING:])
    assert torch.allclose(got[5:LEADING], plain[5:LEADING], rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_many_shapes_and_places_in_one_call(dtype: torch.dtype) -> None:
    bits, normal = random_bits(3001, dtype), torch.randn(5000).to(dtype)
    tensors = [bits, normal, torch.zeros(2100).to(dtype), normal[:2000].reshape(40, 50).t(), normal[:0]]
    tensors += [normal[k : k + n] for k in range(1, 20) for n in (1, 5, 40)]  # every place within a load
    with on_host() as launches:
        packed = measure_cuda(tensors).split([packed_size(dtype)] * len(tensors))
    assert len(launches) == 1
    for tensor, got in zip(tensors, packed, strict=True):
        assert_measured(tensor, got)


def test_tensors_of_several_dtypes_stay_in_order() -> None:
    tensors = [random_bits(300 + i, dtype) for i, dtype in enumerate(DTYPES * 2)]
    with on_host() as launches:
        packed = measure_cuda(tensors).split([packed_size(t.dtype) for t in tensors])
    assert len(launches) == len(DTYPES)
    for tensor, got in zip(tensors, packed, strict=True):
        assert_measured(tensor, got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_cut_into_stretches_that_add_up(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MIN_STRETCH", 1 << 10)
    tensors = [random_bits(10_007, dtype), random_bits(999, dtype)[3:], torch.zeros(5000).to(dtype)]
    with on_host():
        packed = measure_cuda(tensors).split([packed_size(dtype)] * 3)
    for tensor, got in zip(tensors, packed, strict=True):
        assert_measured(tensor, got)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_capped_measurements_are_those_of_capped_values(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(CAPPED))
    outer, count, inner = (data.draw(st.integers(1, most)) for most in (5, 18, 9))
    numbers = st.sampled_from(SPECIAL) | st.floats(width=16)
    few = torch.tensor(data.draw(st.lists(numbers, min_size=1, max_size=20)), dtype=dtype)
    values = few[torch.arange(outer * count * inner + 3) % len(few)][data.draw(st.integers(0, 3)) :]
    values = values[: outer * count * inner]
    most = torch.tensor(data.draw(st.lists(numbers.map(abs), min_size=count, max_size=count)), dtype=dtype)
    with on_host():
        whole, limited = measure_cuda([values], [Cap(most, inner)]).split([packed_size(dtype)] * 2)
    assert_measured(values, whole)
    assert torch.equal(limited[LEADING:], measure_plain(values, Cap(most, inner))[LEADING:])


@pytest.mark.parametrize("dtype", CAPPED)
@pytest.mark.parametrize(
    ("shape", "row"),
    [((64, 96), 0), ((64, 96), 1), ((40, 70, 9), 1), ((300, 33), 1), ((7, 3000), 0), ((2, 16, 8), 1), ((5000, 1), 0)],
)
def test_caps_follow_their_channels_over_stretches(
    dtype: torch.dtype, shape: tuple[int, ...], row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "MIN_STRETCH", 1 << 10)
    other = random_bits(501, dtype)
    values = random_bits(math.prod(shape), dtype).view(shape)
    cap = Cap(torch.rand(shape[row]).to(dtype), math.prod(shape[row + 1 :]))
    with on_host() as launches:
        first, second, third = measure_cuda([other, values], [None, cap]).split([packed_size(dtype)] * 3)
    assert sorted(name for _, name in launches) == ["capped", "measure"]
    assert_measured(other, first)
    assert_measured(values, second)
    assert torch.equal(third[LEADING:], measure_plain(values, cap)[LEADING:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cap_in_float32_of_values_of_the_dtype_is_the_same_cap(dtype: torch.dtype) -> None:
    values, most = torch.randn(30, 8).to(dtype), torch.rand(30).to(dtype)
    with on_host():
        assert torch.equal(measure_cuda([values], [Cap(most.float(), 8)]), measure_cuda([values], [Cap(most, 8)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [(7, 300), (300, 7), (3, 5, 11), (2, 3, 5, 7), (1, 1), (130, 3, 20), (2, 3000), (600, 130), (3, 2, 9000), (9, 512)],
)
def test_the_largest_of_each_channel_is_what_torch_finds(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(math.prod(shape) + 8).to(dtype)
    values[::11] = torch.tensor([0.0, 1e-45, -(2.0**-24), -(2.0**-130), -3.0]).to(dtype)[len(values) % 5]
    for start in (0, 1, 8):
        here = values[start : start + math.prod(shape)].view(shape)
        for channel in range(len(shape)):
            wanted = here.abs().amax([d for d in range(len(shape)) if d != channel])
            with on_host():
                got = channels_cuda(here, shape[channel], math.prod(shape[channel + 1 :]))
            assert got.dtype == dtype and torch.equal(got, wanted)


def test_infinities_and_nans_are_larger_than_anything() -> None:
    values = torch.tensor([[1.0, math.inf, math.nan], [-2.0, math.nan, -math.inf]])
    with on_host():
        largest = channels_cuda(values, 3, 1)
    assert largest[0] == 2 and largest[1].isnan() and largest[2].isnan()


def test_outputs_are_measured_together_with_their_channels() -> None:
    first, second, third = torch.randn(20, 6), torch.randn(5, 6), torch.randn(4, 3, 7).bfloat16()
    before = torch.full((3,), 2.0)
    wanted = [ChannelMax(first, 6, 1), ChannelMax(second, 6, 1, into=0), ChannelMax(third, 3, 7, into=before)]
    with on_host() as launches:
        packed, largest, _ = outputs_cuda([first, second, third], wanted)
    for tensor, got in zip(
        (first, second, third), packed.split([packed_size(t.dtype) for t in (first, second, third)]), strict=True
    ):
        assert_measured(tensor, got)
    assert torch.equal(largest[0], torch.cat([first, second]).abs().amax(0)) and largest[1] is largest[0]
    assert torch.equal(largest[2], third.abs().amax((0, 2)).float().clamp(min=2)) and largest[2] is before
    assert sorted(launches) == [("bf16", "measure"), ("fp32", "channels"), ("fp32", "measure")]


def test_weight_gradients_share_the_launch_of_outputs_of_their_dtype() -> None:
    outputs, weights = [torch.randn(20, 6), torch.randn(7).half()], [torch.randn(9), torch.randn(6, 4)]
    wanted = [ChannelMax(outputs[0], 6, 1)]
    with on_host() as launches:
        _, _, packed = outputs_cuda(outputs, wanted, weights, lambda largest: [None, Cap(largest[0], 4)])
    assert sorted(launches) == [("fp16", "measure"), ("fp32", "capped"), ("fp32", "channels"), ("fp32", "measure")]
    size = packed_size(torch.float32)
    for tensor, got in zip(weights, packed.split(size)[:2], strict=True):
        assert_measured(tensor, got)
    cap = Cap(outputs[0].abs().amax(0), 4)
    assert torch.equal(packed[2 * size + LEADING :], measure_plain(weights[1], cap)[LEADING:])


def test_the_largest_of_each_tensor_whatever_its_dtype() -> None:
    narrow = (torch.float32, torch.float16, torch.bfloat16)
    values = torch.randn(40_000)
    values[::11] = torch.tensor([0.0, 1e-45, -(2.0**-24), -(2.0**-130), -3.0]).repeat(800)[: len(values[::11])]
    tensors = [values.to(d)[k : k + n] for d in narrow for k in (0, 1, 7) for n in (1, 5, 40, 30_000)]
    tensors += [torch.randn(6, 50).t().to(d) for d in narrow] + [torch.zeros(3), torch.zeros(0)]
    tensors += [torch.tensor([1.0, x, -9.0]).to(d) for d in narrow for x in (math.inf, -math.inf, math.nan)]
    with on_host() as launches:
        found = largest_cuda(tensors)
    assert launches == [("fp32", "largest")]
    wanted = torch.stack([t.float().abs().max() if t.numel() else torch.zeros(()) for t in tensors])
    assert torch.equal(found.nan_to_num(-1), wanted.nan_to_num(-1)) and found.isnan().sum() == 3


def test_norms() -> None:
    tensors = [torch.randn(5000), torch.randn(33, 7).t(), torch.randn(3).half(), torch.tensor([3e38, 3e38])]
    tensors += [torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.nan]), torch.zeros(0), torch.zeros(4).bfloat16()]
    with on_host() as launches:
        norms = norms_cuda(tensors)
    wanted = torch.stack([t.double().norm() for t in tensors])
    assert torch.allclose(norms, wanted, rtol=1e-14, equal_nan=True) and len(launches) == 3


@pytest.mark.parametrize("kernel", [norms_cuda, measure_cuda])
def test_a_table_is_made_once_for_tensors_that_stay_in_their_places(
    kernel: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[int] = []
    whole = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda rows: copies.append(len(rows)) or whole(rows))
    kept = [torch.randn(200 + k, dtype=torch.float32 if k % 2 else torch.bfloat16) for k in range(20)]
    turned = [torch.randn(7, 9).t() for _ in range(20)]
    with on_host():
        for changed in (lambda t: t, torch.Tensor.neg_, lambda t: t.mul_(3)):
            for tensor in kept:
                changed(tensor)
            assert torch.equal(kernel(kept), torch.cat([kernel([tensor]) for tensor in kept]))
        assert copies.count(max(copies)) == 1
        others = [*kept[1:], kept[0].clone()]
        assert torch.equal(kernel(others), torch.cat([kernel([tensor]) for tensor in others]))
        for _ in range(2):
            assert torch.equal(kernel(turned), torch.cat([kernel([tensor]) for tensor in turned]))


def test_a_batch_shares_one_table_between_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    whole = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda rows: copies.append(len(rows)) or whole(rows))
    batch = Batch(CPU)
    with on_host() as launches:
        batch.measure([torch.ones(3), torch.ones(3).half()])
        batch.norms([torch.ones(3)])
        batch.launch()
    assert len(launches) == 3 and len(copies) == 1
