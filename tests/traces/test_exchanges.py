"""What is said of the exchanges of several ranks, and of inference on them."""

import pytest

from amp_core import diagnose, load_run
from amp_core.traces import import_traces
from tests.traces import made
from tests.traces.made import Made, products, run_of, write


@pytest.mark.parametrize(("count", "says"), [(60, "in buckets"), (2, "smaller buckets")])
def test_gradients_that_are_reduced_one_by_one_are_not_told_to_take_smaller_buckets(tmp_path, count, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1200, 1)
    trace.op("MmBackward0", 1, 400, 2)
    trace.op("aten::mm", 2, 8, 2, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, 300, 3, 2)
    for n in range(count):
        trace.op("c10d::allreduce_", 20 + 5 * n, 4, 2)
        trace.op("record_param_comms", 20.5 + 5 * n, 3, 2)
        trace.kernel(made.NCCL, 320 + 840 // count * n, 800 // count, 21 + 5 * n, 2, call_us=1)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "exposed-communication"]
    assert says in finding.advice


def test_gradients_that_are_reduced_one_by_one_are_known_without_operators_too(tmp_path):
    trace = Made()
    trace.kernel("void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>>", 10, 300, 3, 2)
    for n in range(60):
        trace.kernel(made.NCCL, 320 + 14 * n, 13, 21 + 5 * n, 2, call_us=1)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "exposed-communication"]
    assert "in buckets" in finding.advice


@pytest.mark.parametrize("alone_us", [400, 10])
def test_fusing_what_runs_beside_collectives_that_take_long_alone_saves_nothing(tmp_path, alone_us):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, 300, 2)
    trace.kernel(made.NCCL, 320, 200 + alone_us, 21)
    trace.op("aten::div_", 30, 8)
    trace.kernel(made.RELU, 325, 190, 31, stream=20)
    run = run_of(tmp_path, trace)
    assert run.kernels.set_index("op").loc["aten::div_", "beside_us"] == 190
    assert ("memory-bound-kernels" in {f.code for f in diagnose(run)}) == (alone_us == 10)


@pytest.mark.parametrize(
    ("collective", "mark", "says"),
    [
        ("ReduceScatter", "backward", "Each rank reduces its shard"),
        ("ReduceScatter", "Optimizer.step#Muon.step", "The optimizer exchanges shards"),
        ("AllGather", "Optimizer.step#Muon.step", "The optimizer exchanges shards"),
        ("AllGather", "forward", "Sharded weights are gathered"),
    ],
)
def test_exchanged_shards_are_not_told_to_take_buckets(tmp_path, collective, mark, says):
    trace = products(backward=True)
    trace.event("mark", mark, 420, 100, 1)
    trace.op(f"c10d::{collective.lower()}_", 425, 30)
    trace.kernel(f"ncclDevKernel_{collective}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 810, 150, 430)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "exposed-communication"]
    assert finding.advice.startswith(says) and "DistributedDataParallel" not in finding.snippet


def test_exposed_exchanges_get_no_advice_on_buckets(tmp_path):
    trace = products(backward=True)
    trace.kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", 810, 150, 430)
    (finding,) = [f for f in diagnose(run_of(tmp_path, trace)) if f.code == "exposed-communication"]
    assert "SendRecv" in finding.where and "bucket" not in finding.advice + finding.snippet


def test_who_has_all_ranks_is_not_asked_for_them(tmp_path):
    def of(ranks):
        files = []
        for rank in range(ranks):
            trace = Made()
            trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
            trace.op("MmBackward0", 1, 10, 2)
            trace.kernel(made.GEMM, 10, 100, 2, 2)
            trace.kernel(made.NCCL, 120, 800, 12)
            document = trace.document(distributedInfo={"rank": rank, "world_size": 2})
            files.append(write(tmp_path / f"{ranks}-{rank}.json", document))
        findings = diagnose(load_run(import_traces(files, tmp_path / f"run{ranks}")))
        return next(f for f in findings if f.code == "exposed-communication")

    assert "import the traces of all ranks" in of(1).advice
    complete = of(2).advice
    assert "all ranks" not in complete and complete.endswith(".")


def queued(tmp_path, ranks):
    """The `kernel-wait` of this many of two ranks, each with a product that a host function may hold up."""
    files = []
    for rank in range(ranks):
        trace = Made()
        trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
        trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, 10, 400, 2)
        trace.event("call", "cudaLaunchHostFunc", 15, 5, 1, correlation=99)
        trace.op("aten::mm", 21, 8, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(made.GEMM, 800, 200, 25)
        document = trace.document(distributedInfo={"rank": rank, "world_size": 2})
        files.append(write(tmp_path / f"{ranks}-{rank}.json", document))
    run = load_run(import_traces(files, tmp_path / f"run{ranks}"))
    return next(f for f in diagnose(run) if f.code == "kernel-wait")


def test_queued_work_of_all_ranks_asks_for_no_more_ranks(tmp_path):
    some, complete = queued(tmp_path, 1), queued(tmp_path, 2)
    assert "Traces of all ranks" in some.advice and "all ranks" in some.snippet
    assert "all ranks" not in complete.advice + complete.snippet and "sync_events" in complete.snippet


ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def inference_with(collectives):
    """A product, then collectives (kernel, microseconds) with nothing beside them."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1200, 1)
    trace.op("aten::mm", 1, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 10, 390, 2)
    at = 400
    for number, (kernel, us) in enumerate(collectives):
        trace.kernel(kernel, at, us, 20 + 3 * number)
        at += us
    return trace


@pytest.mark.parametrize(
    ("collectives", "call"),
    [
        ([(ALL_GATHER, 100)] * 4 + [(REDUCE_SCATTER, 200)], "all_gather_into_tensor("),  # together longer
        ([(ALL_GATHER, 100), (REDUCE_SCATTER, 200)], "reduce_scatter_tensor("),
        ([(made.NCCL, 300)], "all_reduce("),
        ([("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 300)], "irecv("),
        ([("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 300)], "broadcast("),
    ],
)
def test_inference_is_shown_the_collective_that_takes_most(tmp_path, collectives, call):
    run = run_of(tmp_path, inference_with(collectives))
    (finding,) = [f for f in diagnose(run) if f.code == "exposed-communication"]
    assert call in finding.snippet


@pytest.mark.parametrize(("kernel", "narrower"), [(made.NCCL, False), (REDUCE_SCATTER, True)])
def test_inference_that_communicates_16_bits_is_not_advised_to(tmp_path, kernel, narrower):
    run = run_of(tmp_path, inference_with([(kernel, 300)]))
    (finding,) = [f for f in diagnose(run) if f.code == "exposed-communication"]
    assert ("16-bit activations" in finding.advice) == narrower
