"""Tensors over steps: fractions per cell, pooled without losing spikes, and summed over modules."""

import numpy as np
import pytest

from amp_core import RunError, load_run
from amp_core.analysis import shares_over_steps
from amp_core.analysis.numerics.layers import layer_trace
from amp_core.analysis.numerics.ranges import class_shares
from amp_core.store.writer import RunWriter
from tests.synthetic import SAMPLES, write


def few(folder):
    with RunWriter(folder) as writer:
        for step in range(0, 40, 10):
            writer.append(
                "tensors",
                {
                    "step": [step] * 2,
                    "name": ["a.x", "a.y"],
                    "kind": ["weight_grad"] * 2,
                    "numel": [100, 300],
                    "zero": [50, 0],
                    "subnormal": [10 if step == 10 else 0, 0],
                    "normal": [40 if step == 10 else 50, 300],
                    "inf": [0, 1 if step == 30 else 0],
                    "nan": [0, 0],
                    "absmax": [1.0 + step, 2.0],
                },
            )
    return load_run(folder)


def test_each_cell_is_one_tensor_at_one_step(tmp_path):
    cells = shares_over_steps(few(tmp_path / "a"), "weight_grad").set_index(["name", "step"])
    assert cells.index.tolist() == [(n, s) for n in ("a.x", "a.y") for s in (0, 10, 20, 30)]
    assert cells.loc[("a.x", 10), ["subnormal_frac", "zero_frac", "absmax"]].tolist() == [0.2, 0.5, 11.0]
    assert cells["nonfinite_frac"].tolist() == [0.0] * 7 + [pytest.approx(1 / 300)]
    assert (cells["until"] == cells.index.get_level_values("step")).all()


def test_pooled_steps_keep_their_largest_value(tmp_path):
    cells = shares_over_steps(few(tmp_path / "a"), "weight_grad", names=["a.x"], max_steps=2)
    assert cells[["step", "until", "subnormal_frac", "absmax"]].values.tolist() == [[0, 10, 0.2, 11], [20, 30, 0, 31]]


def test_folded_modules_are_summed(tmp_path):
    cells = shares_over_steps(few(tmp_path / "a"), "weight_grad", depth=1)
    assert set(cells["name"]) == {"a.*"} and cells["zero_frac"].tolist() == [50 / 400] * 4


@pytest.mark.parametrize("name", ["fp16-overflow", "fp16-underflow"])
def test_it_agrees_with_the_trace_of_each_tensor(name):
    run = load_run(SAMPLES[name])
    cells = shares_over_steps(run, "output_grad")
    assert list(dict.fromkeys(cells["name"])) == class_shares(run, "output_grad")["name"].tolist()
    trace = layer_trace(run, "output_grad", "head")
    head_cells = cells[cells["name"] == "head"]
    assert np.allclose(head_cells["subnormal_frac"], trace["subnormal_nonzero_frac"], equal_nan=True)
    assert np.allclose(head_cells["absmax"], trace["absmax"], equal_nan=True)


def test_an_unsampled_kind_gives_no_rows_and_an_unknown_one_is_refused(tmp_path):
    run = load_run(write(tmp_path / "a", "empty"))
    assert shares_over_steps(run, "weight_grad").empty
    with pytest.raises(RunError, match="kind='x' is unknown"):
        shares_over_steps(run, "x")
