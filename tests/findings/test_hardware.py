"""Counts per step in a profile of several windows."""

from pathlib import Path

import pytest

from amp_core import load_run
from amp_core.findings import diagnose
from amp_core.store.writer import RunWriter
from tests.findings.zoo.hardware import A100, SGEMM, gpu_run, kernel
from tests.synthetic import write_rows


@pytest.mark.parametrize(("waits", "result"), [(1, None), (4, 4.0)])
def test_waits_are_counted_per_step_over_all_windows(tmp_path: Path, waits: int, result: float | None) -> None:
    """Three windows of two steps with `waits` waits per step; none has a row in `windows`."""
    kernels = {
        "step": [10, 20, 30, 10],
        "steps": [2, 2, 2, 2],
        "name": ["cudaStreamSynchronize"] * 3 + ["gemm"],
        "count": [2 * waits] * 3 + [1],
        "total_us": [1.0] * 4,
        "device": ["cuda:0"] * 4,
    }
    run = load_run(write_rows(tmp_path / "run", kernels=kernels, config={"device": "cuda:0"}))
    assert [f.value for f in diagnose(run) if f.code == "host-syncs"] == ([] if result is None else [result])


def test_a_wait_outside_operators_is_reported_by_its_own_name(tmp_path: Path) -> None:
    kernels = {
        "step": [1, 1],
        "steps": [1, 1],
        "name": ["cudaStreamSynchronize", "gemm"],
        "count": [9, 1],
        "total_us": [1.0, 1.0],
        "device": ["cuda:0", "cuda:0"],
    }
    run = load_run(write_rows(tmp_path / "run", kernels=kernels, config={"device": "cuda:0"}))
    assert [f.where for f in diagnose(run) if f.code == "host-syncs"] == ["cudaStreamSynchronize"]


def test_a_bilinear_layer_is_not_expected_in_16_bits_under_autocast(tmp_path: Path) -> None:
    """In a run without traced operators: its output gradient is FP32 under autocast, as it should be."""
    model = {
        "layers": {"pair": "Bilinear", "fc": "Linear"},
        "shapes": {"pair.weight": [9, 9, 9], "fc.weight": [16, 16]},
    }
    tensors = {
        "step": [0, 0],
        "name": ["pair", "fc"],
        "kind": ["output_grad"] * 2,
        "dtype": ["float32", "bfloat16"],
    }
    config = {"autocast_dtype": "bfloat16", "device": "cuda:0"}
    with RunWriter(tmp_path / "run", config=config, model=model) as writer:
        writer.append("tensors", tensors)
    assert not {"autocast-inactive", "unaligned-dims"} & {f.code for f in diagnose(load_run(tmp_path / "run"))}


@pytest.mark.parametrize(("device", "found"), [("cuda:0", False), ("cuda:1", True)])
def test_a_gpu_without_tensor_cores_is_the_one_of_the_run(device: str, found: bool, tmp_path: Path) -> None:
    h100 = {"name": "NVIDIA H100", "capability": "9.0"}
    gtx = {"name": "NVIDIA GeForce GTX 1650", "capability": "7.5"}
    config = {"precision": "fp16", "autocast_dtype": "float16", "device": device, "optimizers": ["AdamW"]}
    with RunWriter(tmp_path / "run", config=config, environment={"gpus": [h100, gtx]}) as writer:
        for step in range(20):
            writer.append("steps", {"step": [step], "loss": [1.0], "skipped": [False]})
    where = {f.code: f.where for f in diagnose(load_run(tmp_path / "run"))}
    assert where.get("no-tensor-cores-on-device") == (gtx["name"] if found else None)


@pytest.mark.parametrize("tf32", [False, True])
def test_fp32_attention_of_three_products_in_tf32_is_fp32(tf32: bool, tmp_path: Path) -> None:
    attention = ("fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", "yes", "tf32")
    name = "sm80_xmma_gemm_tf32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_kernel"
    product = kernel((name, "yes", "tf32"), 8000.0) if tf32 else kernel(SGEMM, 8000.0)
    gpu_run(tmp_path / "run", [kernel(attention, 1000.0), product], "fp32", A100)
    found = [f for f in diagnose(load_run(tmp_path / "run")) if f.code == "tf32-baseline"]
    assert len(found) == tf32
