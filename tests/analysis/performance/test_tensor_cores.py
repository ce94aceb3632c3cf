"""Shares of tensor cores, the hardware counter, and kernel time summed by several keys."""

from pathlib import Path
from typing import Any

import pytest

from amp_core import Run, RunError, load_run
from amp_core.analysis import kernel_table, profiled_windows, tensor_core_shares, tensor_core_use
from amp_core.store.writer import RunWriter
from tests.synthetic import write
from tests.synthetic_kernels import FIRST, GPU, STEPS, columns, kernel, kernels, window


def run_with_kernels(folder: Path, rows: list[dict[str, Any]], gpu: dict[str, Any] | None = GPU, **tables: Any) -> Run:
    """A run with exactly these kernels."""
    with RunWriter(folder, name="made", environment={"gpus": [gpu]} if gpu else {}) as writer:
        writer.append("kernels", columns(rows))
        for table, content in tables.items():
            writer.append(table, content)
    return load_run(folder)


THREE = [
    kernel("ampere_fp16_s16816gemm", 60.0, 3, "gemm", "aten::mm", "yes", precision="fp16"),
    kernel("triton_tem_fused_mm_0", 20.0, 1, "gemm", "aten::mm", "unknown"),
    kernel("volta_sgemm_32x32_nn", 10.0, 1, "gemm", "aten::bmm", "no", precision="fp32", phase="backward"),
    kernel("vectorized_elementwise_kernel", 110.0, 9, "elementwise", "aten::add", "no"),
    kernel("_count_exponents", 500.0, 1, "other", "", "no", phase="watch"),
    kernel("Memcpy HtoD (Pinned -> Device)", 700.0, 1, "memcpy", "aten::copy_", "no"),
]


def test_shares_are_of_kernel_time_without_watching_and_copies(tmp_path: Path) -> None:
    use = tensor_core_use(run_with_kernels(tmp_path / "r", THREE))
    assert (use.kernel_us, use.matrix_us) == (200.0, 90.0)
    assert (use.tensor_frac, use.unknown_frac, use.matrix_frac) == (0.3, 0.1, 0.45)
    assert use.matrix_tensor_frac == pytest.approx(2 / 3) and use.matrix_unknown_frac == pytest.approx(2 / 9)
    assert (use.capability, use.has_tensor_cores, use.on_cpu) == ((8, 0), True, False)
    assert use.tensor_wall_frac is None and use.counter_frac is None  # neither windows nor samples were recorded


def test_matrix_products_elsewhere_are_distinguished_from_other_kernels(tmp_path: Path) -> None:
    shares = tensor_core_shares(run_with_kernels(tmp_path / "r", THREE)).set_index(["of", "answer"])["us"]
    assert shares["all kernels"].to_dict() == {"yes": 60.0, "unknown": 20.0, "no": 10.0, "none": 110.0}
    assert shares["matrix kernels"].to_dict() == {"yes": 60.0, "unknown": 20.0, "no": 10.0}


def test_kernel_time_is_the_same_total_for_every_grouping(tmp_path: Path) -> None:
    run = run_with_kernels(tmp_path / "r", THREE)
    for by in ("kernel", "op", "module", "phase", "category", "precision"):
        table = kernel_table(run, by)
        assert table["total_us"].sum() == 200.0 and table["time_frac"].sum() == pytest.approx(1.0)
        assert table["count"].sum() == 14 and table["total_us"].is_monotonic_decreasing
    by_op = kernel_table(run, "op").set_index("name")
    assert by_op.loc["aten::mm", ["tensor_frac", "unknown_frac"]].tolist() == [0.75, 0.25]
    assert by_op.loc["aten::bmm", "matrix_frac"] == 1.0 and by_op.loc["aten::add", "matrix_frac"] == 0.0
    with pytest.raises(RunError, match="by='layer' is unknown; choose one of kernel, op, module"):
        kernel_table(run, "layer")


def test_a_cpu_has_operators_and_no_answer(runs: dict[str, Run]) -> None:
    use = tensor_core_use(runs["profiled-cpu"])
    assert use.on_cpu and use.has_tensor_cores is use.tensor_frac is use.unknown_frac is use.counter_frac is None
    assert use.matrix_frac is not None and use.matrix_frac > 0.5
    assert kernel_table(runs["profiled-cpu"])["tensor_frac"].isna().all()
    assert tensor_core_shares(runs["profiled-cpu"]).empty


def test_recorded_tensor_cores_on_a_cpu_are_ignored(tmp_path: Path) -> None:
    run = run_with_kernels(tmp_path / "r", [kernel("aten::mm", 5.0, 1, "gemm", "aten::mm", "yes") | {"device": "cpu"}])
    assert tensor_core_use(run).on_cpu and tensor_core_shares(run).empty


def test_an_invalid_tensor_core_value_counts_as_unknown(tmp_path: Path) -> None:
    run = run_with_kernels(tmp_path / "r", [kernel("k", 5.0, 1, "gemm", "aten::mm", "perhaps")])
    assert tensor_core_use(run).unknown_frac == 1.0


def test_the_counter_is_reported_with_the_shares(tmp_path: Path) -> None:
    step = {"step": list(range(30)), "time_s": [0.1 * (i + 1) for i in range(30)]}
    times = [1.95, 2.05, 2.15, 2.25, 2.95]
    device = {"time_s": times, "tensor_active_frac": [0.9, 0.3, 0.4, 0.5, None]}
    windows = columns([window("fp16", THREE)])
    run = run_with_kernels(tmp_path / "within", THREE, steps=step, device=device, windows=windows)
    use = tensor_core_use(run)
    assert (use.counter_where, use.counter_samples) == ("window", 3)  # steps 20 to 22 end at 2.1, 2.2 and 2.3 s
    assert use.counter_frac == pytest.approx(0.4)
    assert use.tensor_wall_frac == pytest.approx(60 / windows["wall_us"][0])
    few = {"time_s": [0.2, 1.5, 2.05], "tensor_active_frac": [0.9, 0.3, 0.4]}
    use = tensor_core_use(run_with_kernels(tmp_path / "few", THREE, steps=step, device=few, windows=windows))
    assert (use.counter_where, use.counter_samples) == ("run", 2)  # the sample of the warm-up is excluded
    assert use.counter_frac == pytest.approx(0.35)


def test_the_reason_for_a_missing_counter_comes_from_the_run(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "r", name="r", environment={"gpus": [GPU | {"capability": "9.0"}]}) as writer:
        writer.append("kernels", columns(THREE))
        detail = "power_w: not supported; sm_active_frac, tensor_active_frac: not permitted to this user"
        writer.event("warning", name="not recorded", detail=detail)
    use = tensor_core_use(load_run(tmp_path / "r"))
    assert use.counter_frac is None and use.counter_why == "not permitted to this user"
    assert tensor_core_use(run_with_kernels(tmp_path / "silent", THREE)).counter_why == ""


def test_windows_are_analysed_separately_or_together(tmp_path: Path) -> None:
    later = [row | {"step": 40, "total_us": 2 * row["total_us"]} for row in THREE]
    run = run_with_kernels(tmp_path / "r", THREE + later)
    assert profiled_windows(run)[["step", "steps", "devices", "kernel_us"]].values.tolist() == [
        [FIRST, STEPS, 1, 200.0],
        [40, STEPS, 1, 400.0],
    ]
    assert tensor_core_use(run, 40).kernel_us == 400.0 and tensor_core_use(run).kernel_us == 600.0
    assert kernel_table(run, "op", 40)["total_us"].sum() == 400.0


def test_a_trace_that_marks_no_steps_is_one_window(tmp_path: Path) -> None:
    run = run_with_kernels(tmp_path / "r", [row | {"step": None, "steps": None} for row in THREE], gpu=None)
    windows = profiled_windows(run)
    assert len(windows) == 1 and windows["step"].isna().all()
    use = tensor_core_use(run)
    assert use.kernel_us == 200.0 and use.has_tensor_cores is None


def test_kernels_launched_outside_marked_steps_are_in_no_window(tmp_path: Path) -> None:
    outside = [row | {"step": None, "steps": None} for row in THREE]
    run = run_with_kernels(tmp_path / "r", THREE + outside)
    assert tensor_core_use(run).kernel_us == 200.0 and len(profiled_windows(run)) == 1


def test_kernels_without_categories_are_classified_by_their_operator(tmp_path: Path) -> None:
    row = {"step": [0], "name": ["volta_sgemm_128x64_nn"], "count": [1], "total_us": [9.0], "tensor_core": ["no"]}
    run = run_with_kernels(tmp_path / "r", [kernel("x", 1.0, 1, "", "aten::mm", "no")], kernels=row)
    assert tensor_core_use(run).matrix_us == 1.0  # aten::mm is a matrix product; the other kernel is unknown


def test_without_a_window_there_is_no_share(runs: dict[str, Run], tmp_path: Path) -> None:
    use = tensor_core_use(runs["healthy"])
    assert use.windows == 0 and use.tensor_frac is None and profiled_windows(runs["healthy"]).empty
    assert kernel_table(runs["healthy"]).empty
    whole = load_run(write(tmp_path / "r", "profiled"))
    left_out = [row for row in kernels("fp16") if row["category"] == "memcpy" or row["phase"] == "watch"]
    assert len(left_out) == 2 and whole.kernels["total_us"].sum() == pytest.approx(
        tensor_core_use(whole).kernel_us + sum(row["total_us"] for row in left_out)
    )
