"""Unusual parameters: complex, lazy, on the meta device, empty, with sparse gradients."""

import numpy as np
import pytest
import torch
from torch import nn

from amp_core import load_run, watch

STEPS = 6
COUNTS = ["zero", "subnormal", "normal", "inf", "nan"]


def not_recorded(run):
    events = run.events
    return events[(events.kind == "warning") & (events.name == "not recorded")].detail.tolist()


def recording_errors(run):
    return [detail for detail in not_recorded(run) if "stopped at" in detail or "watching failed" in detail]


class Complex(nn.Module):
    """A filter in the frequency domain, between real layers."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(8, 16)
        self.filter = nn.Linear(9, 9, dtype=torch.complex64)
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(torch.fft.irfft(self.filter(torch.fft.rfft(self.into(x))), n=16))


def go(model, into, inputs, *, kinds=("weight_grad", "weight", "output_grad", "activation"), optimizer=None):
    torch.manual_seed(0)
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-3)
    losses, norms = [], []
    with watch(model, optimizer, into=into, every=2, kinds=kinds):
        for _ in range(STEPS):
            loss = model(inputs()).abs().square().mean()
            loss.backward()
            losses.append(loss.detach())
            norms.append([p.grad for p in model.parameters() if p.grad is not None])
            norms[-1] = [g.coalesce().values().norm().item() if g.is_sparse else g.norm() for g in norms[-1]]
            optimizer.step()
            optimizer.zero_grad()
    return losses, norms


def test_complex_parameters_are_recorded_as_their_real_and_imaginary_parts(tmp_path):
    torch.manual_seed(0)
    model = Complex()
    losses, norms = go(model, tmp_path / "run", lambda: torch.randn(5, 8))
    run = load_run(tmp_path / "run")
    assert not recording_errors(run)
    assert run.steps.loss.tolist() == pytest.approx([loss.item() for loss in losses])
    assert run.steps.grad_norm.tolist() == pytest.approx([np.linalg.norm([float(n) for n in ns]) for ns in norms])
    for kind in ("weight_grad", "weight"):
        rows = run.tensors(kind=kind, name="filter.weight")
        assert sorted(rows.step.unique()) == [0, 2, 4]
        assert (rows.numel == 2 * 81).all() and (rows.dtype == "float32").all()
        assert (rows[COUNTS].sum(axis=1) == rows.numel).all()
    for kind in ("output_grad", "activation"):
        assert (run.tensors(kind=kind, name="filter").numel == 2 * 5 * 9).all()
    assert run.head.model["tensors_by_dtype"] == {"float32": 4, "complex64": 2}
    first = run.tensors(kind="weight_grad", name="filter.weight", steps=(0, 0))
    assert np.sqrt((first.rms**2 * first.numel).iloc[0]) == pytest.approx(float(norms[0][2]))


def test_a_complex_model_alone(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, dtype=torch.complex64), nn.Linear(6, 2, dtype=torch.complex64))
    go(model, tmp_path / "run", lambda: torch.randn(4, 6, dtype=torch.complex64))
    run = load_run(tmp_path / "run")
    assert len(run.steps) == STEPS and run.steps.grad_norm.notna().all() and not recording_errors(run)


def test_a_non_finite_complex_gradient_is_reported(tmp_path):
    model = nn.Linear(6, 2, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, into=tmp_path / "run"):
        model(torch.full((4, 6), 3e38 + 0j)).abs().square().mean().backward()
        optimizer.step()
    events = load_run(tmp_path / "run").events
    assert events[events.kind == "non-finite"].name.isin(["weight", "bias"]).all()
    assert (events.kind == "non-finite").sum() == 1


def test_lazy_modules_are_described_once_they_have_their_shapes(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))
    losses, norms = go(model, tmp_path / "run", lambda: torch.randn(8, 5))
    run = load_run(tmp_path / "run")
    assert not not_recorded(run)
    assert run.steps.loss.tolist() == pytest.approx([loss.item() for loss in losses])
    assert run.steps.grad_norm.tolist() == pytest.approx([np.linalg.norm([float(n) for n in ns]) for ns in norms])
    names = [name for name, _ in model.named_parameters()]
    assert set(run.tensors(kind="weight_grad").name) == set(names)
    head = run.head.model
    assert head["shapes"] == {n: list(p.shape) for n, p in model.named_parameters()}
    assert head["parameters"] == sum(p.numel() for p in model.parameters()) and "lazy" not in head
    assert head["layers"]["0"] == "Linear" and head["layers"]["1"] == "BatchNorm1d"
    assert head["weight_absmax"]["name"] in names and "eps" in head
    assert run.head.config["optimizer_settings"][0]["parameters"] == len(names)


def test_a_lazy_module_that_is_never_called_is_counted_as_lazy(tmp_path):
    model = nn.ModuleDict({"used": nn.Linear(5, 3), "unused": nn.LazyLinear(4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, into=tmp_path / "run", kinds=("weight_grad", "weight"), every=1):
        for _ in range(STEPS):
            model["used"](torch.randn(8, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    assert len(run.steps) == STEPS and not recording_errors(run)
    assert run.head.model["lazy"] == 2 and run.head.model["parameters"] == 18
    assert set(run.tensors(kind="weight").name) == {"used.weight", "used.bias"}


def test_parameters_on_the_meta_device_do_not_hide_the_facts_of_others(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"offloaded": nn.Linear(5, 5, device="meta"), "here": nn.Linear(5, 3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with watch(model, optimizer, into=tmp_path / "run", kinds=("weight_grad", "weight"), every=1):
        for _ in range(STEPS):
            model["here"](torch.randn(8, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    assert not recording_errors(run) and len(run.steps) == STEPS and run.steps.loss.notna().all()
    assert run.head.model["weight_absmax"]["name"].startswith("here.") and run.head.config["device"] == "cpu"
    assert set(run.tensors(kind="weight").name) == {"here.weight", "here.bias"}


def test_a_model_on_the_meta_device_has_steps_and_the_run_reports_what_is_missing(tmp_path):
    model = nn.Sequential(nn.Linear(5, 8, device="meta"), nn.ReLU(), nn.Linear(8, 3, device="meta"))
    go(model, tmp_path / "run", lambda: torch.randn(8, 5, device="meta"))
    run = load_run(tmp_path / "run")
    assert len(run.steps) == STEPS and run.steps.grad_norm.isna().all() and run.steps.loss.isna().all()
    assert (run.steps.samples == 8).all() and not recording_errors(run)
    assert sum("meta device" in detail for detail in not_recorded(run)) == 1
    assert run.head.model["parameters"] == sum(p.numel() for p in model.parameters())


def test_empty_tensors_are_recorded_with_zero_elements(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 0), nn.ReLU(), nn.Linear(0, 3))
    losses, _ = go(model, tmp_path / "run", lambda: torch.randn(8, 6))
    run = load_run(tmp_path / "run")
    assert not recording_errors(run)
    assert run.steps.loss.tolist() == pytest.approx([loss.item() for loss in losses])
    empty = run.tensors(kind="weight_grad", name="0.weight")
    assert len(empty) and (empty[["numel", *COUNTS]] == 0).all(axis=None)
    assert (run.tensors(kind="activation", name="0").numel == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_gradients_are_recorded_by_their_stored_values(tmp_path, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True, dtype=dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    _, norms = go(model, tmp_path / "run", lambda: torch.randint(0, 50, (8, 3)), optimizer=optimizer)
    run = load_run(tmp_path / "run")
    assert not recording_errors(run)
    assert run.steps.grad_norm.tolist() == pytest.approx([n[0] for n in norms], rel=1e-2)
    rows = run.tensors(kind="weight_grad")
    assert (rows[COUNTS].sum(axis=1) == rows.numel).all() and (rows.numel <= 8 * 3 * 4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_are_zeros_without_memory_are_recorded_as_zeros(tmp_path, dtype):
    """Autograd makes such tensors for `torch.sgn`; their address is 0."""

    class Signs(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.out, self.bias = nn.Linear(6, 4), nn.Linear(6, 2), nn.Parameter(torch.randn(3))

        def forward(self, x):
            return torch.cat([self.hidden(x).sgn(), self.out(x), self.bias.sgn().expand(len(x), 3)], 1)

    torch.manual_seed(0)
    model = Signs().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = ("weight_grad", "weight", "output_grad", "activation")
    with watch(model, optimizer, into=tmp_path / "run", every=2, kinds=kinds, blocks=True):
        for _ in range(STEPS):
            model(torch.randn(8, 6, dtype=dtype)).float().square().mean().backward()
            assert model.bias.grad._is_zerotensor()
            optimizer.step()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    assert not recording_errors(run) and (run.steps.grad_norm > 0).all()
    zeros = [("weight_grad", "bias", 3), ("weight_grad", "hidden.weight", 24), ("output_grad", "hidden", 32)]
    for kind, name, numel in zeros:
        rows = run.tensors(kind=kind, name=name)
        assert len(rows) == 3 and (rows.zero == numel).all()


def test_a_sparse_parameter_does_not_end_the_record_of_memory(tmp_path):
    class Adjacency(nn.Module):
        def __init__(self):
            super().__init__()
            self.edges, self.hidden = nn.Parameter(torch.eye(5).to_sparse_csr()), nn.Linear(4, 3)

        def forward(self, x):
            return torch.sparse.mm(self.edges, self.hidden(x))

    model = Adjacency()
    optimizer = torch.optim.SGD(model.hidden.parameters(), lr=0.1)
    with watch(model, optimizer, into=tmp_path / "run", every=1):
        for _ in range(STEPS):
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not not_recorded(load_run(tmp_path / "run")) and len(load_run(tmp_path / "run").memory)
