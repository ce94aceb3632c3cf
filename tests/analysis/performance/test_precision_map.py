"""The precision map of a traced step: shares, casts, islands, and operators that stayed in FP32."""

from pathlib import Path

import pandas as pd
import pytest

from amp_core import Run, RunError, load_run
from amp_core.analysis import precision_cells, precision_map, traced_steps
from amp_core.analysis.numerics import rounded_gradients
from amp_core.analysis.performance.precision_map import MAX_COLUMNS, fold
from amp_core.analysis.performance.traced_ops import OUTSIDE, ROOT, formats_of, ran_in
from amp_core.hardware import autocast_ops
from tests import synthetic_ops
from tests.synthetic import write, write_rows


def run(folder: Path, scenario: str = "traced") -> Run:
    return load_run(write(folder / scenario, scenario))


def run_with_ops(folder: Path, **columns: list[object]) -> Run:
    """A run with exactly these rows of `ops`."""
    return load_run(write_rows(folder / "rows", ops=dict(columns)))


def test_matrix_products_are_summed_by_flops(tmp_path: Path) -> None:
    view = precision_map(run(tmp_path))
    rows = [row for row in synthetic_ops._rows("float16", "fp32") if row.get("flops")]
    narrow = sum(row["flops"] for row in rows if row["in_dtypes"] == "float16")
    assert view.weighed_by == "operations"
    assert view.matrix_frac["fp16"] == pytest.approx(narrow / sum(row["flops"] for row in rows))
    assert sum(view.matrix_frac.values()) == pytest.approx(1.0)
    assert view.ops["flops"].sum() == sum(row["flops"] for row in rows)
    assert (view.step, view.device, view.autocast, view.has_policies) == (2, "cuda", "fp16", True)
    assert view.cache_hits == 2


def test_the_tree_counts_the_operators_within_each_module(tmp_path: Path) -> None:
    tree = precision_map(run(tmp_path)).modules.set_index("module")
    assert tree.loc["blocks", "flops"] == tree.loc[["blocks.0", "blocks.1"], "flops"].sum()
    inside = ["blocks.0.qkv", "blocks.0.attention", "blocks.0.fc"]
    assert tree.loc["blocks.0", "flops"] == tree.loc[inside, "flops"].sum()
    assert tree.loc["head", "narrow_frac"] == 0.0 and tree.loc["blocks.0.fc", "narrow_frac"] == 1.0
    assert tree.loc["blocks.0.norm", "narrow_frac"] != tree.loc["blocks.0.norm", "narrow_frac"]  # no GEMM/conv
    assert tree.loc[ROOT, "depth"] == 0 and tree.loc["blocks.1.norm", "depth"] == 3
    assert OUTSIDE not in tree.index


def test_operators_that_stayed_in_fp32_have_their_reason(tmp_path: Path) -> None:
    stayed = precision_map(run(tmp_path)).stayed.set_index("module")
    assert stayed["why"].to_dict() == {
        "head": "inside autocast(enabled=False)",
        "blocks.*.attention": "attention without a fused kernel, which torch computes in FP32",
    }
    assert stayed.loc["blocks.*.attention", ["modules", "count"]].tolist() == [2, 2]
    assert 0 < stayed["flops_frac"].sum() < 1


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"autocast": "float16", "policy": "not applied"}, "called in a way that autocast does not intercept"),
        ({"autocast": None, "policy": None}, "called outside of the autocast region"),
        ({"autocast": "disabled", "policy": None}, "inside autocast(enabled=False)"),
    ],
)
def test_each_reason_for_fp32(row: dict[str, str | None], why: str, tmp_path: Path) -> None:
    rows = {
        "op": ["aten::mm", "aten::mm"],
        "in_dtypes": ["float32", "float16"],
        "policy": [row["policy"], "lower_precision_fp"],
        "autocast": [row["autocast"], "float16"],
        "device": ["cuda:0", "cuda:0"],
    }
    stayed = precision_map(run_with_ops(tmp_path, **rows)).stayed
    assert len(stayed) == 1 and stayed["why"][0].startswith(why)


def test_missing_autocast_is_given_as_the_reason(tmp_path: Path) -> None:
    folder = write_rows(
        tmp_path / "a", ops={"op": ["aten::mm"], "in_dtypes": ["float32"]}, events=[{"kind": "traced", "name": "ops"}]
    )
    view = precision_map(load_run(folder))
    assert (view.autocast, view.has_policies, view.matrix_frac) == (None, True, {"fp32": 1.0})
    assert view.stayed["why"].tolist() == ["no autocast in this step"]


def test_casts_are_counted_by_their_origin(tmp_path: Path) -> None:
    casts = precision_map(run(tmp_path)).casts
    assert casts["count"].sum() == 9 and casts["bytes"].sum() == 9 * 2048
    by = casts.groupby("cast_by")[["count", "repeated", "undone"]].sum()
    assert by.loc["autocast"].tolist() == [4, 2, 0] and by.loc["code"].tolist() == [1, 0, 1]
    assert set(zip(casts["from_format"], casts["to_format"], strict=True)) == {("fp32", "fp16"), ("fp16", "fp32")}


def test_islands_are_modules_that_a_list_or_a_region_keeps_in_fp32(tmp_path: Path) -> None:
    islands = precision_map(run(tmp_path)).islands.set_index("module")
    assert islands.loc["blocks.*.norm", ["modules", "ops"]].tolist() == [2, "native_layer_norm"]
    assert islands.loc["head", "why"] == "inside autocast(enabled=False)"
    assert set(islands.index) == {"blocks.*.norm", "head", OUTSIDE}


def test_a_profilers_trace_has_shares_and_no_reasons(tmp_path: Path) -> None:
    view = precision_map(run(tmp_path, "traced-foreign"))
    assert (view.step, view.device, view.has_policies, view.weighed_by) == (None, "cuda", False, "calls")
    assert view.matrix_frac == {"fp16": 0.6, "fp32": 0.4}
    assert view.islands.empty and view.casts.empty and view.elsewhere.empty
    assert set(view.stayed["why"]) == {"this trace does not record autocast"}


def test_unrecorded_flops_are_computed_from_shapes(tmp_path: Path) -> None:
    rows = {
        "op": ["aten::mm", "aten::addmm"],
        "in_dtypes": ['["c10::Half", "c10::Half"]', '["float", "float", "float"]'],
        "in_shapes": ["[[2, 3], [3, 4]]", "[[4], [2, 3], [3, 4]]"],
        "count": [3, 1],
    }
    view = precision_map(run_with_ops(tmp_path, **rows))
    assert view.weighed_by == "operations" and view.matrix_frac == {"fp16": 0.75, "fp32": 0.25}


def test_cells_are_one_per_module_and_operator_in_order(tmp_path: Path) -> None:
    cells = precision_cells(run(tmp_path))
    assert not cells.duplicated(["module", "op"]).any()
    assert cells["module"].drop_duplicates().tolist()[:3] == ["tokens", "blocks.0.norm", "blocks.0.qkv"]
    assert cells.set_index(["module", "op"]).loc[("head", "mm"), "stayed"]
    together = precision_cells(run(tmp_path / "again"), folded=True)
    assert together.set_index(["module", "op"]).loc[("blocks.*.fc", "addmm"), ["members", "count"]].tolist() == [2, 2]
    assert precision_cells(run(tmp_path / "b"), phase="backward")["op"].tolist() == ["mm"] * 3


def test_calls_of_one_cell_in_several_formats_are_mixed(tmp_path: Path) -> None:
    rows = {"op": ["aten::mul"] * 2, "in_dtypes": ["float16", "float32"], "module": ["a", "a"]}
    assert precision_cells(run_with_ops(tmp_path, **rows))["ran"].tolist() == ["mixed"]


def test_operators_with_matrix_products_are_kept_if_there_are_many(tmp_path: Path) -> None:
    names = [f"aten::op{i}" for i in range(40)]
    rows = {"op": [*names, "aten::mm"], "in_dtypes": ["float32"] * 41, "flops": [None] * 40 + [10]}
    cells = precision_cells(run_with_ops(tmp_path, **rows))
    assert len(cells) == MAX_COLUMNS and "mm" in set(cells["op"])


def test_one_of_several_traced_steps_can_be_chosen(tmp_path: Path) -> None:
    rows = run_with_ops(tmp_path, step=[2, 50], op=["aten::mm"] * 2, in_dtypes=["float32", "float16"])
    assert traced_steps(rows) == [2, 50]
    assert precision_map(rows).matrix_frac == {"fp32": 1.0}
    assert precision_map(rows, 50).matrix_frac == {"fp16": 1.0}
    with pytest.raises(RunError, match="step=7 was not traced; choose one of 2, 50"):
        precision_map(rows, 7)


@pytest.mark.parametrize(
    ("inputs", "output", "matrix", "ran"),
    [
        ("float16, float32", "float32", True, "fp16"),  # 16-bit factors, a wide accumulator
        ("float16", "float32", False, "fp32"),  # CUDA's softmax of 16-bit logits
        ("bfloat16, float32", "bfloat16", False, "bf16"),
        ("float32, int64", "float32", False, "fp32"),
        ('["c10::BFloat16", ""]', None, False, "bf16"),
        ("float64", None, False, "fp64"),
        ("float32, float64", None, False, "fp32"),  # in a profiler's trace: a tensor times a number
        ("int64", "int64", False, None),
        (None, None, True, None),
    ],
)
def test_the_format_that_an_operator_ran_in(
    inputs: str | None, output: str | None, matrix: bool, ran: str | None
) -> None:
    assert ran_in(inputs, output, matrix) == ran


def test_every_name_of_a_dtype_is_known_and_others_are_left_out() -> None:
    spelt = "float64, double, float32, float, bfloat16, c10::BFloat16, float16, c10::Half, half"
    assert formats_of(spelt) == ["fp64", "fp32", "bf16", "fp16"]
    assert formats_of("float8_e4m3fn, c10::Float8_e4m3fn, float8_e5m2") == ["fp8-e4m3", "fp8-e5m2"]
    assert formats_of('["long int", 3, null]') == formats_of("[broken") == formats_of(None) == []


@pytest.mark.parametrize(
    ("layer", "op"),
    [
        ("Linear", "linear"),
        ("Conv2d", "conv2d"),
        ("LSTM", "_cudnn_rnn"),
        ("GRUCell", "gru_cell"),
        ("LayerNorm", "layer_norm"),
        ("RMSNorm", "rms_norm"),
        ("GroupNorm", "group_norm"),
        ("LogSoftmax", "log_softmax"),
        ("Softplus", "softplus"),
        ("MSELoss", "mse_loss"),
        ("Bilinear", "bilinear"),
    ],
)
def test_module_classes_follow_the_autocast_list_of_their_operator(layer: str, op: str) -> None:
    lowered = any(part in layer for part in rounded_gradients.LOWERED_MODULES)
    kept = any(part in layer for part in rounded_gradients.FP32_MODULES)
    assert lowered != kept
    assert lowered == (autocast_ops.policy(op, "cuda") == "lower_precision_fp")


def test_only_numbers_in_names_are_folded() -> None:
    assert fold("h.3.attn.c_attn2.0") == "h.*.attn.c_attn2.*"


def test_the_run_is_not_modified(tmp_path: Path) -> None:
    traced = run(tmp_path)
    before = traced.ops.copy()
    precision_map(traced)
    precision_cells(traced)
    pd.testing.assert_frame_equal(traced.ops, before)
