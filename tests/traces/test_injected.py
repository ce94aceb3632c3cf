"""Faults that were put into real traces, and what was first missed in them: each as a trace of a few events."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of, runs_of

OWN_REDUCE = "void all_reduce_two_shot_kernel<__nv_bfloat16, 4u, true>(char*)"


def throttled(*us_of_steps, marks=True):
    """Steps of ten equal kernels, which take so long each."""
    trace, at = Made(), 0.0
    for number, us in enumerate(us_of_steps):
        if marks:
            trace.event("mark", f"ProfilerStep#{number}", at, 10 * us + 5, 1)
        for place in range(10):
            trace.op("aten::relu", at + 2 + place, 0.5)
            trace.kernel(made.RELU, at + 20 + us * place, us - 1, at + 2 + place, call_us=0.2)
        at += 10 * us + 30
    return trace


@pytest.mark.parametrize(
    ("trace", "told"),
    [
        (throttled(100, 100, 100, 150, 180, 200), True),
        (throttled(100, 100, 100, 100, 100, 300), False),  # one step alone waited for something
        (throttled(100, 104, 98, 102, 101, 105), False),
        (throttled(100, 200, 200), False),  # too few to know the pace
    ],
)
def test_the_same_kernels_that_get_slower_are_those_of_a_throttled_device(tmp_path, trace, told):
    sentence = first_sentence(run_of(tmp_path, trace))
    assert sentence.startswith("The same kernels take 0.990 to 1.99 ms per step") == told
    assert ("the device is throttled by its temperature or power limit, or shared" in sentence) == told


@pytest.mark.parametrize(
    ("queued_us", "says"), [(0, "is shared or throttled"), (2000, "another process takes it in turn")]
)
def test_stretched_products_beside_queued_work_are_those_of_a_shared_device(tmp_path, queued_us, says):
    trace, at = Made(), 100.0
    for number in range(12):
        trace.op("aten::mm", number, 0.8, **{"Input Dims": [[64, 64]] * 2, "Input type": ["c10::Half"] * 2})
        us = 2000 if number % 4 == 3 else 200
        trace.kernel(made.GEMM, at, us, number + 0.1, call_us=0.2)
        at += us + queued_us * (number % 4 == 3)
    assert says in first_sentence(run_of(tmp_path, trace))


def ranks_of(slow_rank, *, slower=3.0, kernels=8, late_us=0.0):
    """Two ranks that reduce after as many kernels, which take `slower` times as long on one, or whose host is late."""
    traces = []
    for rank in range(2):
        trace, at = Made(), 50.0
        trace.event("mark", "ProfilerStep#3", 0, 12_000, 1)
        for number in range(kernels):
            us = 300.0 * (slower if rank == slow_rank else 1.0)
            trace.op("aten::mm", 10 + number, 0.8)
            trace.kernel(made.GEMM, at, us, 10 + number + 0.1, call_us=0.2)
            at += us + (late_us if rank == slow_rank else 0.0) / kernels
        ends = 150 + kernels * 300 * slower + late_us
        trace.kernel(made.NCCL, at, ends - at, 40)
        traces.append(trace)
    return traces


@pytest.mark.parametrize(("slower", "late_us", "told"), [(3.0, 0.0, True), (1.0, 5_000.0, False)])
def test_a_late_rank_whose_gpu_is_slower_is_told_so(tmp_path, slower, late_us, told):
    run = runs_of(tmp_path, ranks_of(1, slower=slower, late_us=late_us))
    assert ("which enters 1 of 1 last: its GPU takes 3.0 × as long for as many kernels" in first_sentence(run)) == told
    assert ("nvidia-smi --query-gpu" in finding_of(run, "exposed-communication").snippet) == told


@pytest.mark.parametrize(("us", "slow"), [(60_000, True), (400, False)])
def test_the_rate_of_a_transfer_is_told_where_nobody_waits(tmp_path, us, slow):
    """512 MiB in 60 ms are 8.95 GB/s, and in 0.4 ms more than a terabyte per second."""
    traces = []
    for _ in range(2):
        trace = Made()
        trace.event("mark", "ProfilerStep#3", 0, us + 500, 1)
        trace.op("aten::mm", 5, 5)
        trace.kernel(made.GEMM, 20, 300, 6)
        message = {"Collective name": "allreduce", "In msg nelems": 2**27, "dtype": "Float", "Group size": 2}
        trace.op("record_param_comms", 10, 8, **message, **{"Process Group Name": "0"})
        trace.kernel(made.NCCL, 320, us, 12)
        trace.events[-1]["args"].update(message, **{"Process Group Name": "0"})
        traces.append(trace)
    run = runs_of(tmp_path, traces)
    assert "an all-reduce of 512 MiB takes" in first_sentence(run)
    advice = finding_of(run, "exposed-communication").advice
    assert ("At 8.95 GB/s these messages go over PCIe" in advice) == slow


def collectives(*lengths_us, kernel=OWN_REDUCE):
    trace, at = Made(), 20.0
    for number, us in enumerate(lengths_us):
        trace.op("Torch-Compiled Region: 0/0", number * 2, 1)
        trace.kernel(kernel, at, us, number * 2 + 0.1, call_us=0.2)
        trace.kernel(made.GEMM, at + us, 5, number * 2 + 0.4, call_us=0.2)
        at += us + 5
    return trace


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ([47.0] * 20 + [60 + 3.1 * n for n in range(60)], True),
        ([47.0] * 40 + [190.0] * 40, False),  # messages of two sizes
        ([47.0 + 2.9 * n for n in range(80)], False),  # nothing tells how long the transfer takes
        ([47.0] * 4 + [60 + 9.1 * n for n in range(20)], False),  # too few
    ],
)
def test_calls_that_take_unequally_long_wait_for_other_ranks(tmp_path, lengths, told):
    run = run_of(tmp_path, collectives(*lengths), distributedInfo={"rank": 0, "world_size": 4})
    sentence = first_sentence(run)
    assert (
        "waiting for other ranks if all 80 calls carry as much as the shortest, which take 47.0" in sentence
    ) == told
    assert ("does not show how much of that is waiting" in sentence) != told


def products(*rates, size=2048):
    """Products of squares of `size` and of twice and three times that, in 16 bits, at these TFLOP/s."""
    trace, at = Made(), 50.0
    for number, (times, rate) in enumerate(zip((1, 2, 3), rates, strict=True)):
        n = size * times
        trace.op("aten::mm", number, 0.8, **{"Input Dims": [[n, n]] * 2, "Input type": ["c10::BFloat16"] * 2})
        us = 2 * n**3 / rate / 1e6
        trace.kernel(made.GEMM.replace("fp16", "bf16"), at, us, number + 0.1, call_us=0.2)
        at += us
    return trace


@pytest.mark.parametrize(
    ("rates", "told"), [((200, 210, 140), True), ((200, 210, 205), False), ((90, 210, 205), False)]
)
def test_a_product_slower_than_smaller_ones_is_told(tmp_path, rates, told):
    run = run_of(tmp_path, products(*rates), "NVIDIA A100-SXM4-40GB", (8, 0))
    sentence = first_sentence(run)
    assert ("aten::mm (M 6144 · N 6144 · K 6144) takes" in sentence) == told
    assert ("at 140 TFLOP/s, where smaller products reach 209 TFLOP/s" in sentence) == told


def test_a_function_that_writes_is_told_by_the_program_and_not_by_pythons_encoder(tmp_path):
    trace = Made()
    for at in (0, 10_000, 20_000):
        trace.op("aten::mm", at, 10)
        trace.kernel(made.GEMM, at + 15, 500, at + 5)
        trace.event("python_function", "engine.py(9): log_step", at + 520, 9_400, 1)
        trace.event("python_function", "json/encoder.py(183): encode", at + 530, 5_000, 1)
        trace.event("python_function", "<built-in method __call__ of _json.Encoder object at 0x7f>", at + 540, 4_900, 1)
        trace.event(
            "python_function", "<built-in method flush of _io.TextIOWrapper object at 0x7e>", at + 5_600, 4_000, 1
        )
    run = run_of(tmp_path, trace)
    assert "engine.py(9): log_step" in first_sentence(run)
    assert "Encoder" not in first_sentence(run)
    assert "which writes something" in finding_of(run, "host-bound").advice


@pytest.mark.parametrize(("scatter_us", "first"), [(600, True), (200, False)])
def test_scattered_writes_that_take_more_than_can_be_saved_come_first(tmp_path, scatter_us, first):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 2, 5, **{"Input Dims": [[512, 512]] * 2, "Input type": ["float"] * 2})
    trace.kernel(made.SIMT, 10, 990 - scatter_us, 3)
    trace.op("aten::embedding_dense_backward", 20, 5)
    trace.kernel("void embedding_backward_kernel<float>", 1000 - scatter_us, scatter_us, 22)
    sentence = first_sentence(run_of(tmp_path, trace, "Tesla T4", (7, 5)))
    assert sentence.startswith("aten::embedding_dense_backward takes 60 % of the step, as it writes") == first
    assert "aten::embedding_dense_backward takes" in sentence


@pytest.mark.parametrize(("name", "why"), [("softmax_kernel_h2_v2<__half>", True), ("my_long_kernel<__half>", False)])
def test_a_long_kernel_beside_products_is_named(tmp_path, name, why):
    trace = Made()
    trace.event("call", "cudaStreamSynchronize", 5, 990, 1, correlation=5)
    trace.kernel(made.GEMM, 10, 400, 1)
    trace.kernel(f"void fastertransformer::{name}(int)", 410, 180, 2)
    trace.kernel(made.GEMM, 590, 400, 3)
    trace.events = [event for event in trace.events if event["cat"] != "cpu_op"]
    sentence = first_sentence(run_of(tmp_path, trace))
    assert f"{name} takes 18.4 %" in sentence
    assert ("attention is computed in steps" in sentence) == why


def test_large_copies_to_the_host_in_a_training_are_its_state(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 4000, 1)
    trace.event("mark", "Optimizer.step#SGD.step", 300, 50, 1)
    trace.op("aten::add_", 305, 8)
    trace.kernel(made.RELU, 320, 100, 306)
    trace.op("aten::copy_", 400, 3500)
    trace.kernel("Memcpy DtoH (Device -> Pageable)", 450, 3400, 405, sort="copy")
    trace.events[-1]["args"]["bytes"] = 20 * 2**20
    assert "as those of a checkpoint" in finding_of(run_of(tmp_path, trace), "copies").advice


def gloo(tokens):
    """A rank whose two products take as long as it has `tokens`, before a reduction that all leave at 5,000 µs."""
    trace = Made()
    for number in range(3):
        at = 6000 * number
        trace.event("mark", f"ProfilerStep#{number}", at, 5900, 1)
        trace.op("aten::mm", at + 5, 10 * tokens)
        trace.op("c10d::allreduce_", at + 10 + 10 * tokens, 5, **{"Input Dims": [[[4096]]]})
        dims = {"Input Dims": [[4096]], "Input type": ["float"]}
        trace.event("mark", "gloo:all_reduce", at + 20 + 10 * tokens, 4980 - 10 * tokens, 9, **dims)
        trace.op("aten::add_", at + 5000, 600)
    return trace


@pytest.mark.parametrize(("tokens", "told"), [((100, 490), True), ((400, 400), False)])
def test_a_late_rank_of_cpus_is_told(tmp_path, tokens, told):
    run = runs_of(tmp_path, [gloo(count) for count in tokens], deviceProperties=[])
    late = "% of the step in collectives for rank 1, which enters 3 of 3 last: its operators take 3.4 × as long"
    assert (late in first_sentence(run)) == told
    collectives = run.collectives
    assert len(collectives) == 6 and set(collectives["message_bytes"]) == {4096 * 4}
    assert ("exposed-communication" in {f.code for f in diagnose(run)}) == told


def test_calls_with_packed_weights_are_not_taken_for_equal(tmp_path):
    """Layers of several widths take the same inputs, and their packed weights have no sizes in a trace."""
    trace, at = Made(), 0.0
    for number in range(40):
        us = 2000.0 if number % 4 == 3 else 200.0
        trace.op("quantized::linear_dynamic", at, us, **{"Input Dims": [[1, 128, 768], [], []]})
        at += us
    assert "the processor is shared" not in first_sentence(run_of(tmp_path, trace))


def test_the_size_that_most_time_is_spent_on_is_told(tmp_path):
    trace, at = Made(), 0.0
    for number in range(12):
        dims = [[512, 128], [128, 50_257]] if number == 11 else [[512, 128], [128, 128]]
        trace.op("aten::mm", at, 900 if number == 11 else 20, **{"Input Dims": dims})
        at += 900
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "Operators on tensors with a size of 50,257 take 80.4 %, in 8.33 % of the calls." in sentence


@pytest.mark.parametrize(("us", "told"), [(800, True), (2, False)])
def test_a_view_that_takes_long_is_a_first_call(tmp_path, us, told):
    trace = Made()
    trace.op("aten::t", 0, us)
    trace.op("aten::addmm", us, 2000)
    assert ("One call of aten::t, which computes nothing" in first_sentence(run_of(tmp_path, trace))) == told


@pytest.mark.parametrize(("backward", "told"), [(False, True), (True, False)])
def test_dropout_without_backward_is_told_to_be_left_out(tmp_path, backward, told):
    trace = Made()
    trace.op("aten::bernoulli_", 0, 800)
    trace.op("autograd::engine::evaluate_function: MulBackward0" if backward else "aten::mul", 800, 100)
    assert ("call model.eval() for inference" in first_sentence(run_of(tmp_path, trace))) == told


@pytest.mark.parametrize(("busiest_us", "told"), [(900, True), (330, False)])
def test_a_rank_that_computes_far_longer_is_told_where_collectives_do_not_tell_who_waits(tmp_path, busiest_us, told):
    """Ranks do not leave the halves of low-latency kernels together, so that these are not compared."""
    traces = []
    for rank in range(4):
        trace = Made()
        us = busiest_us if rank == 2 else 300
        trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
        trace.op("aten::mm", 2, 1)
        trace.kernel(made.GEMM, 10, us, 3)
        trace.op("deep_ep::combine", 5, 1)
        trace.kernel("void deep_ep::internode_ll::combine<3, 10, 7168, 9>(void*)", 10 + us, 980 - us, 6)
        traces.append(trace)
    run = runs_of(tmp_path, traces)
    late = "wait 60 % of the step in collectives for rank 2, whose GPU computes for 0.900 instead of 0.300 ms"
    assert (late in first_sentence(run)) == told
    assert ("Replicate its hot experts" in finding_of(run, "exposed-communication").advice) == told


@pytest.mark.parametrize(("rows", "told"), [(1, True), (64, False)])
def test_products_of_a_single_row_on_a_cpu_are_told(tmp_path, rows, told):
    trace = Made()
    for number in range(8):
        trace.op("aten::addmm", 500 * number, 490, **{"Input Dims": [[4000], [rows, 512], [512, 4000], [], []]})
    assert ("Products of a single row take 100 %" in first_sentence(run_of(tmp_path, trace))) == told


def test_collectives_beside_which_no_operator_runs_are_told(tmp_path):
    traces = []
    for _ in range(2):
        trace = Made()
        for at in range(0, 3000, 1000):
            trace.op("aten::mm", at, 600)
            trace.event(
                "mark", "gloo:all_gather", at + 600, 400, 9, **{"Input Dims": [[2**20]], "Input type": ["float"]}
            )
        traces.append(trace)
    run = runs_of(tmp_path, traces, deviceProperties=[])
    assert "of the time, with no operator beside them, 100 % of that in all-gather of 4.00 MiB" in first_sentence(run)
    assert finding_of(run, "exposed-communication").where == "gloo:all_gather"


@pytest.mark.parametrize(("slow", "first"), [(2, True), (1, False)])
def test_an_uneven_processor_comes_first_only_where_it_costs_much(tmp_path, slow, first):
    trace, at = Made(), 0.0
    for number in range(40):
        us = 2600.0 if number in (11, 25)[:slow] else 250.0
        trace.op("aten::bernoulli_", at, us, **{"Input Dims": [[512, 512]]})
        at += us
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("on the CPU, 4.70 of the 14.7 ms of operators" in sentence) == first
    assert "aten::bernoulli_ takes 100 % of the operators' time" in sentence


@pytest.mark.parametrize(("passes", "told"), [(6, True), (3, False)])
def test_calls_without_sizes_are_compared_with_those_of_other_passes(tmp_path, passes, told):
    """Layers of several widths, so that calls of one operator do unequally much; now and then one stalls."""
    trace, at = Made(), 0.0
    for number in range(passes):
        for place in range(30):
            us = 100.0 + 40 * (place % 7)
            us *= 20 if (number, place) in ((2, 3), (2, 19), (1, 27)) else 1
            trace.op("aten::addmm" if place % 2 else "aten::relu", at, us)
            at += us
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("are what 3 calls take beyond the fastest quarter of the same call" in sentence) == told
    assert ("the processor is shared or throttled" in sentence) == told


def test_runs_of_older_versions_and_damaged_heads_still_have_a_sentence(tmp_path):
    """`slow_calls` had no time of all operators, and anything may stand in a head."""
    trace, at = Made(), 0.0
    for number in range(40):
        us = 2600.0 if number in (11, 25) else 250.0
        trace.op("aten::mm", at, us, **{"Input Dims": [[512, 512]] * 2})
        at += us
    run = run_of(tmp_path, trace)
    del run.head.config["slow_calls"]["of_us"]
    run.head.config["growing_rows"] = {"passes": 9, "first": -4, "last": 4, "frac": 0.9}
    assert "4.70 of the 14.7 ms of operators (32.0 %)" in first_sentence(run)
    assert finding_of(run, "shared-processor").win_ms == pytest.approx(4.7)
