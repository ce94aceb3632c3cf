"""The timeline of one profiled step: rows, bars, queue, and the file for Perfetto."""

import json

import pytest

from amp_core import load_run
from amp_core.analysis import timeline, timeline_bars
from amp_core.analysis.performance.timeline import MAX_BARS, device_use
from amp_core.figures import timeline_figure
from amp_core.interop.perfetto import step_trace
from amp_core.schema import RunError
from amp_core.traces import import_traces, read_trace
from amp_core.views import TIMELINE
from tests.synthetic import write as write_run
from tests.traces import made
from tests.traces.made import Made, write


def run_of(tmp_path, document, name="run"):
    return load_run(import_traces([write(tmp_path / "t.json", document)], tmp_path / name))


def two_streams():
    """A step of 1,000 µs: two products on stream 7, an all-reduce beside them on stream 9."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 5, 30, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 100, 300, 10)
    trace.events[-1]["args"] |= {"est. achieved occupancy %": 40, "blocks per SM": 0.5}
    trace.kernel(made.GEMM, 500, 100, 20)
    trace.events[-1]["args"] |= {"est. achieved occupancy %": 80, "blocks per SM": 4}
    trace.kernel(made.NCCL, 300, 600, 50)
    trace.events[-1]["args"] |= {"stream": 9, "blocks per SM": 0.1}
    return trace.document()


def test_the_step_of_median_length_is_kept(tmp_path):
    trace = Made()
    for number, length in enumerate((900, 300, 500)):
        at = 1000 * number
        trace.event("mark", f"ProfilerStep#{number}", at, length, 1)
        trace.op("aten::mm", at + 5, 30)
        trace.kernel(made.GEMM, at + 50, 10 + number, at + 10)
    rows = read_trace(write(tmp_path / "t.json", trace.document())).timeline
    assert (rows["step"], rows["start_us"], rows["total_us"], rows["queue_us"]) == ([2], [50], [12], [40])
    assert (rows["op"], rows["tensor_core"], rows["stream"]) == (["aten::mm"], ["yes"], [7])


def test_bars_are_by_stream_and_part_below_the_phases(tmp_path):
    bars = timeline_bars(timeline(run_of(tmp_path, two_streams())))
    rows = bars[["lane", "part", "start_ms", "end_ms"]].values.tolist()
    assert ["stream 7", "tensor", 0.1, 0.4] in rows and ["stream 7", "tensor", 0.5, 0.6] in rows
    assert ["stream 9", "communication", 0.3, 0.9] in rows
    assert ["phase", "forward", 0.1, 0.9] in rows and len(rows) == 4


def test_close_neighbours_are_merged_where_there_are_too_many(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 100_000, 1)
    for n in range(MAX_BARS + 500):
        trace.kernel(made.RELU, 20 * n, 15, 20 * n)
    rows = timeline(run_of(tmp_path, trace.document()))
    bars = timeline_bars(rows)
    kernels = bars[bars["lane"] != "phase"]
    assert len(bars) <= MAX_BARS < len(rows) == kernels["count"].sum()


def test_queue_and_occupancy(tmp_path):
    use = device_use(timeline(run_of(tmp_path, two_streams())))
    # From 100 to 900 µs: the second product waits until 500, the all-reduce until 300.
    assert use.queue_length == pytest.approx((400 + 200) / 800) and use.queue_empty_frac == pytest.approx(0.5)
    assert use.occupancy_frac == pytest.approx(0.5) and use.small_frac == pytest.approx(0.75)


def test_without_what_newer_profilers_tell_nothing_is_claimed(tmp_path):
    trace = Made()
    trace.op("aten::mm", 5, 30)
    trace.event("kernel", made.GEMM, 100, 300, "stream 7", device=0)
    use = device_use(timeline(run_of(tmp_path, trace.document())))
    assert (use.queue_length, use.occupancy_frac, use.small_frac) == (None, None, None)


def test_the_step_is_saved_for_perfetto(tmp_path):
    run = run_of(tmp_path, two_streams())
    events = json.loads(step_trace(run))["traceEvents"]
    kernels = [event for event in events if event["ph"] == "X" and event["cat"] == "kernel"]
    assert [(e["tid"], e["ts"], e["dur"]) for e in kernels] == [(7, 100, 300), (9, 300, 600), (7, 500, 100)]
    assert kernels[0]["args"]["op"] == "aten::mm" and kernels[0]["args"]["tensor_core"] == "yes"
    again = read_trace(write(tmp_path / "again.json", json.loads(step_trace(run))))  # the importer reads it too
    assert sum(again.kernels["total_us"]) == 1000


def three_phases():
    """Forward, backward and optimizer, whose last kernel is shorter than the clock can tell."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 5, 30)
    trace.kernel(made.GEMM, 100, 200, 10)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 40, 30)
    trace.kernel(made.GEMM, 300, 200, 50)
    trace.op("Optimizer.step#SGD.step", 80, 30)
    trace.kernel(made.RELU, 600, 50, 90)
    trace.kernel(made.RELU, 700, 0, 95)
    return trace.document()


def test_phases_have_a_thread_of_their_own_in_the_perfetto_file(tmp_path):
    run = run_of(tmp_path, three_phases())
    assert list(dict.fromkeys(timeline(run)["phase"])) == ["forward", "backward", "optimizer"]
    events = json.loads(step_trace(run))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    phases = [e for e in events if e.get("cat") == "phase"]
    assert {names[e["pid"], e["tid"]] for e in phases} == {"phases"}
    assert {names[e["pid"], e["tid"]] for e in events if e.get("cat") == "kernel"} == {"stream 7"}
    bars = timeline_bars(timeline(run))
    drawn = bars[bars["lane"] == "phase"]
    assert [(e["name"], e["ts"] / 1e3) for e in phases] == list(zip(drawn["part"], drawn["start_ms"], strict=True))
    ends = [e["ts"] + e["dur"] for e in phases]
    assert all(end <= later["ts"] for end, later in zip(ends, phases[1:], strict=False))  # Perfetto nests overlaps


def test_a_kernel_of_zero_duration_is_kept_and_drawn(tmp_path):
    run = run_of(tmp_path, three_phases())
    rows = timeline(run)
    assert rows.loc[rows["total_us"] == 0, "start_us"].tolist() == [700]
    figure = TIMELINE.draw(run)
    zero = [(t, i) for t in figure.data for i, width in enumerate(t.x) if width == 0]
    assert len(zero) == 1 and zero[0][0].marker.line.width > 0  # plotly draws a bar of no width by its outline


def test_a_run_without_a_timeline_says_so(tmp_path):
    run = load_run(write_run(tmp_path / "plain", "fp32"))
    assert TIMELINE.missing(run) == "No profiled step has the times of its kernels."
    with pytest.raises(RunError, match="no timeline"):
        step_trace(run)


def test_a_cpu_trace_has_no_timeline(tmp_path):
    trace = Made()
    trace.op("aten::mm", 5, 30)
    assert read_trace(write(tmp_path / "t.json", trace.document())).timeline == {}


def test_the_text_of_a_timeline_tells_kernels_from_copies(tmp_path):
    trace = Made()
    trace.kernel(made.COPY, 10, 100, 0, sort="copy")
    trace.kernel(made.GEMM, 200, 300, 120)
    figure = timeline_figure(timeline_bars(timeline(run_of(tmp_path, trace.document()))))
    assert "1 kernel and 1 copy or fill on 1 stream over" in figure.layout.meta["alt"]


def test_the_timeline_of_a_step_begins_with_its_wait(tmp_path):
    trace = Made()
    for number, wait in enumerate((500, 300, 700)):
        trace.event("mark", f"ProfilerStep#{number}", 1000 * number, 990, 1)
        trace.op("aten::mm", 1000 * number + wait - 10, 8)
        trace.kernel(made.GEMM, 1000 * number + wait, 100, 1000 * number + wait - 5)
        trace.event("gpu_user_annotation", f"ProfilerStep#{number}", 1000 * number + wait, 100, "stream 7")
    rows = read_trace(write(tmp_path / "t.json", trace.document())).timeline
    assert (rows["step"], rows["start_us"]) == ([1], [300])


def test_a_kernel_that_began_in_the_step_before_is_drawn_from_the_start_of_this_one(tmp_path):
    """Otherwise its row would begin before 0, which no table may hold."""
    trace = made.Made()
    for n in range(3):
        trace.event("mark", f"ProfilerStep#{n}", 1000 * n, 990, 1)
        trace.event("device mark", f"ProfilerStep#{n}", 1000 * n + 100, 990, "stream 7")
        trace.kernel(made.GEMM, 1000 * n + 100, 900, 1000 * n + 10)
        trace.kernel(made.RELU, 1000 * n + 900, 500, 1000 * n + 20, stream=8)
    run = made.run_of(tmp_path, trace)
    run.validate(full=True)
    assert (run.timeline["start_us"] >= 0).all() and (run.timeline["total_us"] >= 0).all()
    assert run.timeline["start_us"].min() == 0


def test_parts_that_take_turns_faster_than_can_be_seen_are_drawn_as_the_one_with_most_time(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 200_000, 1)
    for number in range(4_000):
        trace.kernel(made.GEMM, 10 + 50 * number, 30, 2 + number)
        trace.kernel("Memset (Device)", 41 + 50 * number, 1, 3 + number, sort="gpu_memset")
    bars = timeline_bars(timeline(run_of(tmp_path, trace.document())))
    kernels = bars[bars["lane"] != "phase"]
    assert len(kernels) < 10 and kernels["count"].sum() == 8_000
    assert kernels["count"][kernels["part"] == "tensor"].sum() >= 7_990  # but for the last place's one
