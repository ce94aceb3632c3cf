"""The range of a forecast: by the GPU, by operators that no published step has, and by the host."""

import pandas as pd
import pytest

from amp_core.forecast import StepMemory, StepTrace, efficiency_of, forecast
from amp_core.forecast.measured_steps import step_spread
from amp_core.hardware.data_sheets import NAMES, named_part

A100, OF = named_part("A100")[1], efficiency_of(NAMES["A100"])
COLUMNS = ["op", "phase", "count", "flops", "bytes", "narrow", "kind"]


def work(*rows):
    return pd.DataFrame(
        [(op, phase, 1, flops, moved, False, kind) for op, phase, flops, moved, kind in rows], columns=COLUMNS
    )


PRODUCT = ("mm", "forward", 1e12, 0.0, "product")
ADDITION = ("add_", "backward", 0.0, 1e10, "elementwise")
SORT = ("sort", "forward", 0.0, 1e11, "elementwise")
OPTIMIZER = ("_fused_adam", "optimizer", 0.0, 1e11, "elementwise")


def test_operators_of_published_steps_keep_the_range_of_the_gpu():
    found = step_spread(work(PRODUCT, ADDITION, OPTIMIZER), A100, "fp32", OF)
    assert found.spread == pytest.approx(OF.spread) and not found.note


def test_other_operators_widen_the_range_by_their_share_of_the_time_and_are_named():
    one, more = (step_spread(work(PRODUCT, *[SORT] * n), A100, "fp32", OF) for n in (1, 4))
    assert OF.spread < one.spread < more.spread < 0.5
    assert 0.1 < one.unmeasured_frac < more.unmeasured_frac < 1
    assert "Not measured on such models" in more.note and "sort" in more.note


def test_a_depthwise_convolution_is_uncertain_in_fp32_alone():
    depthwise = work(PRODUCT, ("convolution_backward", "backward", 1e9, 1e11, "depthwise"))
    assert step_spread(depthwise, A100, "fp32", OF).spread > step_spread(depthwise, A100, "fp16", OF).spread
    assert not step_spread(depthwise, A100, "fp32", OF).note


def test_a_convolution_in_groups_is_uncertain():
    convolution = work(("convolution", "forward", 1e12, 0.0, "product"))
    sizes = {"m": 1e4, "n": 48.0, "k": 432.0}
    one, many = (
        step_spread(convolution.assign(batch=groups, **sizes), A100, "fp16", OF).spread for groups in (1.0, 9.0)
    )
    assert one == pytest.approx(OF.spread) and many > one


def test_the_forecast_of_a_model_unlike_those_measured_says_so_and_has_a_wider_range():
    def result(*rows):
        traces = [StepTrace("made up", recipe, False, 8, work(*rows), StepMemory()) for recipe in ("fp32", "amp")]
        found = forecast(tuple(traces), ["A100"])
        row = found.table.set_index("recipe").loc["fp32"]
        return row["step_ms_high"] / row["step_ms"], " ".join(found.notes)

    (known, silent), (unknown, told) = result(PRODUCT), result(PRODUCT, SORT)
    assert known == pytest.approx(1 / (1 - OF.spread)) and unknown > known
    assert "Not measured on such models" in told and "Not measured" not in silent.replace("not measured.", "")


def test_a_step_that_waits_for_the_host_has_the_range_of_hosts():
    small = work(*[("add", "forward", 0.0, 1.0, "elementwise")] * 10)
    traces = tuple(StepTrace("made up", recipe, False, 8, small, StepMemory()) for recipe in ("fp32", "amp"))
    row = forecast(traces, ["A100"]).table.set_index("recipe").loc["fp32"]
    assert row["bound_by"] == "launches" and row["step_ms"] == pytest.approx(10 * 0.030)
    assert (row["step_ms_low"], row["step_ms_high"]) == pytest.approx((0.3 / 1.7, 0.3 * 1.7))


def test_cards_of_one_generation_differ_in_multiprocessors():
    found = {gpu: efficiency_of(NAMES[gpu]).sms for gpu in ("RTX 3070", "RTX 3080", "RTX 3090", "RTX A4000", "A40")}
    assert found == {"RTX 3070": 46, "RTX 3080": 68, "RTX 3090": 82, "RTX A4000": 48, "A40": 84}
