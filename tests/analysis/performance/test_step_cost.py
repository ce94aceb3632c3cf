"""The cost of a step: parts that add up, Amdahl's bound, and the comparison of two runs."""

import math
from pathlib import Path
from typing import Any

import pytest

from amp_core import Run, RunError, load_run
from amp_core.analysis import amdahl, compare_step_cost, phase_cost, speed_summary, step_cost
from amp_core.text.formatting import percent
from tests.analysis.performance.test_tensor_cores import run_with_kernels
from tests.paths import ROOT
from tests.synthetic_kernels import STEPS, columns, kernel, kernels, window

GEMM = kernel("gemm", 400.0, 1, "gemm", "aten::mm", "yes")
ADD = kernel("add", 200.0, 1, "elementwise", "aten::add")
COPY = kernel("Memcpy HtoD (Pinned -> Device)", 200.0, 1, "memcpy", "aten::copy_")
REDUCE = kernel("nccl", 300.0, 1, "communication", "nccl:all_reduce")


def cost_of(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Any:
    about = window("fp16", rows) | {"watch_us": None} | changes
    return step_cost(run_with_kernels(folder, rows, windows=columns([about])))


def us(cost: Any) -> dict[str, float]:
    """Time of each part in the whole window."""
    return {part: STEPS * value for part, value in zip(cost.parts["part"], cost.parts["us"], strict=True)}


@pytest.mark.parametrize("name", ["profiled", "profiled-fp32", "profiled-cpu", "healthy", "sample fp16-healthy"])
def test_parts_add_up_to_the_step(name: str, runs: dict[str, Run]) -> None:
    cost = step_cost(runs[name])
    assert cost.source == ("phases" if name == "healthy" else "profile")
    assert cost.parts["us"].sum() == pytest.approx(cost.step_us, rel=1e-9) and cost.step_us > 0
    assert cost.parts["frac"].sum() == pytest.approx(1.0) and (cost.parts["us"].dropna() >= 0).all()


def test_each_kernel_counts_for_its_part(runs: dict[str, Run]) -> None:
    cost = step_cost(runs["profiled"])
    parts = us(cost)
    rows = kernels("fp16")
    wall = window("fp16", rows)["wall_us"]
    assert STEPS * cost.step_us == pytest.approx(wall)
    assert parts["tensor"] == pytest.approx(sum(r["total_us"] for r in rows if r["tensor_core"] == "yes"))
    assert parts["matrix_unknown"] == pytest.approx(400.0) and parts["matrix"] == pytest.approx(900.0)
    assert parts["cast"] == pytest.approx(700.0) and parts["layout"] == pytest.approx(250.0)
    assert parts["memory_bound"] == pytest.approx(2200 + 900 + 500 + 200)
    assert parts["optimizer"] == pytest.approx(1300.0) and parts["copy"] == pytest.approx(150.0)
    assert parts["communication"] == pytest.approx(900.0) and parts["other"] == pytest.approx(0.0, abs=1e-6)
    idle = window("fp16", rows)["idle_us"]
    assert parts["data"] == pytest.approx(0.3 * idle) and parts["watch"] == pytest.approx(180 + 0.1 * idle)
    assert parts["gaps"] == pytest.approx(0.6 * idle)


def test_kernels_in_the_optimizer_phase_count_for_the_optimizer(tmp_path: Path) -> None:
    rows = [GEMM, GEMM | {"phase": "optimizer", "total_us": 50.0}]
    parts = us(cost_of(tmp_path / "r", rows))
    assert (parts["tensor"], parts["optimizer"]) == pytest.approx((400.0, 50.0))


def test_on_a_cpu_operators_that_load_data_count_as_waiting_for_data(tmp_path: Path) -> None:
    rows = [row | {"device": "cpu", "tensor_core": None} for row in (GEMM, ADD, ADD | {"phase": "data"})]
    recorded = {"busy_us": 800.0, "idle_us": 100.0, "wall_us": 900.0, "idle_data_us": 40.0}
    parts = us(cost_of(tmp_path / "r", rows, **recorded))
    assert (parts["data"], parts["gaps"], parts["memory_bound"]) == pytest.approx((240.0, 60.0, 200.0))
    assert sum(parts.values()) == pytest.approx(900.0)


def test_communication_counts_only_while_nothing_else_runs(tmp_path: Path) -> None:
    rows = [GEMM, ADD, REDUCE]
    recorded = {"busy_us": 650.0, "idle_us": 100.0, "wall_us": 750.0, "idle_data_us": 0.0, "kernel_us": 900.0}
    cost = cost_of(tmp_path / "a", rows, **recorded, communication_alone_us=50.0)
    assert us(cost)["communication"] == pytest.approx(50.0) and STEPS * cost.overlap_us == pytest.approx(250.0)
    assert (us(cost)["tensor"], us(cost)["memory_bound"]) == pytest.approx((400.0, 200.0))
    guessed = cost_of(tmp_path / "b", rows, **recorded, communication_alone_us=None)
    # Overlapping time is subtracted from communication first.
    assert us(guessed)["communication"] == pytest.approx(50.0)
    assert sum(us(guessed).values()) == pytest.approx(750.0)


def test_copies_count_only_while_no_kernel_runs(tmp_path: Path) -> None:
    rows = [GEMM, ADD, COPY]
    recorded = {"busy_us": 650.0, "idle_us": 100.0, "wall_us": 750.0, "idle_data_us": 0.0, "kernel_us": 800.0}
    parts = us(cost_of(tmp_path / "a", rows, **recorded, communication_alone_us=0.0, copies_alone_us=50.0))
    assert (parts["copy"], parts["tensor"], parts["memory_bound"]) == pytest.approx((50.0, 400.0, 200.0))
    older = us(cost_of(tmp_path / "b", rows, **recorded, communication_alone_us=0.0, copies_alone_us=None))
    assert older["copy"] > 100.0 and sum(older.values()) == pytest.approx(750.0)


def test_concurrent_kernels_share_their_busy_time(tmp_path: Path) -> None:
    recorded = {"busy_us": 300.0, "idle_us": 0.0, "wall_us": 300.0, "idle_data_us": 0.0}
    parts = us(cost_of(tmp_path / "r", [GEMM, ADD], **recorded))
    assert (parts["tensor"], parts["memory_bound"]) == pytest.approx((200.0, 100.0))


def test_busy_time_that_no_kernel_explains_is_other(tmp_path: Path) -> None:
    recorded = {"busy_us": 700.0, "idle_us": 0.0, "wall_us": 700.0, "idle_data_us": 0.0}
    assert us(cost_of(tmp_path / "r", [GEMM, ADD], **recorded))["other"] == pytest.approx(100.0)


def test_unmarked_data_loading_is_missing_and_not_zero(tmp_path: Path) -> None:
    recordeds = {"busy_us": 600.0, "idle_us": 300.0, "wall_us": 900.0, "idle_data_us": None}
    cost = cost_of(tmp_path / "a", [GEMM, ADD], **recordeds)
    assert math.isnan(us(cost)["data"]) and us(cost)["gaps"] == pytest.approx(300.0)
    assert "Nothing marks data loading" in cost.notes[0]
    steps = {"step": list(range(30)), "step_ms": [0.3] * 30, "data_ms": [0.03] * 30}
    about = window("fp16", [GEMM, ADD]) | recordeds | {"watch_us": None}
    recorded = step_cost(run_with_kernels(tmp_path / "b", [GEMM, ADD], windows=columns([about]), steps=steps))
    assert us(recorded)["data"] == pytest.approx(90.0) and us(recorded)["gaps"] == pytest.approx(210.0)
    assert "taken from the recorded steps" in recorded.notes[0]


def test_a_profiler_that_slows_the_host_is_named(tmp_path: Path) -> None:
    about = window("fp16", [GEMM, ADD])  # 750 µs, so 0.25 ms for each of its three steps
    for name, step_ms, noted in (("slow", 0.2, True), ("same", 0.25, False)):
        steps = {"step": list(range(40)), "step_ms": [step_ms] * 20 + [9.0] * 4 + [step_ms] * 16}
        cost = step_cost(run_with_kernels(tmp_path / name, [GEMM, ADD], windows=columns([about]), steps=steps))
        assert any("the profiler slows the host" in note for note in cost.notes) == noted
    assert "Other steps took 0.200 ms (median), profiled ones 0.250 ms" in step_cost(
        run_with_kernels(tmp_path / "said", [GEMM, ADD], windows=columns([about]),
             steps={"step": list(range(40)), "step_ms": [0.2] * 40})
    ).notes[0]  # fmt: skip


def test_a_window_without_marked_steps_is_shown_as_a_whole(tmp_path: Path) -> None:
    rows = [row | {"step": None, "steps": None} for row in (GEMM, ADD)]
    about = window("fp16", rows) | {"step": None, "steps": None}
    cost = step_cost(run_with_kernels(tmp_path / "r", rows, windows=columns([about])))
    assert cost.source == "profile" and cost.steps == 0
    assert cost.step_us == pytest.approx(750.0) == pytest.approx(cost.parts["us"].sum())


def test_ranks_are_averaged(tmp_path: Path) -> None:
    rows = [GEMM | {"rank": 0}, GEMM | {"rank": 1, "total_us": 200.0}]
    windows = [window("fp16", [row]) | {"rank": rank, "watch_us": None} for rank, row in enumerate(rows)]
    cost = step_cost(run_with_kernels(tmp_path / "r", rows, windows=columns(windows)))
    assert cost.us("tensor") == pytest.approx((400 + 200) / 2 / STEPS) and cost.steps == 2 * STEPS


def test_without_a_window_the_phases_of_the_steps_are_used(runs: dict[str, Run]) -> None:
    cost = step_cost(runs["healthy"])
    assert cost.source == "phases" and cost.parts["part"].tolist() == [
        "data", "forward", "backward", "optimizer", "watch", "other",
    ]  # fmt: skip
    assert cost.steps == 110 and cost.launches is None and amdahl(cost) is None
    assert step_cost(runs["bare"]).source == "nothing" and step_cost(runs["bare"]).parts.empty


def test_amdahl_bounds_the_gain_from_faster_matrix_products(tmp_path: Path) -> None:
    recorded = {"busy_us": 600.0, "idle_us": 0.0, "wall_us": 600.0, "idle_data_us": 0.0}
    rows = [GEMM | {"tensor_core": "no", "total_us": 270.0}, ADD | {"total_us": 330.0}]
    bound = amdahl(cost_of(tmp_path / "r", rows, **recorded))
    assert bound is not None
    assert bound.matrix_frac == bound.cuda_core_frac == pytest.approx(0.45)
    assert bound.bound == bound.cuda_core_bound == pytest.approx(1 / 0.55)
    assert bound.sentence == ("Amdahl limit: 1.8 × if GEMM/conv were free; 55 % of the time is not GEMM/conv.")
    assert bound.rate_ratio == pytest.approx(16.0)  # 312 over 19.5 TFLOP/s
    assert bound.half_expected == pytest.approx(1 / (0.55 + 0.45 / 16))
    assert bound.halved_bound == pytest.approx(1 / 0.275)


def test_tf32_has_its_own_ratio(tmp_path: Path) -> None:
    recorded = {"busy_us": 600.0, "idle_us": 0.0, "wall_us": 600.0, "idle_data_us": 0.0}
    rows = [GEMM | {"precision": "tf32", "total_us": 240.0}, GEMM | {"precision": "fp16", "total_us": 60.0},
            ADD | {"total_us": 300.0}]  # fmt: skip
    bound = amdahl(cost_of(tmp_path / "r", rows, **recorded))
    assert bound is not None and bound.tf32_ratio == pytest.approx(2.0)  # 312 over 156 TFLOP/s
    assert (bound.tf32_frac, bound.cuda_core_frac, bound.matrix_frac) == pytest.approx((0.4, 0.0, 0.5))
    assert bound.half_expected == pytest.approx(1 / (0.6 + 0.4 / 2))


def test_amdahl_for_no_and_for_only_matrix_products(tmp_path: Path) -> None:
    recorded = {"idle_us": 0.0, "idle_data_us": 0.0}
    every = amdahl(cost_of(tmp_path / "a", [GEMM], **recorded, busy_us=400.0, wall_us=400.0))
    none = amdahl(cost_of(tmp_path / "b", [ADD], **recorded, busy_us=200.0, wall_us=200.0))
    assert every is not None and none is not None
    assert math.isinf(every.bound) and every.cuda_core_bound == 1.0 and "unbounded" in every.sentence
    assert none.bound == 1.0 and none.sentence.startswith("Amdahl limit: 1 ×")


def test_comparing_two_runs_shows_what_shrank_and_what_grew(runs: dict[str, Run]) -> None:
    table = compare_step_cost([runs["profiled-fp32"], runs["profiled"]])
    own = table[table["run"] == table["run"].iloc[-1]].set_index("part")
    assert own.loc["cast", "verdict"] == own.loc["tensor", "verdict"] == "new"
    assert own.loc["matrix", "verdict"] == own.loc["matrix_unknown", "verdict"] == "shrank"
    assert own.loc["optimizer", "verdict"] == "same" and (own["source"] == "profile").all()
    steps = [step_cost(runs[name]).step_us for name in ("profiled-fp32", "profiled")]
    assert own["change_us"].sum() == pytest.approx(steps[1] - steps[0])
    assert own["change_frac"].sum() == pytest.approx(steps[1] / steps[0] - 1)


def test_kernels_are_not_compared_with_phases(runs: dict[str, Run]) -> None:
    table = compare_step_cost([runs["fp32"], runs["profiled"]])
    assert set(table["source"]) == {"phases"} and "tensor" not in set(table["part"])
    assert set(compare_step_cost([runs["profiled-cpu"], runs["profiled"]])["source"]) == {"phases"}
    first, other = phase_cost(runs["fp32"]), phase_cost(runs["profiled"])
    change = table[table["run"] == table["run"].iloc[-1]]["change_us"].sum()
    assert change == pytest.approx(other.step_us - first.step_us)


def test_runs_of_unequal_batches_are_compared_by_sample(tmp_path: Path) -> None:
    def run_with_batch(name: str, samples: int) -> Run:
        steps = {"step": list(range(20)), "step_ms": [10.0] * 20, "forward_ms": [10.0] * 20, "samples": [samples] * 20}
        return run_with_kernels(tmp_path / name, [GEMM], steps=steps)

    table = compare_step_cost([run_with_batch("a", 10), run_with_batch("b", 20)])
    assert set(table["per"]) == {"sample"}
    assert table[table["part"] == "forward"]["us"].tolist() == [1000.0, 500.0]
    with pytest.raises(RunError, match="runs="):
        compare_step_cost([])


def test_the_overhead_of_profiled_steps_is_told_from_that_of_the_run():
    run = load_run(ROOT / "sample_runs" / "fp16-overflow")
    overhead = percent(speed_summary(run).watch_frac)
    assert f"as is recording overhead, which is {overhead} over the whole run." in " ".join(step_cost(run).notes)
