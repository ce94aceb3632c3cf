"""GEMM/conv that could have run on tensor cores: reasons, sizes, floating-point operations."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from amp_core.analysis import matrix_ops, missed_tensor_core_time
from amp_core.analysis.performance.eligible_ops import REASONS
from amp_core.analysis.performance.gemm_shapes import padding_frac, product, unaligned
from amp_core.hardware.data_sheets import dense_rates
from tests.analysis.performance.test_tensor_cores import run_with_kernels
from tests.call_count import count_calls
from tests.synthetic_kernels import GPU, kernel

HALF, FLOAT = "c10::Half", "float"


def gpu(capability: str, name: str = "NVIDIA Some GPU") -> dict[str, Any]:
    return GPU | {"name": name, "capability": capability}


def single_row(
    folder: Path, about: dict[str, Any], dtype: str = FLOAT, answer: str = "no", **place: Any
) -> "pd.Series[Any]":
    """The row of `matrix_ops` for a run of one product."""
    shapes = place.pop("shapes", [[64, 128], [128, 256]])
    op = place.pop("op", "aten::mm")
    row = kernel("k", 10.0, 1, "gemm", op, answer, shapes=shapes, dtypes=[dtype] * len(shapes), **place)
    return matrix_ops(run_with_kernels(folder, [row], about)).iloc[0]


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ("8.0", "float", "fp32"),
        ("7.0", "float", "fp32-early"),
        ("7.5", "c10::BFloat16", "bf16-early"),
        ("8.6", "double", "fp64"),
        ("8.0", "double", "simt"),
        ("7.0", "c10::Half", "simt"),
        ("9.0", "c10::BFloat16", "simt"),
        ("8.0", "c10::Float8_e4m3fn", "dtype"),
        ("8.9", "c10::Float8_e4m3fn", "simt"),
        ("6.1", "c10::Half", "no-tensor-cores"),
        ("", "c10::Half", "no-device"),
        ("8.0", "long int", "no-dtype"),
    ],
)
def test_a_matrix_product_off_tensor_cores_has_its_reason(
    capability: str, dtype: str, reason: str, tmp_path: Path
) -> None:
    op = single_row(tmp_path / "r", gpu(capability), dtype)
    assert (op["reason"], op["could"], op["why"]) == (reason, *REASONS[reason])


def test_a_turing_gpu_without_tensor_cores_has_that_reason(tmp_path: Path) -> None:
    assert single_row(tmp_path / "r", gpu("7.5", "NVIDIA GeForce GTX 1660 Ti"), HALF)["reason"] == "no-tensor-cores"


@pytest.mark.parametrize(
    ("op", "shapes", "reason"),
    [
        ("aten::mv", [[64, 128], [128]], "vector"),
        ("aten::mm", [[1, 128], [128, 256]], "vector"),
        ("aten::bmm", [[8, 1, 64], [8, 64, 512]], "vector"),
        ("aten::_conv_depthwise2d", [[8, 32, 14, 14], [32, 1, 3, 3]], "depthwise"),
        ("aten::cudnn_convolution", [[8, 32, 14, 14], [32, 1, 3, 3]], "depthwise"),
        ("aten::cudnn_convolution", [[8, 1, 28, 28], [32, 1, 3, 3]], "simt"),
    ],
)
def test_products_without_gain_have_their_reason(op: str, shapes: Any, reason: str, tmp_path: Path) -> None:
    assert single_row(tmp_path / "r", gpu("8.0"), HALF, op=op, shapes=shapes)["reason"] == reason


def test_kernels_on_tensor_cores_and_unknown_kernels_have_their_reason(tmp_path: Path) -> None:
    assert single_row(tmp_path / "a", gpu("8.0"), HALF, "yes")[["reason", "could"]].tolist() == ["on", ""]
    assert single_row(tmp_path / "b", gpu("8.0"), HALF, "unknown")[["reason", "could"]].tolist() == [
        "by-name",
        "unknown",
    ]


def test_tf32_that_was_allowed_but_not_chosen_has_its_own_reason(tmp_path: Path) -> None:
    from amp_core import load_run
    from amp_core.store.writer import RunWriter
    from tests.synthetic_kernels import columns

    rows = [
        kernel("sgemm", 10.0, 1, "gemm", "aten::mm", shapes=[[8, 8], [8, 8]], dtypes=[FLOAT] * 2),
        kernel("winograd", 5.0, 1, "conv", "aten::cudnn_convolution", shapes=[[8, 8, 9, 9], [8, 8, 3, 3]],
               dtypes=[FLOAT] * 2),
    ]  # fmt: skip
    environment = {"gpus": [GPU], "flags": {"tf32_matmul": False, "tf32_cudnn": True}}
    with RunWriter(tmp_path / "r", name="r", environment=environment) as writer:
        writer.append("kernels", columns(rows))
    assert matrix_ops(load_run(tmp_path / "r"))["reason"].tolist() == ["fp32", "tf32-left"]


def test_tf32_is_inferred_from_the_kernels_of_a_foreign_run(tmp_path: Path) -> None:
    tf32 = kernel("sm80_xmma_gemm_tf32", 10.0, 1, "gemm", "aten::bmm", "yes", precision="tf32")
    rows = [tf32] + [
        kernel(name, us, 1, category, op, dtypes=[FLOAT] * 2)
        for name, us, category, op in (
            ("sgemm", 8.0, "gemm", "aten::mm"),
            ("scudnn", 6.0, "conv", "aten::cudnn_convolution"),
            ("gemv2T_kernel_val", 4.0, "gemm", "aten::mv"),
        )
    ]
    assert matrix_ops(run_with_kernels(tmp_path / "r", rows))["reason"].tolist() == [
        "on",
        "tf32-left",
        "fp32",
        "vector",
    ]


def test_helper_kernels_of_an_operator_do_not_count_as_matrix_products(tmp_path: Path) -> None:
    rows = [
        kernel("sgemm", 10.0, 1, "gemm", "aten::mm", dtypes=[FLOAT] * 2),
        kernel("splitKreduce_kernel", 4.0, 1, "reduction", "aten::mm", dtypes=[FLOAT] * 2),
        kernel("nchwToNhwcKernel", 3.0, 2, "layout", "aten::cudnn_convolution", dtypes=[HALF] * 2),
    ]
    ops = matrix_ops(run_with_kernels(tmp_path / "r", rows))
    assert ops["total_us"].tolist() == [10.0] and ops["time_frac"].iloc[0] == pytest.approx(10 / 17)


def test_time_at_stake_adds_up_by_reason(tmp_path: Path) -> None:
    def product_row(us: float, dtype: str, op: str) -> dict[str, Any]:
        return kernel("k", us, 1, "gemm", f"aten::{op}", shapes=[[64, 64], [64, 64]], dtypes=[dtype] * 2)

    rows = [
        product_row(30.0, FLOAT, "mm"),
        product_row(50.0, HALF, "bmm"),
        product_row(10.0, FLOAT, "addmm"),
        product_row(10.0, "double", "matmul"),
    ]
    ops = matrix_ops(run_with_kernels(tmp_path / "r", rows))
    stake = missed_tensor_core_time(ops).set_index("reason")
    assert stake["total_us"].to_dict() == {"simt": 60.0, "fp32": 40.0}  # an A100 multiplies FP64 there too
    assert stake["ops"].to_dict() == {"simt": 2, "fp32": 2}
    assert missed_tensor_core_time(ops.iloc[:0]).empty


def test_unaligned_sizes_come_with_the_padded_ones(tmp_path: Path) -> None:
    op = single_row(tmp_path / "a", gpu("8.0"), HALF, "yes", shapes=[[4096, 768], [768, 50257]])
    assert (op["unaligned"], op["padded"]) == ("N 50257", "M 4096 · N 50264 · K 768")
    assert op["padding_frac"] == pytest.approx(7 / 50257)
    even = single_row(tmp_path / "b", gpu("8.0"), HALF, "yes")
    assert (even["unaligned"], even["padded"]) == ("", "") and pd.isna(even["padding_frac"])
    tf32 = single_row(tmp_path / "c", gpu("8.0"), FLOAT, "yes", precision="tf32", shapes=[[100, 12], [12, 4]])
    assert tf32["padded"] == ""  # multiples of 4 are enough there, and of 8 in FP16
    half = single_row(tmp_path / "d", gpu("8.0"), HALF, "yes", precision="fp16", shapes=[[100, 12], [12, 4]])
    assert half["padded"] == "M 104 · N 8 · K 16"


def test_operations_per_second_follow_from_the_shapes(tmp_path: Path) -> None:
    row = kernel("k", 700.0, 5, "gemm", "aten::mm", "yes", shapes=[[4096, 4096], [4096, 4096]], dtypes=[HALF] * 2)
    ops = matrix_ops(run_with_kernels(tmp_path / "r", [row | {"total_us": 5 * 700.0}])).iloc[0]
    assert ops["count"] == 5 and ops["flops"] == 5 * 2 * 4096**3
    assert ops["flops_per_s"] == pytest.approx(2 * 4096**3 / 700e-6)
    assert ops["of_peak_frac"] == pytest.approx(2 * 4096**3 / 700e-6 / 312e12)


@pytest.mark.parametrize(("causal", "left"), [("false", 1.0), ("true", 0.5 + 0.5 / 2048)])
def test_a_causal_mask_in_the_kernels_name_is_subtracted(causal: str, left: float, tmp_path: Path) -> None:
    traits = "pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false, Flash_kernel_traits<64, 128> >"
    name = f"void pytorch_flash::flash_fwd_kernel<{traits}, false, {causal}, false, false, true>(Flash_fwd_params)"
    row = kernel(name, 700.0, 1, "attention", "aten::_flash_attention_forward", "yes",
                 shapes=[[8, 2048, 16, 64]] * 3, dtypes=[HALF] * 3, precision="fp16")  # fmt: skip
    ops = matrix_ops(run_with_kernels(tmp_path / "r", [row])).iloc[0]
    assert ops["flops"] == pytest.approx(left * 4 * 8 * 16 * 2048**2 * 64)


def test_a_rate_above_the_data_sheet_rate_is_not_reported(tmp_path: Path) -> None:
    row = kernel("k", 1.0, 5, "gemm", "aten::mm", "yes", shapes=[[4096, 4096], [4096, 4096]], dtypes=[HALF] * 2,
                 precision="fp16")  # fmt: skip
    assert (
        matrix_ops(run_with_kernels(tmp_path / "r", [row]))
        .iloc[0][["flops", "flops_per_s", "of_peak_frac"]]
        .isna()
        .all()
    )


def test_several_kernels_of_one_call_are_one_call(tmp_path: Path) -> None:
    about: dict[str, Any] = {"shapes": [[64, 64], [64, 64]], "dtypes": [HALF] * 2}
    rows = [kernel(name, 5.0, 7, "gemm", "aten::mm", "yes", **about) for name in ("first", "second")]
    assert matrix_ops(run_with_kernels(tmp_path / "r", rows))["count"].tolist() == [7]


def test_on_a_cpu_operators_that_only_call_others_do_not_count(tmp_path: Path) -> None:
    rows = [
        kernel(f"aten::{op}", us, 2, "gemm", f"aten::{op}", None, shapes=[[64, 64], [64, 64]]) | {"device": "cpu"}
        for op, us in (("linear", 3.0), ("mm", 90.0))
    ]
    ops = matrix_ops(run_with_kernels(tmp_path / "r", rows))
    assert ops["op"].tolist() == ["aten::mm"] and ops["flops_per_s"].iloc[0] == pytest.approx(2 * 2 * 64**3 / 90e-6)
    assert ops[["could", "why"]].values.tolist() == [["", ""]]


def test_helper_kernels_count_with_the_main_kernel(tmp_path: Path) -> None:
    rows = [
        kernel("sm80_xmma_fprop_implicit_gemm_tf32f32", 95.0, 6, "conv", "aten::cudnn_convolution", "yes"),
        kernel("computeOffsetsKernel", 5.0, 6, "conv", "aten::cudnn_convolution", "no"),
    ]
    ops = matrix_ops(run_with_kernels(tmp_path / "a", rows))
    assert ops[["tensor_core", "total_us", "count", "reason"]].values.tolist() == [["yes", 100.0, 6, "on"]]
    rows[1] = rows[1] | {"name": "scudnn_winograd", "total_us": 40.0}
    apart = matrix_ops(run_with_kernels(tmp_path / "b", rows))
    assert apart["tensor_core"].tolist() == ["yes", "no"] and apart["flops"].isna().all()


def test_the_number_of_calls_grows_no_faster_than_the_layers(tmp_path: Path) -> None:
    def calls(layers: int) -> int:
        rows = [
            kernel("sgemm", 10.0 + i, 3, "gemm", "aten::mm", module=f"layers.{i}", shapes=[[64, 8 + i], [8 + i, 64]])
            for i in range(layers)
        ]
        run = run_with_kernels(tmp_path / str(layers), rows)
        assert len(matrix_ops(run)) == layers
        return count_calls(lambda: matrix_ops(run))

    calls(10)  # the first call imports modules and fills caches
    assert calls(2000) < 2.5 * calls(1000)


def test_the_output_shape_of_a_forward_convolution_comes_from_its_backward(tmp_path: Path) -> None:
    given, weight, out = [32, 64, 56, 56], [128, 64, 3, 3], [32, 128, 28, 28]
    rows = [
        kernel("fprop", 900.0, 2, "conv", "aten::cudnn_convolution", "yes", shapes=[given, weight], precision="fp16"),
        kernel("dgrad", 900.0, 2, "conv", "aten::convolution_backward", "yes", shapes=[out, given, weight],
               precision="fp16", phase="backward"),
    ]  # fmt: skip
    ops = matrix_ops(run_with_kernels(tmp_path / "r", rows)).set_index("op")["flops"]
    once = 2 * 32 * 128 * 28 * 28 * 64 * 9
    assert ops["aten::cudnn_convolution"] == 2 * once and ops["aten::convolution_backward"] == 2 * 2 * once
    alone = matrix_ops(run_with_kernels(tmp_path / "alone", rows[:1]))
    assert alone["flops"].isna().all() and alone["sizes"].iloc[0] == "C_in 64 · C_out 128"


@pytest.mark.parametrize(
    ("op", "shapes", "sizes", "batch", "flops"),
    [
        ("aten::mm", [[2, 3], [3, 5]], {"M": 2, "N": 5, "K": 3}, 1, 60),
        ("aten::addmm", [[5], [2, 3], [3, 5], [], []], {"M": 2, "N": 5, "K": 3}, 1, 60),
        ("aten::linear", [[7, 2, 3], [5, 3]], {"M": 14, "N": 5, "K": 3}, 1, 420),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], {"M": 2, "N": 5, "K": 3}, 7, 420),
        ("aten::matmul", [[7, 2, 3], [3, 5]], {"M": 14, "N": 5, "K": 3}, 1, 420),
        ("aten::mv", [[2, 3], [3]], {"M": 2, "N": 1, "K": 3}, 1, 12),
        ("aten::_scaled_dot_product_flash_attention", [[2, 4, 16, 8]] * 3, {"D": 8}, 8, 4 * 8 * 16 * 16 * 8),
        ("aten::_flash_attention_forward", [[2, 16, 4, 8]] * 3, {"D": 8}, 8, 4 * 8 * 16 * 16 * 8),
        ("aten::_flash_attention_backward", [[2, 16, 4, 8]] * 4, {"D": 8}, 8, 10 * 8 * 16 * 16 * 8),
        ("aten::convolution_backward", [[1, 6, 4, 4], [1, 4, 4, 4], [6, 2, 3, 3]], {"C_in": 2, "C_out": 3}, 2, 6912),
    ],
)
def test_operators_map_to_matrix_products(op: str, shapes: Any, sizes: dict[str, int], batch: int, flops: int) -> None:
    product_ = product(op, json.dumps(shapes))
    assert product_ is not None
    assert (dict(product_.sizes), product_.batch, product_.flops) == (sizes, batch, flops)


def test_flops_are_those_that_torch_counts() -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    x, w = torch.randn(2, 4, 10, 10, requires_grad=True), torch.randn(6, 4, 3, 3, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        out = torch.nn.functional.conv2d(x, w)
        forward = counted.get_total_flops()
        out.backward(torch.ones_like(out))
    shapes = json.dumps([list(out.shape), list(x.shape), list(w.shape)])
    product_ = product("aten::convolution_backward", shapes)
    assert product_ is not None
    assert product_.flops == counted.get_total_flops() - forward == 2 * forward


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "[[2]]", "[[2, 3], [4, 5]]", "{}", '[["a"]]', "[[1e9, 2], 3]"])
def test_impossible_shapes_give_no_product(text: str) -> None:
    assert product("aten::mm", text) is None
    assert product("aten::cudnn_convolution", text) is None
    assert product("aten::add", text) is None


def test_padding_is_counted_in_operations() -> None:
    product_ = product("aten::mm", "[[100, 63], [63, 64]]")
    assert product_ is not None
    padded = unaligned(product_.sizes, 8)
    assert padded == {"M": 104, "K": 64}
    assert padding_frac(product_, padded) == pytest.approx(104 / 100 * 64 / 63 - 1)


@pytest.mark.parametrize(
    ("name", "half"),
    [
        ("Tesla V100-SXM2-16GB", 125.0),
        ("Tesla V100-PCIE-16GB", 112.0),
        ("Tesla T4", 65.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", None),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Quadro P400", None),
    ],
)
def test_rates_are_those_of_the_gpu(name: str, half: float | None) -> None:
    rates = dense_rates(name)
    assert (rates.half if rates else None) == half
