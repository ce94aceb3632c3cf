"""Statements on traces of a CPU, or of a host alone, that real traces refuted, and what has to be said instead."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from amp_core.store.run import load_run
from amp_core.traces import import_traces
from tests.findings.zoo.cpu_traces import looping
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of, write

SOLVER = ("aten::matmul", "aten::dot", "aten::div", "aten::mul", "aten::add")


@pytest.mark.parametrize(
    ("ops", "says", "snippet"),
    [
        (
            ("aten::ge", "aten::lt", "aten::nonzero"),
            "compute its passes at once, or each in fewer operators",
            "inside =",
        ),
        (SOLVER, "compute each of its passes in fewer operators, or compile the loop", "torch.compile(all_passes)"),
        ((*SOLVER, "aten::lt", "aten::is_nonzero"), "or compile the loop", "torch.compile(all_passes)"),
    ],
)
def test_only_passes_that_compare_are_told_to_be_computed_at_once(tmp_path, ops, says, snippet):
    """A solver's pass needs the one before, also where it tests whether to go on."""
    run = run_of(tmp_path, looping(*ops, passes=60, rest_us=3000.0))
    assert says in first_sentence(run)
    assert snippet in finding_of(run, "operator-loop").snippet


def heads(layers=6, selects=64, launched="cuLaunchKernel"):
    """Layers, of which each selects slices in a loop, with a launch outside of operators after every second one."""
    trace, at = Made(), 0.0
    for _ in range(layers):
        for number in range(selects):
            trace.op("aten::select", at, 10)
            if number % 2:
                trace.event("call", launched, at + 11, 5, 1, correlation=int(at))
            at += 20
        for name in ("aten::linear", "aten::layer_norm"):
            trace.op(name, at, 190)
            at += 200
    return trace


def test_the_time_of_a_loop_is_that_of_passes_that_follow_one_another(tmp_path):
    sentence = first_sentence(run_of(tmp_path, heads()))
    assert (
        "A loop of Python runs aten::select 384 times and launches 192 kernels outside of operators, for 7.66 of "
        "10.1 ms (76.0 %): put the dimension that it slices into the grid of its kernels." in sentence
    )


@pytest.mark.parametrize(("launched", "told"), [("cuLaunchKernel", True), ("cudaStreamSynchronize", False)])
def test_a_kernel_per_slice_belongs_into_a_grid(tmp_path, launched, told):
    trace = heads(launched=launched)
    trace.op("aten::cudnn_convolution", 9000, 10)
    assert ("grid" in finding_of(run_of(tmp_path, trace), "operator-loop").advice) == told


def unrecorded(op, *us):
    """Calls of an operator on a device that was not recorded."""
    trace, at = Made(), 0.0
    for each in us:
        trace.op(op, at, each)
        at += each + 50
    trace.op("aten::cudnn_convolution", at, 10)
    return trace


@pytest.mark.parametrize(
    ("op", "us", "says"),
    [
        ("aten::cudnn_batch_norm", [130] * 20, "of the time: launching."),
        ("aten::nonzero", [200] + [110] * 20, "of the time: launching, and waiting for the device."),
        ("aten::cudnn_batch_norm", [1300] + [130] * 20, "launching, waiting for the device, or its first call."),
        ("aten::cudnn_batch_norm", [900] * 4, "launching, waiting for the device, or its first call."),
    ],
)
def test_calls_that_take_equally_long_are_no_first_calls(tmp_path, op, us, says):
    assert f"On the host, {op} takes " in (sentence := first_sentence(run_of(tmp_path, unrecorded(op, *us))))
    assert says in sentence


def test_an_operator_of_a_loop_is_not_told_again(tmp_path):
    trace = looping("aten::ge", "aten::lt", "aten::where", passes=60, us=20)
    for number in range(60):
        trace.op("aten::nonzero", 75 * number + 50 + 2, 16)
    trace.op("aten::cudnn_convolution", 60 * 75 + 1100, 10)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "A loop of Python runs" in sentence and "On the host" not in sentence


def test_memory_that_is_freed_later_is_no_time_of_the_host(tmp_path):
    trace = unrecorded("aten::sin", *[90] * 20)
    run = run_of(tmp_path, trace)
    trace.events.append({"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 77, "tid": 1,
                         "ts": made.BASE + 9_000, "args": {"Device Type": 1, "Device Id": 0, "Bytes": -512,
                                                            "Total Allocated": 0, "Total Reserved": 512}})  # fmt: skip
    later = run_of(tmp_path / "later", trace)
    assert later.head.config["host_op_frac"] == pytest.approx(run.head.config["host_op_frac"])


@pytest.mark.parametrize(("python_us", "is_cost"), [(0, True), (300, False)])
def test_calls_directly_in_a_range_cost_as_much_as_others(tmp_path, python_us, is_cost):
    """Operators that call three each for 200 µs, and lie 200 µs apart in a range, or as much longer as Python takes."""
    trace, at = Made(), 200.0 + python_us
    for number in range(100):
        trace.op(f"aten::kind_{number % 20}", at, 610)
        for place, name in enumerate(("aten::t", "aten::view", "aten::addmm")):
            trace.op(name, at + 200 * (place + 1), 3)
        at += 810 + python_us
    trace.op("model_inference", 0, at)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "300 calls of operators by others cost 200 µs each" in sentence
    assert ("; model_inference beside its 100 operators takes " in sentence) == is_cost
    assert (" ms), most of which is the same cost of calling these" in sentence) == is_cost
    assert ("Python or other code in model_inference, outside of operators, takes" in sentence) != is_cost


@pytest.mark.parametrize(
    ("us", "cold"),
    [([2500, 2400, 2600, 150, 140, 160, 150, 150], True), ([2500, 150, 2400, 140, 2600, 160, 150], False)],
)
def test_a_device_is_not_warm_only_before_it_is_fast(tmp_path, us, cold):
    trace, at = Made(), 0
    for one in us:
        trace.op("aten::mm", at, 8, **{"Input type": ["c10::Half"] * 2, "Input Dims": [[64, 64], [64, 64]]})
        trace.kernel(made.GEMM, at + 10, one, at + 2)
        at += one + 12
    run = run_of(tmp_path, trace)
    assert ("shared, throttled, or not warm yet." in first_sentence(run)) == cold
    assert ("the device is shared or throttled." in first_sentence(run)) != cold
    assert "to blame" not in finding_of(run, "uneven-device").advice


@pytest.mark.parametrize(
    ("name", "calls", "us", "first"),
    [
        ("aten::view", 1, 8_000, True),  # 1 % of the time, but views take microseconds
        ("aten::view", 1, 80, False),
        ("aten::view", 9, 8_000, False),  # a trace of several passes
        ("aten::mul", 1, 8_000, False),
    ],
)
def test_one_cold_pass_is_told_first(tmp_path, name, calls, us, first):
    trace, at = Made(), 0.0
    for number in range(9):
        if number < calls:
            trace.op(name, at, us if number == 0 else 3)
        trace.op("aten::mkldnn_convolution", at + us, 90_000)
        at += us + 90_000
    sentence = first_sentence(run_of(tmp_path, trace, ""))
    told = "The trace contains no device activity. One call of aten::view, which computes nothing, takes 8.00 ms: these"
    assert sentence.startswith(told) == first
    assert ("warm-up. On the CPU, aten::mkldnn_convolution takes" in sentence) == first


@pytest.mark.parametrize(("slower", "told"), [(0, True), (2, False)])
def test_pairs_of_calls_tell_first_ones_where_the_later_are_faster(tmp_path, slower, told):
    """Six sizes, each twice: the first call takes 3 ms and the second 1, or the other way round on some of them."""
    trace, at = Made(), 0.0
    for later in (False, True):
        for number in range(6):
            us = 3_000 if later == (number < slower) else 1_000
            dims = {"Input Dims": [[1, 16 + number, 8, 8]], "Input type": ["float"]}
            trace.op("aten::mkldnn_convolution", at, us, **dims)
            at += us
    sentence = first_sentence(run_of(tmp_path, trace, ""))
    assert ("activity. First calls on 6 sizes take 12.0 of the 24.0 ms of operators beyond later" in sentence) == told


def exchanging(*kinds, computes_us=0.0, dims=(1024,)):
    """Ten exchanges of gloo; the last of several kinds runs within the first."""
    trace, at = Made(), 0.0
    for _ in range(10):
        for place, kind in enumerate(kinds):
            us = 400 - 100 * place
            trace.op(f"gloo:{kind}", at + 50 * place, us, **{"Input Dims": [list(dims)], "Input type": ["float"]})
        trace.op("aten::add_", at + 410, 5 + computes_us)
        at += 420 + computes_us
    return trace


def test_what_is_received_while_a_send_lasts_is_none_of_its_time(tmp_path):
    run = run_of(tmp_path, exchanging("send", "recv"))
    assert (
        "messages between ranks take 95.4 % of the time, with no operator beside them, 75.0 % of that in recv of 4.00 "
        "KiB" in first_sentence(run)
    )
    assert run.collectives["alone_us"].tolist() == run.collectives["total_us"].tolist() == [100.0, 300.0] * 10
    assert "GPU" not in first_sentence(run)


@pytest.mark.parametrize(
    ("kind", "advice", "snippet"),
    [
        ("recv", "Small messages cost their latency", "all_reduce(values)"),
        ("all_gather", "as counts instead of what they are counted from", "instead of gathered objects"),
        ("broadcast", "as counts instead of what they are counted from", "instead of gathered objects"),
        ("all_reduce", "Reduce less often", "no_sync()"),
        ("reduce_scatter", "Reduce less often", "no_sync()"),
    ],
)
def test_what_ranks_exchange_decides_the_advice(tmp_path, kind, advice, snippet):
    finding = finding_of(run_of(tmp_path, exchanging(kind)), "exposed-communication")
    assert advice in finding.advice and snippet in finding.snippet


@pytest.mark.parametrize(("op", "snippet"), [("aten::zeros", 'x = torch.zeros(shape, device="cuda")'),
                                             ("aten::sort", 'x = x.to("cuda")')])  # fmt: skip
def test_a_gpu_is_offered_what_the_trace_creates_and_not_hosts_that_communicate(tmp_path, op, snippet):
    trace = exchanging("all_reduce", computes_us=2_000)
    trace.op(op, 30_000, 50)
    assert finding_of(run_of(tmp_path, trace), "idle-gpu").snippet == snippet


@pytest.mark.parametrize(("thread", "mac"), [(15_164_791, True), (4_194_304, False), (140_215_744_943_872, False)])
def test_a_convolution_without_onednn_on_a_mac_is_told_to_go_to_mps(tmp_path, thread, mac):
    trace = Made()
    trace.op("aten::conv2d", 0, 1000, thread)
    trace.op("aten::_slow_conv2d_forward", 5, 990, thread, **{"Input type": ["float"]})
    run = run_of(tmp_path, trace, "")
    finding = finding_of(run, "fallback-convolution")
    for text in (first_sentence(run), finding.advice):
        assert ('move the model to the device "mps"' in text) == mac and ("is_available()" in text) != mac
    assert ('.to("mps")' in finding.snippet) == mac


@pytest.mark.parametrize(
    ("name", "thread", "mac"),
    [
        ("Annas-MacBook-Pro-2.local_914.1672911380959.pt.trace.json", 2_268_207, True),
        ("annas.local_914.1672911380959.pt.trace.json", 2_268_207, True),
        ("Annas-MacBook-Pro-2.local_77.1672911380959.pt.trace.json", 77, False),  # in Linux there, as in a container
        ("node7_914.1672911380959.pt.trace.json", 2_268_207, False),
    ],
)
def test_a_trace_is_a_macs_by_the_name_of_its_file_unless_its_threads_are_those_of_linux(tmp_path, name, thread, mac):
    trace = Made()
    trace.op("aten::conv2d", 0, 1000, thread)
    trace.op("aten::_slow_conv2d_forward", 5, 990, thread, **{"Input type": ["float"]})
    run = load_run(import_traces([write(tmp_path / name, trace.document())], tmp_path / "run"))
    assert ('move the model to the device "mps"' in first_sentence(run)) == mac


@pytest.mark.parametrize(
    ("mask", "backward", "told"),
    [("aten::bernoulli_", False, True), ("aten::bernoulli_", True, False), ("", False, False)],
)
def test_dropout_beside_a_longer_operator_is_told_in_inference(tmp_path, mask, backward, told):
    trace = Made()
    trace.op("aten::mkldnn_convolution", 0, 750)
    trace.op("aten::dropout", 750, 240)
    if mask:
        trace.op(mask, 760, 150)
    if backward:
        trace.op("ConvolutionBackward0", 1000, 50, 2)
    sentence = first_sentence(run_of(tmp_path, trace, ""))
    said = " Dropout takes 24.2 %, and the trace contains no backward: call model.eval() for inference."
    assert (said in sentence) == told


def test_dropout_within_attention_is_part_of_its_time(tmp_path):
    """With what it allocates, and once where dropout calls dropout."""
    trace = Made()
    trace.op("aten::mkldnn_convolution", 0, 700)
    trace.op("aten::scaled_dot_product_attention", 700, 200)
    trace.op("aten::dropout", 710, 100)
    trace.op("aten::empty_like", 711, 30)
    trace.op("aten::feature_dropout", 900, 100)
    trace.op("aten::dropout", 905, 90)
    for at in (745, 910):
        trace.op("aten::bernoulli_", at, 60)
    assert " Dropout takes 20.0 %, and the trace contains no backward" in first_sentence(run_of(tmp_path, trace, ""))


@pytest.mark.parametrize(("training", "backward", "told"), [("True", False, True), ("False", False, False),
                                                            ("True", True, False)])  # fmt: skip
def test_batch_norm_in_training_mode_is_told_where_the_device_was_not_recorded(tmp_path, training, backward, told):
    trace = Made()
    for number in range(20):
        inputs = ["", "", "", "", "", training, "0.1", "1e-05", "True"]
        trace.op("aten::batch_norm", 200 * number, 120, **{"Concrete Inputs": inputs})
        trace.op("aten::cudnn_batch_norm", 200 * number + 5, 100)
    if backward:
        trace.op("CudnnBatchNormBackward0", 5000, 50, 2)
        trace.op("aten::cudnn_batch_norm_backward", 5005, 40, 2)
    findings = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "batchnorm-in-training-mode"]
    assert [(f.value, f.unit) for f in findings] == [(20, "calls")] * told
