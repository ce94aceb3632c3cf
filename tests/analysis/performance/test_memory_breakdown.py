"""The parts of a step's memory: they add up to the peak, and a recipe's difference is explained."""

import numpy as np
import pandas as pd
import pytest

from amp_core import Run, RunError, load_run
from amp_core.analysis import memory_breakdown, memory_difference, memory_moments, memory_phases, memory_steps
from amp_core.analysis.performance.memory_breakdown import CATEGORIES
from amp_core.figures import memory_moments_figure, memory_parts_figure
from tests.synthetic import write_rows
from tests.synthetic_memory import CONTEXT, memory_rows

MIB = 2**20


def run_of(tmp_path, precision="fp32", device="cuda:0", name="run", **tables) -> Run:
    config = {"precision": precision, "device": device}
    tables = tables or {"memory": memory_rows(4, device, precision)}
    return load_run(write_rows(tmp_path / name, config=config, **tables))


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_categories_add_up_to_the_peak(tmp_path, device, precision):
    run = run_of(tmp_path, precision, device)
    breakdown = memory_breakdown(run)
    assert breakdown.parts["bytes"].sum() == breakdown.total_bytes
    assert breakdown.parts["frac"].sum() == pytest.approx(1.0)
    moments = memory_moments(run)
    assert np.allclose(moments[list(CATEGORIES)].sum(axis=1), moments["peak_bytes"])


def test_on_cuda_the_peak_is_that_of_the_allocator(tmp_path):
    run = run_of(tmp_path)
    breakdown = memory_breakdown(run)
    rows = run.memory
    assert breakdown.total_bytes == rows.peak_bytes.max()
    assert (
        breakdown.moment == "in backward, when the gradient of blocks.3.weight was computed"
        and breakdown.phase == "backward"
    )
    size = breakdown.parts.set_index("category")["bytes"]
    top = rows.loc[rows.peak_bytes.idxmax()]
    assert size["temporary"] == top.peak_bytes - top.allocated_bytes > 0
    assert size["other"] == 2 * MIB
    assert size["gradients"] == 2 * MIB  # gradients that had arrived by then
    assert breakdown.reserved_bytes == top.reserved_bytes and breakdown.step == 4


def test_on_a_cpu_the_peak_is_that_of_the_tensors_and_the_rest_is_the_process(tmp_path):
    breakdown = memory_breakdown(run_of(tmp_path, device="cpu"))
    assert breakdown.what == "resident set of the process" and breakdown.reserved_bytes is None
    size = breakdown.parts.set_index("category")["bytes"]
    assert size["other"] == CONTEXT and "temporary" not in size
    assert breakdown.moment == "in the forward of blocks.3"
    assert breakdown.parts.set_index("category")["about"]["other"].startswith("Python, libraries")


def test_the_highest_rank_and_the_last_step_are_used(tmp_path):
    early, late = memory_rows(1, "cuda:0", "fp32"), memory_rows(4, "cuda:0", "fp32")
    other = memory_rows(4, "cuda:1", "fp32", parameters=16 * MIB)
    columns = {c: early[c] + late[c] + other[c] for c in early}
    columns["rank"] = [0] * (2 * len(early["step"])) + [1] * len(early["step"])
    run = run_of(tmp_path, memory=columns)
    assert memory_steps(run) == [1, 4]
    assert memory_moments(run)["parameters"].unique().tolist() == [16 * MIB]
    assert memory_breakdown(run, 1).parts.set_index("category")["bytes"]["parameters"] == 8 * MIB
    with pytest.raises(RunError, match="step=7 was not sampled; memory was at 1, 4"):
        memory_breakdown(run, 7)


def test_an_unmeasured_category_is_missing_and_the_others_still_add_up(tmp_path):
    rows = memory_rows(4, "cuda:0", "fp32")
    rows["activations_bytes"] = rows["autocast_bytes"] = [None] * len(rows["step"])
    breakdown = memory_breakdown(run_of(tmp_path, memory=rows))
    size = breakdown.parts.set_index("category")["bytes"]
    assert np.isnan(size["activations"]) and size.sum() == breakdown.total_bytes


def test_phases_have_their_own_peaks(tmp_path):
    run = run_of(tmp_path)
    phases = memory_phases(run).set_index("phase")
    assert phases.index.tolist() == ["forward", "backward", "optimizer"]
    for phase, rows in run.memory.groupby("phase"):
        assert phases.loc[phase, "peak_bytes"] == rows.peak_bytes.max()


def test_amp_against_fp32_is_explained_per_category(tmp_path):
    fp32, bf16 = run_of(tmp_path, "fp32", name="a"), run_of(tmp_path, "bf16", name="b")
    difference = memory_difference([fp32, bf16]).set_index("category")
    assert difference["run"].unique().tolist() == ["b"]
    assert difference.loc["parameters", "difference_bytes"] == 0
    assert difference.loc["parameters", "why"] == "the same: autocast leaves them in FP32"
    assert (
        difference.loc["activations", "difference_bytes"] < 0
        and "norms and loss in FP32" in difference.loc["activations", "why"]
    )
    assert difference.loc["activations", "why"].startswith("0.62 ×")
    assert difference.loc["autocast", "first_bytes"] == 0 < difference.loc["autocast", "bytes"]
    assert difference.loc["autocast", "why"] == "16-bit copies of weights, which FP32 does not need"
    total = memory_breakdown(bf16).total_bytes - memory_breakdown(fp32).total_bytes
    assert difference["difference_bytes"].sum() == total


def test_pure_16_bit_weights_and_unmeasured_categories_are_explained(tmp_path):
    pure = memory_rows(4, "cuda:0", "bf16", parameters=4 * MIB)
    pure["activations_bytes"] = [None] * len(pure["step"])
    runs = [run_of(tmp_path, "fp32", name="a"), run_of(tmp_path, "bf16-pure", name="b", memory=pure)]
    why = memory_difference(runs).set_index("category")["why"]
    assert "stored in 16 bits" in why["optimizer"] and why["activations"] == "not measured in both"


def test_notes_name_what_would_reduce_memory_and_what_would_not(tmp_path):
    notes = memory_breakdown(run_of(tmp_path)).notes
    assert any("checkpointing or 16 bits makes" in n for n in notes) and any("would halve" in n for n in notes)
    notes = memory_breakdown(run_of(tmp_path, "bf16", name="low")).notes
    assert not any("16 bits makes" in n for n in notes) and any("copies of weights take" in n for n in notes)
    rows = memory_rows(4, "cuda:0", "bf16")
    rows["activations_bytes"] = [1000] * len(rows["step"])
    notes = memory_breakdown(run_of(tmp_path, "bf16", name="small", memory=rows)).notes
    assert any("which autocast leaves in FP32" in n for n in notes)


@pytest.mark.parametrize(
    ("rows", "total"),
    [
        ({"step": [1, 2]}, None),
        ({"step": [1], "moment": [None], "phase": [None], "allocated_bytes": [None]}, None),
        ({"step": [1], "allocated_bytes": [0], "peak_bytes": [0], "reserved_bytes": [0]}, None),
        ({"step": [1, 1], "number": [0, 1], "parameters_bytes": [5, 6], "phase": ["forward", None]}, 6),
        ({"step": [1], "peak_bytes": [100], "reserved_bytes": [200]}, 100),
    ],
)
def test_partial_rows_of_other_programs_are_used(tmp_path, rows, total):
    run = run_of(tmp_path, memory=rows)
    run.validate(full=True)
    breakdown = memory_breakdown(run)
    assert breakdown.total_bytes == total
    assert memory_parts_figure(breakdown.parts.assign(run="a")).layout.meta["alt"]
    assert memory_moments_figure(memory_moments(run)).layout.meta["alt"]
    assert len(memory_difference([run, run])) == len(breakdown.parts)
    if total is not None:
        assert breakdown.parts["bytes"].sum() == total


def test_a_run_without_memory_rows_has_no_breakdown(tmp_path):
    run = run_of(tmp_path, steps={"step": [0], "loss": [1.0]})
    breakdown = memory_breakdown(run)
    assert (breakdown.step, breakdown.total_bytes, breakdown.notes, len(breakdown.parts)) == (None, None, (), 0)
    assert memory_steps(run) == [] and not len(memory_moments(run)) and not len(memory_phases(run))
    assert not len(memory_difference([run, run_of(tmp_path, name="other")]))
    assert isinstance(memory_difference([run]), pd.DataFrame)
