"""One line in `FORMATS` is a new format everywhere: analysis, traces, figures, pages and kernel names follow."""

import dataclasses
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest

from amp_core import RunError
from amp_core.analysis import layer_advice, safe_window, what_if
from amp_core.analysis.format_lab.rounding import bits, element_formats, format_ranges, rounded, stored_values
from amp_core.analysis.performance import eligible_ops
from amp_core.analysis.performance.traced_ops import formats_of, ran_in
from amp_core.figures.precision_map import precision_figure
from amp_core.formats import (
    BY_TENSOR,
    FORMATS,
    Format,
    Scaling,
    dtype_of,
    element_bytes,
    limits_to_show,
    narrowest_first,
)
from amp_core.traces.operators import precision_of, refine
from tests.analysis.numerics.test_what_if import row, run_of
from tests.edited_package import run_edited_copy

FP12 = Format(
    "fp12-e5m6", "FP12", "float12_e5m6", 5, 6, 65024.0, True,
    scaling=BY_TENSOR, family="fp12", stored_bits=16, spellings=("fp12_t",), kernel_tokens=("e5m6",),
)  # fmt: skip
MX = Scaling("block", block=32, scale_format="e8m0")


@pytest.fixture
def fp12(monkeypatch):
    monkeypatch.setitem(FORMATS, FP12.name, FP12)
    return FP12


def wide(folder):
    """A run with a gradient that spans more octaves than an 8-bit format."""
    return run_of(folder, [row("w", [5] * 40, -60, kind=kind) for kind in ("weight_grad", "output_grad")])


def test_a_format_is_scaled_by_its_definition_not_its_name(tmp_path, monkeypatch):
    twin = dataclasses.replace(FORMATS["fp8-e4m3"], name="ocp-e4m3", dtype=None, spellings=(), kernel_tokens=())
    monkeypatch.setitem(FORMATS, twin.name, twin)
    predictions = what_if(wide(tmp_path / "run"), ("fp8-e4m3", "ocp-e4m3"), (0,))
    one, other = (
        predictions[predictions["format"] == name].drop(columns="format") for name in ("fp8-e4m3", "ocp-e4m3")
    )
    assert len(one) and (one["own_log2_scale"] != 0).all()
    pd.testing.assert_frame_equal(one.reset_index(drop=True), other.reset_index(drop=True))


def test_a_block_scaled_format_is_refused_if_no_blocks_were_recorded(tmp_path, monkeypatch):
    mx = dataclasses.replace(FORMATS["fp8-e4m3"], name="mxfp8-e4m3", label="MXFP8 E4M3", dtype=None, scaling=MX)
    monkeypatch.setitem(FORMATS, mx.name, mx)
    run = wide(tmp_path / "run")
    for ask in (
        lambda: what_if(run, ("fp16", "mxfp8-e4m3"), (0,)),  # also where a recipe has that name
        lambda: what_if(run, ("mxfp8-e4m3",), (0,), scaling="tensor"),
        lambda: safe_window(run, "mxfp8-e4m3"),
    ):
        with pytest.raises(RunError, match=r"^format='mxfp8-e4m3' has a scale per block of 32 values.*without blocks"):
            ask()
    assert mx not in element_formats() and mx.name not in limits_to_show()
    assert mx.name not in set(layer_advice(run)["fp8_format"])
    with pytest.raises(RunError, match=r"choose one of fp64, fp32, tf32, fp16, bf16, fp8-e4m3, fp8-e5m2, fp8-tens"):
        what_if(run, ("fp99",))


@pytest.mark.parametrize("wrong", [("row",), ("block",), ("tensor", 32, "e8m0"), ("block", 32)])
def test_an_incomplete_or_contradictory_scaling_is_refused(wrong):
    with pytest.raises(ValueError, match="block"):
        Scaling(*wrong)


def test_traces_and_operators_know_its_dtype(fp12):
    assert ran_in("float12_e5m6, float32", None, matrix=True) == "fp12-e5m6"
    assert formats_of('["c10::Float12_e5m6", "long int"]') == ["fp12-e5m6"]
    assert precision_of(["long int", "c10::Float12_e5m6"]) == "fp12"
    assert refine("elementwise", "aten::copy_", ["c10::Float12_e5m6", "float"]) == "cast"
    assert dtype_of("c10::Float12_e5m6") == dtype_of("fp12_t") == "float12_e5m6"
    assert element_bytes("torch.float12_e5m6") == 2
    assert eligible_ops._precision('["c10::Float12_e5m6", "float12_e5m6"]') == "fp12"


def test_the_added_format_is_listed_between_eight_and_sixteen_bits(fp12):
    names = [form.name for form in narrowest_first() if not form.by_block]
    assert names == ["fp8-e5m2", "fp8-e4m3", "fp12-e5m6", "bf16", "fp16", "tf32", "fp32", "fp64"]
    assert limits_to_show() == ["fp16", "bf16", "fp8-e4m3", "fp8-e5m2", "fp12-e5m6"]


def test_the_format_lab_rounds_to_it(fp12):
    table = stored_values(Fraction(1, 10)).set_index("format")
    assert table.loc["fp12-e5m6", "value"] == rounded(Fraction(1, 10), fp12) == 0.099609375  # 1.59375 × 2^-4
    assert bits(0.099609375, fp12) == ("0", "01011", "100110")
    ranges = format_ranges().set_index("format")
    assert ranges.loc["fp12-e5m6", "subnormal_low"] == -20 and list(ranges.index).index("fp12-e5m6") == 4


def test_the_precision_map_names_it_between_its_neighbours(fp12):
    formats = ["fp32", "fp12-e5m6", "mixed", "fp8-e4m3"]
    cells = pd.DataFrame({"module": formats, "op": "mm", "ran": formats, "count": 1, "flops": 1.0})
    figure = precision_figure(cells.assign(policy="", stayed=False, members=1))
    named = [trace.name for trace in figure.data if trace.type == "scatter" and trace.x[0] is None]
    assert named == ["ran in FP8 E4M3", "ran in FP12", "calls differ", "ran in FP32"]
    assert np.ravel(figure.data[0].text).tolist() == ["FP32", "FP12", "mix", "FP8"]


def test_kernel_names_are_read_with_it(tmp_path):
    """In a copy of the package, because the patterns of kernel names are compiled at import."""
    line = (
        'Format("fp12-e5m6", "FP12", None, 5, 6, 65024.0, True, family="fp12", spellings=("fp12_t",), '
        'kernel_tokens=("e5m6",)),'
    )
    code = (
        "from amp_core.hardware.kernel_names import dtypes as types\n"
        "print(types.of_xmma('sm90_xmma_gemm_e5m6e5m6_e5m6f32_f32_tn_n'), types.of_template('gemm<fp12_t, 4>'))\n"
    )
    end = "    )\n}  # fmt: skip"
    assert run_edited_copy(tmp_path, {"amp_core/formats.py": (end, line)}, code).split() == ["fp12", "fp12"]
