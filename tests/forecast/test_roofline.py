"""The roofline compared with closed forms, and invariants of ranges, memory and batches."""

import dataclasses
import math

import pandas as pd
import pytest

from amp_core import RunError
from amp_core.forecast import EFFICIENCY, Speeds, StepMemory, StepTrace, forecast, largest_batch, memory_needed
from amp_core.forecast.efficiency import OLD_SOFTWARE
from amp_core.forecast.roofline import MIN_DRAM_FRAC, MIN_KERNEL_US, Work, device_time, operator_us
from amp_core.hardware.data_sheets import NAMES, named_part

FULL = Speeds(tensor_cores=1.0, cuda_cores=1.0, bandwidth=1.0, launch_us=5.0)
A100 = named_part("A100")[1]


def trace(recipe="fp32", flops=0.0, moved=0.0, count=1, samples=8, memory=None):
    work = pd.DataFrame([("mm", "forward", count, flops, moved, recipe == "amp")],
                        columns=["op", "phase", "count", "flops", "bytes", "narrow"])  # fmt: skip
    return StepTrace("made up", recipe, False, samples, work, memory or StepMemory())


def test_the_time_of_a_large_product_is_its_flops_over_the_peak():
    work = trace("amp", flops=312e12).work
    time = device_time(Work.of(work), A100, "fp16", FULL)
    assert time.total_us == pytest.approx(1e6) and time.bound_by == "GEMM/conv"
    assert device_time(Work.of(trace(flops=19.5e12).work), A100, "fp32", FULL).total_us == pytest.approx(1e6)
    assert device_time(Work.of(trace(flops=156e12).work), A100, "tf32", FULL).total_us == pytest.approx(1e6)


def test_the_time_of_an_elementwise_operator_is_its_bytes_over_the_bandwidth():
    time = device_time(Work.of(trace(moved=2039e9).work), A100, "fp32", FULL)
    assert time.total_us == pytest.approx(1e6) and time.bound_by == "memory bandwidth"


def test_the_time_of_many_small_operators_is_that_of_the_host():
    time = device_time(Work.of(trace(count=1000).work), A100, "fp32", FULL)
    assert time.total_us == 5000.0 and time.bound_by == "launches" and time.device_us == 1000 * MIN_KERNEL_US


def test_a_slower_assumption_never_takes_less_time():
    work = trace("amp", flops=1e12, moved=1e9, count=10).work
    slow, likely, fast = (
        device_time(Work.of(work), A100, "fp16", s).total_us
        for s in (EFFICIENCY.slow, EFFICIENCY.likely, EFFICIENCY.fast)
    )
    assert slow > likely > fast


def test_the_range_contains_the_likely_value_and_the_ratio_of_peaks():
    table = forecast((trace(flops=1e14), trace("amp", flops=1e14)), list(NAMES)).table
    known = table[table["why_not"] == ""]
    for column in ("step_ms", "speedup"):
        assert (known[f"{column}_low"] <= known[column]).all() and (known[column] <= known[f"{column}_high"]).all()
    fp16 = table[(table["gpu"] == "V100") & (table["recipe"] == "fp16")].iloc[0]
    assert fp16["speedup_low"] < 125 / 15.7 < fp16["speedup_high"]


def test_recipes_that_a_gpu_cannot_run_are_not_forecast():
    table = forecast((trace(flops=1e12), trace("amp", flops=1e12)), ["T4", "v100"]).table
    for recipe in ("bf16", "tf32"):
        rows = table[table["recipe"] == recipe]
        assert rows["step_ms"].isna().all() and rows["why_not"].str.contains("Ampere").all()
    assert table[table["recipe"] == "fp16"]["step_ms"].notna().all()


def test_the_table_of_data_sheets_is_consistent():
    for name in NAMES:
        short, rates = named_part(name.lower().replace("rtx ", ""))
        assert short == name and rates.source
        assert rates.fp32 < rates.half and (rates.tf32 is None or rates.tf32 == pytest.approx(rates.half / 2, rel=0.02))
        assert rates.fp8 is None or rates.fp8 == pytest.approx(2 * rates.half, rel=0.02)
        assert 200 < rates.gb_per_s < 10_000 and 7 < rates.memory_gb < 200
    with pytest.raises(RunError, match="gpu='GTX 1080'"):
        named_part("GTX 1080")


def test_old_software_takes_longer_unless_a_measured_run_says_how_long():
    traces = trace(flops=1e13), trace("amp", flops=1e13)
    now, then, measured = (
        forecast(traces, ["A100"], factor=factor, software_year=year)
        for factor, year in ((None, 2024), (None, 2020), (1.0, 2020))
    )
    assert (then.table["step_ms"] / now.table["step_ms"]).tolist() == pytest.approx([OLD_SOFTWARE] * 4)
    assert "With software of 2020" in then.notes[-1]
    assert measured.table["step_ms"].tolist() == now.table["step_ms"].tolist()


def test_an_operator_of_the_optimizer_takes_the_host_less_and_reads_its_tensors_from_memory():
    model, optimizer = trace(moved=1e6, count=10).work, trace(moved=1e6, count=10).work.assign(phase="optimizer")
    one, other = (
        device_time(Work.of(work), A100, "fp32", dataclasses.replace(FULL, l2_mb=40.0)) for work in (model, optimizer)
    )
    assert one.host_us / other.host_us == pytest.approx(3.0)
    one, other = (
        operator_us(Work.of(work.assign(count=1)), A100, "fp32", dataclasses.replace(FULL, l2_mb=40.0))[0]
        for work in (model.assign(bytes=1e7), optimizer.assign(bytes=1e7))
    )
    assert other / one == pytest.approx(1 / MIN_DRAM_FRAC, rel=0.05)  # starting the kernel takes 2 µs


def test_the_largest_batch_fits_and_the_next_does_not():
    memory = StepMemory(parameters=1e9, gradients=1e9, optimizer=2e9, activations=8e9)
    step = trace(memory=memory, samples=8)
    untold = trace(memory=dataclasses.replace(memory, gradients=None), samples=8)
    assert memory_needed(untold) == memory_needed(step)  # gradients are as large as their tensors
    low, high = largest_batch(step, A100)
    room = 0.95 * 80e9
    assert 0 < low < high
    assert memory_needed(step, low)[1] <= room < memory_needed(step, low + 1)[1]
    assert memory_needed(step, high)[0] <= room < memory_needed(step, high + 1)[0]
    big = trace(memory=StepMemory(parameters=1e11, gradients=1e11, optimizer=2e11, activations=1e9))
    assert largest_batch(big, A100) == (0, 0)
    assert largest_batch(trace(), A100) is None and memory_needed(trace()) is None


def test_a_measured_run_scales_times_and_not_ratios():
    traces = trace(flops=1e14), trace("amp", flops=1e14)
    plain, moved = (forecast(traces, ["A100"], factor=f) for f in (None, 1.5))
    assert moved.table["step_ms"].to_numpy() == pytest.approx(1.5 * plain.table["step_ms"].to_numpy())
    assert moved.table["speedup"].to_numpy() == pytest.approx(plain.table["speedup"].to_numpy())
    assert "1.50 times its own forecast" in " ".join(moved.notes)
    assert plain.notes[0].startswith("Forecast, not measured.") and "no run on a listed GPU" in plain.notes[2]


def test_no_gpu_is_refused():
    with pytest.raises(RunError, match="gpus"):
        forecast((trace(), trace("amp")), [])
    assert math.isnan(forecast((trace(flops=1.0), trace("amp", flops=1.0)), ["T4"]).table["over_tf32"].iloc[0])


def test_fp8_and_fp4_take_their_share_of_the_products_at_their_own_peak():
    traces = trace(flops=1e15), trace("amp", flops=1e15)
    table = forecast(traces, ["B200"], fp8_frac=1.0, fp4_frac=0.5).table.set_index("recipe")
    assert list(table.index) == ["fp32", "tf32", "bf16", "fp16", "fp8", "nvfp4"]
    assert table.loc["fp8", "over_bf16"] == pytest.approx(4500 / 2250, rel=0.01)
    assert table.loc["nvfp4", "over_bf16"] == pytest.approx(1 / (0.5 + 0.5 / 4), rel=0.01)  # Amdahl
    assert table.loc["nvfp4", "over_bf16_low"] < 1.6 < table.loc["nvfp4", "over_bf16_high"]
    assert table["over_bf16"].isna().tolist() == [True] * 4 + [False] * 2
    none = forecast(traces, ["B200"], fp8_frac=0.0).table.set_index("recipe")
    assert none.loc["fp8", "step_ms"] == pytest.approx(none.loc["bf16", "step_ms"], rel=0.01)


def test_quantizing_the_inputs_costs_traffic():
    traces = trace(moved=1e12), trace("amp", flops=1.0, moved=1e12)
    table = forecast(traces, ["H100"], fp8_frac=1.0).table.set_index("recipe")
    # the product reads two thirds of its bytes once in 8 bits; before, they are read in 16 and written in 8
    assert table.loc["bf16", "step_ms"] / table.loc["fp8", "step_ms"] == pytest.approx(
        1 / (1 / 3 + 1 / 3 + 1), rel=0.01
    )


def test_gpus_without_8_or_4_bits_say_so_and_without_shares_nothing_changes():
    traces = trace(flops=1e12), trace("amp", flops=1e12)
    result = forecast(traces, ["A100", "H100", "H200", "B200", "5090"], fp8_frac=0.9, fp4_frac=0.8)
    why = result.table.set_index(["gpu", "recipe"])["why_not"]
    assert why["A100", "fp8"].startswith("no FP8 on tensor cores before Ada and Hopper")
    assert why["H200", "nvfp4"].startswith("no FP4 on tensor cores before Blackwell")
    able = ("H100", "fp8"), ("H200", "fp8"), ("B200", "nvfp4"), ("RTX 5090", "nvfp4")
    assert not any(why[one] for one in able)
    assert "90 % in FP8 and 80 % in NVFP4, the rest in BF16" in " ".join(result.notes)
    plain = forecast(traces, ["B200"])
    assert plain.table["recipe"].tolist() == ["fp32", "tf32", "bf16", "fp16"] and "over_bf16" not in plain.table
    for name in NAMES:
        rates = named_part(name)[1]
        assert rates.fp4 is None or 3.9 < rates.fp4 / rates.fp8 < 4.1 or rates.fp4 == 2 * rates.fp8


@pytest.mark.parametrize("wrong", [1.5, -0.1, "half", True, math.nan])
def test_a_share_beyond_one_is_refused(wrong):
    with pytest.raises(RunError, match=r"^fp4_frac=.* is not a share; give a number from 0 to 1"):
        forecast((trace(), trace("amp")), ["B200"], fp4_frac=wrong)
