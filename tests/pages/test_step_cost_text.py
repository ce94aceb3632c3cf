"""What Step cost says of kernels whose use of tensor cores their names do not tell."""

import pytest

from amp_core.analysis import amdahl, step_cost
from pages.parts.hardware import step_cost_text
from tests.traces import made
from tests.traces.made import Made, run_of


@pytest.mark.parametrize(
    ("kernel", "says", "beside"),
    [
        ("triton_tem_fused_convolution_view_3", "what 16 bits would save is unknown", "100 % of it unclassified"),
        (made.GEMM, "16 bits there would save hardly any of it", "100 % of it on tensor cores"),
    ],
)
def test_products_of_an_unknown_type_are_not_said_to_gain_nothing(tmp_path, kernel, says, beside):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel(kernel, 10, 900, 2)
    cost = step_cost(run_of(tmp_path, trace))
    bound = amdahl(cost)
    assert bound is not None and says in step_cost_text.outlook(cost, bound)
    assert step_cost_text.on_cores(cost) == beside


@pytest.mark.parametrize(("waits", "says"), [(1, "1 host sync"), (2, "2 host syncs")])
def test_host_syncs_are_counted_in_words(tmp_path, waits, says):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.kernel(made.GEMM, 10, 900, 2)
    for number in range(waits):
        trace.event("call", "cudaDeviceSynchronize", 100 + 100 * number, 90, 1, correlation=90 + number)
    assert step_cost_text.syncs(step_cost(run_of(tmp_path, trace))) == says
