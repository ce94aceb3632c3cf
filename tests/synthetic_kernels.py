"""A profiled window of a small transformer without a GPU: rows of `kernels` and `windows` made up by hand.

    write(tmp_path / "a", "profiled")                 # a scenario of tests.synthetic that has such a window
    add_window(writer, "fp16")                        # or into a run of one's own; KINDS has the others

Names are of the kind that a profiler gives on an A100; times are invented, and add up: one stream, 3 steps, so the
kernels' times are the busy time. `fp32` is the same work without TF32, `cpu` the same as operators of a CPU.
"""

import json
from typing import Any

from amp_core.store.writer import RunWriter

GPU = {"name": "NVIDIA A100-SXM4-80GB", "capability": "8.0", "memory_bytes": 85_000_000_000, "multiprocessors": 108}
KINDS = ("fp16", "fp32", "cpu")
FIRST, STEPS = 20, 3

_X, _W = [4096, 768], [768, 3072]


def kernel(
    name: str,
    us: float,
    count: int,
    category: str,
    op: str,
    tensor_core: str | None = "no",
    *,
    module: str = "blocks.0.fc",
    phase: str = "forward",
    shapes: Any = (),
    dtypes: Any = (),
    precision: str | None = None,
) -> dict[str, Any]:
    """One row of `kernels`."""
    return {
        "step": FIRST,
        "steps": STEPS,
        "device": "cuda:0",
        "name": name,
        "count": count,
        "total_us": us,
        "tensor_core": tensor_core,
        "precision": precision,
        "op": op,
        "top_op": op,
        "module": module,
        "phase": phase,
        "category": category,
        "in_shapes": json.dumps(shapes) if shapes else None,
        "in_dtypes": json.dumps(dtypes) if dtypes else None,
    }


def _gemm(us: float, op: str, shapes: Any, kind: str, count: int = 36, **place: Any) -> dict[str, Any]:
    """A matrix product: on tensor cores in FP16 at some 200 TFLOP/s, thirteen times as long on CUDA cores in FP32."""
    half = kind == "fp16"
    name = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn" if half else "ampere_sgemm_128x64_tn"
    about = {"shapes": shapes, "dtypes": [_dtype(kind)] * len(shapes), "precision": kind} | place
    return kernel(name, us if half else 13 * us, count, "gemm", op, "yes" if half else "no", **about)


def _dtype(kind: str) -> str:
    return "c10::Half" if kind == "fp16" else "float"


def kernels(kind: str) -> list[dict[str, Any]]:
    """Rows of `kernels` of one window."""
    if kind == "cpu":
        rows = [row for row in kernels("fp32") if row["category"] not in ("memcpy", "communication", "layout")]
        return [_on_cpu(row) for row in rows]
    half = kind == "fp16"
    rows = [
        _gemm(3600.0, "aten::addmm", [[3072], _X, _W], kind),
        _gemm(3400.0, "aten::mm", [_X, [768, 3072]], kind, phase="backward"),
        _gemm(4900.0, "aten::mm", [_X, [768, 50257]], kind, 3, module="head"),
        *_attention(kind),
        kernel("vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", 2200.0 if half else 3900.0, 400,
               "elementwise", "aten::add", phase="backward"),
        kernel("vectorized_layer_norm_kernel<float>", 900.0 if half else 1400.0, 75, "norm", "aten::native_layer_norm",
               module="blocks.0.norm"),
        kernel("softmax_warp_forward<float>", 500.0, 3, "reduction", "aten::_log_softmax", module="loss"),
        kernel("indexSelectLargeIndex<float>", 200.0, 3, "embedding", "aten::embedding", module="embed"),
        kernel("cudnn::nchwToNhwcKernel<float>", 250.0, 30, "layout", "aten::cudnn_convolution", module="stem"),
        kernel("multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", 1300.0, 12, "optimizer",
               "aten::_fused_adamw_", module="", phase="optimizer"),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 900.0, 6, "communication", "nccl:all_reduce", module="",
               phase="backward"),
        kernel("Memcpy HtoD (Pinned -> Device)", 150.0, 3, "memcpy", "aten::copy_", module="", phase="data"),
        kernel("_count_exponents", 180.0, 3, "other", "", module="", phase="watch"),
    ]  # fmt: skip
    if half:
        cast = "unrolled_elementwise_kernel<direct_copy_kernel_cuda<float, c10::Half>>"
        rows.append(kernel(cast, 700.0, 220, "cast", "aten::copy_", shapes=[_W], dtypes=["float"]))
    return rows


def _attention(kind: str) -> list[dict[str, Any]]:
    """Attention, a product that Triton generated, and one in FP32 within it that autocast does not reach."""
    half = kind == "fp16"
    flash, efficient = (
        "pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>",
        "fmha_cutlassF_f32_aligned_64x64_rf_sm80",
    )
    return [
        kernel(flash if half else efficient, 1500.0 if half else 9000.0, 36, "attention",
               "aten::_scaled_dot_product_flash_attention", "yes" if half else "unknown", precision=kind,
               module="blocks.0.attention", shapes=[[8, 12, 512, 64]] * 3, dtypes=[_dtype(kind)] * 3),
        kernel("triton_tem_fused_mm_0", 400.0, 36, "gemm", "aten::mm", "unknown", module="blocks.0.mlp",
               shapes=[_X, [768, 64]], dtypes=[_dtype(kind)] * 2),
        kernel("cutlass_80_simt_sgemm_64x64_8x5_nn_align1", 900.0, 36, "gemm", "aten::bmm", precision="fp32",
               module="blocks.0.attention.bias", shapes=[[8, 512, 63], [8, 63, 512]], dtypes=["float"] * 2),
    ]  # fmt: skip


def _on_cpu(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"name": row["op"] or "aten::histc", "device": "cpu", "tensor_core": None, "precision": None,
                  "total_us": row["total_us"] * 40}  # fmt: skip


def window(kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of `windows` that goes with `rows`."""
    busy = sum(row["total_us"] for row in rows)
    idle = 0.25 * busy
    communication = sum(row["total_us"] for row in rows if row["category"] == "communication")
    watch = sum(row["total_us"] for row in rows if row["phase"] == "watch")
    return {
        "step": FIRST,
        "steps": STEPS,
        "device": rows[0]["device"],
        "device_name": "" if kind == "cpu" else GPU["name"],
        "wall_us": busy + idle,
        "busy_us": busy,
        "idle_us": idle,
        "data_us": 0.4 * idle,
        "idle_data_us": 0.3 * idle,
        "watch_us": watch + 0.1 * idle,
        "kernel_us": busy,
        "launches": None if kind == "cpu" else sum(row["count"] for row in rows),
        "cast_us": sum(row["total_us"] for row in rows if row["category"] == "cast"),
        "communication_us": communication,
        "communication_alone_us": communication,
        "sync_us": 0.0,
        "syncs": 0,
    }


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Rows as a writer takes them."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def add_window(writer: RunWriter, kind: str) -> None:
    """Append one profiled window of this kind."""
    rows = kernels(kind)
    writer.append("kernels", columns(rows))
    writer.append("windows", columns([window(kind, rows)]))
