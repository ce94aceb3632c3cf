"""What equal calls of operators tell of a processor, in traces of a CPU."""

import pytest

from amp_core import diagnose, load_run
from amp_core.findings import first_sentence
from amp_core.store.run import Run
from amp_core.traces import import_traces
from tests.traces.made import Made, write

SIZES = {"Input Dims": [[5, 64, 56, 56], [64, 64, 3, 3]], "Input type": ["float", "float"]}


def run_of(tmp_path, trace: Made) -> Run:
    return load_run(import_traces([write(tmp_path / "t.json", trace.document())], tmp_path / "run"))


@pytest.mark.parametrize(
    ("slow", "sizes", "told"),
    [
        ((5, 11), SIZES, True),
        ((0, 1), SIZES, False),  # the first calls set something up, and one is no longer than the others by much
        ((), SIZES, False),
        ((5, 11), {}, False),  # of other sizes, perhaps
    ],
)
def test_equal_calls_that_take_far_longer_now_and_then_blame_the_processor(tmp_path, slow, sizes, told):
    trace = Made()
    at = 0.0
    for number in range(20):
        us = 20_000 if number in slow and number != 1 else 1_100 if number % 2 else 1_000
        trace.op("aten::mkldnn_convolution", at, us, **sizes)
        at += us
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("fewer cores than the program has threads" in sentence) == told
    assert "aten::mkldnn_convolution takes 100 % of the operators' time" in sentence
    if told:
        assert "37.8 of the 58.8 ms of operators (64.3 %) are what 2 calls take beyond" in sentence
        assert "one of aten::mkldnn_convolution 20.0 instead of 1.10 ms" in sentence


@pytest.mark.parametrize(
    ("held_up", "longer", "marked", "told"),
    [
        (5, 1, True, True),
        (50, 1, True, False),  # few calls, which may do something else
        (5, 6, True, False),  # a step of longer sequences: all of its calls take longer
        (5, 1, False, False),
    ],
)
def test_the_same_calls_of_other_steps_tell_what_calls_without_sizes_take(tmp_path, held_up, longer, marked, told):
    """Three steps of 100 calls of 100 µs and one to three that load data; in the third every 5th or 50th takes 8 ms."""
    trace, at = Made(), 0.0
    for step in range(3):
        start = at
        for number in range(100):
            us = 8000 if step == 2 and number % held_up == 0 else 100 * (longer if step == 2 else 1)
            trace.op("aten::mm", at, us)
            at += us
        for _ in range(step + 1):
            trace.op("aten::stack", at, 10)
            at += 10
        if marked:
            trace.event("mark", f"ProfilerStep#{step}", start, at - start, 1)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("are what 20 calls take beyond the fastest of the same call in other steps" in sentence) == told
    assert ("one of aten::mm 8.00 instead of 0.100 ms: the processor is shared" in sentence) == told


def test_an_uneven_processor_comes_before_fp64_where_it_costs_more(tmp_path):
    trace, at = Made(), 0.0
    for number in range(40):
        us = 20_000 if number % 4 == 3 else 100
        trace.op("aten::mm", at, us, **{"Input Dims": [[64, 64], [64, 64]], "Input type": ["double", "double"]})
        at += us
    sentence = first_sentence(run_of(tmp_path, trace))
    assert sentence.index("the processor is shared") < sentence.index("Operators on FP64 tensors take 100 %")


@pytest.mark.parametrize(("cost_us", "computes_us", "told"), [(240, 10, True), (4, 10, False), (240, 2_000, False)])
def test_calls_that_cost_most_of_the_time_come_before_the_longest_operator(tmp_path, cost_us, computes_us, told):
    trace = Made()
    for number in range(200):
        at = number * (2 * cost_us + computes_us)
        trace.op("aten::linear", at, 2 * cost_us + computes_us)
        trace.op("aten::addmm", at + cost_us, computes_us)
        trace.op("aten::t", at + cost_us + computes_us, 0.5)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("400 calls of operators by others cost 240 µs each, 97.9 %" in sentence) == told
    assert ("takes" in sentence) and ("on more data each; aten::linear takes" in sentence) == told


@pytest.mark.parametrize(
    ("counts", "backward", "told"),
    [("aten::add_", False, True), ("aten::add", False, True), ("", False, False), ("aten::add_", True, False)],
)
def test_batch_norm_that_counts_batches_is_in_training_mode(tmp_path, counts, backward, told):
    trace = Made()
    for number in range(3):
        if counts:
            trace.op(
                counts, 100 * number, 5, **{"Input Dims": [[], [], []], "Input type": ["long int", "long int", ""]}
            )
        trace.op("aten::batch_norm", 100 * number + 10, 80, **{"Input Dims": [[5, 64, 8, 8]], "Input type": ["float"]})
    if backward:
        trace.op("NativeBatchNormBackward0", 400, 50, 2)
    findings = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "batchnorm-in-training-mode"]
    assert [f.unit for f in findings] == ["share of operators' time"] * told
