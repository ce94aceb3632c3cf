"""Transformer Engine's debug logs become runs: text and TensorBoard, in the formats of nvdlfw-inspect."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import pytest

from amp_core import RunError, diagnose, load_run
from amp_core.__main__ import main
from amp_core.analysis.numerics.casts import conversion
from amp_core.interop import import_te
from amp_core.interop.te_logs import Statistic, parse_name

LAYER = "transformer_layer.self_attention.layernorm_qkv"
STATISTICS = {
    f"{LAYER}_activation_max": 4.3188,
    f"{LAYER}_activation_min": -4.5,
    f"{LAYER}_activation_mean": 0.0,
    f"{LAYER}_activation_std": 2.0,
    f"{LAYER}_activation_fp8_delayed_scaling_underflows%": 1.25,
    f"{LAYER}_activation_fp8_delayed_scaling_overflows%": 0.5,
    f"{LAYER}_activation_fp8_delayed_scaling_scale_inv_min": 0.0100,
    f"{LAYER}_activation_fp8_delayed_scaling_scale_inv_max": 0.0100,
    f"{LAYER}_activation_fp8_delayed_scaling_mse": 0.04,
    f"{LAYER}_activation_mxfp8_underflows%": 0.01,
    f"{LAYER}_gradient_cur_amax": 0.00004,
    f"{LAYER}_gradient_dynamic_range": 12.0,
    f"{LAYER}_gradient_fp8_delayed_scaling_underflows%": 31.5,
    f"{LAYER}_gradient_fp8_delayed_scaling_scale_inv_max": 0.00001,
    f"{LAYER}_weight_cur_amax": 0.5,
    f"{LAYER}_weight_max_blockwise_dynamic_range_block_size_32_dims_1": 8.0,
    "another thing": 1.0,
}


def write_text(folder: Path, statistics: Mapping[str, float] = STATISTICS, rank: int = 0) -> Path:
    """As FileLogger writes it."""
    place = folder / "nvdlfw_inspect_statistics_logs"
    place.mkdir(parents=True, exist_ok=True)
    lines = [
        f"2026-03-01 12:00:{step:02d},250 - INFO - {name} \t\t\t\t iteration={step:06d} \t\t\t\t value={value:.4f}"
        for step in (0, 2)
        for name, value in statistics.items()
    ]
    (place / f"nvdlfw_inspect_globalrank-{rank}.log").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def write_gemms(folder: Path) -> None:
    """As DebugQuantizer writes its plans."""
    place = folder / "nvdlfw_inspect_logs"
    place.mkdir()
    lines = ["2026-03-01 12:00:00,000 - INFO - Default logging to a file enabled at log"]
    for layer, how in ((LAYER, "FP8 Quantize"), ("transformer_layer.layernorm_mlp.fc1", "High Precision")):
        plans = {("activation", "fprop"): how, ("weight", "fprop"): how, ("gradient", "wgrad"): "modify_tensor()"}
        lines += [
            f"2026-03-01 12:00:00,000 - INFO - LAYER={layer}: Tensor: {tensor}, gemm {gemm} - {plan}"
            for (tensor, gemm), plan in plans.items()
        ]
        lines.append(f"2026-03-01 12:00:00,000 - INFO - LAYER={layer}: Tensor: output, gemm None - High Precision")
    (place / "nvdlfw_inspect_globalrank-0.log").write_text("\n".join(lines), encoding="utf-8")


def row(frame: pd.DataFrame, **conditions: object) -> dict[str, object]:
    for column, value in conditions.items():
        frame = frame[frame[column] == value]
    (found,) = frame.to_dict("records")
    return found


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("a.b_weight_underflows%", Statistic("a.b", "weight", "", "underflows%")),
        ("a_weight_weight_cur_amax", Statistic("a_weight", "weight", "", "cur_amax")),
        ("fc1_gradient_mxfp8_scale_inv_min_columnwise", Statistic("fc1", "gradient", "mxfp8", "scale_inv_min", True)),
        ("fc1_activation_nvfp4_mse", Statistic("fc1", "activation", "nvfp4", "mse")),
        ("a_weight_fp8_block_scaling_underflows_", Statistic("a", "weight", "fp8_block_scaling", "underflows%")),
        ("fc1_dgrad_std", Statistic("fc1", "dgrad", "", "std")),
        ("fc1_activation_kurtosis", None),
        ("loss", None),
    ],
)  # fmt: skip
def test_names_of_statistics(name: str, parsed: Statistic | None) -> None:
    assert parse_name(name) == parsed


def test_text_logs_become_a_run(tmp_path: Path) -> None:
    write_gemms(write_text(tmp_path / "log"))
    made = import_te([tmp_path / "log"], tmp_path / "run")
    run = load_run(tmp_path / "run")
    run.validate(full=True)
    assert made.recipe == "fp8-delayed" and run.steps["step"].tolist() == [0, 2]
    assert run.steps["time_s"].tolist() == [0.0, 2.0] and run.head.created_at.startswith("2026-03-01T12:00:00.250")
    of_input = row(run.quantized, step=2, kind="activation")
    assert of_input["name"] == LAYER and of_input["element"] == "fp8-e4m3" and of_input["recipe"] == "fp8-delayed"
    assert of_input["amax"] == 4.5 and of_input["scale"] == pytest.approx(100) == of_input["scale_max"]
    assert of_input["underflow_frac"] == 0.0125 and of_input["saturated_frac"] == 0.005
    assert of_input["rel_error"] == pytest.approx((0.04 / 4) ** 0.5)
    gradient = row(run.quantized, step=2, kind="output_grad")
    assert gradient["underflow_frac"] == 0.315 and gradient["element"] == "fp8-e5m2"
    assert gradient["scale"] != gradient["scale"] and gradient["amax"] != gradient["amax"]  # null: printed as 0.0000
    weight = row(run.tensors(kind="weight"), step=0)
    assert weight["name"] == f"{LAYER}.weight" and weight["absmax"] == 0.5
    assert run.tensors(kind="activation").empty  # TE's activation is the layer's input, a run's the module's output
    assert {"another thing", "activation mxfp8_underflows%"} <= set(made.left_out)


def test_the_tools_own_log_tells_which_layers_are_quantized(tmp_path: Path) -> None:
    write_gemms(write_text(tmp_path / "log"))
    import_te([tmp_path / "log"], tmp_path / "run")
    seen = conversion(load_run(tmp_path / "run"))
    assert seen is not None and (seen.converted, seen.layers) == (1, 2)
    assert seen.left["name"].tolist() == ["transformer_layer.layernorm_mlp.fc1"]


def test_ranks_have_rows_of_their_own(tmp_path: Path) -> None:
    for rank in (0, 1):
        write_text(tmp_path / "log", {f"{LAYER}_weight_underflows%": float(rank)}, rank)
    import_te([tmp_path / "log"], tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.head.world_size == 2
    shares = run.quantized.groupby("rank")["underflow_frac"].max().to_dict()
    assert shares == {0: 0.0, 1: 0.01} and run.quantized["recipe"].isna().all()


def test_tensorboard_logs_become_the_same_rows_with_all_digits(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    torch = pytest.importorskip("torch")
    from torch.utils.tensorboard import SummaryWriter

    del torch
    with SummaryWriter(str(tmp_path / "tb")) as writer:
        for step in (0, 2):
            for name, value in STATISTICS.items():
                writer.add_scalar(name, value, step)
    import_te([tmp_path / "tb"], tmp_path / "run")
    frame = load_run(tmp_path / "run").quantized
    gradient = row(frame, step=2, kind="output_grad")
    assert gradient["scale"] == pytest.approx(1e5) and gradient["amax"] == pytest.approx(4e-5)
    assert row(frame, step=0, kind="activation")["underflow_frac"] == 0.0125


def test_both_logs_of_one_training_are_the_same_rows_with_all_digits(tmp_path: Path) -> None:
    """The tool writes text beside the event files of a writer that it is given."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(write_text(tmp_path / "log") / "tensorboard")) as writer:
        for step in (0, 2):
            writer.add_scalar(f"{LAYER}_gradient_cur_amax", STATISTICS[f"{LAYER}_gradient_cur_amax"], step)
    assert import_te([tmp_path / "log"], tmp_path / "run").layers == 1
    frame = load_run(tmp_path / "run").quantized
    assert len(frame) == 2 * len(frame["kind"].unique())
    gradient = row(frame, step=2, kind="output_grad")
    assert gradient["amax"] == pytest.approx(4e-5) and pd.isna(gradient["scale"])  # 0.0000 in the text


def test_block_recipes_have_a_product_per_orientation(tmp_path: Path) -> None:
    statistics = {f"fc1_activation_mxfp8_underflows%{way}": 1.0 for way in ("", "_columnwise")}
    write_text(tmp_path / "log", statistics)
    import_te([tmp_path / "log"], tmp_path / "run")
    frame = load_run(tmp_path / "run").quantized
    assert set(frame["product"]) == {"forward", "weight_grad"} and set(frame["block"]) == {"32"}


@pytest.mark.parametrize("recipe", ["fp8_delayed_scaling_", ""])
def test_findings_work_on_an_imported_run(recipe: str, tmp_path: Path) -> None:
    write_text(tmp_path / "log", {k.replace("fp8_delayed_scaling_", recipe): v for k, v in STATISTICS.items()})
    import_te([tmp_path / "log"], tmp_path / "run")
    codes = {finding.code for finding in diagnose(load_run(tmp_path / "run"))}
    assert "quantized-gradient-underflow" in codes


def test_the_command_prints_what_was_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_text(tmp_path / "log")
    assert main(["import-te", str(tmp_path / "log"), "--out", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "1 layer, recipe: fp8-delayed" in printed and "quantized: 4 rows" in printed and "another thing" in printed


@pytest.mark.parametrize("content", [None, "", "no statistics here\n", "x" * 100_000])
def test_a_folder_without_statistics_is_refused_and_writes_nothing(content: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    if content is not None:
        (folder / "a.log").write_text(content)
    with pytest.raises(RunError, match="holds n"):
        import_te([folder], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist"):
        import_te([tmp_path / "none"], tmp_path / "run")
