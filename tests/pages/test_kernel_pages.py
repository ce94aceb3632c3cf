"""Tensor cores and Step cost: the answer first, kernels in tables, and a sentence if there is no window."""

import pytest

from amp_core import load_run
from amp_core.analysis import amdahl, compare_step_cost, kernel_table, matrix_ops, step_cost, tensor_core_use
from amp_core.store.writer import RunWriter
from amp_core.traces import import_traces
from pages.parts.hardware import abilities
from pages.parts.words import percent
from tests.pages.conftest import metric, run_picker, titles, words
from tests.synthetic import write
from tests.synthetic_kernels import columns, kernel, kernels, window
from tests.traces.made import GEMM, Made
from tests.traces.made import write as write_trace
from tests.traces.test_timeline import two_streams
from tests.traces.test_two_traces import forward

TENSOR_CORES, STEP_COST = "pages/tensor_cores.py", "pages/step_cost.py"
OVERVIEW = "pages/run_overview.py"


def foreign(folder, rows, **tables):
    """A run with kernels and without steps, like some imported traces."""
    with RunWriter(folder, name=folder.name, config={"source": "import"}) as writer:
        writer.append("kernels", columns(rows))
        for table, content in tables.items():
            writer.append(table, content)


def test_the_answer_has_both_shares_and_the_unknown_beside_them(home, open_app):
    write(home.runs / "a", "profiled")
    app = open_app(TENSOR_CORES, run="run/a")
    use = tensor_core_use(load_run(home.runs / "a"))
    assert not app.exception
    assert (
        f"Tensor cores run GEMM/conv: kernels that use them take {percent(use.matrix_tensor_frac)} of its time"
        in words(app)
    )
    assert f"; {percent(use.unknown_frac)} is unclassified" in words(app)
    assert metric(app, "Kernels on tensor cores").value == percent(use.tensor_frac)
    assert metric(app, "Unclassified").value == percent(use.unknown_frac)
    assert metric(app, "Tensor pipe busy, by counter").value == "–"
    assert "this GPU has none (NVML has it for Hopper and newer)" in words(app)
    assert titles(app) == ["Time on tensor cores", "Where kernel time goes"]


def test_idle_tensor_cores_are_called_idle_with_the_reason(home, open_app):
    write(home.runs / "a", "profiled-fp32")
    app = open_app(TENSOR_CORES, run="run/a")
    page_text = words(app)
    assert "Tensor cores are unused: no kernel time is known to use them" in page_text
    assert "mostly for this reason: FP32 without TF32" in page_text
    table = app.dataframe[0].value
    assert set(table["precision"]) <= {"FP32", "TF32", "FP16", "BF16", "–"}  # as written in sentences
    ops = matrix_ops(load_run(home.runs / "a"))
    assert table["why"].tolist() == ops["why"].tolist()
    assert "since cuBLAS 11 any size runs there" in page_text  # a hint about multiples of 8


def test_the_counter_is_explained_beside_the_table(home, open_app):
    rows = [row | {"device": "cuda:0"} for row in kernels("fp16")]
    times = {"step": list(range(30)), "time_s": [0.1 * (i + 1) for i in range(30)], "step_ms": [100.0] * 30}
    device = {"time_s": [2.05, 2.15, 2.25], "tensor_active_frac": [0.3, 0.3, 0.3]}
    foreign(home.runs / "a", rows, steps=times, device=device, windows=columns([window("fp16", rows)]))
    app = open_app(TENSOR_CORES, run="run/a")
    assert "the tensor pipe was busy 30.0 % of the time (mean of 3 samples of these steps)" in words(app)
    assert "GPU utilisation in `nvidia-smi` is neither" in words(app)
    assert metric(app, "Tensor pipe busy, by counter").value == "30.0 %"


def test_a_cpu_has_its_operators_and_a_plain_sentence(home, open_app):
    write(home.runs / "a", "profiled-cpu")
    app = open_app(TENSOR_CORES, run="run/a")
    assert "This run was profiled on a CPU, which has no tensor cores" in words(app)
    assert titles(app) == ["Where operator time goes"] and not app.metric
    shown = [set(frame.value.columns) for frame in app.dataframe]
    assert shown and "All operators" in [box.label for box in app.expander]
    assert app.dataframe[-1].value["name"].tolist() == kernel_table(load_run(home.runs / "a"))["name"].tolist()


def test_kernel_time_is_summed_by_the_chosen_key(home, open_app):
    write(home.runs / "a", "profiled")
    app = open_app(TENSOR_CORES, run="run/a")
    app.get("button_group")[0].set_value("module").run()
    assert not app.exception
    expected = kernel_table(load_run(home.runs / "a"), "module")
    table = app.dataframe[-1].value
    assert table["total_ms"].tolist() == pytest.approx((expected["total_us"] / 1e3).tolist())
    assert "–" in table["name"].tolist()  # kernels outside modules


@pytest.mark.parametrize("page", [TENSOR_CORES, STEP_COST])
def test_a_run_without_a_window_says_how_to_record_one(home, open_app, page):
    write(home.runs / "a", "fp32")
    app = open_app(page, run="run/a")
    assert "profile=(50, 53)" in words(app) and "--profile 50:53" in words(app) and "import-trace" in words(app)


def test_an_imported_trace_without_steps_opens(home, open_app):
    rows = [row | {"step": None, "steps": None} for row in kernels("fp16")]
    about = window("fp16", rows) | {"step": None, "steps": None}
    foreign(home.runs / "a", rows, windows=columns([about]))
    app = open_app(TENSOR_CORES, run="run/a")
    assert not app.exception and "Profiled: a window without step markers." in words(app)
    app = open_app(STEP_COST, run="run/a")
    assert not app.exception and "The profiled window takes" in words(app)


def test_compare_names_step_cost_for_a_trace_alone(home, open_app):
    rows = [row | {"step": None, "steps": None} for row in kernels("fp16")]
    foreign(home.runs / "trace", rows, windows=columns([window("fp16", rows) | {"step": None, "steps": None}]))
    write(home.runs / "stopped", "fp32", steps=0, status="stopped")
    app = open_app("pages/compare_runs.py", **{"with": ["run/trace", "run/stopped"]})
    assert [info.value for info in app.info[:2]] == [
        "trace has no steps and is left out. Step cost sets a trace beside another run.",
        "stopped has no steps and is left out.",
    ]


def test_a_device_without_tensor_cores_is_named_as_such(home, open_app, tmp_path):
    environment = {"gpus": [{"name": "NVIDIA GeForce GTX 1080", "capability": "6.1"}]}
    with RunWriter(home.runs / "a", name="a", environment=environment) as writer:
        writer.append("kernels", columns([kernel("maxwell_sgemm_128x64_nn", 9.0, 1, "gemm", "aten::mm")]))
    app = open_app(TENSOR_CORES, run="run/a")
    assert "No tensor cores: they start at compute capability 7.0" in words(app)


def test_two_windows_can_be_shown_one_by_one(home, open_app):
    later = [row | {"step": 40, "total_us": 2 * row["total_us"]} for row in kernels("fp16")]
    windows = [window("fp16", kernels("fp16")), window("fp16", later) | {"step": 40}]
    foreign(home.runs / "a", kernels("fp16") + later, windows=columns(windows))
    app = open_app(STEP_COST, run="run/a")
    assert "Profiled: steps 20–22, steps 40–42." in words(app)
    app.get("button_group")[0].set_value(40).run()
    assert "Profiled: steps 40–42." in words(app)
    assert metric(app, "Step").value == f"{step_cost(load_run(home.runs / 'a'), 40).step_us / 1e3:.1f} ms"


def test_step_cost_names_the_parts_and_the_bound(home, open_app):
    write(home.runs / "a", "profiled-fp32")
    app = open_app(STEP_COST, run="run/a")
    cost = step_cost(load_run(home.runs / "a"))
    bound = amdahl(cost)
    assert bound is not None and bound.sentence in words(app)
    assert "by the data sheet" in words(app) and "halve the traffic" in words(app)
    assert titles(app) == ["Where the time of a step goes"]
    table = app.dataframe[0].value
    assert table["ms"].sum() == pytest.approx(cost.step_us / 1e3, rel=0.005)
    assert metric(app, "GEMM/conv").value == percent(bound.matrix_frac)


def test_without_a_window_step_cost_shows_the_phases_and_a_note(home, open_app):
    write(home.runs / "a", "healthy")
    app = open_app(STEP_COST, run="run/a")
    assert "No profiled window: these are the recorded phases of the steps." in words(app)
    assert titles(app) == ["Where the time of a step goes"] and not app.metric
    assert "backward" in app.dataframe[0].value["label"].tolist()


def test_tensor_cores_gives_the_same_answer_of_the_baseline(home, open_app):
    write(home.runs / "a", "profiled")
    write(home.runs / "b", "profiled-fp32")
    alone = words(open_app(TENSOR_CORES, run="run/b", baseline="none"))
    (answer,) = (line for line in alone.splitlines() if line.startswith("## "))
    beside = words(open_app(TENSOR_CORES, run="run/a", baseline="run/b"))
    assert f"Baseline **b**: {answer.removeprefix('## ')}" in beside
    assert "Baseline **" not in alone


def test_step_cost_is_compared_with_another_run(home, open_app):
    write(home.runs / "a", "profiled")
    write(home.runs / "b", "profiled-fp32")
    write(home.runs / "c", "healthy")
    app = open_app(STEP_COST, run="run/a", baseline="run/b")
    assert not app.exception and titles(app) == ["Time of a step"]  # both runs in one chart
    assert "Shrank: GEMM/conv, on CUDA cores" in words(app) and "Grew: GEMM/conv, on tensor cores" in words(app)
    table = compare_step_cost([load_run(home.runs / "b"), load_run(home.runs / "a")])
    own = table[table["run"] == table["run"].iloc[-1]]
    assert app.dataframe[-1].value["verdict"].tolist() == own["verdict"].tolist()
    app.selectbox(key="baseline").select("run/c").run()
    assert "Phases are shown, because only one run has a profiled window." in words(app)
    run_picker(app).select("run/c").run()  # the former baseline run: no run is compared with itself
    assert not app.exception and app.selectbox(key="baseline").value != "run/c"


def test_compare_takes_traces_and_says_what_was_bought(home, open_app, tmp_path):
    for name in ("fp32", "amp"):
        file = write_trace(tmp_path / f"{name}.json", forward(amp=name == "amp"))
        import_traces([file], home.runs / name)
    app = open_app("pages/compare_runs.py", **{"with": ["run/fp32", "run/amp"]})
    assert "amp takes 0.700 ms per step, fp32 1.00 ms: 1.43 × as fast." in words(app)
    assert titles(app) == ["Time of a step"]
    assert "aten::mm" in app.dataframe[-1].value["name"].tolist()
    app.get("button_group")[-1].set_value("kernel").run()
    assert not app.exception and GEMM in app.dataframe[-1].value["name"].tolist()


def test_compare_takes_traces_without_steps(home, open_app, tmp_path):
    for name in ("fp32", "amp"):
        file = write_trace(tmp_path / f"{name}.json", forward(amp=name == "amp", steps=False))
        import_traces([file], home.runs / name)
    app = open_app("pages/compare_runs.py", **{"with": ["run/fp32", "run/amp"]})
    assert not app.exception and "in the profiled window" in words(app)


def test_a_trace_in_16_bits_is_not_said_to_become_as_fast_in_16_bits(home, open_app, tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(GEMM, 10, 980, 2)
    import_traces([write_trace(tmp_path / "t.json", trace.document())], home.runs / "half")
    shown = words(open_app(TENSOR_CORES, run="run/half"))
    assert "16 bits for all GEMM/conv would not make this run faster" in shown


def test_step_cost_draws_the_timeline_of_a_step_and_saves_it(home, open_app, tmp_path):
    import_traces([write_trace(tmp_path / "t.json", two_streams())], home.runs / "a")
    app = open_app(STEP_COST, run="run/a")
    assert "Timeline of step 3" in titles(app)
    assert "Mean launch queue: 0.750 kernels; it is empty 50.0 % of the time." in words(app)
    assert "Save this timeline for Perfetto" in [button.label for button in app.get("download_button")]


@pytest.mark.parametrize(("bf16_ms", "said"), [(12.0, "Try **FP32** first. Measured here"), (None, "Try **BF16 AMP**")])
def test_the_recipe_to_try_is_the_measured_one_on_tensor_cores_and_on_start(home, open_app, monkeypatch, bf16_ms, said):
    monkeypatch.setattr(abilities, "cpu_name", lambda: "a CPU")
    monkeypatch.setattr(abilities, "cpu_flags", lambda: ["avx512_bf16"])
    task = {"workload": "text-gpt", "size": "tiny", "device": "cpu"}
    machine = {"cpu": "a CPU", "cpu_16bit": ["avx512_bf16"], "gpus": []}
    for precision, step_ms in {"fp16": 40.0, "fp32": 10.0, "bf16": bf16_ms}.items():
        if step_ms:
            with RunWriter(
                home.runs / precision, config=task | {"precision": precision}, environment=machine
            ) as writer:
                times = [step_ms + step % 7 / 10 for step in range(100)]
                writer.append("steps", {"step": range(100), "loss": [2.0] * 100, "step_ms": times})
    for page in ("pages/tensor_cores.py", "pages/start_run.py"):
        assert said in words(open_app(page, run="run/fp16")), page


def test_a_window_without_steps_is_not_called_a_step(home, open_app, tmp_path):
    import_traces([write_trace(tmp_path / "t.json", forward(amp=True, steps=False))], home.runs / "a")
    app = open_app(STEP_COST, run="run/a")
    assert not app.exception and "Timeline of the profiled window" in titles(app)


def test_overview_says_that_the_device_was_not_recorded(home, open_app, tmp_path):
    document = forward(amp=True, steps=False)
    document["traceEvents"] = [event for event in document["traceEvents"] if event["cat"] != "kernel"]
    import_traces([write_trace(tmp_path / "t.json", document)], home.runs / "a")
    app = open_app(OVERVIEW, run="run/a")
    assert not app.exception and "No device activity was recorded" in words(app)
    assert "No device activity was recorded" in words(open_app(STEP_COST, run="run/a"))
