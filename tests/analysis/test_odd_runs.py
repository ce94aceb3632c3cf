"""Findings, analyses and figures of odd runs raise nothing.

Synthetic runs are rewritten with all numbers zero, unrecorded, NaN or infinite, with one row per table, or with every
step skipped. The recorded runs have models with layers that have no elements.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_core import Run, RunError, diagnose, load_run
from amp_core.record import watch
from amp_core.schema import TABLES
from amp_core.store.writer import RunWriter
from tests.analysis.test_contract import NEED_GRADIENTS, OF_A_RUN, OF_RUNS, calls
from tests.figures.test_contract import OF_A_RUN as FIGURES_OF_A_RUN
from tests.figures.test_contract import drawn
from tests.synthetic import write

KEYS = {"step", "rank", "index", "exp_min", "capped_min", "optimizer"}
"""Columns that say which row it is, or what its other columns are of."""
SCENARIOS = ("calibrating", "collapsing", "two-optimizers", "two-ranks", "profiled", "profiled-cpu", "traced", "bf16")


def everything(run: Run) -> None:
    """All findings, analyses and figures."""
    for finding in diagnose(run, baseline=run):
        assert finding.title and finding.evidence()
    for name, function in OF_A_RUN.items():
        for arguments in calls(function, run):
            with contextlib.suppress(RunError) if name in NEED_GRADIENTS else contextlib.nullcontext():
                function(*arguments)
    for function in OF_RUNS.values():
        for arguments in calls(function, [run, run]):
            function(*arguments)
    for name in FIGURES_OF_A_RUN:
        drawn(name, run)


def floats(column: pa.ChunkedArray, value: float) -> pa.ChunkedArray:
    if not pa.types.is_floating(column.type):
        return column
    return pa.chunked_array([pa.array(np.full(len(column), value), column.type)])


NUMBERS: dict[str, Callable[[pa.ChunkedArray], pa.ChunkedArray]] = {
    "zeros": lambda column: pc.multiply(column, pa.scalar(0, column.type)),
    "nulls": lambda column: pa.chunked_array([pa.nulls(len(column), column.type)]),
    "nans": lambda column: floats(column, np.nan),
    "infinities": lambda column: floats(column, np.inf),
}


def changed(name: str, table: pa.Table, how: str) -> pa.Table:
    if how == "one row":
        return table.slice(0, 1)
    for place, field in enumerate(table.schema):
        column = table.column(place)
        if how == "all skipped" and (name, field.name) == ("steps", "skipped"):
            column = pa.chunked_array([pa.array([True] * table.num_rows)])
        numeric = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        if how in NUMBERS and numeric and field.name not in KEYS:
            column = NUMBERS[how](column)
        table = table.set_column(place, field.name, column)
    return table


HOWS = (*NUMBERS, "one row", "all skipped")
CASES = [
    pytest.param(how, scenario, id=f"{how}-{scenario}", marks=[] if (i + k) % 3 == 0 else pytest.mark.whole)
    for i, how in enumerate(HOWS)
    for k, scenario in enumerate(SCENARIOS)
]
"""Per commit a third of them, in which each way of being odd meets two or three scenarios, and each scenario two."""


@pytest.mark.parametrize(("how", "scenario"), CASES)
def test_runs_with_odd_numbers_raise_nothing(how: str, scenario: str, runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs[scenario]
    with RunWriter(tmp_path / "odd", config=dict(run.head.config), model=dict(run.head.model)) as writer:
        for name in TABLES:
            table = changed(name, run.table(name), how)
            if table.num_rows:
                writer.append(name, {c: table.column(c).combine_chunks() for c in table.column_names})
    everything(load_run(tmp_path / "odd"))


@pytest.mark.parametrize(
    ("steps", "scenario"), [*((steps, "calibrating") for steps in (0, 1, 2)), (1, "bf16"), (2, "fp32")]
)
def test_runs_with_few_steps_raise_nothing(steps: int, scenario: str, tmp_path: Path) -> None:
    everything(load_run(write(tmp_path / "run", scenario, steps=steps)))


class Beside(nn.Module):
    """A layer without elements beside others. With `called`, it is called as a function, without hooks."""

    def __init__(self, empty: nn.Module, *, called: bool) -> None:
        super().__init__()
        self.first, self.empty, self.head = nn.Linear(16, 16), empty, nn.Linear(16, 8)
        self.called = called

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        nothing = self.empty(x) if self.called else F.linear(x, self.empty.weight)
        out: torch.Tensor = self.head(x) + nothing.sum()
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "beside": lambda: Beside(nn.Linear(16, 0), called=True),
    "as a function": lambda: Beside(nn.Linear(16, 0), called=False),
    "between": lambda: nn.Sequential(nn.Linear(16, 0), nn.Linear(0, 8)),
    "alone": lambda: nn.Sequential(nn.Linear(16, 0)),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float16) for name in MODELS), ("beside", torch.bfloat16), ("between", None), ("alone", None)],
)
def test_runs_with_an_empty_layer_raise_nothing(name: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype == torch.float16)
    with watch(model, optimizer, scaler=scaler, into=tmp_path / "run", every=1, level="full"):
        for _ in range(3):
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = model(torch.randn(4, 16)).float().square().sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    run = load_run(tmp_path / "run")
    everything(run)
    assert len(run.steps) == 3 and "fp16-without-scaler" not in {f.code for f in diagnose(run)}
