"""What is said of the backward of parts of tensors, which fills and adds the whole for each."""

import pytest

from amp_core import diagnose
from amp_core.analysis.performance.saving import MemorySaving, Saving
from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings import first_sentence
from tests.findings.zoo.cpu_traces import backward_of_parts
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of

FILL = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul>>(int)"
COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(float)>(int)"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"


def on_gpu(parts, of_each=1):
    """A step of a product of 2 ms and the gradients of tensors of `parts` parts, on a GPU that is never idle."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 5_990, 1)
    trace.op("aten::mm", 2, 6, **{"Input type": ["float"] * 2, "Input Dims": [[512, 512]] * 2})
    trace.kernel(made.GEMM, 10, 2_000, 4)
    host, device = 20.0, 2_010.0
    for _ in range(of_each):
        for number in range(parts):
            node = "SelectBackward0"
            trace.op(f"autograd::engine::evaluate_function: {node}", host, 50, 2)
            trace.op(node, host + 1, 30, 2)
            for op, kernel, us in (("aten::fill_", FILL, 300), ("aten::copy_", COPY, 30)):
                trace.op(op, host + 2, 8, 2)
                trace.kernel(kernel, device, us, host + 3, 2)
                host, device = host + 10, device + us
            host += 15
            if number:
                trace.op("aten::add_", host, 8, 2)
                trace.kernel(ADD, device, 400, host + 1, 2)
                device += 400
            host += 20
    return trace


def test_gradients_of_parts_are_a_saving_of_their_own_and_none_of_fusing(tmp_path):
    run = run_of(tmp_path, on_gpu(6))
    savings = possible_savings(run)
    saving = savings.of("part-gradients", Saving)
    assert saving.saved_us == pytest.approx(6 * 300 + 5 * 400)
    fusing = savings.of("memory-bound-kernels", MemorySaving)
    assert fusing is None or fusing.saved_us == 0
    assert "gradients of 6 parts of tensors take 66 % of the step" in first_sentence(run)
    finding = finding_of(run, "part-gradients")
    assert finding.where == "SelectBackward0" and "unbind(0)" in finding.snippet


def test_the_gradient_of_the_one_part_that_is_taken_of_a_tensor_is_none(tmp_path):
    """As that of logits without the last token: there is nothing to join."""
    assert not [f for f in diagnose(run_of(tmp_path, on_gpu(1, of_each=5))) if f.code == "part-gradients"]


@pytest.mark.parametrize(("product_us", "first"), [(300, True), (6_000, False)])
def test_on_a_cpu_they_come_before_a_shorter_operator_and_after_a_longer_one(tmp_path, product_us, first):
    trace = Made()
    at = backward_of_parts(trace, 0.0, 6)
    trace.op("aten::mm", at, product_us)
    sentence = first_sentence(run_of(tmp_path, trace, ""))
    assert "x.unbind() or x.split() instead of x[i] or x[:n] joins them once" in sentence
    assert (": on the CPU, gradients of 6 parts of tensors take" in sentence) == first


def assigned(parts, us=100.0):
    """The backward of as many assignments to parts of one tensor, on a CPU: each copies the whole."""
    trace, at = Made(), 0.0
    for _ in range(parts):
        trace.op("autograd::engine::evaluate_function: torch::autograd::CopySlices", at, 2 * us)
        trace.op("torch::autograd::CopySlices", at + 1, 1.8 * us)
        trace.op("aten::copy_", at + 2, us)
        trace.op("aten::clone", at + us + 3, us / 10)
        trace.op("aten::fill_", at + us + 4 + us / 10, us / 10)
        at += 2 * us
    trace.op("aten::mm", at, us)
    return trace


@pytest.mark.parametrize(("parts", "told"), [(6, True), (1, False)])
def test_assignments_to_parts_of_a_tensor_are_told_to_be_joined_once(tmp_path, parts, told):
    run = run_of(tmp_path, assigned(parts), "")
    found = [finding for finding in diagnose(run) if finding.code == "part-gradients"]
    assert bool(found) == told
    if found:
        assert found[0].where == "torch::autograd::CopySlices" and "torch.stack(parts)" in found[0].snippet
        told_of = "backward of 6 assignments to parts of tensors takes 92.3 % of the operators' time"
        assert f"on the CPU, {told_of}" in first_sentence(run) and "torch.stack of a list" in first_sentence(run)
