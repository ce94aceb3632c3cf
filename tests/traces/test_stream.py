"""Any bytes in a trace file give events or one sentence."""

import gzip
import json
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amp_core import RunError
from amp_core.traces import collect, json_stream, read_trace
from amp_core.traces.json_stream import TraceStream
from tests.traces.made import training, write

SOUND = json.dumps(training()).encode()


def sentence(file):
    with pytest.raises(RunError) as caught:
        read_trace(file)
    message = str(caught.value)
    assert message.startswith("trace=") and "\n" not in message and len(message) < 300
    return message


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "named otherwise"])
def test_events_are_in_order_and_other_keys_are_the_head(tmp_path, name):
    document = training(distributedInfo={"rank": 1})
    stream = TraceStream(write(tmp_path / name, document))
    assert list(stream) == document["traceEvents"]
    assert stream.head == {k: v for k, v in document.items() if k != "traceEvents"}


def test_chunks_may_end_anywhere(tmp_path, monkeypatch):
    document = training(steps=1, text='ü€😀\\"{[', number=-12.5e-3, nothing=None)
    file = write(tmp_path / "t.json", document)
    for size in (1, 2, 3, 7, 64):
        monkeypatch.setattr(json_stream, "CHUNK_BYTES", size)
        stream = TraceStream(file)
        assert list(stream) == document["traceEvents"] and stream.head["text"] == document["text"]
        assert stream.head["number"] == -12.5e-3


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is cut off"),
        (b"   ", "is cut off"),
        (b"PK\x03\x04", "is a zip archive; unpack it"),
        (b"\x28\xb5\x2f\xfd....", "is compressed with zstd; unpack it"),
        (b"SQLite format 3\0....", "is a database, such as Nsight Systems exports; record with torch.profiler"),
        (b"\x80\x04\x95....", "is a pickle of Python, such as a memory snapshot"),
        (b"P# text", "it begins with 'P'"),
        (b"# text", "it begins with '#'"),
        (b"{}", "has no list of traceEvents"),
        (b'{"schema": 1, "run_id": "a"}', "has no list of traceEvents"),
        (b'{"traceEvents": {}}', "has no list of traceEvents"),
        (b'{"traceEvents": [1]}', "has a int among its events"),
        (b'{"traceEvents": []}', "has no operator and no kernel"),
        (b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "has no operator and no kernel"),
        (b"[]", "has no operator and no kernel"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "cuda_runtime", "name": "cudaGetDevice", "ts": 1, "dur": 90}]}',
            "in on_trace_ready",
        ),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#4", "ts": 1, "dur": 9}]}',
            "has marked steps, but no operator and no kernel in them",
        ),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": "forward", "ts": 1, "dur": 9}]}',
            "only marked ranges",
        ),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "python_function", "name": "main.py(3): run", "ts": 1, "dur": 9}]}',
            "has no operator and no kernel, only 1 function of Python: this process computes nothing",
        ),
        (b'{"traceEvents": [{"ph": }]}', "is damaged"),
        (b'{"traceEvents": [{"ts": ' + b"9" * 5000 + b"}]}", "is damaged"),
        (b'{"traceEvents": [' + b'{"a":' * 100_000, "is nested deeper"),
        (b'{"a": ' + b"[" * 100_000, "is nested deeper"),
        (b'{"traceEvents" [', "is damaged"),
        (b"\x1f\x8bgarbage", "cannot be read"),
        (gzip.compress(SOUND)[:300], "cannot be read"),
        (gzip.compress(SOUND)[:-20] + b"\x00" * 20, "cannot be read"),
        (b"\xff\xfe{\x00}\x00", "no list of traceEvents"),
    ],
)
def test_a_file_that_is_not_a_trace_raises_one_sentence(tmp_path, data, text):
    file = tmp_path / "t.json"
    file.write_bytes(data)
    assert text in sentence(file)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("report.nsys-rep", "a report of Nsight Systems"),
        ("report.ncu-rep", "a report of Nsight Compute"),
        ("trace.pftrace", "a binary trace of Perfetto"),
        ("host.xplane.pb", "a profile of XLA"),
        ("traces.TAR.xz", "an archive; unpack it"),
    ],
)
def test_files_of_other_tools_are_named(tmp_path, name, what):
    file = tmp_path / name
    file.write_bytes(b"\n\x10" + b"\x00" * 40)
    assert f"trace={name!r} is {what}" in sentence(file)


def test_a_path_that_is_not_a_file_raises_one_sentence(tmp_path):
    assert "is not a file" in sentence(tmp_path)
    assert "is not a file" in sentence(tmp_path / "none.json")


def test_a_trace_truncated_anywhere_raises_one_sentence(tmp_path):
    file = tmp_path / "t.json"
    for end in range(0, len(SOUND) - 1, 97):
        file.write_bytes(SOUND[:end])
        assert "is cut off" in sentence(file)


def test_a_bare_list_may_lack_its_end(tmp_path):
    events = json.dumps(training("list")).encode()
    file = tmp_path / "t.json"
    file.write_bytes(events[:-1])
    assert len(read_trace(file).kernels["name"]) == len(
        read_trace(write(tmp_path / "u.json", training("list"))).kernels["name"]
    )


def test_a_compressed_trace_that_never_ends_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "MAX_BYTES", 2**22)
    file = tmp_path / "t.json.gz"
    file.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 2**23))
    assert "is longer than" in sentence(file)


def test_an_endless_value_is_refused_without_keeping_it_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(json_stream, "MAX_VALUE_CHARS", 2**20)
    file = tmp_path / "t.json.gz"
    file.write_bytes(gzip.compress(b'{"x": "' + b"a" * 2**26))
    tracemalloc.start()
    assert "is damaged" in sentence(file)
    assert tracemalloc.get_traced_memory()[1] < 2**25
    tracemalloc.stop()


def test_memory_does_not_grow_with_the_trace(tmp_path):
    """Events that are not kept take no memory, whatever their number."""
    peaks = []
    for events in (2_000, 40_000):
        file = tmp_path / f"{events}.json"
        flow = json.dumps({"ph": "s", "id": 1, "cat": "ac2g", "name": "ac2g", "args": {"x": "y" * 200}})
        file.write_text(json.dumps(training())[:-1] + f', "x": 1, "traceEvents": [{",".join([flow] * events)}]}}')
        tracemalloc.start()
        assert sum(1 for _ in TraceStream(file)) > events
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 12 * json_stream.CHUNK_BYTES


def read_or_refuse(file):
    """The trace, or None if it is refused with a well-formed sentence."""
    try:
        return read_trace(file)
    except RunError as error:
        message = str(error)
    assert message.startswith("trace=") and len(message) < 300
    return None


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from([-1, 2**63, 1e300, "7"])
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
ARGS = st.dictionaries(
    st.sampled_from(
        [
            "External id",
            "correlation",
            "device",
            "Input Dims",
            "Input type",
            "Sequence number",
            "Fwd thread id",
            "stream",
        ]
    ),
    VALUES,
)
EVENTS = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.sampled_from(["X", "M", "s", 3]),
        "cat": st.sampled_from(
            ["cpu_op", "kernel", "user_annotation", "cuda_runtime", "python_function", "Operator", [], None]
        ),
        "name": st.sampled_from(
            [
                "aten::mm",
                "ProfilerStep#1",
                "ProfilerStep#99",
                "MmBackward0",
                "Optimizer.step#A",
                "nn.Module: L",
                "nccl",
                7,
            ]
        )
        | st.text(max_size=4),
        "pid": VALUES,
        "tid": VALUES,
        "ts": st.integers(0, 50) | VALUES,
        "dur": st.integers(0, 30) | VALUES,
        "args": ARGS | VALUES,
    },
)


@pytest.mark.parametrize("examples", [30, pytest.param(150, marks=pytest.mark.whole)])
def test_any_events_give_rows_or_one_sentence(tmp_path, examples):
    heads = st.dictionaries(st.sampled_from(["deviceProperties", "distributedInfo"]), VALUES)

    @settings(max_examples=examples, deadline=None)
    @given(st.lists(EVENTS, max_size=25), heads)
    def check(events, head):
        gives_rows_or_one_sentence(tmp_path, events, head)

    check()


def gives_rows_or_one_sentence(tmp_path, events, head):
    from amp_core import load_run
    from amp_core.traces import import_traces

    file = write(tmp_path / "t.json", head | {"traceEvents": events})
    target = tmp_path / f"run{sum(1 for _ in tmp_path.iterdir())}"
    trace = read_or_refuse(file)
    if trace is None:
        return
    for window in range(len(trace.windows.get("wall_us", []))):
        parts = [trace.windows[c][window] for c in ("busy_us", "idle_us", "wall_us")]
        assert parts[0] + parts[1] == pytest.approx(parts[2]) and min(parts) >= 0
    import_traces([file], target)
    load_run(target).validate(full=True)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_bytes_give_rows_or_one_sentence(tmp_path, data):
    bad = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path / "t.json"
    file.write_bytes(bytes(bad))
    read_or_refuse(file)


@pytest.mark.parametrize("sort", ["cpu_op", "cuda_runtime", "kernel"])
def test_too_many_events_of_any_kind_are_refused(monkeypatch, sort):
    monkeypatch.setattr(collect, "MAX_EVENTS", 3)
    event = {"ph": "X", "cat": sort, "name": "cudaLaunchKernel", "ts": 1, "dur": 1}
    with pytest.raises(RunError, match="more than 3 events"):
        collect.collect([event] * 4)
    if sort != "cuda_runtime":
        assert len(collect.collect([event] * 3).spans) in (0, 3)


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_progress_is_the_share_of_the_file_that_was_read(tmp_path, name):
    file = tmp_path / name
    document = json.dumps({"traceEvents": [{"ph": "X", "name": f"{n:0100}"} for n in range(50_000)]}).encode()
    file.write_bytes(gzip.compress(document, 0) if name.endswith(".gz") else document)
    seen = []
    assert sum(1 for _ in TraceStream(file, seen.append)) == 50_000
    assert seen == sorted(seen) and len(seen) > 4 and 0 < seen[0] < 0.5 and seen[-1] == 1


def test_importing_tells_the_name_of_each_trace_with_its_progress(tmp_path, capsys, monkeypatch):
    from amp_core.__main__ import main
    from amp_core.cli import import_trace

    monkeypatch.setattr(import_trace, "PROGRESS_EVERY_S", 0.0)
    file = write(tmp_path / "t.json", training())
    assert main(["import-trace", str(file), "--out", str(tmp_path / "run")]) == 0
    size = f"{file.stat().st_size / 2**10:.1f} KiB"
    assert f"reading t.json: 100% of {size}; linking operators and kernels" in capsys.readouterr().err
