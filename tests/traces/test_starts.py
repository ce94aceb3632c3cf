"""Traces of first calls, of one call without a warm-up, and of a host whose device was not recorded."""

import pytest

from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of, runs_of

ONE_BLOCK = "void layer_norm_backward<float>(float const*, float*, int)"


def one_call(*, empty_us=320, launch_us=220, kernel_us=60, blocks=1, times=1):
    """A backward of three kernels, without a warm-up: the first allocation and the first launch take long. The last
    kernel has so many blocks on a GPU of 108 multiprocessors."""
    trace = Made()
    for number in range(times):
        at, first = 1_000 * number, number == 0
        us = empty_us if first else 5
        trace.op("aten::ones_like", at, us + (launch_us if first else 5) + 15)
        trace.op("aten::empty_strided", at + 1, us)
        launched = at + us + 5
        call_us = launch_us if first else 5
        trace.kernel(made.RELU, launched + call_us, 1, launched, call_us=call_us)
        at = launched + call_us + 60
        trace.op("aten::mse_loss_backward", at, 10)
        trace.kernel(made.NORM, at + 8, 3, at + 2, call_us=4)
        trace.op("LayerNormBackward", at + 50, 20)
        trace.op("aten::empty", at + 51, 5)
        trace.kernel(ONE_BLOCK, at + 70, kernel_us, at + 60, call_us=4)
        trace.events[-1]["args"] |= {"blocks per SM": blocks / 108, "grid": [blocks, 1, 1]}
    return trace


A100 = {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "computeMajor": 8, "computeMinor": 0, "numSms": 108}


def _run(tmp_path, trace):
    return run_of(tmp_path, trace, deviceProperties=[A100])


def test_a_single_call_without_a_warm_up_is_told_first(tmp_path):
    text = first_sentence(_run(tmp_path, one_call()))
    assert text.startswith(
        "The trace holds a single call without a warm-up: 0.540 of 0.735 ms (73.5 %) are first calls of the driver and "
        "the allocator; profile many calls after a warm-up. Largest possible saving: the GPU is idle"
    )
    assert "come before the first device activity" not in text and "prof.step()" not in text


@pytest.mark.parametrize("case", [{"empty_us": 20, "launch_us": 20}, {"times": 8}, {"kernel_us": 250}])
def test_a_warm_call_a_loop_and_a_busy_device_are_no_single_call(tmp_path, case):
    assert "without a warm-up" not in first_sentence(_run(tmp_path, one_call(**case)))


def test_launches_that_are_always_slow_are_no_first_calls(tmp_path):
    trace = Made()
    for number in range(4):
        trace.op("aten::mm", 400 * number, 250)
        trace.kernel(made.GEMM, 400 * number + 240, 10, 400 * number + 5, call_us=230)
    assert "without a warm-up" not in first_sentence(_run(tmp_path, trace))


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ({}, "in 1 block for 108 multiprocessors: more blocks"),
        ({"blocks": 8}, "in 8 blocks for 108 multiprocessors: more blocks"),
        ({"blocks": 64}, ""),
        ({"kernel_us": 6}, ""),  # little more than its start
    ],
)
def test_a_kernel_of_few_blocks_with_most_of_the_time_is_named(tmp_path, case, told):
    text = first_sentence(_run(tmp_path, one_call(**case)))
    assert (" multiprocessors" in text) == bool(told) and told in text
    if told:
        saving, named = text.index("Largest possible saving"), text.index("layer_norm_backward<float> takes 93.8 %")
        assert saving < named


def cold(*names_us, memory=True):
    """A program whose device was not recorded: operators by name, and how long their calls take."""
    trace, at = Made(), 0
    for name, us in names_us:
        trace.op(name, at, us, **{"Input Dims": [[8, 8]]})
        at += us + 10
    if memory:
        trace.events.append(
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 77, "tid": 1, "ts": made.BASE + 20,
             "args": {"Device Type": 1, "Device Id": 0, "Bytes": 512, "Total Allocated": 512, "Total Reserved": 2**21}}
        )  # fmt: skip
    return trace


def test_first_calls_of_all_operators_are_added_up_where_the_device_was_not_recorded(tmp_path):
    """The second product has other sizes, which take another kernel."""
    calls = [("aten::elu", 10_000), ("aten::elu", 50), ("aten::bmm", 100_000), ("aten::sum", 26_000)]
    calls += [("aten::bmm", 13_000), ("aten::bmm", 400)]
    text = first_sentence(run_of(tmp_path, cold(*calls)))
    assert text.endswith(
        "On the host, aten::bmm takes 75.9 % of the time, 113 ms of it in its first 2 calls; first calls take 149 of "
        "150 ms in all: profile after a warm-up."
    )


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        ([("aten::bmm", 9_000), ("aten::sum", 4_000)], True),  # each runs once
        ([("aten::bmm", 9_000), ("aten::sum", 50), ("aten::sum", 60), ("aten::sum", 40)], False),
        ([("aten::bmm", 9_000), ("aten::bmm", 2_000), ("aten::bmm", 1_500)], False),
        ([("aten::item", 9_000), ("aten::item", 20)], False),  # which waits
        ([("aten::normal_", 9_000), ("aten::normal_", 20)], False),  # which may run on the host
    ],
)
def test_a_first_call_is_told_where_others_show_it(tmp_path, calls, told):
    text = first_sentence(run_of(tmp_path, cold(*calls)))
    assert ("in its first call" in text) == told


def unrecorded(*, masked=True, copies=False):
    """A function of a program that launches 65 kernels, none of which is recorded, with a boolean mask."""
    trace = Made()
    trace.event("python_function", "pkg/solver.py(5): matvec", 0, 8_000, 1)
    for number in (*range(50), *range(65, 80)):
        trace.op(f"aten::op{number}", 100 * number, 98)
        trace.event("call", "cudaLaunchKernel", 100 * number + 5, 5, 1, correlation=number + 1)
    if masked:
        trace.op("aten::index_put_", 5_000, 1_500)
        trace.op("aten::_index_put_impl_", 5_010, 1_480)
    trace.op("aten::nonzero", 5_020, 1_000)
    if copies:
        trace.event("call", "cudaMemcpyAsync", 5_100, 10, 1, correlation=100)
        trace.event("call", "cudaStreamSynchronize", 5_200, 500, 1, correlation=101)
    trace.event("call", "cudaDeviceSynchronize", 8_010, 1_990, 1, correlation=102)
    return trace


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (
            {},
            "Boolean masks in aten::index_put_ take 1.50 ms (15.0 %), 1.00 ms of it in aten::nonzero, which runs 1 "
            "time: compute the indices once, on the device.",
        ),
        ({"copies": True}, "which runs 1 time and waits for the device: compute the indices once"),
        ({"copies": True, "masked": False}, "The host reads back from the device 1 time, for 1.00 ms (aten::nonzero)."),
        ({"masked": False}, "and makes 65 launches in it."),  # of a tensor of the host
    ],
)
def test_where_the_host_is_and_what_it_reads_is_told_of_launches_without_kernels(tmp_path, case, told):
    text = first_sentence(run_of(tmp_path, unrecorded(**case)))
    assert "The host is in pkg/solver.py(5): matvec for 8.00 of 10.0 ms (80.0 %), and makes 65 launches in it." in text
    assert told in text and ("nonzero" in text) == (told != "and makes 65 launches in it.")


@pytest.mark.parametrize(("driver", "told"), [(12040, True), (12080, False), (13000, False), (None, False)])
def test_a_driver_that_is_older_than_the_runtime_is_named(tmp_path, driver, told):
    head = {} if driver is None else {"cuda_driver_version": driver}
    run = run_of(tmp_path, unrecorded(), cuda_runtime_version=12080, **head)
    advice = finding_of(run, "device-not-recorded").advice
    assert ("the driver (CUDA 12.4) is older than the runtime and its profiler (CUDA 12.8)" in advice) == told


@pytest.mark.parametrize("operator_us", [2_000, 9_000])
def test_what_the_host_does_is_told_by_its_length(tmp_path, operator_us):
    """Between two launches it is in no operator for 5 ms, and in one for less or more."""
    trace = Made()
    trace.op("aten::mm", 0, 8)
    trace.kernel(made.GEMM, 10, 300, 2)
    trace.op("aten::sort", 5_320, operator_us)
    at = 5_320 + operator_us
    trace.op("aten::mm", at + 10, 8)
    trace.kernel(made.GEMM, at + 20, 300, at + 12)
    text = first_sentence(run_of(tmp_path, trace))
    assert (text.index("in aten::sort") < text.index("in no operator")) == (operator_us > 5_000)


def test_a_single_call_of_several_ranks_is_that_of_the_first(tmp_path):
    text = first_sentence(runs_of(tmp_path, [one_call(), one_call()]))
    assert text.startswith("Rank 0's trace holds a single call without a warm-up: 0.540 of 0.735 ms")
