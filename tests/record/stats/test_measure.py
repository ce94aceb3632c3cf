"""`measure` compared with a slow exact reference, for every dtype, on every code path."""

import math
import os
import signal
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_core.formats import FORMAT_OF_DTYPE
from amp_core.record.stats import layout
from amp_core.record.stats import measure as measuring
from amp_core.record.stats.cuda.measure import measure_cuda
from amp_core.record.stats.numba import measure, thread_team
from amp_core.record.stats.plain import measure_plain
from tests.compilers import needs_cxx
from tests.record.stats.cuda.on_host import on_host

DTYPES = {
    "float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
}  # fmt: skip
BITS = {"float32": 32, "float64": 64, "float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8}
INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def measure_by_cuda(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The CUDA kernel's source, compiled for the host."""
    with on_host():
        return [measure_cuda([tensor])]


PATHS = {"plain": lambda t: [measure_plain(t)], "kernel": lambda t: measuring.measure([t]), "cuda": measure_by_cuda}
ALL_PATHS = [pytest.param(name, marks=[needs_cxx] if name == "cuda" else []) for name in PATHS]


def reference(tensor: torch.Tensor) -> dict:
    """The statistics computed value by value in Python, without rounding."""
    form = FORMAT_OF_DTYPE[layout.dtype_name(tensor.dtype)]
    statistics = {"zero": 0, "subnormal": 0, "normal": 0, "inf": 0, "nan": 0, "exponents": {}}
    finite = []
    for value in tensor.reshape(-1).to(torch.float64).tolist():
        if math.isnan(value):
            statistics["nan"] += 1
        elif math.isinf(value):
            statistics["inf"] += 1
        else:
            finite.append(abs(value))
            if value == 0:
                statistics["zero"] += 1
            else:
                exponent = math.frexp(value)[1] - 1
                statistics["exponents"][exponent] = statistics["exponents"].get(exponent, 0) + 1
                statistics["normal" if abs(value) >= form.min_normal else "subnormal"] += 1
    nonzero = [v for v in finite if v]
    return statistics | {
        "absmax": max(finite, default=0.0), "absmin": min(nonzero, default=0.0),
        "abs_sum": math.fsum(v for v in finite if v < 1e150),
        "sq_sum": math.fsum(v * v for v in finite if v < 1e150),
    }  # fmt: skip


def assert_same(tensor: torch.Tensor, path: str) -> None:
    got = layout.unpack(PATHS[path](tensor)[0].numpy(), layout.dtype_name(tensor.dtype))
    expected = reference(tensor)
    for key in ("zero", "subnormal", "normal", "inf", "nan", "absmax", "absmin"):
        assert getattr(got, key) == expected[key], key
    assert got.numel == tensor.numel()
    counted = {got.exp_min + i: int(n) for i, n in enumerate(got.exp_counts) if n}
    assert counted == expected["exponents"]
    if expected["absmax"] < 1e150:
        assert got.abs_sum == pytest.approx(expected["abs_sum"], rel=1e-12)
        assert got.sq_sum == pytest.approx(expected["sq_sum"], rel=1e-12)


def from_bits(patterns: list[int], dtype: str) -> torch.Tensor:
    bits = BITS[dtype]
    raw = b"".join(struct.pack({8: "B", 16: "H", 32: "I", 64: "Q"}[bits], p % 2**bits) for p in patterns)
    held = torch.frombuffer(bytearray(raw), dtype=INTEGERS[bits]) if raw else torch.empty(0, dtype=INTEGERS[bits])
    return held.view(DTYPES[dtype])


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_bit_pattern_is_measured_exactly(path, dtype, data):
    patterns = data.draw(st.lists(st.integers(0, 2 ** BITS[dtype] - 1), max_size=40))
    assert_same(from_bits(patterns, dtype), path)


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_value_of_the_small_formats(path, dtype):
    assert_same(from_bits(list(range(2 ** BITS[dtype])), dtype), path)


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_exponent_of_the_large_formats(path, dtype):
    mantissa = FORMAT_OF_DTYPE[dtype].mantissa_bits
    patterns = [e << mantissa for e in range(2 ** (BITS[dtype] - 1 - mantissa))] + [1 << k for k in range(mantissa)]
    assert_same(from_bits(patterns, dtype), path)


@pytest.mark.parametrize("path", ALL_PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_strides_and_emptiness(path, dtype):
    base = torch.randn(12, 10).to(DTYPES[dtype])
    for tensor in (base, base.t(), base[::2, 1::3], base[0, 0], base[:0], base.unsqueeze(0).expand(3, 12, 10)):
        assert_same(tensor, path)


@pytest.mark.parametrize("path", ALL_PATHS)
def test_sums_are_not_rounded_to_float32(path):
    assert_same(torch.cat([torch.full((1,), 2.0**24), torch.ones(3000)]), path)


@pytest.fixture(params=["torch's threads", "plain threads"])
def small_shares(request, monkeypatch):
    """Let several threads share even small tensors."""
    if request.param == "plain threads":
        monkeypatch.setattr(thread_team, "_team", lambda process: None)
    elif thread_team._team(os.getpid()) is None:
        pytest.skip("torch was built without OpenMP here")
    monkeypatch.setattr(measure, "SHARE", 1 << 14)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def test_every_value_of_a_large_tensor_is_counted_by_some_thread(small_shares):
    torch.manual_seed(0)
    tensors = [torch.randn(300_001), torch.randn(700_000) * 1e-30, torch.zeros(1000), torch.randn(400_000).double()]
    tensors[1][5] = float("nan")
    tensors[0][7] = float("inf")
    together = measuring.measure(tensors)
    for tensor, packed in zip(tensors, together, strict=True):
        plain = measure_plain(tensor)
        assert torch.equal(packed[:5], plain[:5]) and torch.equal(packed[7:], plain[7:])
        assert torch.allclose(packed[5:7], plain[5:7], rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_many_blocks_split_between_threads(dtype, small_shares):
    """Random bits: every exponent, many subnormals, infinities and NaNs in every block, and an odd length."""
    size = 4 * 4096 * 17 + 4099
    bits = torch.randint(
        0, 256, (size * BITS[dtype] // 8,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )
    tensor = bits.view(DTYPES[dtype])
    if dtype == "float64":  # values whose squares are finite, so that sums can be compared
        tensor = torch.where(tensor.isfinite() & (tensor.abs() > 1e150), tensor.sign(), tensor)
    for few in (tensor, tensor[:4096], tensor[1:8194]):
        packed, plain = measuring.measure([few])[0], measure_plain(few)
        assert torch.equal(packed[:5], plain[:5]) and torch.equal(packed[7:], plain[7:])
        assert torch.allclose(packed[5:7], plain[5:7], rtol=1e-12)


def test_many_tensors_of_all_dtypes_split_between_threads(monkeypatch, small_shares):
    torch.manual_seed(0)
    kinds = list(DTYPES.values())
    tensors = [
        torch.randn(n).to(kinds[i % len(kinds)]) for i, n in enumerate([5, 0, 4096, 9000, 40_000, 1, 90_001, 77] * 5)
    ]
    expected = [measure_plain(t) for t in tensors]
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        for packed, plain in zip(measuring.measure(tensors), expected, strict=True):
            assert torch.equal(packed[:5], plain[:5]) and torch.equal(packed[7:], plain[7:])
            assert torch.allclose(packed[5:7], plain[5:7], rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_kernel_counts_subnormals_even_if_the_processor_flushes_them(dtype):
    mantissa = FORMAT_OF_DTYPE[dtype].mantissa_bits
    tensor = from_bits([1 << k for k in range(mantissa)], dtype)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        packed = measuring.measure([tensor])[0]
    finally:
        torch.set_flush_denormal(False)
    got = layout.unpack(packed.numpy(), dtype)
    assert got.subnormal == mantissa and list(got.exp_counts) == [1] * mantissa


def test_a_dense_tensor_is_read_without_a_copy():
    """Also if it is transposed or channels-last: a copy would cost more than the measurement."""
    image = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    for tensor in (image, image.permute(3, 0, 2, 1), torch.randn(5, 7).t()):
        assert layout.in_one_row(tensor).data_ptr() == tensor.data_ptr()
    assert layout.in_one_row(image[:, :2]).data_ptr() != image.data_ptr()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_measures_without_its_parents_threads(small_shares):
    """A forked process has no OpenMP threads; waiting for them would never end."""
    tensor = torch.ones(1 << 17)
    assert measuring.measure([tensor])[0][7 + 149] == 1 << 17
    child = os.fork()
    if child == 0:
        os._exit(0 if measure.measure_cpu([tensor])[7 + 149] == 1 << 17 else 1)
    deadline = time.monotonic() + 300
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)


@pytest.mark.usefixtures("small_shares")
def test_several_threads_measure_at_the_same_time():
    tensors = [torch.full((90_000 + 10_000 * k,), 2.0**k) for k in range(6)]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(20):
            for k, packed in enumerate(pool.map(lambda t: measure.measure_cpu([t]), tensors)):
                assert packed[7 + 149 + k] == len(tensors[k]) == packed[7:].sum()


def test_the_five_counts_add_up_and_zero_is_not_subnormal():
    tensor = torch.tensor([0.0, -0.0, 2.0**-149, 1.0, float("inf"), -float("inf"), float("nan")])
    got = layout.unpack(measuring.measure([tensor])[0].numpy(), "float32")
    assert (got.zero, got.subnormal, got.normal, got.inf, got.nan) == (2, 1, 1, 2, 1)
    assert got.exp_min == -149 and got.exp_counts[0] == 1 and got.exp_counts[149] == 1
    assert got.rms == pytest.approx(0.5)


def test_packed_size_is_the_length_of_what_measure_returns():
    for dtype in DTYPES.values():
        tensor = torch.zeros(3, dtype=dtype)
        assert len(measuring.measure([tensor])[0]) == layout.packed_size(dtype)
        assert len(measure_plain(tensor)) == layout.packed_size(dtype)


def test_measurable_is_false_for_tensors_that_measure_does_not_accept():
    assert layout.measurable(torch.ones(1)) and not layout.measurable(torch.ones(1, dtype=torch.int64))
    assert not layout.measurable(torch.ones(1, dtype=torch.complex64))


def test_a_forked_worker_can_measure_too(small_shares):
    """Numba's OpenMP layer kills forked workers; plain threads survive, and each process has its own."""
    import multiprocessing

    tensor = torch.randn(600_000)
    expected = measuring.measure([tensor])[0]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        got = pool.apply_async(_in_worker, (tensor.numpy(),)).get(timeout=300)
    assert np.array_equal(expected.numpy(), got)


def _in_worker(values):
    return measuring.measure([torch.from_numpy(values)])[0].numpy()


def test_a_kernel_does_not_read_values_without_memory():
    zeros = torch._efficientzerotensor((3,))
    empty = torch.empty(0)
    assert layout.addresses_of([empty, torch.ones(2)])[0] == 0
    with pytest.raises(ValueError, match="no memory"):
        measure.measure_cpu([torch.ones(2), zeros])
