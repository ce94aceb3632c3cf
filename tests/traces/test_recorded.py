"""Traces that other people recorded: their times, added up here straight from the JSON, and what is concluded."""

import gzip
import json
from pathlib import Path

import pandas as pd
import pytest

from amp_core import diagnose, load_run
from amp_core.traces import import_traces, read_trace

FOLDER = Path(__file__).parent / "recorded"
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def events(name):
    document = json.loads(gzip.decompress((FOLDER / name).read_bytes()))
    return [event for event in document["traceEvents"] if event.get("ph") == "X"]


def covered_us(spans):
    """Length of the union of (begin, end) pairs."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def diagnosed(tmp_path, name):
    run = load_run(import_traces([FOLDER / name], tmp_path / "run"))
    return run, {finding.code for finding in diagnose(run)}


@pytest.mark.parametrize(
    "name",
    ["a100-alexnet.json.gz", "a100-two-streams.json.gz", "mi210-device-only.json.gz", "mi300-compiled.json.gz"],
)
def test_a_trace_without_steps_is_one_window_with_all_the_work(name):
    work = [event for event in events(name) if event["cat"] in DEVICE_WORK]
    trace = read_trace(FOLDER / name)
    rows, (window,) = pd.DataFrame(trace.kernels), pd.DataFrame(trace.windows).to_dict("records")
    assert rows["total_us"].sum() == pytest.approx(sum(event["dur"] for event in work), abs=0.01)
    assert window["launches"] == len(work)
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in work]
    assert window["busy_us"] == pytest.approx(covered_us(spans), abs=0.1)


def test_a_mark_of_the_device_that_leaves_work_out_is_no_step():
    """ROCm marks 1,031 µs of a step whose last kernels run 8 ms later. The second mark of the host holds no work."""
    recorded = events("mi250-training.json.gz")
    (mark,) = [e for e in recorded if e["cat"] == "gpu_user_annotation" and e["name"].startswith("ProfilerStep")]
    first, second = [e for e in recorded if e["cat"] == "user_annotation" and e["name"].startswith("ProfilerStep")]
    assert max(e["ts"] for e in recorded if e["cat"] == "kernel") > mark["ts"] + mark["dur"]
    assert not [e for e in recorded if e["cat"] == "cpu_op" and e["ts"] >= second["ts"]]
    trace = read_trace(FOLDER / "mi250-training.json.gz")
    assert trace.step_rows["step_ms"] == pytest.approx([first["dur"] / 1e3], abs=0.001)


@pytest.mark.parametrize(
    ("name", "device", "code"),
    [
        ("a100-alexnet.json.gz", "NVIDIA A100-PG509-200", "host-bound"),
        ("mi250-training.json.gz", "AMD Radeon Graphics", "host-bound"),
        ("mi300-compiled.json.gz", "AMD Instinct MI300X", "slow-products"),
        ("mi210-device-only.json.gz", "AMD Instinct MI210", "memory-bound-kernels"),
    ],
)
def test_the_first_finding_is_the_largest_thing_to_win(tmp_path, name, device, code):
    run, _ = diagnosed(tmp_path, name)
    assert run.head.environment["gpus"][0]["name"] == device
    first = diagnose(run)[0]
    assert first.code == code and first.win_ms > 0


def test_a_trace_of_a_cpu_concludes_nothing_about_a_device(tmp_path):
    _, codes = diagnosed(tmp_path, "cpu-only.json.gz")
    assert codes == set()
