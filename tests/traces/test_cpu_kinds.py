"""What is said of a CPU's operators beside the longest, of its steps, and of a loader's workers."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from tests.traces.made import Made, finding_of, run_of

WORKERS = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
ALONE = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def in_turn(*operators):
    """Operators one after another: name, length, and input types."""
    trace, at = Made(), 0.0
    for name, us, *types in operators:
        trace.op(name, at, us, **({"Input type": types, "Input Dims": [[8, 8]] * len(types)} if types else {}))
        at += us
    return trace


@pytest.mark.parametrize(
    ("operators", "says", "never"),
    [
        (
            [("aten::mul", 300), ("aten::add", 250), ("aten::clamp", 250), ("aten::mm", 200)],
            "aten::mul takes 30.0 % of the operators' time (0.300 ms), and all elementwise operators take 80.0 %",
            "products",
        ),
        (
            [("aten::index", 300), ("aten::_index_put_impl_", 300), ("aten::scatter_add_", 300), ("aten::mm", 100)],
            "and all indexing, gathering and scattering takes 90.0 %",
            "products",
        ),
        (
            [("aten::mkldnn_rnn_layer", 500), ("aten::mkldnn_rnn_layer_backward", 400), ("aten::mm", 100)],
            "and all recurrent layers and matrix products take 100 %",
            "all matrix",
        ),
        ([("aten::mm", 800, "double"), ("aten::add", 200)], "operators on FP64 tensors take 80.0 %", "and all"),
        ([("aten::mm", 800, "float", "float"), ("aten::add", 200)], "aten::mm takes 80.0 %", "FP64"),
        (
            [("aten::copy_", 500, "c10::BFloat16", "float"), ("aten::copy_", 200, "float", "float"), ("aten::mm", 300)],
            "aten::copy_ takes 70.0 % of the operators' time (0.700 ms), 0.500 ms of that in casts between types",
            "and all",
        ),
        (
            [("aten::bmm", 500, "float", "float"), ("aten::_softmax", 300), ("aten::mm", 200)],
            "Attention is computed in steps, aten::_softmax alone 30.0 %",
            "FP64",
        ),
        ([("aten::bmm", 900, "float", "float"), ("aten::_softmax", 100)], "aten::bmm takes 90.0 %", "Attention"),
        (
            [("rpc_async#f(worker0 -> worker1)", 800), ("aten::mm", 200)],
            "This process waits for others, whose work the trace does not hold",
            "products",
        ),
    ],
)
def test_the_longest_kind_of_operators_is_told(tmp_path, operators, says, never):
    sentence = first_sentence(run_of(tmp_path, in_turn(*operators)))
    assert says in sentence and never not in sentence


def steps_of(*pace_us, fewer=0):
    """Steps of ten equal operators each, which take `pace_us`; the third step has `fewer` operators."""
    trace, at = Made(), 0.0
    for number, us in enumerate(pace_us):
        trace.event("mark", f"ProfilerStep#{number}", at, 10 * us, 1)
        for place in range(10 - fewer * (number == 2)):
            trace.op("aten::mm", at + place * us, us)
        at += 10 * us
    return trace


@pytest.mark.parametrize(
    ("trace", "told"),
    [
        (steps_of(900, 900, 800, 850, 200, 200), True),
        (steps_of(900, 200, 210, 200, 205, 200), False),  # the first step may set something up
        (steps_of(900, 900, 800, 850, 200, 200, fewer=3), False),  # it does something else
        (steps_of(900, 900, 200, 200), False),  # too few to know the pace
    ],
)
def test_equal_steps_that_take_unequally_long_blame_the_processor(tmp_path, trace, told):
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("the same operators take 2.00 to 9.00 ms per step" in sentence) == told
    assert ("the processor is shared or throttled" in sentence) == told


@pytest.mark.parametrize(("waiting_us", "told"), [(10_000, True), (80_000, False)])
def test_an_uneven_processor_that_costs_little_of_the_time_is_not_told(tmp_path, waiting_us, told):
    """Steps of unequal pace, with nothing after each."""
    trace, at = Made(), 0.0
    for number, us in enumerate((900, 900, 800, 850, 200, 200)):
        trace.event("mark", f"ProfilerStep#{number}", at, 10 * us + waiting_us, 1)
        for place in range(10):
            trace.op("aten::mm", at + place * us, us)
        at += 10 * us + waiting_us
    run = run_of(tmp_path, trace)
    assert ("the processor is shared" in first_sentence(run)) == told
    assert ("shared-processor" in {f.code for f in diagnose(run)}) == told


@pytest.mark.parametrize(("thread", "mac"), [(15_164_791, True), (4_194_304, False)])
def test_on_a_mac_a_shared_processor_is_advised_what_macos_has(tmp_path, thread, mac):
    trace = steps_of(900, 900, 800, 850, 200, 200)
    for event in trace.events:
        event["tid"] = thread
    finding = finding_of(run_of(tmp_path, trace, ""), "shared-processor")
    assert ("os.cpu_count()" in finding.snippet) == mac
    assert ("cgroup" in finding.snippet) != mac and "sched_getaffinity" not in finding.snippet  # which Windows lacks


def loading(mark, *batches_us, before_us=0.0, last_us=0.0):
    """Batches that take so long to load, each before 100 µs of work; before the first one the seed of workers is drawn,
    and the last mark finds no further batch."""
    trace = Made()
    trace.op("aten::random_", 0, 5)
    at = 5 + before_us
    for us in batches_us:
        trace.event("mark", mark, at, us, 1)
        trace.op("aten::mm", at + us, 100)
        at += us + 100
    if last_us:
        trace.event("mark", mark, at, last_us, 1)
    return trace


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        (loading(WORKERS, 5000), "take 97.9 % of the trace: 5.00 ms for the first, and only, batch, and neither"),
        (loading(WORKERS, 20, 10, 10, before_us=9000, last_us=600), "9.00 ms before the first batch is asked for and"),
        (loading(WORKERS, 20, 10, 10, before_us=9000, last_us=600), "0.600 ms after the last one"),
        (loading(WORKERS, 500, 500, 500, 500), None),  # batches that take long are no start
        (loading(ALONE, 5000), None),  # no workers
    ],
)
def test_the_start_and_the_end_of_workers_are_told_first(tmp_path, trace, says):
    sentence = first_sentence(run_of(tmp_path, trace))
    assert sentence.startswith("The start and the end of the loader's worker processes") == (says is not None)
    assert says is None or says in sentence
    assert ("Data is loaded in the loop's own process (num_workers=0)." in sentence) == (ALONE in str(trace.events))


def test_operators_of_the_loader_are_none_of_the_models(tmp_path):
    trace = Made()
    trace.event("mark", ALONE, 0, 600, 1)
    for at in range(0, 600, 10):
        trace.op("aten::copy_", at, 5)
    trace.op("aten::mm", 600, 100)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "outside of loading data, aten::mm takes 100 % of the operators' time" in sentence


def test_the_start_of_the_profiler_is_no_time_of_the_program(tmp_path):
    trace = Made()
    trace.event("python_function", "<built-in method _record_function_enter_new of object>", 50, 900, 1)
    trace.op("aten::mm", 0, 50)
    trace.op("aten::mm", 950, 50)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "no operator runs" not in sentence and "_record_function" not in sentence
    assert "The profiler's own work takes 90.0 % of the profiled time" in sentence


def test_the_range_of_a_cpu_program_is_told(tmp_path):
    trace = in_turn(("aten::mul", 700), ("aten::mm", 300))
    trace.event("mark", "augment", 0, 705, 1)
    assert "The program's range augment takes 70.5 % of the time." in first_sentence(run_of(tmp_path, trace))


def marked(*ranges, between_us=0.0):
    """Operators with Python between them, within ranges one after another: names and lengths of these."""
    trace, at = Made(), 0.0
    for name, us in ranges:
        trace.op("aten::mm", at, 50)
        trace.event("mark", name, at + 50, us, 1)
        at += 50 + us + between_us
    trace.op("aten::mm", at, 50)
    return trace


@pytest.mark.parametrize(
    ("ranges", "says"),
    [
        ((("metrics", 6000), ("plots", 3000)), "metrics takes 65.6 % of the time, plots 32.8 %; aten::mm takes"),
        ((("plots", 3000), ("metrics 1", 3000), ("metrics 2", 3000)), "metrics * takes 65.2 % of the time, plots"),
        ((("a", 1800), ("b", 1900), ("c", 2000), ("d", 2100)), "d takes 26.1 % of the time, c 24.8 % and b 23.6 %;"),
        ((("metrics", 9000), ("plots", 100)), "metrics takes 97.3 % of the time; aten::mm takes"),
        ((("metrics", 8500), ("plots", 600), ("saving", 600)), "metrics takes 85.9 % of the time, plots 6.06 %; aten"),
    ],
)
def test_ranges_in_which_no_operator_runs_come_before_operators(tmp_path, ranges, says):
    assert f"; the program's range {says}" in first_sentence(run_of(tmp_path, marked(*ranges)))


@pytest.mark.parametrize(("inner", "says"), [(("metrics", "plots"), "metrics takes 59.6 % of the time, plots 29.8 %;"),
                                             (("metrics",), "metrics takes 59.6 % of the time;")])  # fmt: skip
def test_ranges_within_another_are_told_if_they_contain_its_time(tmp_path, inner, says):
    trace = marked(("metrics", 6000), ("plots", 3000))
    trace.events = [event for event in trace.events if event["name"] in (*inner, "aten::mm")]
    trace.event("mark", "evaluate", 10, 9000, 1)
    trace.event("mark", "idling", 9120, 900, 1)
    trace.op("aten::mm", 10_020, 50)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert f"the program's range {says}" in sentence


def test_what_comes_before_the_first_whole_step_of_a_cpu_is_told(tmp_path):
    """The optimizer's steps end the steps of a trace without marks; backward's start is in its first call."""
    trace = Made()
    trace.event("python_function", "<built-in method run_backward of object>", 100, 5000, 1)
    for number in range(4):
        at = 5200 + 200 * number
        trace.op("aten::mm", at, 80)
        trace.event("mark", "Optimizer.step#SGD.step", at + 90, 100, 1)
        trace.op("aten::add_", at + 95, 60)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "come before the first whole step, with the first iteration, and are left out" in sentence
    assert "5.00 ms of them in <built-in method run_backward" in sentence


def test_two_steps_of_one_optimizer_per_iteration_are_one_step(tmp_path):
    """Gradients are zeroed once per iteration."""
    trace = Made()
    for number in range(4):
        at = 1000 * number
        trace.event("mark", "Optimizer.zero_grad#SGD.zero_grad", at, 10, 1)
        trace.op("aten::mm", at + 20, 300)
        for step in (400, 700):
            trace.event("mark", "Optimizer.step#SGD.step", at + step, 100, 1)
            trace.op("aten::add_", at + step + 5, 60)
    run = run_of(tmp_path, trace)
    assert run.steps["step_ms"].tolist() == pytest.approx([1.0, 1.0, 1.0])


def held_in_optimizer():
    """The host is held until the queue of the device, which is not recorded, has room."""
    trace = Made()
    trace.op("aten::cudnn_convolution", 0, 100)
    trace.event("mark", "Optimizer.step#Adam.step", 100, 900, 1)
    for number in range(8):
        trace.op("aten::addcdiv_", 100 + 10 * number, 8)
    trace.op("aten::addcdiv_", 200, 700)
    return trace


def test_a_device_of_which_one_call_of_the_optimizer_waits(tmp_path):
    run = run_of(tmp_path, held_in_optimizer())
    assert "device-not-recorded" in {f.code for f in diagnose(run)}
    assert "0.700 ms of it in one call of aten::addcdiv_, which waits" in first_sentence(run)


@pytest.mark.parametrize(
    ("rows", "trains", "told"), [(60_000_000, False, True), (60_000_000, True, False), (60_000, False, False)]
)
def test_tensors_that_no_cache_holds_are_told_to_be_computed_in_parts(tmp_path, rows, trains, told):
    trace = Made()
    for at, name in ((0, "aten::relu"), (500, "aten::exp")):
        trace.op(name, at, 480, **{"Input Dims": [[rows, 16]], "Input type": ["float"]})
    if trains:
        trace.op("autograd::engine::evaluate_function: ExpBackward0", 1000, 500)
        trace.op("aten::mul", 1005, 480, **{"Input Dims": [[rows, 16]], "Input type": ["float"]})
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("on tensors of up to 3.58 GiB take 100 %: no cache holds these" in sentence) == told


def test_a_large_weight_is_no_tensor_of_rows(tmp_path):
    trace = Made()
    dims = [[10_000_000], [10, 1024], [1024, 10_000_000]]
    trace.op("aten::addmm", 0, 480, **{"Input Dims": dims, "Input type": ["float"] * 3})
    assert "no cache holds" not in first_sentence(run_of(tmp_path, trace))


@pytest.mark.parametrize(("us", "told"), [(400, True), (200, False)])
def test_the_second_operator_is_told_where_it_takes_long(tmp_path, us, told):
    trace = Made()
    trace.op("aten::addmm", 0, 1000)
    trace.op("aten::clamp_min", 1000, us)
    assert ("aten::clamp_min takes 28.6 %." in first_sentence(run_of(tmp_path, trace))) == told


@pytest.mark.parametrize(("first_us", "shapes", "told"), [(900, 4, True), (900, 2, False), (130, 4, False)])
def test_first_calls_on_their_sizes_are_told_where_they_take_longer(tmp_path, first_us, shapes, told):
    trace, at = Made(), 0.0
    for call in range(3):
        for size in range(shapes):
            us = float(first_us if call == 0 else 100)
            trace.op("aten::mkldnn_convolution", at, us, **{"Input Dims": [[1, 64 * size + 3, 8, 8]]})
            at += us
    run = run_of(tmp_path, trace)
    said = "First calls on 4 sizes take 3.20 of the 4.40 ms of operators beyond later ones"
    assert (said in first_sentence(run)) == told
    run.head.config["growing_rows"] = {"passes": 9, "first": 40, "last": 48, "frac": 0.9}  # each has sizes of its own
    assert "First calls" not in first_sentence(run)


@pytest.mark.parametrize(
    ("longest", "us", "told"),
    [
        ("aten::addmm", 300, True),
        ("_C::onednn_mm", 300, True),
        ("aten::addmm", 50, False),
        ("aten::sort", 300, False),
    ],
)
def test_what_reads_each_value_once_is_told_beside_products(tmp_path, longest, us, told):
    trace = Made()
    trace.op(longest, 0, 1000)
    for place, name in enumerate(("aten::native_layer_norm", "aten::gelu", "aten::mul", "aten::relu")):
        trace.op(name, 1000 + us * place, us / 2)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert ("Elementwise operators and norms take 37.5 %: torch.compile, from PyTorch 2.0 on" in sentence) == told


@pytest.mark.parametrize("others", [True, False])
def test_small_convolutions_beside_those_of_onednn_are_no_fallback(tmp_path, others):
    trace = Made()
    trace.op("aten::_slow_conv2d_forward", 0, 1000)
    trace.op("aten::mkldnn_convolution" if others else "aten::relu", 1000, 300)
    run = run_of(tmp_path, trace)
    assert ("where oneDNN is" in first_sentence(run)) != others
    assert any(f.code == "fallback-convolution" for f in diagnose(run)) != others


@pytest.mark.parametrize(
    ("caller", "inner", "us", "says"),
    [
        (
            "aten::quantile",
            "aten::sort",
            900,
            "(0.889 ms), all of it in aten::quantile",
        ),
        ("aten::one_hot", "aten::fill_", 890, "all of it in aten::one_hot"),
        ("PowBackward0", "aten::mul", 500, "all of it in PowBackward0, which takes 89"),
        ("aten::linear", "aten::addmm", 890, ""),
        ("ConvolutionBackward0", "aten::convolution_backward", 890, ""),
        ("aten::sort", "aten::sort_out", 890, ""),
    ],
)
def test_the_operator_around_the_longest_one_is_named_unless_it_is_a_matter_of_course(
    tmp_path, caller, inner, us, says
):
    trace = Made()
    trace.op(caller, 0, 891)
    trace.op(inner, 1, min(us, 889))
    trace.op("aten::relu", 900, 110)
    sentence = first_sentence(run_of(tmp_path, trace, ""))
    assert (says or "takes") in sentence and ("of it in" in sentence) == bool(says)


def test_convolutions_without_onednn_are_told_with_the_share_of_each_number(tmp_path):
    trace = Made()
    trace.op("aten::_slow_conv2d_forward", 0, 600)
    trace.op("aten::_slow_conv2d_backward", 600, 200)
    trace.op("aten::relu", 800, 200)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "fallback-convolution"]
    assert "take 80.0 % of the operators' time, 60.0 % in aten::_slow_conv2d_forward" in finding.title


@pytest.mark.parametrize(("op", "model"), [("aten::rand", False), ("aten::addmm", True)])
def test_a_gpu_without_work_is_advised_on_by_what_the_cpu_computes(tmp_path, op, model):
    trace = Made()
    trace.op(op, 0, 1000)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "idle-gpu"]
    assert ("model.to" in finding.snippet) == model and ("Create tensors on the GPU" in finding.advice) != model


def passes_of(*each_us):
    """Passes of the same 24 operators, the n-th of which take `each_us[n]`, nothing marking them."""
    trace, at = Made(), 0.0
    for us in each_us:
        for n in range(24):
            trace.op(("aten::mkldnn_convolution", "aten::mkldnn_convolution", "aten::relu")[n % 3], at, us, 1)
            at += us + 1
    return trace


@pytest.mark.parametrize(
    ("each_us", "told"),
    [((900.0, 1900.0, 1500.0, 1000.0, 1000.0, 1000.0), True), ((900.0, 1010.0, 1000.0, 990.0, 1000.0), False)],
)
def test_passes_that_nothing_marks_show_a_shared_processor(tmp_path, each_us, told):
    run = run_of(tmp_path, passes_of(*each_us), "")
    assert ("per pass after the first" in first_sentence(run)) == told
    if told:
        finding = finding_of(run, "shared-processor")
        assert finding.value == pytest.approx(24 * (900 + 500) / 5 / 1e3)  # the first pass is none of the five
        assert "beyond the pace of the fastest quarter" in finding.unit


def test_convolutions_of_a_cpu_are_told_with_what_makes_them_faster(tmp_path):
    told = first_sentence(run_of(tmp_path, passes_of(*[1000.0] * 5), ""))
    compiled = "torch.compile, from PyTorch 2.0 on (on Windows 2.5)"
    assert f"What may make it faster: channels_last, {compiled}, and BF16 where the processor multiplies it" in told


def test_a_trace_of_old_operators_is_not_advised_a_profiler_that_its_version_lacks(tmp_path):
    trace = Made()
    for n in range(40):
        trace.op(("addmm", "relu")[n % 2], 1000.0 * n, 100.0, 1)
    finding = finding_of(run_of(tmp_path, trace, ""), "python-outside-operators")
    assert "py-spy" in finding.snippet and "before 1.7" in finding.advice


@pytest.mark.parametrize("in_training", [True, False])
def test_statistics_within_batch_norm_tell_its_mode_without_shapes(tmp_path, in_training):
    trace = Made()
    for n in range(10):
        trace.op("aten::batch_norm", 2000.0 * n, 1000.0, 1)
        trace.op("aten::native_batch_norm", 2000.0 * n + 10, 900.0, 1)
        trace.op("aten::mean" if in_training else "aten::empty_like", 2000.0 * n + 20, 300.0, 1)
    codes = {f.code for f in diagnose(run_of(tmp_path, trace, ""))}
    assert ("batchnorm-in-training-mode" in codes) == in_training
