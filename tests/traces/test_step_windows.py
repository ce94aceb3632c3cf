"""Where a step of a trace begins and ends: by the device's own marks, the host's, and behind earlier work."""

import pandas as pd
import pytest

from amp_core.traces import read_trace
from tests.traces import made
from tests.traces.made import Made, read, write


def queued(steps=2, before=500, device_marks=False, gap=0):
    """A loop that runs ahead of the device: it launches a step of 300 µs of kernels in 20 µs, behind `before` µs of
    work that was launched before the trace began. `gap`: idle time of the device before each step."""
    loop = Made()
    loop.event("kernel", made.SIMT, 0, before, 7, correlation=1, device=0, stream=7)
    at = before
    for number in range(steps):
        host = 40 * number
        loop.event("mark", f"ProfilerStep#{number}", host, 30, 1)
        loop.op("aten::mm", host + 2, 20)
        loop.kernel(made.GEMM, at + gap, 200, host + 5)
        loop.kernel(made.NCCL, at + gap + 200, 100, host + 15)
        if device_marks:
            loop.event("gpu_user_annotation", f"ProfilerStep#{number}", at + gap, 300, 7)
        at += 300 + gap
    return loop


def test_work_launched_before_the_trace_began_is_in_no_step(tmp_path):
    trace, rows = read(tmp_path, queued().document())
    (window,) = pd.DataFrame(trace.windows).to_dict("records")
    assert (window["wall_us"], window["busy_us"], window["idle_us"]) == (600, 600, 0)
    assert (window["launches"], window["communication_alone_us"]) == (4, 200)
    assert pd.DataFrame(trace.step_rows)["step_ms"].tolist() == [0.3, 0.3]
    inside = rows[rows["step"].notna()]
    assert inside["total_us"].sum() == 600 and set(rows[rows["step"].isna()]["name"]) == {made.SIMT}


def test_a_step_begins_where_its_mark_on_the_device_does(tmp_path):
    """The device may be idle between the work of the step before and the first kernel of this one."""
    marked, _ = read(tmp_path, queued(1, device_marks=True, gap=10).document())
    bare, _ = read(tmp_path, queued(1, gap=10).document())
    assert (marked.windows["wall_us"], bare.windows["wall_us"]) == ([300], [310])
    tiny = queued(1, gap=10)  # some versions of ROCm mark hardly any of the step
    tiny.event("gpu_user_annotation", "ProfilerStep#0", 600, 2, 7)
    assert read(tmp_path, tiny.document())[0].windows["wall_us"] == [310]


def test_a_mark_on_the_device_does_not_hide_that_the_device_waited_for_the_host(tmp_path):
    slow = Made()
    slow.event("mark", "ProfilerStep#3", 0, 1000, 1)
    slow.op("aten::mm", 690, 20)
    slow.kernel(made.GEMM, 700, 100, 695)
    slow.event("gpu_user_annotation", "ProfilerStep#3", 700, 100, 7)
    trace, _ = read(tmp_path, slow.document())
    assert (trace.windows["wall_us"], trace.windows["idle_us"], trace.windows["lead_us"]) == ([100], [0], [700])


def optimized(steps, names=("Optimizer.step#AdamW.step",), marks=False):
    """A loop of 1,000 µs per step, each with a kernel of 400 µs; the first one begins 5,000 µs after the trace."""
    loop = Made()
    loop.event("call", "cudaFree", 0, 4_900, 1, correlation=1)
    for number in range(steps):
        at = 5000 + 1000 * number
        loop.op("aten::mm", at + 100, 20)
        loop.kernel(made.GEMM, at + 300, 400, at + 105)
        if marks:
            loop.event("mark", f"ProfilerStep#{number}", at, 995, 1)
        for place, name in enumerate(names):
            loop.event("mark", name, at + 800 + 90 * place, 80, 1)
            loop.event("mark", name, at + 805 + 90 * place, 70, 1)  # a wrapper's
            loop.kernel(made.ADAM, at + 850 + 90 * place, 20, at + 810 + 90 * place)
    return loop


def test_without_marks_a_step_is_from_the_end_of_an_optimizers_step_to_the_end_of_the_next(tmp_path):
    trace, rows = read(tmp_path, optimized(4).document())
    (window,) = pd.DataFrame(trace.windows).to_dict("records")
    assert (window["step"], window["steps"], window["wall_us"], window["busy_us"]) == (1, 3, 3000, 3 * 420)
    assert trace.step_rows["step"] == [1, 2, 3] and trace.step_rows["step_ms"] == [1.0] * 3
    assert rows[rows["step"].notna()]["total_us"].sum() == 3 * 420


def test_of_two_optimizers_the_one_that_steps_last_bounds_the_steps(tmp_path):
    two = optimized(4, ("Optimizer.step#Shampoo.step", "Optimizer.step#EMAOptimizer.step"))
    assert read(tmp_path, two.document())[0].step_rows["step_ms"] == [1.0] * 3


def adversarial(pattern, *, loads=True, sizes=True):
    """A GAN's loop of 1,000 µs per iteration, in which optimizers of one class step in this order: `dg`, or `dddg`."""
    loop = Made()
    each = 900 // len(pattern)
    for number in range(4):
        at = 1000 * number
        if loads:
            loop.event("mark", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, 20, 1)
        for place, net in enumerate(pattern):
            start = at + 50 + each * place
            loop.op("aten::mm", start, 10)
            loop.kernel(made.GEMM, start + 30, each - 40, start + 2)
            loop.event("mark", "Optimizer.step#Adam.step", start + 20, 30, 1)
            if number == 0 and place == pattern.index(net):
                loop.op("aten::zeros_like", start + 21, 2)  # the state
            shapes = {"Input Dims": [[8 if net == "d" else 16]]} if sizes else {}
            loop.op("aten::_fused_adam_", start + 25, 20, **shapes)
    return loop


@pytest.mark.parametrize("pattern", ["dg", "dddg"])
@pytest.mark.parametrize("loads", [True, False])
def test_two_optimizers_of_one_class_step_once_per_iteration(tmp_path, pattern, loads):
    trace, _ = read(tmp_path, adversarial(pattern, loads=loads, sizes=not loads).document())
    assert trace.step_rows["step_ms"] == [1.0] * 3


def test_optimizers_steps_that_look_alike_are_steps_of_one_optimizer(tmp_path):
    trace, _ = read(tmp_path, adversarial("dd", loads=False).document())
    assert trace.steps == 7


def test_ranks_that_are_merged_into_one_trace_share_their_steps(tmp_path):
    merged = Made()
    for rank in (0, 1):
        for number in range(2):
            at = 1000 * number + 10 * rank
            merged.event("mark", f"ProfilerStep#{3 + number}", at, 1000, 1)
            merged.op("aten::mm", at + 1, 8)
            merged.kernel(made.GEMM, at + 10, 900, at + 3)
            merged.events[-1]["args"]["device"] = rank
        for event in merged.events[-10:]:
            event["pid"] = rank
    trace, _ = read(tmp_path, merged.document())
    windows = pd.DataFrame(trace.windows)
    assert windows["device"].tolist() == ["cuda:0", "cuda:1"]
    assert windows["steps"].tolist() == [2, 2] and windows["wall_us"].tolist() == [2010, 2010]


@pytest.mark.parametrize(("steps", "marks", "windows"), [(2, False, [None]), (4, True, [0])])
def test_marks_of_steps_come_first_and_two_optimizers_steps_bound_none(tmp_path, steps, marks, windows):
    trace, _ = read(tmp_path, optimized(steps, marks=marks).document())
    assert trace.windows["step"] == windows and trace.steps == (steps if marks else 0)


def test_a_trace_without_steps_begins_where_earlier_work_ends(tmp_path):
    loop = queued()
    loop.events = [e for e in loop.events if not e["name"].startswith("ProfilerStep")]
    trace, rows = read(tmp_path, loop.document())
    (window,) = pd.DataFrame(trace.windows).to_dict("records")
    assert (window["wall_us"], window["idle_us"], window["launches"]) == (600, 0, 4)
    assert made.SIMT not in set(rows["name"])


def test_unlaunched_work_counts_as_earlier_by_stream_or_correlation(tmp_path):
    loop = queued()
    loop.event("kernel", made.NORM, 450, 100, 9, correlation=2, device=0, stream=9)  # another stream, earlier launch
    loop.event("kernel", made.RELU, 700, 10, 9, correlation=99_999, device=0, stream=9)  # its launch was lost
    trace, rows = read(tmp_path, loop.document())
    assert trace.windows["wall_us"] == [1100 - 550]
    assert set(rows[rows["step"].isna()]["name"]) == {made.SIMT, made.NORM, made.RELU}


def host_bound(steps=1, *, marked=True, covers=True):
    """Steps of 1,000 µs whose first kernel comes 400 µs after the host began them, and which the GPU marks."""
    trace = Made()
    for number in range(steps):
        at = 1000 * number
        trace.event("mark", f"ProfilerStep#{3 + number}", at, 990, 1)
        trace.event("mark", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, 300, 1)
        for start in (400, 700):
            trace.op("aten::mm", at + start - 10, 8)
            trace.kernel(made.GEMM, at + start, 200, at + start - 8)
        if marked:
            duration = 500 if covers else 20
            trace.event("gpu_user_annotation", f"ProfilerStep#{3 + number}", at + 400, duration, "stream 7")
    return trace.document()


def test_a_window_is_what_the_gpu_marks_and_the_wait_before_it(tmp_path):
    trace = read_trace(write(tmp_path / "t.json", host_bound()))
    (window,) = [dict(zip(trace.windows, row, strict=True)) for row in zip(*trace.windows.values(), strict=True)]
    assert (window["wall_us"], window["busy_us"], window["idle_us"]) == (500, 400, 100)
    assert (window["lead_us"], window["lead_data_us"]) == (400, 300)


@pytest.mark.parametrize("marked", [True, False])
def test_a_step_that_an_idle_gpu_waits_for_begins_with_the_host(tmp_path, marked):
    trace = read_trace(write(tmp_path / "t.json", host_bound(steps=3, marked=marked)))
    assert trace.step_rows["step_ms"] == [0.99] * 3
    assert trace.windows["wall_us"] == [2500 if marked else 2990]
    assert trace.windows["idle_data_us"] == [600 if marked else 900]


def behind(steps, collectives=False):
    """The same behind work that was launched before the trace, and ends 300 µs after the host began the first step."""
    events = host_bound(steps=steps, marked=False)
    older = Made()
    older.event("kernel", made.NCCL if collectives else made.SIMT, -50, 350, 7, correlation=1, device=0, stream=7)
    return {**events, "traceEvents": [*older.document()["traceEvents"], *events["traceEvents"]]}


@pytest.mark.parametrize(("steps", "collectives", "told"), [(3, False, [0.99] * 2), (2, False, [0.69, 0.99]),
                                                            (3, True, [0.69, 0.99, 0.99])])  # fmt: skip
def test_a_first_step_that_older_work_hides_a_part_of_is_left_out(tmp_path, steps, collectives, told):
    trace = read_trace(write(tmp_path / "t.json", behind(steps, collectives)))
    assert trace.step_rows["step_ms"] == told and trace.windows["steps"] == [len(told)]
    assert trace.windows["wall_us"] == [pytest.approx(1e3 * sum(told), abs=25)]


WAITS = (470, 220, 620, 300)


def waiting(marks=True, streams=(7,), empty=()):
    """Steps whose kernel of 50 µs comes after waits of several lengths, and which end when it does. The steps of
    `empty` launch none."""
    loop, at = Made(), 0
    for number, wait in enumerate(WAITS):
        loop.event("mark", f"ProfilerStep#{number}", at, wait + 60, 1)
        if number not in empty:
            loop.op("aten::mm", at + wait - 10, 8)
            for stream in streams:
                late = 5 * (stream - 7)
                loop.kernel(made.GEMM, at + wait + late, 50 - late, at + wait - 8, stream=stream)
                if marks:
                    name = f"ProfilerStep#{number}"
                    loop.event("gpu_user_annotation", name, at + wait + late, 50 - late, f"stream {stream}")
        at += wait + 60
    return loop


@pytest.mark.parametrize("kinds", [{}, {"marks": False}, {"streams": (7, 8)}, {"empty": (1,)}, {"empty": (0, 2)}])
def test_each_wait_counts_in_the_step_that_waits(tmp_path, kinds):
    trace, _ = read(tmp_path, waiting(**kinds).document())
    assert trace.step_rows["step_ms"] == [(wait + 60) / 1e3 for wait in WAITS]
    assert trace.step_rows["time_s"] == [sum(w + 60 for w in WAITS[: n + 1]) / 1e6 for n in range(4)]


def test_a_wait_behind_earlier_work_counts_in_the_step_that_waits_too(tmp_path):
    """The host begins the second step while the device still works, and is late for it."""
    loop = Made()
    for number, (host, start) in enumerate(((0, 20), (100, 600))):
        loop.event("mark", f"ProfilerStep#{number}", host, 90 + 500 * number, 1)
        loop.kernel(made.GEMM, start, 200, start - 10)
        loop.event("gpu_user_annotation", f"ProfilerStep#{number}", start, 200, "stream 7")
    assert read(tmp_path, loop.document())[0].step_rows["step_ms"] == [0.22, 0.58]


@pytest.mark.parametrize("device_marks", [True, False])
def test_a_host_that_runs_ahead_does_not_shorten_steps(tmp_path, device_marks):
    trace, _ = read(tmp_path, queued(4, device_marks=device_marks).document())
    assert trace.step_rows["step_ms"] == [0.3] * 4 and trace.windows["wall_us"] == [1200]


def test_a_step_that_overlaps_with_the_one_before_begins_with_its_mark(tmp_path):
    """An all-reduce outlasts its step on a stream of its own."""
    loop = Made()
    for number in range(2):
        loop.event("mark", f"ProfilerStep#{number}", 40 * number, 30, 1)
        loop.kernel(made.GEMM, 100 + 300 * number, 300, 40 * number + 5)
        loop.kernel(made.NCCL, 250 + 300 * number, 200, 40 * number + 15, stream=8)
        loop.event("gpu_user_annotation", f"ProfilerStep#{number}", 100 + 300 * number, 350, "stream 7")
    trace, _ = read(tmp_path, loop.document())
    assert trace.step_rows["step_ms"] == [0.4, 0.35] and trace.windows["wall_us"] == [650]


@pytest.mark.parametrize("marks", [{"marked": False}, {"covers": False}])
def test_without_a_mark_that_covers_the_work_a_step_begins_with_the_host(tmp_path, marks):
    trace = read_trace(write(tmp_path / "t.json", host_bound(**marks)))
    assert trace.step_rows["step_ms"] == [0.99] and trace.windows["lead_us"] == [0]


def test_a_last_step_in_which_nothing_ran_is_none(tmp_path):
    """The last `prof.step()` of a loop begins a step that ends with the profiler."""
    trace = Made()
    for number, took in enumerate((1000, 50)):
        trace.event("mark", f"ProfilerStep#{number}", 1000 * number, took, 1)
    trace.op("aten::mm", 100, 20)
    trace.kernel(made.GEMM, 200, 300, 105)
    assert read(tmp_path, trace.document())[0].step_rows["step"] == [0]
    trace.op("aten::add", 1010, 10)
    assert read(tmp_path, trace.document())[0].step_rows["step"] == [0, 1]


def test_work_that_outlasts_the_last_step_would_overlap_with_the_next(tmp_path):
    """The host generates inputs for 600 µs and the GPU then works for 500: in a loop the GPU is idle for 490 of 990."""
    slow = Made()
    for number in range(2):
        slow.event("mark", f"ProfilerStep#{number}", 1000 * number, 990, 1)
        slow.kernel(made.GEMM, 1000 * number + 600, 500, 1000 * number + 595)
        slow.event("gpu_user_annotation", f"ProfilerStep#{number}", 1000 * number + 600, 500, 7)
    trace, _ = read(tmp_path, slow.document())
    assert trace.windows["wall_us"] == [1500]
    assert trace.windows["lead_us"] == [600 - (2100 - 1990)]


@pytest.mark.parametrize("thread", [1, 2])  # of backward: the loop's on a CPU, autograd's on a GPU
def test_forward_and_backward_in_a_closure_are_not_the_optimizers(tmp_path, thread):
    """Lightning calls `optimizer.step(closure)`."""
    trace = Made()
    for number in range(2):
        at = 1000 * number
        trace.event("mark", f"ProfilerStep#{number}", at, 990, 1)
        trace.event("mark", "Optimizer.step#AdamW.step", at + 10, 900, 1)
        trace.op("aten::mm", at + 20, 20)
        trace.kernel(made.GEMM, at + 50, 200, at + 25)
        trace.op("autograd::engine::evaluate_function: MmBackward0", at + 300, 100, thread, **{"Sequence number": 7})
        trace.op("MmBackward0", at + 301, 98, thread, **{"Sequence number": 7})
        trace.op("aten::mm", at + 310, 20, thread)
        trace.kernel(made.SIMT, at + 320, 100, at + 312, thread)
        trace.op("aten::_foreach_add_", at + 500, 20)
        trace.kernel(made.ADAM, at + 510, 50, at + 505)
    run, rows = read(tmp_path, trace.document())
    by_phase = rows.groupby("phase")["name"].agg(set).to_dict()
    assert by_phase == {"forward": {made.GEMM}, "backward": {made.SIMT}, "optimizer": {made.ADAM}}
    steps = pd.DataFrame(run.step_rows)
    assert (steps["optimizer_ms"] > 0).all() and (steps["forward_ms"] > 0).all()


def gap_of_5_ms(call_us, name=made.RELU, sort="kernel"):
    """Two kernels with 5 ms between them; the second one was launched while the first one ran."""
    trace = Made()
    trace.event("mark", "ProfilerStep#0", 0, 6000, 1)
    trace.kernel(made.GEMM, 100, 300, 90)
    trace.op("aten::bitwise_not", 105, call_us)
    trace.kernel(name, 5400, 50, 110, sort=sort, call_us=call_us)
    return trace


def test_the_device_does_not_wait_for_queued_work_while_the_launch_itself_takes_long(tmp_path):
    """The first launch of a kernel loads it, which takes milliseconds."""
    (quick,), (slow,) = (
        pd.DataFrame(read(tmp_path, gap_of_5_ms(call_us).document())[0].windows).to_dict("records")
        for call_us in (2, 5300)
    )
    assert (quick["idle_wait_us"], slow["idle_wait_us"]) == (5000, 0)
    assert (quick["host_op_us"], slow["host_op"], slow["host_op_us"]) == (0, "aten::bitwise_not", 5000)


def test_a_copy_to_pageable_memory_is_a_wait_of_the_host(tmp_path):
    """`cudaMemcpyAsync` to memory that is not pinned returns when the copy has ended."""
    syncs = {}
    for name, call_us in (("Memcpy DtoH (Device -> Pageable)", 400), ("Memcpy DtoH (Device -> Pinned)", 4)):
        trace = Made()
        trace.event("mark", "ProfilerStep#0", 0, 1000, 1)
        trace.kernel(made.GEMM, 100, 300, 90)
        trace.op("aten::nonzero", 98, call_us + 3)
        trace.kernel(name, 400, 50, 100, sort="copy", call_us=call_us)
        trace.kernel(made.RELU, 600, 50, 590)
        (window,) = pd.DataFrame(read(tmp_path, trace.document())[0].windows).to_dict("records")
        syncs[call_us] = (window["syncs"], window["sync_op"], window["idle_sync_us"])
    assert syncs == {400: (1, "aten::nonzero", 150), 4: (0, None, 0)}
