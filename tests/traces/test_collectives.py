"""Collectives in traces: what they carry, and who is waited for."""

import pytest

from amp_core import diagnose, load_run
from amp_core.analysis.performance.collectives import collective_rows, collective_table, gradient_dtype
from amp_core.analysis.performance.rank_waiting import late_ranks, rank_waiting, waited_for
from amp_core.analysis.ranks import rank_spread
from amp_core.findings import first_sentence
from amp_core.traces import import_traces, read_trace
from tests.traces.made import GEMM, NCCL, Made, write

REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def collective(trace, start, duration, launched, kernel=NCCL, **message):
    """One collective: the operator that tells what it carries, its launch and its kernel."""
    trace.op("record_param_comms", launched - 2, 20, 2, **message)
    trace.kernel(kernel, start, duration, launched, 2)


def ddp(enters, *, leaves=(700, 950), rank=0, dtype="Float", group=None, backward_us=920):
    """A step of 1,000 µs on one rank, which enters its collectives at `enters`; all leave them at `leaves`."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::mm", 5, 8, **{"Input type": ["float"] * 2})
    trace.kernel(GEMM, 20, 280, 6)
    trace.op("MmBackward0", 30, backward_us, 2)
    for enter, leave in zip(enters, leaves, strict=True):
        message = {"Collective name": "allreduce", "dtype": dtype, "In msg nelems": 1000, "Out msg nelems": 1000}
        message |= {"Process Group Name": group} if group else {}
        collective(trace, enter, leave - enter, enter - 25, **message, **{"Group size": 2})
    return trace.document(distributedInfo={"rank": rank, "world_size": 2})


def run_of(tmp_path, *documents):
    files = [write(tmp_path / f"r{n}.json", document) for n, document in enumerate(documents)]
    return load_run(import_traces(files, tmp_path / "run"))


def test_the_rank_that_enters_last_is_the_one_that_is_waited_for(tmp_path):
    # Rank 0 enters first and waits 300 and 100 µs; rank 1's transfers take 100 µs each.
    run = run_of(tmp_path, ddp((300, 750)), ddp((600, 850), rank=1))
    table = rank_waiting(run).set_index("rank")
    assert table["waiting_ms"].to_dict() == pytest.approx({0: 0.4, 1: 0.0})
    assert table["transfer_ms"].to_dict() == pytest.approx({0: 0.2, 1: 0.2})
    waited = waited_for(run)
    assert (waited.rank, waited.last_frac) == (1, 1.0)
    assert waited.waiting_ms == pytest.approx(0.4) and waited.all_waiting_ms == pytest.approx(0.2)
    spread = rank_spread(run)
    assert spread.slowest == 1 and spread.frac > 0.35 and spread.own_ms > spread.median_ms


def test_waiting_per_step_is_known_without_the_windows(tmp_path):
    run = run_of(tmp_path, *(two_steps(rank) for rank in range(2)))
    whole = rank_waiting(run)["kept_ms"].tolist()
    (tmp_path / "run" / "windows" / "00000.parquet").write_bytes(b"cut")
    assert rank_waiting(load_run(tmp_path / "run").salvaged())["kept_ms"].tolist() == whole


def two_steps(rank):
    """Rank 1 enters the collective of each of two steps 300 µs late."""
    trace = Made()
    for number in range(2):
        at = 1000 * number
        trace.event("mark", f"ProfilerStep#{3 + number}", at, 1000, 1)
        trace.op("aten::mm", at + 5, 8)
        trace.kernel(GEMM, at + 20, 280, at + 6)
        enter = at + (600 if rank else 300)
        message = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 10, "Group size": 2}
        collective(trace, enter, at + 700 - enter, enter - 25, **message)
    return trace.document(distributedInfo={"rank": rank, "world_size": 2})


def test_waiting_is_told_by_collective(tmp_path):
    run = run_of(tmp_path, ddp((300, 850)), ddp((600, 750), rank=1))
    rows = collective_rows(run)
    assert rows.groupby("number")["last"].first().tolist() == [1.0, 0.0]
    assert rows.sort_values(["number", "rank"])["waiting_us"].tolist() == pytest.approx([300, 0, 0, 100])
    assert waited_for(run).rank == 1


@pytest.mark.parametrize(("second_us", "late"), [(180, [0, 1]), (40, [0])])
def test_all_ranks_that_hold_up_the_others_are_named(tmp_path, second_us, late):
    """Rank 0 enters the first collective 200 µs after rank 1, which enters the second `second_us` after rank 0."""
    waited = waited_for(run_of(tmp_path, ddp((500, 720)), ddp((300, 720 + second_us), rank=1)))
    assert [rank for rank, _ in waited.late] == late
    assert (waited.rank, waited.last_frac) == waited.late[0] == (0, 0.5)


def test_ranks_with_different_collectives_are_not_matched(tmp_path):
    run = run_of(tmp_path, ddp((300, 750)), ddp((600,), leaves=(700,), rank=1))
    assert collective_rows(run)["last"].isna().all() and waited_for(run) is None
    assert rank_waiting(run).empty


def test_groups_of_some_ranks_are_matched_among_themselves(tmp_path):
    documents = [
        ddp((e, 800), rank=r, group=g) for r, (e, g) in enumerate([(300, "a"), (600, "a"), (400, "b"), (500, "b")])
    ]
    rows = collective_rows(run_of(tmp_path, *documents))
    first = rows[rows["number"] == 0].set_index("rank")
    assert first["waiting_us"].to_dict() == pytest.approx({0: 300, 1: 0, 2: 100, 3: 0})


def test_the_root_of_a_broadcast_is_not_called_late(tmp_path):
    def broadcast(duration, rank):
        trace = Made()
        trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
        collective(trace, 100, duration, 10, **{"Collective name": "broadcast", "In msg nelems": 10})
        return trace.document(distributedInfo={"rank": rank, "world_size": 2})

    assert waited_for(run_of(tmp_path, broadcast(10, 0), broadcast(600, 1))) is None


def test_bandwidth_is_of_the_transfer_alone(tmp_path):
    both = collective_table(run_of(tmp_path, ddp((300, 750)), ddp((600, 850), rank=1)))
    row = both.iloc[0]
    assert (row["name"], row["dtype"], row["phase"], row["count"], row["group_size"]) == (
        "all_reduce", "float32", "backward", 2.0, 2.0,
    )  # fmt: skip
    assert row["message_bytes"] == 4000 and row["gb_per_s"] == pytest.approx(4000 / 100e-6 / 1e9) and not row["bound"]


def test_of_one_rank_bandwidth_is_a_lower_bound(tmp_path):
    row = collective_table(run_of(tmp_path, ddp((300, 750)))).iloc[0]
    assert row["bound"] and row["gb_per_s"] == pytest.approx(8000 / 600e-6 / 1e9)


def test_time_alone_leaves_out_what_runs_beside(tmp_path):
    rows = collective_rows(run_of(tmp_path, ddp((200, 750))))  # the product ends at 300
    assert rows.sort_values("number")["alone_us"].tolist() == pytest.approx([400, 200])


def test_gradients_in_fp32_are_named_in_the_advice_and_16_bit_ones_too(tmp_path):
    full = run_of(tmp_path, ddp((300, 750)))
    assert gradient_dtype(full) == "float32"
    (finding,) = [f for f in diagnose(full) if f.code == "exposed-communication"]
    assert "bf16_compress_hook" in finding.advice
    (tmp_path / "b").mkdir()
    half = run_of(tmp_path / "b", ddp((300, 750), dtype="BFloat16"))
    assert gradient_dtype(half) == "bfloat16"
    (finding,) = [f for f in diagnose(half) if f.code == "exposed-communication"]
    assert "already reduced in bfloat16" in finding.advice and "compress" not in finding.advice + finding.snippet


def test_exposed_communication_says_who_is_waited_for(tmp_path):
    run = run_of(tmp_path, ddp((300, 750)), ddp((650, 900), rank=1))
    (finding,) = [f for f in diagnose(run) if f.code == "exposed-communication"]
    assert "waiting for others" in finding.title and "rank 1 enters 2 of 2 collectives last" in finding.advice
    assert "at least" not in finding.title + finding.advice
    # 250 µs of 350 µs, the mean of the ranks, are waiting: who is late comes before what shortens the transfer.
    assert "0.250 of the 0.350 ms are waiting for ranks whose hosts are late" in finding.title
    assert finding.advice.startswith("Shorten what makes those hosts late first.")
    assert finding.advice.index("rank 1 enters 2 of 2 collectives last") < finding.advice.index("Overlap")
    assert "the other rank waits 0.500 ms per step for it" in finding.advice


@pytest.mark.parametrize(("backward_us", "slow_hosts"), [(100, False), (920, True)])
def test_ranks_that_are_late_come_first_and_not_the_network(tmp_path, backward_us, slow_hosts):
    """Ranks 0 and 1 wait for rank 2 before the first collective and for rank 3 before the second one."""
    enters = [(300, 650), (300, 650), (590, 650), (300, 940)]
    ranks = (ddp(e, leaves=(600, 950), rank=rank, backward_us=backward_us) for rank, e in enumerate(enters))
    run = run_of(tmp_path, *ranks)
    assert late_ranks(run)["rank"].tolist() == [2, 3]
    (finding,) = [f for f in diagnose(run) if f.code == "exposed-communication"]
    text = first_sentence(run)
    assert (
        "the other ranks wait 58 % of the step in collectives for ranks 2 and 3, which enter 1 of 2 and 1 of 2 last"
        in text
    )
    assert finding.win_ms == pytest.approx(0.29 + 0.29, abs=0.01)
    assert "Overlap communication" not in finding.advice
    # Where the hosts of the others take as long, whichever is late, the others wait for it.
    assert ("with_stack" in finding.snippet) != slow_hosts
    assert ("The hosts of the other ranks need 0.9" in finding.advice) == slow_hosts
    assert "rank 3's GPU is idle for" in finding.advice and "themselves take 0.0200 ms" in finding.advice


def test_a_late_rank_saves_what_it_enters_after_the_last_of_the_others(tmp_path):
    """The others enter 300, 300 and 100 µs before rank 3."""
    enters = [(300, 940), (300, 940), (500, 940), (600, 940)]
    run = run_of(tmp_path, *(ddp(e, leaves=(610, 950), rank=rank) for rank, e in enumerate(enters)))
    assert late_ranks(run)["rank"].tolist() == [3]
    (finding,) = [f for f in diagnose(run) if f.code == "exposed-communication"]
    assert (
        "the other ranks wait 23 % of the step" in finding.title.lower() and "could save up to 0.100" in finding.title
    )
    assert finding.win_ms == pytest.approx(0.1, abs=0.001)


def slow_host(rank):
    """A step of 1,000 µs with seven kernels, which rank 1 launches late each, before the collective at its end."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for n in range(7):
        at = 120 * n if rank else 8 * n
        trace.op("aten::mm", at, 4, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(GEMM, at + 6, 20 if rank else 8, at + 2)
    enter = 800 if rank else 80
    collective(trace, enter, 820 - enter, enter - 10)
    return trace.document(distributedInfo={"rank": rank, "world_size": 2})


def test_what_makes_the_one_late_rank_late_is_told_of_its_own_gpu_after_the_waiting(tmp_path):
    first, second = diagnose(run_of(tmp_path, slow_host(0), slow_host(1)))[:2]
    assert "the other ranks wait 72 % of the step in collectives for rank 1" in first.title.lower()
    assert second.title.startswith("Rank 1's GPU is idle for 84 % of its step because the host launches too late")
    assert first.win_ms == pytest.approx(0.72) and second.win_ms < first.win_ms


def slow_hosts(rank):
    """Both hosts launch a kernel every 40 µs, and rank 1 enters the collective 100 µs after rank 0."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for n in range(20):
        trace.op("aten::mm", 40 * n, 4, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(GEMM, 40 * n + 6, 8, 40 * n + 2)
    enter = 890 if rank else 790
    collective(trace, enter, 900 - enter, enter - 10)
    return trace.document(distributedInfo={"rank": rank, "world_size": 2})


def test_hosts_that_are_all_slow_come_before_the_one_late_rank(tmp_path):
    run = run_of(tmp_path, slow_hosts(0), slow_hosts(1))
    sentence = first_sentence(run)
    idle = "Largest possible saving: rank 1's GPU is idle for 83 % of its step, the others' for 73 %, because the host"
    assert sentence.startswith(idle) and "8.0 µs on average" in sentence
    assert " Beside that, the other ranks wait " in sentence and "for rank 1" in sentence
    assert {f.code: f.where for f in diagnose(run)}["exposed-communication"] == "rank 1"


def varying_hosts(rank):
    """Both hosts launch a kernel every 60 µs, and each enters every second collective 60 µs after the other."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 2000, 1)
    for n in range(30):
        at = 60 * n
        trace.op("aten::mm", at, 4, **{"Input type": ["c10::Half"] * 2})
        trace.kernel(GEMM, at + 6, 8, at + 2)
        if n % 3 == 2:
            late = 30 if (n // 3 + rank) % 2 else 0
            collective(trace, at + 15 + late, 35 - late, at + 10 + late)
    return trace.document(distributedInfo={"rank": rank, "world_size": 2})


def test_hosts_that_are_slow_at_different_times_come_before_the_waiting(tmp_path):
    sentence = first_sentence(run_of(tmp_path, varying_hosts(0), varying_hosts(1)))
    assert sentence.startswith("Largest possible saving: the GPU is idle for")
    assert " Beside that, the GPU only communicates for" in sentence


def in_first_launch(rank, *, pending=0):
    """Both hosts are in one launch of 5 ms, rank 0 before it launches the second collective and rank 1 after it.
    `pending`: launches queued before it."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 8000, 1)
    trace.op("aten::mm", 1, 8)
    trace.kernel(GEMM, 20, 280, 2)
    collective(trace, 300, 20, 150)
    for n in range(pending):
        trace.kernel(GEMM, 7000 + n, 0.5, 200 + 0.1 * n, call_us=0.05)
    enter = 5500 if rank == 0 else 400
    collective(trace, enter, 5600 - enter, 5465 if rank == 0 else 350)
    trace.op("aten::add_", 380, 5080)
    trace.kernel(GEMM, 7900, 50, 400, call_us=5050)
    return trace.document(distributedInfo={"rank": rank, "world_size": 2})


def test_waits_while_all_hosts_are_in_a_first_launch_are_of_that_launch(tmp_path):
    run = run_of(tmp_path, in_first_launch(0), in_first_launch(1))
    text = first_sentence(run)
    assert "is idle or waits in collectives for" in text and "launching or loading kernels (cudaLaunchKernel)" in text
    assert not [f for f in diagnose(run) if f.code == "exposed-communication"]


def test_a_launch_behind_a_full_queue_waits_for_the_device(tmp_path):
    run = run_of(tmp_path, in_first_launch(0, pending=600), in_first_launch(1, pending=600))
    assert run.windows["alone_loading_us"].tolist() == [0, 0]


def test_a_rank_that_is_last_as_often_as_by_chance_is_not_called_late(tmp_path):
    run = run_of(tmp_path, ddp((300, 940)), ddp((590, 650), rank=1))
    assert late_ranks(run).empty
    (finding,) = [f for f in diagnose(run) if f.code == "exposed-communication"]
    assert "only communicates" in finding.title
    assert "no rank is late alone: 2 of 2 ranks each enter up to 1 of 2 collectives last" in finding.advice


def test_each_late_rank_is_named_though_the_network_is_slow_too(tmp_path):
    enters = [(300, 650), (300, 650), (400, 650), (300, 750)]
    run = run_of(tmp_path, *(ddp(e, rank=rank) for rank, e in enumerate(enters)))
    (finding,) = [f for f in diagnose(run) if f.code == "exposed-communication"]
    assert "only communicates" in finding.title
    assert all(f"rank {rank} enters 1 of 2 collectives last" in finding.advice for rank in (2, 3))


def test_waits_among_some_of_the_ranks_are_a_lower_bound(tmp_path):
    documents = [ddp((300, 750)), ddp((650, 900), rank=1)]
    for document in documents:
        document["distributedInfo"]["world_size"] = 8
    (finding,) = [f for f in diagnose(run_of(tmp_path, *documents)) if f.code == "exposed-communication"]
    assert "a rank spends at least" in finding.title and "last of these 2 of 8 ranks" in finding.advice


def test_older_versions_tell_the_message_by_the_range_around_the_launch(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op(
        "c10d::_allgather_base_", 10, 60, **{"Input Dims": [[64, 8], [32, 8], []], "Input type": ["c10::Half"] * 2}
    )
    trace.op("record_param_comms", 12, 50, **{"Input Dims": [[], []], "Input type": ["Scalar", "Scalar"]})
    trace.event("mark", "nccl:_all_gather_base", 14, 40, 1, **{"Input Dims": [[32, 8]], "Input type": ["c10::Half"]})
    trace.kernel("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)", 100, 50, 20)
    rows = read_trace(write(tmp_path / "t.json", trace.document())).collectives
    assert (rows["name"], rows["dtype"], rows["message_bytes"]) == (["all_gather"], ["float16"], [64 * 8 * 2])


def test_without_a_message_the_kernel_tells_kind_and_type(tmp_path):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel(REDUCE_SCATTER, 100, 50, 20)
    trace.kernel("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 200, 50, 40)
    rows = read_trace(write(tmp_path / "t.json", trace.document())).collectives
    assert rows["name"] == ["reduce_scatter", "all_reduce"] and rows["dtype"] == ["bfloat16", "float32"]
    assert rows["message_bytes"] == [None, None]


def test_ranks_with_another_order_of_collectives_are_not_matched(tmp_path):
    documents = [ddp((300, 750), rank=rank) for rank in range(2)]
    arguments = [e["args"] for e in documents[1]["traceEvents"] if e["name"] == "record_param_comms"]
    arguments[1]["Collective name"] = "_allgather_base"
    rows = collective_rows(run_of(tmp_path, *documents))
    assert rows["last"].isna().all()


@pytest.mark.parametrize(("beside_us", "sure"), [(0, True), (500, False)])
def test_waiting_that_computation_may_hide_is_not_all_of_the_communication(tmp_path, beside_us, sure):
    """Rank 0 waits 560 µs for rank 1 and both transfer 40 µs; a product runs beside the first `beside_us`."""
    documents = []
    for rank, enter in enumerate((300, 860)):
        trace = Made()
        trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
        collective(trace, enter, 900 - enter, enter - 25)
        trace.op("aten::mm", 200, 8)
        trace.kernel(GEMM, 290, 10 + (beside_us if rank == 0 else 0), 202, stream=8)
        documents.append(trace.document(distributedInfo={"rank": rank, "world_size": 2}))
    (finding,) = [f for f in diagnose(run_of(tmp_path, *documents)) if f.code == "exposed-communication"]
    assert ("neither a faster network nor" in finding.advice) == sure
    assert ("at least 0.0600 ms are waiting and at most 0.0400 ms the transfer" in finding.advice) == (not sure)


@pytest.mark.parametrize(
    ("message", "world_size", "is_least"),
    [
        ({"Group size": 16}, 16, True),
        ({"Group size": 4, "Global rank start": 3, "Global rank stride": 8}, 28, True),
        ({"Group size": 2, "Process Group Ranks": "[5, 21]"}, 22, True),
        ({"Group size": 1, "Global rank start": 0, "Global rank stride": 0}, 1, False),
        ({"Group size": 2**40}, 1, False),
    ],
)
def test_a_trace_that_states_no_ranks_has_those_that_its_collectives_name(tmp_path, message, world_size, is_least):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    collective(trace, 300, 400, 250, **{"Collective name": "allreduce", "In msg nelems": 1000}, **message)
    run = run_of(tmp_path, trace.document())
    assert run.head.world_size == world_size and run.head.config.get("world_size_is_least", False) == is_least
    (tmp_path / "b").mkdir()
    stated = run_of(tmp_path / "b", trace.document(distributedInfo={"rank": 0, "world_size": 64}))
    assert stated.head.world_size == 64 and "world_size_is_least" not in stated.head.config


def of_one_rank(*sizes_and_ms, group="0", name="allreduce", beside_us=0, ranks=8, elements="In msg nelems"):
    """The trace of one rank with collectives one after the other, each of so many MB and milliseconds; a product runs
    beside the first `beside_us` of the first one."""
    trace, at = Made(), 1000.0
    trace.event("mark", "ProfilerStep#3", 0, 200_000, 1)
    trace.op("aten::mm", 5, 8, **{"Input type": ["float"] * 2})
    trace.kernel(GEMM, 20, 980 + beside_us, 6, stream=8)
    trace.op("MmBackward0", 30, 900, 2)
    for n, (megabytes, ms) in enumerate(sizes_and_ms):
        message = {"Collective name": name, "dtype": "Float", elements: round(megabytes * 250_000), "Group size": ranks}
        message |= {"Process Group Name": group} if group else {}
        collective(trace, at, 1000 * ms, 40 + 30 * n, **message)
        at += 1000 * ms
    trace.op("aten::mm", 950, 8)
    trace.kernel(GEMM, at, 20_000, 952)
    return trace.document(distributedInfo={"rank": 0, "world_size": ranks})


def exposed(tmp_path, *documents):
    (finding,) = [f for f in diagnose(run_of(tmp_path, *documents)) if f.code == "exposed-communication"]
    return finding


def test_a_collective_slower_than_larger_ones_waits_for_ranks_that_are_missing(tmp_path):
    """16 MB take 53 ms, of which four times the time per byte of the largest, 4 ms, may be the transfer."""
    finding = exposed(tmp_path, of_one_rank((16, 53), (64, 6), (150, 9.375), (10, 2.2)))
    assert "at least 49.0 of 70.6 ms of it waiting for other ranks" in finding.title
    assert "an all-reduce of 15.3 MiB takes 53.0 ms, one of 143 MiB 9.38 ms" in finding.title
    assert finding.advice.startswith("At least 49.0 ms of this is waiting for ranks that enter the collectives late")
    assert "The rest, at most 21.6 ms, is the transfer. Most bytes are in messages of more than 25" in finding.advice
    assert "on every rank" in finding.snippet and "Waiting for a slower rank looks" not in finding.advice


def test_of_equal_collectives_the_shortest_tells_the_transfer(tmp_path):
    finding = exposed(tmp_path, of_one_rank((25, 40), (25, 5), (25, 6)))
    assert "at least 35.0 of 51.0 ms of it waiting" in finding.title


def test_where_nearly_all_is_waiting_nothing_is_advised_for_the_transfer(tmp_path):
    finding = exposed(tmp_path, of_one_rank((25, 60), (25, 1), (25, 1)))
    assert "waiting for ranks" in finding.advice and "Overlap" not in finding.advice


def test_computation_beside_a_wait_may_hide_all_but_the_transfer(tmp_path):
    finding = exposed(tmp_path, of_one_rank((25, 40), (25, 5), (25, 6), beside_us=10_000))
    assert "at least 25.0 of 41.0 ms of it waiting" in finding.title


@pytest.mark.parametrize(
    "document",
    [
        of_one_rank((16, 20), (64, 80), (150, 190)),  # in proportion
        of_one_rank((4, 8), (64, 25)),  # small messages reach less of the bandwidth
        of_one_rank((16, 12), (64, 6), (150, 9)),  # contention
        of_one_rank((150, 60), (16, 2)),  # no larger one
        of_one_rank((16, 53), (64, 6), elements="unknown"),  # no sizes
        of_one_rank((16, 53), (64, 6), group=""),  # perhaps among other ranks
        of_one_rank((16, 53), (64, 6), name="all_to_all"),  # other ranks may send more
        of_one_rank((25, 4), *((25, 1),) * 20),  # little of all
    ],
)
def test_other_slow_collectives_are_not_said_to_wait(tmp_path, document):
    finding = exposed(tmp_path, document)
    assert "waiting for other ranks" not in finding.title and "enter the collectives late" not in finding.advice
    assert "the trace of one of 8 ranks does not show how much of that is waiting for others" in finding.title


def test_collectives_of_two_groups_are_not_compared(tmp_path):
    document = of_one_rank((16, 53), (64, 6))
    arguments = [e["args"] for e in document["traceEvents"] if e["name"] == "record_param_comms"]
    arguments[1]["Process Group Name"] = "1"
    assert "waiting for other ranks" not in exposed(tmp_path, document).title


def test_with_all_ranks_here_a_slow_collective_waits_for_something_else(tmp_path):
    documents = [of_one_rank((16, 53), (24, 6), ranks=2) for _ in range(2)]
    documents[1]["distributedInfo"]["rank"] = 1
    finding = exposed(tmp_path, *documents)
    assert "at least 47.0 of 59.0 ms of it waiting for something other than these ranks: an all-reduce" in finding.title
    assert "does not show" not in finding.title and "none of these ranks enters so late" in finding.advice
    assert "smaller buckets" in finding.advice and "do not split" not in finding.advice


def test_a_collective_that_lasts_after_all_have_entered_is_no_waiting(tmp_path):
    """Rank 1 enters four collectives 2 ms late and leaves at once; rank 0 stays in the last two for 3 ms more."""
    documents = []
    for rank in range(2):
        trace = Made()
        trace.event("mark", "ProfilerStep#3", 0, 38_000, 1)
        trace.op("aten::mm", 5, 8)
        trace.kernel(GEMM, 20, 980, 6, stream=8)
        for number in range(6):
            at = 2_000 + 6_000 * number
            late, stays = (2_000, 3_000) if number in (2, 3) else (0, 0)
            message = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1000, "Group size": 2}
            enter = at + late * rank
            collective(trace, enter, at + late + 10 + (stays if rank == 0 else 0) - enter, enter - 25, **message)
        documents.append(trace.document(distributedInfo={"rank": rank, "world_size": 2}))
    run = run_of(tmp_path, *documents)
    table = rank_waiting(run).set_index("rank")
    assert table["waiting_ms"].to_dict() == pytest.approx({0: 4.0, 1: 0.0})
    assert table["stalled_ms"].to_dict() == pytest.approx({0: 6.0, 1: 0.0})
    (finding,) = [f for f in diagnose(run) if f.code == "exposed-communication"]
    assert ", and 3.00 ms in them after all have entered" in finding.title


@pytest.mark.parametrize(("slower_us", "says"), [(0, True), (900, False)])
def test_what_late_hosts_alone_save_is_no_more_than_they_lag(tmp_path, slower_us, says):
    """Rank 1 begins 1 ms late, and launches each of ten collectives as slowly as rank 0, or slower; GPUs spin."""
    documents = []
    for rank in range(2):
        trace, ends = Made(), 0
        trace.event("mark", "ProfilerStep#3", 0, 40_000, 1)
        trace.op("aten::mm", 5, 8)
        trace.kernel(GEMM, 20, 80, 6)
        for number in range(10):
            launched = [1_000 + 2_000 * number + late * (1_000 + slower_us * number) for late in range(2)]
            message = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1000, "Group size": 2}
            enter, leave = max(launched[rank] + 5, ends), launched[1] + 20
            collective(trace, enter, leave - enter, launched[rank], **message)
            ends = leave
        documents.append(trace.document(distributedInfo={"rank": rank, "world_size": 2}))
    finding = exposed(tmp_path, *documents)
    assert "wait" in finding.title and "for rank 1, which enters 10 of 10 (100 %) last" in finding.title
    assert ("so faster late ranks alone save at most 1.00 of" in finding.advice) == says


def test_a_late_rank_among_some_of_the_ranks_is_not_told_to_be_the_latest(tmp_path):
    documents = [ddp((300, 750)), ddp((590, 940), leaves=(600, 950), rank=1)]
    documents[0] = ddp((300, 750), leaves=(600, 950))
    for document in documents:
        document["distributedInfo"]["world_size"] = 8
    finding = exposed(tmp_path, *documents)
    assert "wait at least" in finding.title and "last of these 2 of 8 ranks" in finding.title
    assert "A rank whose trace is missing may enter later still" in finding.advice
