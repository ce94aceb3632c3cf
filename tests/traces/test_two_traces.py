"""Two traces side by side: what AMP bought, and where the rest of the time went."""

import json

import pytest
import torch

from amp_core import load_run
from amp_core.__main__ import main
from amp_core.analysis import compare_step_cost
from amp_core.analysis.comparison.trace_change import compare_kernels, trace_change
from amp_core.schema import RunError
from amp_core.traces import import_traces
from tests.traces.made import CAST, GEMM, RELU, SIMT, Made, run_of, write


def forward(*, amp, steps=True):
    """A step of a product and a ReLU: 600 and 200 µs in FP32; with casts, 200 and 100 in 16 bits, and a longer gap."""
    trace = Made()
    if steps:
        trace.event("mark", "ProfilerStep#3", 0, 700 if amp else 1000, 1)
    at = 100
    if amp:
        trace.op("aten::copy_", 1, 8, **{"Input type": ["c10::Half", "float"], "Input Dims": [[8, 8], [8, 8]]})
        trace.kernel(CAST, at, 50, 2)
        at += 50
    trace.op("aten::mm", 20, 8, **{"Input type": ["c10::Half" if amp else "float"] * 2})
    trace.kernel(GEMM if amp else SIMT, at, 200 if amp else 600, 22)
    trace.op("aten::relu", 40, 8)
    trace.kernel(RELU, at + (200 if amp else 600), 100 if amp else 200, 42)
    return trace.document()


@pytest.fixture
def files(tmp_path):
    return [write(tmp_path / f"{name}.json", forward(amp=name == "amp")) for name in ("fp32", "amp")]


@pytest.fixture
def runs(tmp_path, files):
    return [load_run(import_traces([file], tmp_path / file.stem)) for file in files]


def test_the_change_says_what_was_bought_what_it_cost_and_what_is_left(runs):
    change = trace_change(runs)
    assert (change.first_us, change.us, change.unit) == (1000, 700, "step")
    assert dict(zip(change.parts["label"], change.parts["change_us"], strict=True)) == pytest.approx(
        {"GEMM/conv": -400, "memory-bound": -100, "casts": 50, "idle between kernels": 150}
    )
    assert change.sentences == (
        "amp takes 0.700 ms per step, fp32 1.00 ms: 1.43 × as fast.",
        "Faster: GEMM/conv by 0.400 ms (3.00 ×); memory-bound by 0.100 ms (2.00 ×).",
        "Slower: idle between kernels by 0.150 ms; casts by 0.0500 ms.",
        "Casts added: 1.00 per step, taking 0.0500 ms.",
        "Largest remaining parts: idle between kernels 50.0 %, GEMM/conv 28.6 %, memory-bound 14.3 %.",
    )


@pytest.mark.parametrize(("us", "told"), [(5, "nearly eliminated"), (10, "90.0 ×")])
def test_what_hardly_takes_time_any_more_is_given_no_ratio(tmp_path, us, told):
    runs = []
    for name, relu_us in (("before", 900), ("after", us)):
        trace = Made()
        trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
        trace.op("aten::mm", 20, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(GEMM, 0, 100, -5)
        trace.op("aten::relu", 40, 8)
        trace.kernel(RELU, 100, relu_us, 42)
        runs.append(run_of(tmp_path / name, trace))
    assert f"memory-bound by {'0.895' if us == 5 else '0.890'} ms ({told})" in trace_change(runs).sentences[1]


def test_backwards_it_is_slower(runs):
    assert "1.43 × as long" in trace_change(runs[::-1]).sentences[0]


def test_operators_are_faster_though_their_kernels_appear_and_vanish(runs):
    ops = compare_kernels(runs, "op").set_index("name")
    assert ops["verdict"].to_dict() == {"aten::mm": "faster", "aten::relu": "faster", "aten::copy_": "appeared"}
    mm = ops.loc["aten::mm"]
    assert (mm["first_us"], mm["us"], mm["ratio"], mm["first_kernel"], mm["kernel"]) == (600, 200, 3, SIMT, GEMM)
    assert (mm["first_tensor_core"], mm["tensor_core"]) == ("no", "yes")
    kernels = compare_kernels(runs, "kernel").set_index("name")["verdict"].to_dict()
    assert kernels == {SIMT: "vanished", GEMM: "appeared", RELU: "faster", CAST: "appeared"}


def test_times_are_per_step_and_rank(tmp_path, files):
    single = load_run(import_traces(files[:1], tmp_path / "one"))
    both = load_run(import_traces([files[0], write(tmp_path / "again.json", forward(amp=False))], tmp_path / "two"))
    assert (compare_kernels([single, both], "op")["verdict"] == "same").all()
    assert trace_change([single, both]).parts["change_us"].abs().max() == 0


def test_traces_without_steps_are_compared_by_window(tmp_path):
    runs = [
        load_run(import_traces([write(tmp_path / f"{n}.json", forward(amp=n == 1, steps=False))], tmp_path / f"r{n}"))
        for n in range(2)
    ]
    change = trace_change(runs)
    assert change.unit == "profiled window"
    assert change.notes == ("The device is busy for 0.800 ms of the window, then 0.350 ms.",)
    frame = compare_step_cost(runs)
    assert set(frame["per"]) == {"window"} and set(frame["source"]) == {"profile"}


def test_only_one_with_steps_is_said(tmp_path, runs):
    plain = load_run(import_traces([write(tmp_path / "n.json", forward(amp=True, steps=False))], tmp_path / "n"))
    assert "Only one of the two traces marks its steps" in trace_change([runs[0], plain]).notes[0]


def test_phases_are_those_of_a_step_though_the_first_trace_marks_none(tmp_path, runs):
    plain = load_run(import_traces([write(tmp_path / "n.json", forward(amp=True, steps=False))], tmp_path / "n"))
    for pair in ([plain, runs[0]], [runs[0], plain]):
        frame = compare_step_cost(pair)
        assert set(frame["per"]) == {"step"} and "profile" not in set(frame["source"])


def gpu_run(tmp_path, name, products=1, **head):
    trace = Made()
    for number in range(products):
        trace.op("aten::mm", 20 * number, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(head.pop("kernel", GEMM), 10 + 300 * number, 200, 20 * number + 2)
    return load_run(import_traces([write(tmp_path / f"{name}.json", trace.document(**head))], tmp_path / name))


def test_times_of_different_devices_and_numbers_of_ranks_are_told_to_be(tmp_path):
    ranks = {"rank": 0, "world_size": 8}
    runs = [
        gpu_run(tmp_path, "a", distributedInfo=ranks),
        gpu_run(tmp_path, "v", deviceProperties=[{"id": 0, "name": "Tesla V100-SXM2-16GB"}]),
    ]
    notes = trace_change(runs).notes
    assert "NVIDIA A100-SXM4-80GB, then Tesla V100-SXM2-16GB" in notes[0] and "8, then 1" in notes[1]
    assert len(trace_change([runs[0], runs[0]]).notes) == 1


def test_unclassified_kernels_and_windows_of_other_work_are_told(tmp_path):
    runs = [gpu_run(tmp_path, "one"), gpu_run(tmp_path, "unknown", kernel="triton_"), gpu_run(tmp_path, "two", 2)]
    assert "0 % of the kernel time, then 100 %" in trace_change(runs[:2]).notes[0]
    assert "1 products and convolutions, then 2" in trace_change([runs[0], runs[2]]).notes[0]


def test_equal_times_are_neither_faster_nor_slower(tmp_path):
    run = gpu_run(tmp_path, "one")
    assert "they differ by less than 1.00 %" in trace_change([run, run]).sentences[0]


def test_copies_of_lists_of_tensors_are_no_optimizer(tmp_path):
    trace = Made()
    trace.op("aten::_foreach_copy_", 1, 8)
    trace.kernel("void at::native::multi_tensor_apply_kernel<at::native::Copy<float, float>>", 10, 90, 2)
    run = load_run(import_traces([write(tmp_path / "t.json", trace.document())], tmp_path / "run"))
    assert run.kernels["category"].tolist() == ["elementwise"]


def test_the_command_takes_traces(files, capsys):
    assert main(["compare", *map(str, files)]) == 0
    out = capsys.readouterr().out
    assert "amp.json takes 0.700 ms per step, fp32.json 1.00 ms: 1.43 × as fast." in out
    assert "aten::mm" in out and "vanished" in out
    assert main(["compare", "--json", *map(str, files)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["first_us"], document["us"]) == (1, 1000, 700)
    assert document["sentences"][0] in out
    assert {row["name"]: row["verdict"] for row in document["ops"]}["aten::mm"] == "faster"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give --out DIR for the runs, or two traces"),
        (["a"], "give two, the baseline first"),
        (["a", "b", "--steps", "5"], "steps applies to training"),
        (["a", "b", "--out", "c"], "out applies to training"),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, says, capsys):
    assert main(["compare", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_run_without_kernels_is_refused(tmp_path, runs):
    from tests.synthetic import write as write_run

    with pytest.raises(RunError, match="no profiled window"):
        trace_change([runs[0], load_run(write_run(tmp_path / "plain", "fp32"))])


def test_casts_that_autocast_adds_on_a_cpu_are_counted_once(tmp_path):
    """A real pair of traces. The input, weight and bias of a layer are cast: `to`, `_to_copy` and `copy_` each."""
    layer, x = torch.nn.Linear(8, 8), torch.ones(4, 8)
    for name in ("fp32", "bf16"):
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=name == "bf16")
        with torch.profiler.profile(record_shapes=True) as prof, torch.no_grad(), autocast:
            layer(x)
        prof.export_chrome_trace(str(tmp_path / f"{name}.json"))
    runs = [load_run(import_traces([tmp_path / f"{name}.json"], tmp_path / name)) for name in ("fp32", "bf16")]
    change = trace_change(runs)
    assert change.casts_added == 3 and change.casts_added_us > 0
    products = compare_kernels(runs).set_index("name").loc["aten::addmm"]
    assert (products["first_count"], products["count"]) == (1, 1)


@pytest.mark.parametrize(
    ("name", "shared", "answer"),
    [
        ("triton__0d1d2d3d", 36_864, "unknown"),
        ("triton__0d1d2d", 10_240, "unknown"),
        ("triton__0d1d2d3d", 9_216, "no"),
        ("triton__0d1d2d3de4de", 33_792, "no"),
    ],
)
def test_a_numbered_kernel_with_much_shared_memory_may_be_a_product(tmp_path, name, shared, answer):
    eager, compiled = Made(), Made()
    for number in range(9):
        eager.op("aten::mm", 100 * number, 8)
        eager.kernel(GEMM, 100 * number + 10, 80, 100 * number + 2)
        compiled.kernel(name if number > 3 else GEMM, 100 * number + 10, 5 if number > 3 else 80, 100 * number + 2)
        compiled.events[-1]["args"]["shared memory"] = shared
    runs = [run_of(tmp_path / side, trace) for side, trace in (("eager", eager), ("compiled", compiled))]
    kernels = runs[1].kernels
    assert set(kernels["tensor_core"][kernels["name"] == name]) == {answer}
    timeline = runs[1].timeline
    assert set(timeline["tensor_core"][timeline["name"] == name]) == {answer}
    assert ("hardly hold the same work" in " ".join(trace_change(runs).notes)) == (answer == "no")
