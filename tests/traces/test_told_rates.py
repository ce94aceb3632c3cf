"""What is told of memory's and links' rates: of a program that only adds, an optimizer, and collectives of one host."""

import pytest

from amp_core import diagnose
from amp_core.findings import first_sentence
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of
from tests.traces.test_collectives import collective

ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
MI300X = ("AMD Instinct MI300X", (9, 4))
A100 = ("NVIDIA A100-SXM4-80GB", (8, 0))


def _adds(us: float, *, other: bool = False) -> Made:
    """Ten additions of tensors of 256 MiB, whose kernels have threads of 16 elements each, as in ROCm."""
    trace = Made()
    for n in range(10):
        name = "aten::mul" if other and n % 2 else "aten::add"
        sizes = {"Input Dims": [[8192, 8192], [8192, 8192], []], "Input type": ["float", "float", "Scalar"]}
        trace.op(name, 12 * n, 10, **sizes)
        trace.kernel(ADD, 200 + n * us, us, 12 * n + 4)
        trace.events[-1]["args"] |= {"grid": [16384, 1, 1], "block": [256, 1, 1]}
    for event in trace.events:
        event["name"] = event["name"].replace("cudaLaunchKernel", "hipLaunchKernel")
    return trace


@pytest.mark.parametrize(("us", "is_left"), [(420, True), (200, False)])
def test_a_program_that_repeats_one_call_is_told_its_rate(tmp_path, us, is_left):
    run = run_of(tmp_path, _adds(us), *MI300X)
    sentence = first_sentence(run)
    assert not any(f.code == "memory-bound-kernels" for f in diagnose(run))
    assert f"aten::add takes 100 % of the kernel time, at up to {3 * 2**28 / us / 1e3:,.0f} GB/s" in sentence
    assert ("Largest possible saving" in sentence) == is_left != sentence.startswith("No single change would")
    assert "at its speed" not in sentence


def test_two_calls_in_turn_may_be_fused(tmp_path):
    assert "fusing" in finding_of(run_of(tmp_path, _adds(420, other=True), *MI300X), "memory-bound-kernels").title


@pytest.mark.parametrize(("addcdiv_us", "saved_us"), [(400, 1_800 - 700), (900, 1_150)])
def test_a_fused_adam_saves_all_but_seven_accesses(tmp_path, addcdiv_us, saved_us):
    """Where addcdiv takes so long that a fused step would save less than half, half is told."""
    trace, at = Made(), 100
    trace.event("mark", "ProfilerStep#3", 0, 5_000, 1)
    trace.event("mark", "Optimizer.step#Adam.step", 1, 2_400, 1)
    for name, us in (("lerp_", 300), ("mul_", 200), ("addcmul_", 400), ("sqrt", 200), ("div_", 200), ("add_", 100),
                     ("addcdiv_", addcdiv_us)):  # fmt: skip
        trace.op(f"aten::_foreach_{name}", at - 90, 5)
        trace.kernel("void at::native::multi_tensor_apply_kernel<at::native::Op<float>>", at, us, at - 88)
        at += us
    savings = finding_of(run_of(tmp_path, trace, *A100), "unfused-optimizer")
    assert savings.win_ms == pytest.approx(saved_us / 1e3)


@pytest.mark.parametrize(("gpus", "us", "told"), [(4, 1_400, True), (4, 300, False), (1, 1_400, False)])
def test_equal_collectives_of_one_host_that_are_all_slow_wait(tmp_path, gpus, us, told):
    """Of 0.5 MiB each; none of them is short, so that only the link tells."""
    trace, at = Made(), 100
    message = {"Collective name": "allreduce", "In msg nelems": 2**18, "Out msg nelems": 2**18, "dtype": "BFloat16"}
    message |= {"Process Group Name": "tp", "Group size": 4}
    for _ in range(20):
        trace.kernel(made.GEMM, at, 40, at - 60)
        collective(trace, at + 40, us, at - 40, **message)
        at += us + 40
    devices = [{"id": n, "name": A100[0], "computeMajor": 8, "computeMinor": 0} for n in range(gpus)]
    run = run_of(tmp_path, trace, *A100, deviceProperties=devices, distributedInfo={"rank": 0, "world_size": 4})
    title = finding_of(run, "exposed-communication").title
    assert ("GB/s between GPUs of one host" in title) == told
    assert ("waiting for other ranks" in title) == told


@pytest.mark.parametrize(("gpus", "told"), [(4, False), (1, True)])
def test_waits_of_a_host_for_a_device_that_waits_for_ranks_are_none_that_could_be_left_out(tmp_path, gpus, told):
    """Collectives of 0.5 MiB that take 1.4 ms wait for other ranks where all GPUs are of one host; each step the host
    waits for one of them, and launches late afterwards."""
    trace, at = Made(), 100
    message = {"Collective name": "allreduce", "In msg nelems": 2**18, "Out msg nelems": 2**18, "dtype": "BFloat16"}
    message |= {"Process Group Name": "tp", "Group size": 4}
    for n in range(20):
        trace.kernel(made.GEMM, at, 40, at - 60)
        collective(trace, at + 40, 1_400, at - 40, **message)
        trace.op("aten::item", at + 45, 1_400)
        trace.event("call", "cudaStreamSynchronize", at + 50, 1_391, 1, correlation=5_000 + n)
        at += 1_740
    devices = [{"id": n, "name": A100[0], "computeMajor": 8, "computeMinor": 0} for n in range(gpus)]
    run = run_of(tmp_path, trace, *A100, deviceProperties=devices, distributedInfo={"rank": 0, "world_size": 4})
    assert ("host-syncs" in {f.code for f in diagnose(run)}) == told
