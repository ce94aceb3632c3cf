"""Products by their types and masks: what TF32 would speed up, causal attention, doubles, and biases."""

import json

import pytest

from amp_core.analysis.performance.eligible_ops import matrix_ops
from amp_core.analysis.performance.kernels import kernel_rows
from amp_core.traces.causal import is_causal
from amp_core.traces.convolutions import convolution_flops
from tests.traces import made
from tests.traces.made import Made, finding_of, run_of
from tests.traces.test_refuted_advice import convolutions

A100 = ("NVIDIA A100-SXM4-80GB", (8, 0))
TF32_CONV = "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x64x16"
GEMV = "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, true>"


@pytest.mark.parametrize(
    ("op", "inputs", "causal"),
    [
        ("aten::_flash_attention_forward", ["", "", "", "", "", "9", "9", "0.", "True", "False"], True),
        ("aten::_flash_attention_forward", ["", "", "", "", "", "9", "9", "0.", "False", "True"], False),
        ("aten::_scaled_dot_product_efficient_attention", ["", "", "", "", "True", "0.", "True"], True),
        ("aten::_efficient_attention_backward", [*[""] * 14, "1", "False"], True),
        ("aten::_efficient_attention_forward", [*[""] * 8, "0.", "True"], False),  # of another version
        ("aten::_flash_attention_backward", [], False),
        ("aten::mm", ["True"] * 12, False),
        ("aten::scaled_dot_product_attention", None, False),
    ],
)
def test_the_argument_of_an_operator_tells_its_mask(op, inputs, causal):
    assert is_causal(op, inputs) == causal


@pytest.mark.parametrize(("masks", "share"), [((False, False), 1.0), ((True, True), 0.5), ((True, False), 0.75)])
def test_operations_of_attention_leave_out_what_a_causal_mask_does(tmp_path, masks, share):
    trace, shape = Made(), [16, 1024, 16, 64]
    for n, masked in enumerate(masks):
        inputs = ["", "", "", "", "", "1024", "1024", "0.", str(masked), "False"]
        arguments = {"Input Dims": [shape] * 3, "Input type": ["c10::BFloat16"] * 3, "Concrete Inputs": inputs}
        trace.op("aten::_flash_attention_forward", 20 * n, 18, **arguments)
        trace.kernel("attn_fwd", 100 + 4000 * n, 4000, 20 * n + 2)
    run = run_of(tmp_path, trace, *A100)
    assert kernel_rows(run)["causal_count"].sum() == sum(masks)
    (flops,) = matrix_ops(run)["flops"]
    assert flops == pytest.approx(share * 2 * 4 * 256 * 1024**2 * 64, rel=1e-3)


def with_vectors(*, conv_us, vector_us):
    """Convolutions in TF32, one in FP32, and a product with a vector."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 2000, 1)
    trace.op("aten::cudnn_convolution", 1, 8, **{"Input type": ["float"] * 2})
    trace.kernel(TF32_CONV, 10, 700, 2)
    trace.kernel("ampere_scudnn_128x64_relu_medium_nn_v1", 710, conv_us, 4)
    trace.op("aten::addmm", 20, 8, **{"Input type": ["float"] * 3})
    trace.kernel(GEMV, 1000, vector_us, 22)
    return trace


def test_vectors_and_what_cudnn_left_in_fp32_gain_nothing_by_allowing_tf32(tmp_path):
    finding = finding_of(run_of(tmp_path, with_vectors(conv_us=200, vector_us=900), *A100), "fp32-products")
    assert "TF32" not in finding.advice and "allow_tf32" not in finding.snippet


@pytest.mark.parametrize(
    ("tf32_us", "gemm_us", "settings"),
    [(100, 900, ["cuda.matmul"]), (0.001, 10, ["cudnn"]), (0.001, 900, ["cuda.matmul", "cudnn"])],
)
def test_tf32_is_advised_by_the_setting_of_what_it_speeds_up(tmp_path, tf32_us, gemm_us, settings):
    trace = convolutions(tf32_us=tf32_us, gemm_us=gemm_us)
    if tf32_us < 1:
        trace.events = [event for event in trace.events if "tf32" not in event["name"]]
    finding = finding_of(run_of(tmp_path, trace, *A100), "fp32-products")
    told = [line for line in finding.snippet.splitlines() if "allow_tf32" in line]
    assert [line.split("torch.backends.")[1].split(".allow")[0] for line in told] == settings


@pytest.mark.parametrize(
    ("name", "joins"),
    [("void gemmSN_TN_kernel<float, 128, 16, 2, __half>", True), ("turing_fp16_sgemm_fp16_64x64_nn", False)],
)
def test_kernels_for_few_rows_of_no_known_operator_are_no_layer_to_pad(tmp_path, name, joins):
    trace = Made()
    trace.op("Torch-Compiled Region: 8/0", 0, 9)
    trace.kernel(name, 10, 900, 2)
    trace.kernel(made.GEMM, 910, 900, 4)
    finding = finding_of(run_of(tmp_path, trace, *A100), "kernels-off-tensor-cores")
    assert ("few rows" in finding.advice) == joins and ("torch.nn.Linear" in finding.snippet) != joins


@pytest.mark.parametrize(("shapes", "share"), [([[8192, 4096], [1]], 78), ([[8192, 4096], []], 48)])
def test_kernels_on_doubles_count_by_their_operators_inputs_too(tmp_path, shapes, share):
    """Numbers of Python have no sizes; a kernel that both tell counts once, and a copy to the host never."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    doubles = {"Input Dims": [[4096, 4096]], "Input type": ["double"]}
    trace.op("aten::upsample_bilinear2d", 1, 8, **doubles)
    trace.kernel("void at::native::elementwise_upsample_bilinear2d<double, double>(int)", 10, 480, 2)
    trace.op("aten::mul", 10, 8, **{"Input Dims": shapes, "Input type": ["float", "double"]})
    trace.kernel(made.RELU, 490, 300, 11)
    trace.op("aten::copy_", 20, 8, **{"Input Dims": [[512, 512]] * 2, "Input type": ["double"] * 2})
    trace.kernel("Memcpy DtoH (Device -> Pageable)", 790, 200, 21, sort="copy")
    title = finding_of(run_of(tmp_path, trace), "fp64-operators").title
    assert f"Kernels in FP64 take {share} % of the step, " in title and "in aten::upsample_bilinear2d;" in title


@pytest.mark.parametrize(("sms", "says"), [(108, "by the data sheet, 16 bits are 16 ×"), (107, "assumed")])
def test_the_devices_of_a_head_cut_by_hand_are_read(tmp_path, sms, says):
    trace = Made()
    trace.op("aten::mm", 1, 8, **{"Input type": ["float"] * 2})
    trace.kernel(made.SIMT, 10, 900, 2)
    device = {"id": 6, "name": "PG509-210", "computeMajor": 8, "computeMinor": 0, "numSms": sms}
    events = json.dumps({"traceEvents": trace.events})[1:]
    file = tmp_path / "cut.json"
    file.write_text(f"{{ {json.dumps(device)}, {json.dumps(device)} ], {events}", encoding="utf-8")
    run = made.load_run(made.import_traces([file], tmp_path / "run"))
    assert run.head.environment["gpus"][0]["capability"] == "8.0"
    assert says in finding_of(run, "fp32-products").title


@pytest.mark.parametrize(
    ("outer", "op", "counts"),
    [
        ("aten::linear", "aten::add_", True),
        ("aten::conv2d", "aten::add_", True),
        ("aten::linear", "aten::mul", False),
        ("aten::lstm", "aten::add_", False),
    ],
)
def test_the_addition_of_a_bias_is_fused(tmp_path, outer, op, counts):
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    trace.op("aten::relu", 0, 8)
    trace.kernel(made.RELU, 10, 200, 2)
    trace.op(outer, 10, 40)
    trace.op("aten::mm", 11, 8, **{"Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, 210, 200, 12)
    trace.op(op, 30, 8)
    trace.kernel(made.RELU, 410, 300, 31)
    share = "50 %" if counts else "20 %"
    assert f"take {share} of the step" in finding_of(run_of(tmp_path, trace), "memory-bound-kernels").title


CONV_ARGUMENTS = ["", "", "", "[2, 2]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1"]
IN_ROUND_BRACKETS = [text.replace("[", "(").replace("]", ")").replace(" ", "") for text in CONV_ARGUMENTS]


@pytest.mark.parametrize(
    ("op", "dims", "inputs", "flops"),
    [
        # 2 · batch · output positions · C_out · C_in per group · taps
        ("aten::convolution", [[1, 3, 2048, 2048], [64, 3, 7, 7]], CONV_ARGUMENTS, 2 * 1024**2 * 64 * 3 * 49),
        ("aten::_convolution", [[1, 3, 2048, 2048], [64, 3, 7, 7]], IN_ROUND_BRACKETS, 2 * 1024**2 * 64 * 3 * 49),
        (
            "aten::cudnn_convolution",
            [[8, 64, 56, 56], [64, 1, 3, 3]],
            ["", "", "[1, 1]", "[2, 2]", "[1, 1]", "64", "False", "False", "True"],
            2 * 8 * 28**2 * 64 * 9,
        ),
        (
            "aten::miopen_convolution",
            [[2, 16, 100], [32, 16, 5]],
            ["", "", "", "[0]", "[1]", "[4]", "1", "False", "False"],
            2 * 2 * 84 * 32 * 16 * 5,
        ),
        (
            "aten::_slow_conv2d_forward",
            [[1, 4, 8, 8], [4, 4, 3, 3]],
            ["", "", "", "", "[1]", "[1]"],
            2 * 64 * 4 * 4 * 9,
        ),
        (
            "aten::convolution",
            [[1, 8, 10, 10], [8, 4, 2, 2]],
            ["", "", "", "[2, 2]", "[0, 0]", "[1, 1]", "True", "[0, 0]", "1"],
            2 * 8 * 100 * 4 * 4,
        ),
        ("aten::conv2d", [[1, 3, 8, 8], [4, 3, 3, 3]], ["", "", "", "[1, 1]", "same", "[1, 1]", "1"], None),
        ("aten::convolution", [[1, 3, 8, 8], [4, 3, 3, 3]], ["", "", ""], None),  # of another version
        ("aten::convolution", [[1, 3, 2, 2], [4, 3, 7, 7]], [*CONV_ARGUMENTS[:4], "[0, 0]", "[1, 1]"], None),
        ("aten::convolution", [[3, 8], [4, 3]], CONV_ARGUMENTS, None),
        ("aten::convolution", None, CONV_ARGUMENTS, None),
        ("aten::mm", [[8, 8], [8, 8]], CONV_ARGUMENTS, None),
    ],
)
def test_stride_padding_and_dilation_tell_the_operations_of_a_convolution(op, dims, inputs, flops):
    assert convolution_flops(op, dims, inputs) == flops


def test_the_rate_of_a_convolution_is_counted_by_its_recorded_arguments(tmp_path):
    trace, sizes = Made(), [[1, 3, 2048, 2048], [64, 3, 7, 7]]
    for n in range(2):
        arguments = {"Input Dims": sizes, "Input type": ["float"] * 2, "Concrete Inputs": CONV_ARGUMENTS}
        trace.op("aten::convolution", 20 * n, 18, **arguments)
        trace.kernel("ampere_scudnn_128x64_relu_medium_nn_v1", 100 + 4000 * n, 4000, 20 * n + 2)
    run = run_of(tmp_path, trace, *A100)
    (flops,) = matrix_ops(run)["flops"]
    assert flops == 2 * kernel_rows(run)["convolution_flops"].sum() / 2 == 2 * 2 * 1024**2 * 64 * 3 * 49


@pytest.mark.parametrize("waits", [True, False])
def test_an_operator_that_outlasts_its_own_long_kernel_waits_for_it(tmp_path, waits):
    """The host of a trace whose operators end with their kernels is no limit for shorter ones."""
    trace = Made()
    trace.op("aten::mm", 0, 1300, **{"Input Dims": [[4096, 4096]] * 2, "Input type": ["float"] * 2})
    trace.kernel("ampere_sgemm_128x64_nn", 60, 1200, 10)
    if not waits:  # what the operator calls meanwhile is work of the host
        trace.op("aten::empty", 1200, 20)
    run = run_of(tmp_path, trace, *A100)
    assert run.windows["host_us"].sum() < 200 if waits else run.windows["host_us"].sum() > 1000
