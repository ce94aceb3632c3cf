"""What is said of loops of short kernels: whether they are launch-bound, and what would help."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, run_of


@pytest.mark.parametrize(("each_us", "code"), [(250, "launch-bound"), (500, "host-bound")])
def test_idle_time_is_dispatch_in_short_gaps_and_other_work_in_long_ones(tmp_path, each_us, code):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 8 * each_us, 1)
    for at in range(0, 8 * each_us, each_us):
        trace.op("aten::mm", at, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, at + 10, 50, at + 2)
    first = diagnose(run_of(tmp_path, trace))[0]
    assert (first.code, first.where) == (code, "host")


@pytest.mark.parametrize("compiled", [True, False])
def test_a_model_that_is_compiled_already_is_not_told_to_be_compiled(tmp_path, compiled):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 2000, 1)
    for n in range(20):
        name = "triton_poi_fused_add_mul_0" if compiled and n % 2 else made.RELU
        trace.op("triton_poi_fused_add_mul_0" if compiled and n % 2 else "aten::relu", 100 * n, 20)
        trace.kernel(name, 100 * n + 20, 5, 100 * n + 10)
    finding = diagnose(run_of(tmp_path, trace))[0]
    assert finding.code == "launch-bound" and ("compile the model" in finding.advice) != compiled
    assert ("graph_breaks" in finding.snippet) == compiled


def tiny_kernels(optimizer, launches=4):
    """A loop that is bound by launches, whose optimizer is of the kind given and launches so often per step."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("MmBackward0", 780, 10, 2)
    for at in range(0, 800, 100):
        trace.op("aten::mm", at, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, at + 50, 4, at + 40)
    trace.event("mark", "Optimizer.step#Adagrad.step", 900, 80, 1)
    trace.op(optimizer, 905, 60)
    for at in range(910, 910 + 10 * launches, 10):
        trace.kernel(made.ADAM, at + 40, 4, at)
    return trace


@pytest.mark.parametrize(
    ("call", "around", "category", "says", "refuted"),
    [
        ("cudaLaunchKernel", None, "cuda_runtime", "capture CUDA graphs", "already"),
        ("cudaGraphLaunch", None, "cuda_runtime", "Graphs are replayed already", "compile the model"),
        ("cudaLaunchKernel", "Torch-Compiled Region", "cuda_runtime", "compiled already", "compile the model"),
        ("mtiaLaunch", None, "mtia_runtime", "compile the model", "graphs"),
    ],
)
def test_launch_bound_loops_are_not_advised_to_do_what_they_do(tmp_path, call, around, category, says, refuted):
    trace = tiny_kernels("aten::_fused_adagrad_")
    trace.event("call", call, 2, 5, 1, correlation=99)
    for at in range(0, 800, 100) if around else ():
        trace.op(around, at - 0.5, 60)
    for event in trace.events:
        event["cat"] = category if event["cat"] == "cuda_runtime" else event["cat"]
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "launch-bound"]
    assert says in finding.advice and refuted not in finding.advice
    assert ("reduce-overhead" in finding.snippet) == (category == "cuda_runtime" and call != "cudaGraphLaunch")


@pytest.mark.parametrize(
    ("every", "call", "says", "snippet"),
    [
        (4, "cudaStreamSynchronize", "after some 4 launches", "set_sync_debug_mode"),
        (4, "cudaDeviceSynchronize", "after some 4 launches", "start.record()"),
        (40, "cudaStreamSynchronize", "capture CUDA graphs", "torch.compile"),
    ],
    ids=["stream", "device", "rare"],
)
def test_no_graph_is_advised_across_frequent_synchronizations(tmp_path, every, call, says, snippet):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 8000, 1)
    for n in range(80):
        trace.op("aten::mm", 100 * n, 20, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, 100 * n + 20, 5, 100 * n + 10)
        if n % every == every - 1:
            trace.event("call", call, 100 * n + 24, 2, 1)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "launch-bound"]
    assert says in finding.advice and snippet in finding.snippet


@pytest.mark.parametrize(("steps", "graphs"), [(1, False), (8, True), (0, True)])
def test_one_synchronization_in_each_step_leaves_its_launches_to_a_graph(tmp_path, steps, graphs):
    """Ten launches for each of eight synchronizations."""
    trace = Made()
    for step in range(steps):
        trace.event("mark", f"ProfilerStep#{3 + step}", 8000 / steps * step, 8000 / steps, 1)
    for n in range(80):
        trace.op("aten::mm", 100 * n, 20, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, 100 * n + 20, 5, 100 * n + 10)
        if n % 10 == 9:
            trace.event("call", "cudaStreamSynchronize", 100 * n + 24, 2, 1)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "launch-bound"]
    assert ("capture CUDA graphs" in finding.advice) == graphs


def test_a_loop_of_short_calls_is_not_taken_for_the_start_of_a_program(tmp_path):
    trace = Made()
    for at in range(0, 20_000, 200):
        trace.op("aten::addmv", at, 60, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, at + 70, 6, at + 50)
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "launches too late" in sentence and "warm-up" not in sentence


@pytest.mark.parametrize(
    ("optimizer", "launches", "fused"),
    [("aten::_foreach_add_", 4, True), ("aten::_foreach_add_", 1, False), ("aten::_fused_adagrad_", 4, False)],
)
def test_launch_bound_loops_are_advised_on_their_own_optimizer(tmp_path, optimizer, launches, fused):
    trace = tiny_kernels(optimizer, launches)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "launch-bound"]
    assert ("fused=True" in finding.snippet) == fused and "AdamW(" not in finding.snippet


def test_a_loop_that_trains_is_not_taken_for_an_idle_server(tmp_path):
    trace = tiny_kernels("aten::_foreach_add_")
    trace.events = [event for event in trace.events if "ProfilerStep" not in event["name"]]
    sentence = first_sentence(run_of(tmp_path, trace))
    assert "launches too late" in sentence and "idle server" not in sentence


@pytest.mark.parametrize(("us", "named"), [(20, True), (150, False)])
def test_long_kernels_are_not_what_short_gaps_are_between(tmp_path, us, named):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 4000, 1)
    for at in range(0, 4000, 250):
        trace.op("aten::mm", at, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, at + 240 - us, us, at + 230 - us)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "launch-bound"]
    assert ("on average" in finding.title) == named


@pytest.mark.parametrize(
    ("marks", "says", "refuted"),
    [(["Adam"], "fused=True)", "optimizer.step)"), (["Lion"], "compile(optimizer.step)", "type(optimizer)")],
)
def test_a_step_of_the_optimizer_alone_is_named_with_what_makes_it_fewer_kernels(tmp_path, marks, says, refuted):
    trace = Made()
    for name in marks:
        trace.event("mark", f"Optimizer.step#{name}.step", 0, 1000, 1)
    for n in range(20):
        trace.op("aten::mul_", 50 * n, 20)
        trace.kernel(made.RELU, 50 * n + 10, 2, 50 * n + 5)
    run = run_of(tmp_path, trace)
    assert "between kernels of 2.0 µs on average, with 100 % of the launches in the optimizer" in first_sentence(run)
    (finding,) = [f for f in diagnose(run) if f.code == "launch-bound"]
    assert says in finding.snippet and refuted not in finding.snippet
    assert run.head.config["optimizers"] == marks


@pytest.mark.parametrize(
    ("op", "device", "says", "not_says"),
    [
        ("vllm::unified_attention_with_output", "cuda", "vLLM", "graph_breaks"),
        ("sglang::unified_attention_with_output", "cuda", "CUDAGraph", "vLLM"),
        ("aten::relu", "cuda", "graph_breaks", "vLLM"),
    ],
)
def test_engines_split_their_compiled_code_on_purpose(tmp_path, op, device, says, not_says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 4000, 1)
    for n in range(40):
        region = n % 2 == 0
        trace.op(f"Torch-Compiled Region: {n}/0" if region else op, 100 * n, 20)
        trace.kernel(f"triton_poi_fused_add_{n % 4}" if region else made.RELU, 100 * n + 20, 5, 100 * n + 10)
    finding = next(f for f in diagnose(run_of(tmp_path, trace)) if f.code == "launch-bound")
    assert says in finding.snippet and not_says not in finding.snippet
