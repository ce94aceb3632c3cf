"""Traces of torch_npu: rows of NPUs that no category marks, and the arrows that link them."""

import pytest

from amp_core import diagnose, load_run
from amp_core.findings import first_sentence
from amp_core.traces import import_traces
from tests.traces.made import BASE, GEMM, Made, run_of, write

PYTHON, NPU, HCCL, CANN = 88, 901, 902, 903
MAIN, LAUNCHER = 88, 89
"""Processes, and threads of the host: operators run on the first and are launched by the second."""


class Npu:
    """A trace as torch_npu writes it: a list, with times as text."""

    def __init__(self):
        self.events = []
        self.event("ProfilerStep#5", 0, 1000, PYTHON, MAIN, cat="cpu_op")

    def event(self, name, start, us, process, thread, args=(), **rest):
        one = {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": f"{BASE + start}.000", "dur": us}
        self.events.append(one | {"args": dict(args)} | rest)

    def arrow(self, kind, number, begins, thread, ends, process, row):
        for ph, at, where in (("s", begins, (PYTHON, thread)), ("f", ends, (process, row))):
            one = {"ph": ph, "cat": kind, "name": kind, "id": number, "pid": where[0], "tid": where[1]}
            self.events.append(one | {"ts": f"{BASE + at}.000"})

    def op(self, name, start, us):
        self.event(name, start, us, PYTHON, MAIN, cat="cpu_op")

    def row(self, name, start, us, caused, launched=None, *, process=NPU, row=2, task="AI_CORE"):
        """A row of the NPU that the operator at `caused` causes, launched on another thread."""
        args = {"Task Type": task, "Physic Stream Id": row} if process == NPU else {"alg_type": "RING"}
        self.event(name, start, us, process, row, args)
        if caused is not None:
            self.arrow("async_npu", BASE + start, caused, MAIN, start, process, row)
        if launched is not None:
            self.arrow("HostToDevice", str(start), launched, LAUNCHER, start, process, row)

    def run(self, folder):
        folder.mkdir(exist_ok=True)
        return load_run(import_traces([write(folder / "trace_view.json", self.events)], folder / "run"))


def of_two(launched=690):
    """A step of two kernels, 100–300 µs and 700–1,000 µs."""
    trace = Npu()
    trace.op("aten::mm", 20, 30)
    trace.row("aclnnMm_MatMulCommon_MatMulV2", 100, 200, 20, 90)
    trace.op("aten::relu", 60, 30)
    trace.row("aclnnRelu_Relu_Relu", 700, 300, 60, launched)
    return trace


def test_rows_of_an_npu_are_its_kernels(tmp_path):
    trace = of_two()
    trace.row("EVENT_WAIT", 300, 400, None, row=4, task="EVENT_WAIT_SQE")  # a wait, which nothing causes
    run = trace.run(tmp_path)
    assert run.head.config["device"] == "npu:0"
    kernels = run.kernels.sort_values("total_us", ascending=False)
    assert kernels["name"].tolist() == ["aclnnRelu_Relu_Relu", "aclnnMm_MatMulCommon_MatMulV2"]
    assert kernels["op"].tolist() == ["aten::relu", "aten::mm"] and kernels["total_us"].tolist() == [300, 200]
    assert run.windows["busy_us"].item() == 500 and len(diagnose(run)) > 0
    run.validate(full=True)


@pytest.mark.parametrize(("launched", "cause"), [(690, "because the host launches too late"), (250, "work is queued")])
def test_an_npu_is_idle_for_the_launch_and_not_for_the_operator(tmp_path, launched, cause):
    """The operator at 60 µs has long ended; a thread of its own launches."""
    sentence = first_sentence(of_two(launched=launched).run(tmp_path))
    assert "the device is idle for" in sentence and cause in sentence


def test_collectives_of_an_npu_are_counted_whole(tmp_path):
    trace = of_two()
    trace.op("c10d::allreduce_", 95, 5)
    trace.row("hcom_allReduce__868_0_1", 300, 400, 95, process=HCCL, row=0)
    trace.row("Notify Wait", 300, 390, None, row=7, task="Notify Wait")
    run = trace.run(tmp_path)
    assert "the device only communicates for" in first_sentence(run)
    assert run.windows["communication_alone_us"].item() == 400
    assert run.collectives["name"].tolist() == ["all_reduce"]


def test_operators_that_cann_compiles_between_launches_are_named(tmp_path):
    trace = of_two()
    trace.event("AscendCL@aclopCompileAndExecute", 310, 380, CANN, LAUNCHER, {"Mode": "ACL_OP", "level": "acl"})
    run = trace.run(tmp_path)
    assert "0.380 ms of it compiling and starting operators (AscendCL@aclopCompileAndExecute)" in first_sentence(run)
    (finding,) = [f for f in diagnose(run) if f.code == "host-bound"]
    assert "set_compile_mode(jit_compile=False)" in finding.snippet


def test_arrows_without_rows_and_rows_without_arrows_are_no_work(tmp_path):
    trace = Npu()
    trace.op("aten::mm", 20, 300)
    trace.row("aclnnMm_MatMulCommon_MatMulV2", 100, 200, None)
    trace.arrow("async_npu", 7, 20, MAIN, 500, NPU, 2)
    trace.event("Computing", 100, 200, 905, 0)
    assert "aten::mm takes 100 % of the operators" in first_sentence(trace.run(tmp_path))


def reducing(*, count=4_000_000, kind="FP32", called="allReduce", ranks=(0, 0)):
    """A step with one collective, and a part of it between two ranks."""
    trace = of_two()
    trace.op("c10d::allreduce_", 95, 5)
    trace.row(f"hcom_{called}__868_0_1", 300, 400, 95, process=HCCL, row=0)
    trace.events[-3]["args"] |= {"count": count, "data_type": kind}
    trace.event("Notify_Wait", 300, 390, HCCL, 1, {"src rank": ranks[0], "dst rank": ranks[1], "stream id": 3})
    return trace


def test_a_collective_of_an_npu_tells_its_bytes_and_group(tmp_path):
    row = reducing().run(tmp_path).collectives.iloc[0]
    assert (row["name"], row["group"], row["dtype"], row["message_bytes"]) == ("all_reduce", "868", "float32", 16e6)
    row = reducing(kind="BFP16").run(tmp_path / "b").collectives.iloc[0]
    assert (row["dtype"], row["message_bytes"]) == ("bfloat16", 8e6)


def test_a_count_of_one_rank_alone_is_no_message_of_all(tmp_path):
    row = reducing(called="allGather").run(tmp_path).collectives.iloc[0]
    assert row["name"] == "all_gather" and row["dtype"] == "float32" and row["message_bytes"] != row["message_bytes"]


@pytest.mark.parametrize(("ranks", "world_size"), [((0, 5), 6), ((0, 2**32 - 1), 1), ((0, True), 1)])
def test_a_trace_of_an_npu_has_the_ranks_that_its_collectives_name(tmp_path, ranks, world_size):
    run = reducing(ranks=ranks).run(tmp_path)
    assert run.head.world_size == world_size and ("world_size_is_least" in run.head.config) == (world_size > 1)


def test_two_of_more_ranks_are_said_to_be_some(tmp_path):
    files = []
    for rank, start in enumerate((310, 600)):
        trace = of_two()
        trace.op("c10d::allreduce_", 95, 5)
        trace.row("hcom_allReduce__868_0_1", start, 690 - start, 95, process=HCCL, row=0)
        trace.event("Notify_Wait", 300, 390, HCCL, 1, {"src rank": rank, "dst rank": 3})
        files.append(write(tmp_path / f"{rank}.json", trace.events))
    run = load_run(import_traces(files, tmp_path / "run"))
    (finding,) = [f for f in diagnose(run) if f.code == "exposed-communication"]
    assert "at least" in finding.title and "of these 2 of at least 4 ranks" in finding.title + finding.advice


def test_kernels_of_an_npu_are_classified_by_their_operators(tmp_path):
    trace = of_two()
    trace.op("aten::npu_dtype_cast", 70, 5)
    trace.row("trans_TransData_117", 350, 100, 70, 340)
    rows = trace.run(tmp_path).kernels.set_index("name")
    product, relu = rows.loc["aclnnMm_MatMulCommon_MatMulV2"], rows.loc["aclnnRelu_Relu_Relu"]
    assert (product["tensor_core"], product["category"]) == ("yes", "gemm")
    assert (relu["tensor_core"], relu["category"]) == ("no", "elementwise")
    assert (rows.loc["trans_TransData_117", "category"], rows.loc["trans_TransData_117", "tensor_core"]) == (
        "layout",
        "no",
    )


def test_advice_on_an_npu_names_no_gpu(tmp_path):
    run = of_two(launched=250).run(tmp_path)
    (finding,) = [f for f in diagnose(run) if f.code == "kernel-wait"]
    assert "No stream of the device runs" in finding.advice and "virtual or shared device" in finding.advice
    assert not [f for f in diagnose(run) if "GPU" in f.title + f.advice] and "GPU" not in first_sentence(run)


def test_advice_on_a_gpu_still_names_it(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for start in (100, 700):
        trace.op("aten::mm", start // 10, 8)
        trace.kernel(GEMM, start, 200, start // 10 + 2)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "kernel-wait"]
    assert "No stream of" in finding.advice and "GPU" in finding.title and "GPU" in finding.advice
