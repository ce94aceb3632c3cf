"""Norms of gradients, on every code path."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_core.record.model.parameters import local_values
from amp_core.record.stats import dispatch
from amp_core.record.stats.norms import norms
from amp_core.record.stats.numba import norm_kernel, thread_team

VALUES = st.floats(width=32, allow_nan=True, allow_infinity=True)


@settings(deadline=None)  # the first example compiles the kernel
@given(st.lists(st.lists(VALUES, max_size=40), min_size=1, max_size=8))
def test_the_kernel_computes_the_norm_of_each_tensor(values):
    computed = norm_kernel.norms_cpu([torch.tensor(v, dtype=torch.float32) for v in values])
    for norm, of in zip(computed.tolist(), values, strict=True):
        if any(math.isnan(v) for v in of):
            assert math.isnan(norm)
        else:
            assert norm == pytest.approx(math.hypot(*of), rel=1e-12)


@pytest.mark.parametrize("plain_threads", [False, True])
def test_norms_of_tensors_split_between_threads(monkeypatch, plain_threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(norm_kernel, "SHARE", 1000)
    if plain_threads:
        monkeypatch.setattr(thread_team, "_team", lambda process: None)
    tensors = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (1, 0, 7001, 3, 90_000, 64)]
    computed = norm_kernel.norms_cpu(tensors)
    assert torch.allclose(computed, torch.stack([t.double().norm() for t in tensors]), rtol=1e-12)


@pytest.mark.parametrize("kernel", [False, True])
def test_norms_of_gradients_of_every_dtype_and_layout(monkeypatch, kernel):
    """Gradients of several dtypes are grouped by dtype; the norm of a sparse gradient is that of its dense form."""
    if not kernel:
        monkeypatch.setattr(dispatch, "_kernels", {"cpu": {}})
    single = torch.randn(5, 7)
    for grads in ([single], [single, single.t()], [single.half(), single.double(), single], [torch.zeros(0), single]):
        computed, order = norms(grads)
        assert sorted(order) == list(range(len(grads))) and computed.dtype == torch.float64
        for i, norm in zip(order, computed.tolist(), strict=True):
            assert norm == pytest.approx(float(grads[i].double().norm()), rel=1e-6)


def test_a_norm_is_infinite_only_where_a_value_is():
    computed, _ = norms([torch.full((4,), 1e30), torch.tensor([1.0, math.inf])])
    assert computed.tolist() == [pytest.approx(2e30), math.inf]


def test_values_of_plain_gradients_are_not_copied():
    grad = torch.randn(3)
    assert local_values(grad) is grad
    leaf = torch.randn(3, requires_grad=True)
    assert not local_values(leaf).requires_grad and local_values(leaf).data_ptr() == leaf.data_ptr()
