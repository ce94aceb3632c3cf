"""Faults that need a GPU, as the rows that a profiled run on a GPU would have."""

from pathlib import Path
from typing import Any

from amp_core.store.writer import RunWriter
from tests.findings.zoo.case import case

A100 = {"name": "NVIDIA A100-SXM4-80GB", "capability": "8.0"}
GTX = {"name": "NVIDIA GeForce GTX 1650", "capability": "7.5"}
TENSOR = ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", "yes", "fp16")
SGEMM = ("ampere_sgemm_128x64_tn", "no", "fp32")
HGEMM = ("cutlass_80_simt_hgemm_256x128_8x4_nt_align1", "no", "fp16")
TF32 = ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_execute_kernel__5x_cublas", "yes", "tf32")


def kernel(kind: tuple[str, str, str], us: float, **more: Any) -> dict[str, Any]:
    """One row of `kernels`."""
    name, tensor_core, precision = kind
    row = {"step": 10, "steps": 3, "device": "cuda:0", "count": 300, "category": "gemm", "op": "aten::mm"}
    row |= {"name": name, "tensor_core": tensor_core, "precision": precision, "total_us": us, "phase": "forward"}
    return row | {"module": "blocks.0.mlp.up"} | more


def elementwise(us: float, name: str = "vectorized_elementwise_kernel", **more: Any) -> dict[str, Any]:
    """A row of a kernel that is not a matrix product."""
    return kernel((name, "no", ""), us, category="elementwise", op="aten::add", module="blocks.0.norm") | more


def gpu_run(
    into: Path, rows: list[dict[str, Any]], precision: str = "fp16", gpu: dict[str, str] = A100, **tables: Any
) -> None:
    """A run of 20 steps on a GPU with these kernels."""
    autocast = {"fp16": "float16", "bf16": "bfloat16"}.get(precision)
    config = {"precision": precision, "autocast_dtype": autocast, "device": "cuda:0", "optimizers": ["AdamW"]}
    config["scaler"] = {"enabled": True} if precision == "fp16" else None
    environment = {"gpus": [gpu], "flags": tables.pop("flags", {})}
    with RunWriter(
        into, config=config | tables.pop("config", {}), environment=environment, model=tables.pop("model", {})
    ) as writer:
        steps = list(range(20))
        writer.append(
            "steps",
            {
                "step": steps,
                "loss": [1.0 + s / 7 for s in steps],
                "loss_scale": [2.0**16] * 20,
                "step_ms": [10.0] * 20,
                "memory_peak_bytes": [10_000] * 20,
            },
        )
        if rows:
            writer.append("kernels", {c: [row.get(c) for row in rows] for c in rows[0]})
        for table, columns in tables.items():
            if table == "events":
                for event in columns:
                    writer.event(**event)
            else:
                writer.append(table, columns)


@case("tf32-baseline", "blocks.0.mlp.up")
def tf32(into: Path, faulty: bool) -> None:
    gpu_run(into, [kernel(TF32 if faulty else SGEMM, 9000.0), elementwise(900.0)], "fp32")


@case("tf32-baseline", "allow_tf32")
def tf32_switch(into: Path, faulty: bool) -> None:
    gpu_run(into, [], "fp32", flags={"tf32_matmul": faulty, "tf32_cudnn": True})


@case("no-tensor-cores-on-device", "GTX 1650")
def gtx(into: Path, faulty: bool) -> None:
    gpu_run(into, [kernel(TENSOR, 27_000.0)], gpu=GTX if faulty else A100)


@case("launch-bound", "forward")
def launches(into: Path, faulty: bool) -> None:
    busy = 6_000.0 if faulty else 27_000.0
    window = {"step": [10], "steps": [3], "device": ["cuda:0"], "wall_us": [30_000.0], "busy_us": [busy]}
    window |= {"idle_us": [30_000.0 - busy], "idle_data_us": [0.0]}
    gpu_run(into, [kernel(TENSOR, busy, count=3000)], windows=window)


@case("launch-bound", "forward")
def launches_without_window(into: Path, faulty: bool) -> None:
    gpu_run(into, [kernel(TENSOR, 6_000.0 if faulty else 27_000.0, count=3000)])


@case("kernels-off-tensor-cores", "blocks.3.conv")
def off(into: Path, faulty: bool) -> None:
    gpu_run(into, [kernel(TENSOR, 7000.0), kernel(HGEMM if faulty else TENSOR, 3000.0, module="blocks.3.conv")])


@case("unaligned-dims", "head")
def vocabulary(into: Path, faulty: bool) -> None:
    model = {"layers": {"head": "Linear", "up": "Linear"}}
    model["shapes"] = {"head.weight": [33708 if faulty else 33712, 512], "up.weight": [2048, 512]}
    gpu_run(into, [], model=model)


@case("layout-transposes", "conv1")
def transposes(into: Path, faulty: bool) -> None:
    turn = elementwise(
        2000.0 if faulty else 20.0,
        "void cudnn::ops::nchwToNhwcKernel<__half, __half, float>",
        category="layout",
        op="aten::cudnn_convolution",
        module="conv1",
    )
    gpu_run(into, [kernel(TENSOR, 7000.0), turn])


@case("memory-not-lower", "optimizer")
def states(into: Path, faulty: bool) -> None:
    part = 1000 if not faulty else 2200
    row = {"step": 0, "number": 0, "device": "cuda:0", "allocated_bytes": 9000, "parameters_bytes": part}
    row |= {"gradients_bytes": part, "optimizer_bytes": 2 * part, "activations_bytes": 9000 - 4 * part}
    gpu_run(into, [], memory={c: [v] for c, v in row.items()})


@case("host-syncs", "aten::_local_scalar_dense")
def syncs(into: Path, faulty: bool) -> None:
    wait = elementwise(
        10.0,
        "Memcpy DtoH (Device -> Pageable)",
        op="aten::_local_scalar_dense",
        category="memcpy",
        count=12 if faulty else 3,
    )
    gpu_run(into, [kernel(TENSOR, 7000.0), wait])


@case("host-syncs", "get_scale")
def scale_asked_for(into: Path, faulty: bool) -> None:
    calls = "scale backward scaler.step update" + (" get_scale" if faulty else "")
    gpu_run(into, [], events=[{"kind": "calls", "name": calls, "step": 0}])


@case("autocast-inactive", "blocks.2.router")
def wide_kernels(into: Path, faulty: bool) -> None:
    gpu_run(into, [kernel(TENSOR, 8000.0), kernel(SGEMM, 2000.0 if faulty else 100.0, module="blocks.2.router")])
