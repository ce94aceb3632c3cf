"""Long runs and deep models stay fast: no Python call per row, and no work that grows faster than the layers.

The tests count calls, because times depend on the load of the machine.
"""

import numpy as np
import pyarrow as pa
import pytest

from amp_core import Run, load_run
from amp_core.analysis import (
    class_shares,
    downsample,
    exponent_shares,
    layer_advice,
    loss_curves,
    overview,
    phase_times,
    safe_window,
    safe_window_over_time,
    scale_trace,
    skip_episodes,
    what_if,
    whole_model,
)
from tests.call_count import count_calls
from tests.synthetic import write_rows

STEPS = 300_000
LAYERS = 3000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Run:
    random = np.random.default_rng(0)
    ones = np.ones(STEPS)
    steps = {
        "step": np.arange(STEPS),
        "time_s": np.arange(STEPS) * 0.1,
        "loss": 3 + random.standard_normal(STEPS),
        "loss_scale": np.exp2(random.integers(8, 17, STEPS)),
        "skipped": random.random(STEPS) < 0.01,
        "samples": np.full(STEPS, 32),
    } | dict.fromkeys(("step_ms", "data_ms", "forward_ms", "backward_ms", "optimizer_ms", "watch_ms"), ones)
    counts = random.integers(0, 100, (LAYERS * 10, 25))
    zeros = np.zeros(LAYERS * 10, dtype=np.int64)
    tensors = {
        "step": np.repeat(np.arange(10) * 100, LAYERS),
        "name": [f"layers.{i}.weight" for i in range(LAYERS)] * 10,
        "kind": ["weight_grad"] * (LAYERS * 10),
        "exp_min": zeros - 20,
        "exp_counts": pa.ListArray.from_arrays(np.arange(0, counts.size + 1, 25, dtype=np.int32), counts.ravel()),
        "numel": counts.sum(axis=1),
        "normal": counts.sum(axis=1),
    } | dict.fromkeys(("zero", "subnormal", "inf", "nan"), zeros)
    run = load_run(write_rows(tmp_path_factory.mktemp("large") / "run", steps=steps, tensors=tensors))
    _ = run.steps, run.table("tensors")  # read first: reading is not measured here
    return run


def test_a_long_run_is_analysed_without_a_call_per_row(large: Run) -> None:
    trace = scale_trace(large)
    works = (
        lambda: scale_trace(large),
        lambda: skip_episodes(large),
        lambda: phase_times(large),
        lambda: overview(large),
        lambda: downsample(trace, "step", "loss_scale", max_points=4000, keep="skipped"),
        lambda: loss_curves([large], max_points=4000),
    )
    for work in works:
        assert count_calls(work) < STEPS / 10
    small = downsample(trace, "step", "loss_scale", max_points=4000, keep="skipped")
    assert len(small) < 8200 and small["skipped"].sum() == pytest.approx(trace["skipped"].sum(), rel=0.01)


def test_the_calls_for_a_deep_model_grow_no_faster_than_its_layers(large: Run) -> None:
    assert count_calls(lambda: exponent_shares(large, "weight_grad")) < 10 * LAYERS
    assert count_calls(lambda: class_shares(large, "weight_grad")) < 10 * LAYERS
    shares, classes = exponent_shares(large, "weight_grad"), class_shares(large, "weight_grad")
    assert len(classes) == LAYERS and shares["name"].nunique() == LAYERS
    assert np.allclose(shares.groupby("name")["share"].sum(), 1.0)


def test_the_calls_of_predictions_grow_no_faster_than_the_layers(large: Run) -> None:
    assert count_calls(lambda: what_if(large, step=500)) < 400 * LAYERS
    predictions = what_if(large, step=500)
    assert count_calls(lambda: whole_model(predictions)) < 10 * LAYERS
    totals = whole_model(predictions)
    assert len(predictions) == LAYERS * 2 * 51 and len(totals) == 2 * 51
    for work in (safe_window, safe_window_over_time, layer_advice):
        assert count_calls(lambda work=work: work(large)) < 2000 * LAYERS
    window, over_time, advice = safe_window(large), safe_window_over_time(large), layer_advice(large)
    assert window.lowest in set(over_time["lowest"]) and len(over_time) == 10 and len(advice) == LAYERS
