"""JSON that profilers wrote wrongly: what they meant is read, and the run says that it was repaired."""

import json

import pytest

from amp_core import load_run
from amp_core.__main__ import main
from amp_core.traces import import_traces, json_stream, lenient_json
from amp_core.traces.json_stream import TraceStream
from tests.traces.made import training

FAULTS = [
    (r'"C:\Users\me\new\table.py(12): step"', r"C:\Users\me\new\table.py(12): step"),
    (r'"D:\data\runs\"', "D:\\data\\runs\\"),
    (r'"torch\cuda\__init__.py(219): _lazy_init"', r"torch\cuda\__init__.py(219): _lazy_init"),
    ('"a "quoted" name"', 'a "quoted" name'),
    ('"<lambda x: x["key"], y>"', '<lambda x: x["key"], y>'),
    ('"one line\nand the next\x01"', "one line\nand the next\x01"),
    (r'"kept \"as\" it\n is "here""', 'kept "as" it\n is "here"'),
    ("nan", None),
    ("-inf", None),
    ("N/A", None),
    ("", None),
    ("default_pg group", "default_pg group"),
]


@pytest.mark.parametrize(("written", "meant"), FAULTS)
def test_a_fault_is_read_as_what_was_meant(written, meant):
    text = f'{{"ph": "X", "args": {{"what": {written}, "rank": 3}}, "dur": 2.5}}, {{"ph": "X"}}'
    value, end = lenient_json.decode(text, 0)
    assert value == {"ph": "X", "args": {"what": meant, "rank": 3}, "dur": 2.5}
    assert text[end:] == ', {"ph": "X"}'


def test_valid_json_is_read_as_json_reads_it():
    text = json.dumps(training(text='ü€😀\\"{[,', number=-12.5e-3, nothing=None, flag=True, lists=[[], {}, [1, "2"]]))
    assert lenient_json.decode(text, 0) == (json.loads(text), len(text))


@pytest.mark.parametrize("text", ["", "{", '{"a"', '{"a": ', '{"a": "b', "[1, ", '{"ph": }', "[" * 100, "{1: 2}"])
def test_what_ends_early_or_has_no_value_is_refused(text):
    with pytest.raises(ValueError, match=r"no |nested|cut off|without an end"):
        lenient_json.decode(text, 0)


def damaged(tmp_path, mark=b"", name=r'C:\dev\new\train.py(3): a "quoted" step'):
    """A trace whose marks of the forward have an invalid name, and with them all else that is wrong in JSON."""
    document = training(modules="python")
    text = json.dumps(document).replace("torch/nn/functional.py(10): linear", name)
    text = text.replace('"traceName": "made.json"', r'"traceName": "C:\Users\x\made.json"')
    file = tmp_path / "t.json"
    file.write_bytes(mark + text.encode())
    return file, document


@pytest.mark.parametrize("size", [1, 7, 1000, 2**20])
def test_a_repaired_trace_has_all_events(tmp_path, monkeypatch, size):
    monkeypatch.setattr(json_stream, "CHUNK_BYTES", size)
    file, document = damaged(tmp_path, b"\xef\xbb\xbf")
    stream = TraceStream(file)
    events = list(stream)
    assert [e["name"] for e in events if "train.py" in e["name"]] == [r'C:\dev\new\train.py(3): a "quoted" step'] * 2
    assert [{**e, "name": ""} for e in events] == [{**e, "name": ""} for e in document["traceEvents"]]
    assert stream.repaired == 3 and stream.head["traceName"] == r"C:\Users\x\made.json"


def test_a_byte_order_mark_alone_is_no_fault(tmp_path):
    file = tmp_path / "t.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(training()).encode())
    stream = TraceStream(file)
    assert list(stream) == training()["traceEvents"] and stream.repaired == 0


def test_the_run_and_the_command_say_what_was_repaired(tmp_path, capsys):
    file, _ = damaged(tmp_path)
    run = load_run(import_traces([file], tmp_path / "run"))
    (detail,) = run.events[run.events["kind"] == "warning"]["detail"]
    assert detail == "t.json: 3 values were not valid JSON and were repaired or left out"
    assert main(["import-trace", str(file), "--out", str(tmp_path / "other")]) == 0
    assert "note: t.json: 3 values were not valid JSON and were repaired or left out" in capsys.readouterr().out
