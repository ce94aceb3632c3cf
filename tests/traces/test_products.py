"""A product on a CPU counts with its helpers, and nested operators of one product count once."""

import pytest

from amp_core.analysis import step_cost
from amp_core.analysis.comparison.trace_change import compare_kernels, trace_change
from amp_core.analysis.performance.tensor_cores import kernel_table
from amp_core.findings import first_sentence
from tests.traces.made import SIMT, Made, run_of


def linear(trace, at=0, *, bias_us=300, around=None, dtypes=("float", "float")):
    """`aten::linear` of 1,000 µs: in `aten::addmm`, `aten::expand` and a copy of the bias, in `around` if given."""
    trace.op("aten::linear", at, 1000)
    trace.op("aten::addmm", at + 10, 980, **{"Input Dims": [[8], [4, 16], [16, 8]], "Input type": ["float"] * 3})
    trace.op("aten::expand", at + 15, 10)
    if around is not None:
        trace.op(around, at + 30, bias_us + 10)
    trace.op("aten::copy_", at + 35, bias_us, **{"Input Dims": [[4, 8], [4, 8]], "Input type": list(dtypes)})
    trace.op("aten::clamp_min", at + 1000, 700)


def on_cpu(folder, *steps):
    trace = Made()
    for add in steps:
        add(trace)
    return run_of(folder, trace, "")


def test_the_copy_of_a_bias_is_time_of_its_product(tmp_path):
    run = on_cpu(tmp_path, linear)
    assert "on the CPU, aten::addmm, with aten::copy_ within it (17.6 %), takes 57.6 % of the" in first_sentence(run)
    parts = step_cost(run).parts.set_index("part")["us"]
    assert parts["matrix"] == 1000 and not parts.get("layout")
    by_op = kernel_table(run, "op").set_index("name")
    assert (by_op.loc["aten::addmm", "total_us"], by_op.loc["aten::addmm", "count"]) == (980, 1)


@pytest.mark.parametrize(
    ("around", "dtypes", "part"),
    [("aten::contiguous", ("float", "float"), "layout"), (None, ("c10::BFloat16", "float"), "cast")],
)
def test_a_change_of_layout_or_dtype_within_a_product_is_none_of_its_own(tmp_path, around, dtypes, part):
    run = on_cpu(tmp_path, lambda trace: linear(trace, around=around, dtypes=dtypes))
    assert step_cost(run).parts.set_index("part")["us"][part] >= 300


def test_two_linear_layers_differ_in_no_layout(tmp_path):
    runs = [on_cpu(tmp_path / f"{us}", lambda trace, us=us: linear(trace, bias_us=us)) for us in (300, 600)]
    assert "layout" not in " ".join(trace_change(runs).sentences)
    addmm = compare_kernels(runs).set_index("name").loc["aten::addmm"]
    assert (addmm["first_us"], addmm["us"], addmm["count"]) == (980, 980, 1)


def test_the_products_that_a_convolution_calls_count_as_the_convolution(tmp_path):
    trace = Made()
    for depth, name in enumerate(("aten::conv2d", "aten::thnn_conv2d", "aten::thnn_conv2d_forward")):
        trace.op(name, depth, 1000 - 2 * depth)
    trace.op("aten::addmm_", 400, 500, **{"Input Dims": [[4, 8], [4, 16], [16, 8]], "Input type": ["float"] * 3})
    trace.op("aten::copy_", 410, 20, **{"Input Dims": [[4, 8], [4, 8]], "Input type": ["float"] * 2})
    trace.op("aten::addmm", 1100, 300)
    run = run_of(tmp_path, trace, "")
    sentence = first_sentence(run)
    assert "aten::thnn_conv2d_forward, with aten::addmm_ within it (36.9 %), takes 76.6 %" in sentence
    assert "where oneDNN is missing" in sentence
    by_op = kernel_table(run, "op").set_index("name")["total_us"]
    assert by_op["aten::thnn_conv2d_forward"] == 996 and by_op["aten::addmm"] == 300
    assert run.windows["products"].tolist() == [2]


def conv(trace, device=False):
    """One convolution: four nested operators on a CPU, and two kernels on a GPU."""
    names = ("aten::conv2d", "aten::convolution", "aten::_convolution", "aten::cudnn_convolution")
    names = names if device else (*names[:3], "aten::mkldnn_convolution")
    for depth, name in enumerate(names):
        trace.op(name, depth, 100 - 2 * depth)
    if device:
        for at in (10, 20):
            trace.kernel("implicit_convolve_sgemm<float, 1024>" if at == 10 else SIMT, 100 + 10 * at, 90, at)


def test_one_convolution_is_one_on_a_cpu_and_on_a_gpu(tmp_path):
    cpu = on_cpu(tmp_path / "cpu", conv)
    trace = Made()
    conv(trace, device=True)
    gpu = run_of(tmp_path / "gpu", trace)
    assert cpu.windows["products"].tolist() == gpu.windows["products"].tolist() == [1]
    assert "same work" not in " ".join(trace_change([cpu, gpu]).notes)


def test_kernels_without_operators_count_by_themselves(tmp_path):
    trace = Made()
    for at in (0, 200):
        trace.kernel(SIMT, at + 10, 90, at)
    assert run_of(tmp_path, trace).windows["products"].tolist() == [2]


def test_few_calls_with_nearly_all_of_a_products_time_are_named_by_their_sizes(tmp_path):
    trace = Made()
    for number in range(20):
        shapes = [[8], [4, 16], [16, 4096 if number == 7 else 8]]
        trace.op("aten::addmm", 3000 * number, 2900 if number == 7 else 5, **{"Input Dims": shapes})
    sentence = first_sentence(run_of(tmp_path, trace, ""))
    assert "nearly all of it in 1 of its 20 calls (M 4 · N 4096 · K 16)." in sentence
