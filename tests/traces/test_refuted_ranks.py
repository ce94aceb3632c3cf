"""Late ranks, waits for hosts, and what shortens launches and collectives: words that traces had refuted before."""

import pytest

from amp_core import diagnose
from amp_core.analysis.performance.rank_waiting import late_ranks, rank_waiting
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import GEMM, RELU, Made, finding_of, run_of
from tests.traces.test_collectives import collective, ddp, in_first_launch
from tests.traces.test_collectives import run_of as run_of_ranks
from tests.traces.test_refuted_advice import exchanges

EXCHANGE = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
TF32 = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_tn_align4>"


def test_collectives_of_dtensor_are_asynchronous_already(tmp_path):
    for op, tells in (("_c10d_functional::all_gather_into_tensor", True), ("c10d::allreduce_", False)):
        trace = Made()
        trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
        trace.kernel(GEMM, 10, 100, 2)
        trace.op(op, 20, 30)
        trace.op("record_param_comms", 21, 20, **{"Collective name": "allgather", "dtype": "Float"})
        trace.kernel(made.NCCL, 110, 700, 25)
        finding = finding_of(run_of(tmp_path / str(tells), trace), "exposed-communication")
        assert ("asynchronous tensor parallelism" in finding.snippet) == tells
        assert ("async_op=True" not in finding.snippet and "or exchange 16 bits" in finding.advice) == tells
        assert "overlap hides at most that of" in finding.advice


def test_an_exchange_that_runs_beside_computing_is_not_told_to_be_launched_so(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("record_param_comms", 1, 8, **{"Collective name": "all_to_all", "dtype": "Float"})
    trace.kernel(EXCHANGE, 10, 900, 3)
    trace.kernel(GEMM, 20, 600, 15, stream=8)
    finding = finding_of(run_of(tmp_path, trace), "exposed-communication")
    assert "runs beside computing already" in finding.advice and "async_op" not in finding.snippet


def waiting_for_a_device(rank):
    """As `in_first_launch`, but rank 0 launches its last collective before the launch of 5 ms, and enters it late since
    its device does not start it."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 8000, 1)
    trace.op("aten::mm", 1, 8)
    trace.kernel(GEMM, 20, 280, 2)
    for at in (300, 320):
        collective(trace, at, 20, at - 150)
    enter = 3500 if rank == 0 else 400
    collective(trace, enter, 3600 - enter, 350)
    trace.op("aten::add_", 380, 5080)
    trace.kernel(GEMM, 7900, 50, 400, call_us=5050)
    return trace.document(distributedInfo={"rank": rank, "world_size": 2})


@pytest.mark.parametrize("make", [in_first_launch, waiting_for_a_device])
def test_a_collective_that_all_ranks_launched_in_time_waits_for_no_host(tmp_path, make):
    title = finding_of(run_of_ranks(tmp_path, make(0), make(1)), "host-bound").title
    assert ("is idle or waits in collectives" in title) == (make is in_first_launch)


@pytest.mark.parametrize(("leaves_us", "told"), [(5, False), (60, False), (190, True)])
def test_overlap_is_advised_on_only_where_a_part_is_transfer(tmp_path, leaves_us, told):
    """A transfer that is short beside the time that the hosts are late delays nothing that they launch."""
    finding = finding_of(run_of_ranks(tmp_path, *exchanges(leaves_us)), "exposed-communication")
    assert ("For the rest" in finding.advice) == told == ("topo -m" in finding.snippet)


def test_near_ties_do_not_hide_the_rank_that_makes_most_of_the_waiting(tmp_path):
    """Of ten collectives rank 1 is last in one, by 150 µs, and each of the others in three, by a microsecond."""
    documents = []
    for rank in range(4):
        trace = Made()
        trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
        trace.op("aten::mm", 1, 4, **{"Input type": ["float"] * 2})
        trace.kernel(GEMM, 10, 20 if rank == 1 else 40, 2)
        for number in range(10):
            last = 1 if number == 0 else (0, 2, 3)[number % 3]
            late = (150 if last == 1 else 1) if rank == last else 0
            enter = 50 + late if number == 0 else 250 + 40 * number + late
            leave = 240 if number == 0 else 280 + 40 * number
            collective(trace, enter, leave - enter, enter - 25)
        documents.append(trace.document(distributedInfo={"rank": rank, "world_size": 4}))
    run = run_of_ranks(tmp_path, *documents)
    assert late_ranks(run)["rank"].tolist() == [1]
    assert rank_waiting(run)["caused_ms"].tolist() == pytest.approx([0.003, 0.150, 0.003, 0.003])
    finding = finding_of(run, "exposed-communication")
    assert "waiting for others, most of it for rank 1" in finding.title


def test_the_idle_gpu_of_the_late_rank_is_told_where_it_explains_the_waiting(tmp_path):
    """Rank 1 waits for its host until 500 µs; the transfers take as long as the waiting."""
    documents = []
    for rank in range(3):
        trace = Made()
        trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
        trace.kernel(GEMM, 10, 90, 2)
        enter = 500 if rank == 1 else 100
        collective(trace, enter, 900 - enter, enter - 25)
        documents.append(trace.document(distributedInfo={"rank": rank, "world_size": 3}))
    advice = finding_of(run_of_ranks(tmp_path, *documents), "exposed-communication").advice
    assert "ms per step for it on average: rank 1's GPU is idle for" in advice and ", the others' for" in advice


@pytest.mark.parametrize(("backward_us", "slow"), [(100, False), (920, True)])
def test_hosts_as_slow_as_the_late_ones_are_told_with_them(tmp_path, backward_us, slow):
    """Ranks 0 and 1 wait for rank 2 before the first collective and for rank 3 before the second one."""
    enters = [(300, 650), (300, 650), (590, 650), (300, 940)]
    ranks = (ddp(e, leaves=(600, 950), rank=rank, backward_us=backward_us) for rank, e in enumerate(enters))
    sentence = first_sentence(run_of_ranks(tmp_path, *ranks))
    assert ("1 of 2 and 1 of 2 last, though their own hosts are nearly as slow" in sentence) == slow


@pytest.mark.parametrize("works", [False, True])
def test_time_before_a_step_outside_of_operators_is_not_bound_by_launches(tmp_path, works):
    """The first kernel of the step comes after 4 ms in which the host runs no operator, or one."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 14_000, 1)
    trace.event("gpu_user_annotation", "ProfilerStep#3", 4_008, 9_904, 7)
    if works:
        trace.op("aten::uniform_", 2, 3_990)
    for n in range(100):
        at = 4_000 + 100 * n
        trace.op("aten::mul", at, 6)
        trace.kernel(RELU, at + 8, 4, at + 2)
    finding = finding_of(run_of(tmp_path, trace), "launch-bound")
    told = "ms before the first kernel the host is in no operator and no call" in finding.title
    assert told != works and ("ms before its first kernel because" in finding.title) == works


def vllm(tokens):
    trace = Made()
    trace.event("mark", f"execute_context_1({tokens})_generation_0(0)", 0, 4000, 1)
    for n in range(40):
        trace.op("Torch-Compiled Region: 0/0", 100 * n, 90)
        trace.op("vllm::moe_forward", 100 * n + 1, 80)
        trace.kernel(GEMM, 100 * n + 20, 10, 100 * n + 10)
    return trace


@pytest.mark.parametrize(
    ("tokens", "says"), [(1024, '"max_cudagraph_capture_size": 1024'), (256, "FULL_AND_PIECEWISE")]
)
def test_a_pass_of_more_tokens_than_are_captured_by_default_is_told_so(tmp_path, tokens, says):
    finding = finding_of(run_of(tmp_path, vllm(tokens)), "launch-bound")
    assert says in finding.snippet and "enforce-eager" not in finding.snippet
    assert ("1,024 tokens" in finding.advice) == (tokens == 1024)


def with_a_long_gap(*, function, optimizer, function_us=2990):
    """Short kernels every 100 µs, and a gap of 3 ms in a function, within an optimizer's step or not."""
    trace, at = Made(), 0
    for number in range(40):
        if number == 20:
            trace.event("python_function", function, at + 60, function_us, 1) if function else None
            trace.event("mark", "Optimizer.step#AdamW.step", at + 50, 3100, 1) if optimizer else None
            at += 3000
        at += 100
        trace.op("aten::_foreach_mul_" if optimizer and number >= 20 else "aten::mul", at, 6)
        trace.kernel(RELU, at + 8, 4, at + 2)
    return trace


@pytest.mark.parametrize(
    ("function", "optimizer", "says"),
    [
        (
            "optim/adam.py(544): _multi_tensor_adam",
            True,
            "is longest in optim/adam.py(544): _multi_tensor_adam: the opt",
        ),
        ("", True, "is longest in the optimizer's step: the optimizer's fused=True"),
        ("metrics.py(7): report", False, "is longest in metrics.py(7): report, which neither graphs nor larger"),
        ("_dynamo/eval_frame.py(231): _fn", False, "a timeline shows its functions there"),
        ("", False, "profile it with stacks"),
    ],
)
def test_longer_gaps_are_told_by_what_the_host_does_there(tmp_path, function, optimizer, says):
    finding = finding_of(run_of(tmp_path, with_a_long_gap(function=function, optimizer=optimizer)), "launch-bound")
    assert says in finding.advice


def test_a_function_that_takes_little_of_the_longer_gaps_is_told_as_the_longest_there(tmp_path):
    trace = with_a_long_gap(function="metrics.py(7): report", optimizer=False, function_us=450)
    advice = finding_of(run_of(tmp_path, trace), "launch-bound").advice
    assert "a timeline shows its functions there, the longest of which is metrics.py(7): report, 0.450 ms;" in advice


@pytest.mark.parametrize(("op", "recurrent"), [("aten::gru", True), ("aten::linear", False)])
def test_recurrent_layers_are_not_told_to_be_compiled(tmp_path, op, recurrent):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 4000, 1)
    for n in range(40):
        trace.op(op, 100 * n, 60)
        trace.kernel(RELU, 100 * n + 20, 5, 100 * n + 10)
    finding = finding_of(run_of(tmp_path, trace), "launch-bound")
    assert ("make_graphed_callables" in finding.snippet) == recurrent == ("reduce-overhead" not in finding.snippet)


@pytest.mark.parametrize(("op", "flag"), [("aten::_cudnn_rnn", "cudnn.allow_tf32"), ("aten::mm", "matmul.allow_tf32")])
def test_tf32_is_switched_off_where_the_launching_operator_takes_it(tmp_path, op, flag):
    trace = Made()
    for n, (name, kernel) in enumerate(((op, TF32), ("aten::addmm", made.SIMT))):
        trace.op(name, 500 * n, 20)
        trace.kernel(kernel, 500 * n + 30, 400, 500 * n + 5)
    finding = finding_of(run_of(tmp_path, trace, "NVIDIA A100-SXM4-80GB", (8, 0)), "tf32-baseline")
    assert finding.snippet == f"torch.backends.{'cuda.' if 'matmul' in flag else ''}{flag} = False"


def passes(count, *, ahead):
    """Equal passes of six launches and 1,000 µs of kernels; the host launches the first with pauses, and then runs
    ahead of the device, or is as slow in all of them."""
    trace, ends, launched = Made(), 0.0, 0.0
    for number in range(count):
        for n in range(6):
            launched += 230 if number == 0 or not ahead else 5
            trace.op("aten::something", launched - 1, 3)
            begins = max(ends, launched + 4)
            trace.kernel((GEMM, RELU)[n == 3], begins, 160, launched)
            ends = begins + 160
    return trace


@pytest.mark.parametrize("ahead", [True, False])
def test_a_queue_that_fills_in_the_first_of_equal_passes_is_no_saving_of_the_loop(tmp_path, ahead):
    run = run_of(tmp_path, passes(5, ahead=ahead))
    found = [f for f in diagnose(run) if f.code in ("launch-bound", "host-bound")]
    assert (not found) == ahead and (run.windows["idle_filling_us"].sum() > 300) == ahead


def test_kernels_beside_one_another_are_not_beside_collectives_and_little_to_overlap_is_told(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 1, 20)
    trace.kernel(GEMM, 10, 90, 2)
    trace.kernel(GEMM, 20, 90, 6, stream=8)
    collective(trace, 150, 800, 30)
    finding = finding_of(run_of(tmp_path, trace), "exposed-communication")
    assert "computes for 0.100 ms per step, so overlap hides at most that of 0.800 ms" in finding.advice
    assert "Overlap communication" not in finding.advice and "async_op" not in finding.snippet


@pytest.mark.parametrize(("elements", "told"), [(2**24, True), (2**20, False)])
def test_asynchronous_tensor_parallelism_is_told_only_of_gpus_that_may_have_access_to_each_other(
    tmp_path, elements, told
):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 2000, 1)
    trace.op("aten::mm", 1, 8)
    trace.kernel(GEMM, 10, 900, 2)
    message = {"Collective name": "allgather", "dtype": "Float", "In msg nelems": elements, "Out msg nelems": elements}
    trace.op("_c10d_functional::all_gather_into_tensor", 20, 30)
    trace.op("record_param_comms", 21, 20, **message, **{"Group size": 2, "Process Group Name": "tp"})
    trace.kernel("ncclDevKernel_AllGather_RING_LL(int)", 910, 1000, 25)
    finding = finding_of(run_of(tmp_path, trace), "exposed-communication")
    assert ("_micro_pipeline_tp" in finding.snippet) == told
