"""Distances below the tops of blocks: the kernel and plain torch against a slow count, value by value."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_core.quantization import BINS, EIGHTHS, FINE_OCTAVES, OCTAVES, RECIPES, scalings
from amp_core.record.stats import blocks, dispatch
from amp_core.record.stats.blocks import distances_plain, measure_blocks
from amp_core.record.stats.cuda.blocks import distances_cuda
from amp_core.record.stats.numba.blocks import distances_cpu
from tests.compilers import needs_cxx
from tests.record.stats.cuda.on_host import on_host


def distances_on_host(*args: Any) -> torch.Tensor:
    """The CUDA kernel's source, compiled for the host."""
    with on_host() as launches:
        result = distances_cuda(*args)
    assert launches == [("fp32", "distances")]
    return result


PATHS = {"plain": distances_plain, "kernel": distances_cpu, "cuda": distances_on_host}
ALL_PATHS = [pytest.param(name, marks=[needs_cxx] if name == "cuda" else []) for name in PATHS]


def counted_slowly(
    magnitude: torch.Tensor, factor: torch.Tensor, top: torch.Tensor, rows: int, columns: int, exponent: int
) -> np.ndarray:
    """The specification, with Python's floats."""
    result = np.zeros((4, BINS))
    for i, row in enumerate(magnitude.tolist()):
        for j, value in enumerate(row):
            if not value:
                continue
            block = i // rows, j // columns
            scaled = float(np.float32(value) * factor[block].numpy())
            mantissa, power = math.frexp(scaled)
            below = exponent - (power - 1) if scaled >= 2.0**-126 else OCTAVES
            eighth = int((1 - mantissa) * 2 * EIGHTHS - 1e-12) if scaled else 0
            if below < FINE_OCTAVES:
                place = max(EIGHTHS * below + eighth, 0)
            else:
                place = EIGHTHS * FINE_OCTAVES + min(below, OCTAVES - 1) - FINE_OCTAVES
            height = float(top[block])
            result[:3, place] += 1, height, height * height
            if mantissa == 0.5:
                result[3, max(min(below, OCTAVES - 1), 0)] += 1
    return result


@pytest.mark.parametrize("path", ALL_PATHS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_value_is_counted_where_it_lies(path: str, data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 40))
    numbers = st.sampled_from([0.0, 1.0, 0.5, 1.75, 2.0**-60, 1e30, 2.0**-100]) | st.floats(0, 1e6, width=32).filter(
        lambda v: v == 0 or v > 1e-30
    )
    values = data.draw(st.lists(numbers, min_size=height * width, max_size=height * width))
    magnitude = torch.tensor(values, dtype=torch.float32).view(height, width)
    rows, columns = data.draw(st.sampled_from([(1, 16), (16, 1), (1, width), (height, 1), (4, 4), (height, width)]))
    high, wide = -(-height // rows), -(-width // columns)
    factor = 2.0 ** torch.randint(-6, 6, (high, wide)).float()
    top = torch.rand(high, wide, dtype=torch.float64)
    exponent = data.draw(st.sampled_from([0, 2, 8, 15]))
    got = PATHS[path](magnitude, factor, top, rows, columns, exponent).numpy()
    expected = counted_slowly(magnitude, factor, top, rows, columns, exponent)
    assert np.array_equal(got[[0, 3]], expected[[0, 3]])
    assert np.allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize("path", ALL_PATHS)
def test_rows_are_the_same_with_and_without_the_kernel(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    matrix = torch.exp(3 * torch.randn(150, 200)) * torch.randn(150, 200).sign()
    expected = measure_blocks(matrix, "weight")
    monkeypatch.setattr(dispatch, "_kernels", {"cpu": {"blocks": PATHS[path]}})
    for got, other in zip(measure_blocks(matrix, "weight"), expected, strict=True):
        assert got[:3] == other[:3]
        assert torch.allclose(got.packed, other.packed, rtol=1e-9)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_several_threads_count_what_one_counts(threads: int) -> None:
    torch.manual_seed(0)
    magnitude = torch.exp(2 * torch.randn(401, 700)).bfloat16().float()
    before = torch.get_num_threads()
    try:
        for rows, columns in [(1, 16), (32, 1), (1, 700), (401, 1), (401, 700), (128, 128)]:
            high, wide = -(-401 // rows), -(-700 // columns)
            given = (
                magnitude,
                torch.rand(high, wide) + 0.5,
                torch.rand(high, wide, dtype=torch.float64),
                rows,
                columns,
                2,
            )
            torch.set_num_threads(threads)
            got = distances_cpu(*given)
            torch.set_num_threads(before)
            assert torch.allclose(got, distances_plain(*given), rtol=1e-9)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", [(40, 50), (33, 257), (1, 7), (130, 16)])
def test_the_largest_of_large_blocks_is_that_of_the_small_ones_in_them(size: tuple[int, int]) -> None:
    magnitude = torch.rand(size)
    largest = blocks._Largest(magnitude)
    for rows, columns in [(1, 16), (16, 1), (16, 16), (1, 24), (1, 48), (32, 1), (128, 128), (1, size[1]), size]:
        got = largest.of_blocks(rows, columns)
        for i, j in [(0, 0), (got.shape[0] - 1, got.shape[1] - 1)]:
            block = magnitude[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            assert got[i, j] == block.max()


@pytest.mark.parametrize("kind", ["weight", "activation", "output_grad"])
def test_all_scalings_are_measured_along_both_contractions(kind: str) -> None:
    matrix = torch.randn(40, 50)
    rows = measure_blocks(matrix, kind)
    assert {(r.block, r.scaling) for r in rows} == set(scalings(kind))
    assert {r.block for r in rows} >= {"16", "32", "row", "tensor", "128x128" if kind == "weight" else "128"}
    for row in rows:
        assert row.packed[0].sum() == 2000
        assert (row.product is None) == (row.block in ("tensor", "128x128", "16x16"))
    along = {r.product for r in rows if r.block == "32"}
    assert (
        along
        == {
            "weight": {"forward", "input_grad"},
            "activation": {"forward", "weight_grad"},
            "output_grad": {"input_grad", "weight_grad"},
        }[kind]
    )


def test_in_mx_the_distance_is_that_of_exponents_from_the_blocks_largest() -> None:
    torch.manual_seed(0)
    matrix = torch.exp(2 * torch.randn(8, 64))
    row = next(r for r in measure_blocks(matrix, "activation") if r.block == "32" and r.product == "forward")
    exponents = torch.frexp(matrix).exponent.view(8, 2, 32)
    below = (exponents.amax(-1, keepdim=True) - exponents).flatten()
    octaves = row.packed[0].clone()
    fine = octaves[: EIGHTHS * FINE_OCTAVES].view(FINE_OCTAVES, EIGHTHS).sum(1)
    got = torch.cat([fine, octaves[EIGHTHS * FINE_OCTAVES :]])
    assert torch.equal(got, torch.bincount(below, minlength=OCTAVES)[:OCTAVES].double())


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_values_that_are_not_finite_or_zero_are_not_counted(value: float) -> None:
    matrix = torch.ones(4, 32)
    matrix[1, 3] = value
    for row in measure_blocks(matrix, "output_grad"):
        assert row.packed[0].sum() == 127 and row.totals.tolist() == [1.0, 127.0, 127.0]
        assert torch.isfinite(row.packed).all()


def test_empty_and_zero_matrices_have_no_values() -> None:
    for matrix in (torch.zeros(3, 5), torch.zeros(0, 5), torch.zeros(3, 0)):
        assert all(not row.packed.any() for row in measure_blocks(matrix, "weight"))


def test_a_recipe_with_blocks_of_its_own_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    own = dataclasses.replace(RECIPES["mxfp4-e2m1"], name="mxfp4-64", block=64, aliases=())
    monkeypatch.setitem(RECIPES, own.name, own)
    assert {r.block for r in measure_blocks(torch.ones(2, 128), "activation")} >= {"32", "64"}
