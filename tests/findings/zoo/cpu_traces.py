"""Faults that an imported trace of a CPU shows, as traces of a few operators."""

from pathlib import Path

from tests.findings.zoo.case import case
from tests.findings.zoo.traces import import_into
from tests.traces.made import Made

WORKERS = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def import_cpu(into: Path, trace: Made, *gpus: dict[str, object]) -> None:
    """The run that importing `trace` makes, of a machine with these GPUs."""
    import_into(into, trace, deviceProperties=list(gpus))


@case("loader-start", "data loading")
def workers_for_three_batches(into: Path, faulty: bool) -> None:
    """The first batch waits for the workers to start, or is there."""
    trace = Made()
    trace.op("aten::random_", 0, 5)
    at = 5.0
    for loading in (9000 if faulty else 20, 20, 20):
        trace.event("mark", WORKERS, at, loading, 1)
        trace.op("aten::mm", at + loading, 980)
        at += loading + 980
    import_cpu(into, trace)


@case("python-outside-operators", "Python")
def python_between_operators(into: Path, faulty: bool) -> None:
    """Operators with long gaps between them, or none."""
    trace = Made()
    for at in range(0, 10_000, 1000):
        trace.op("aten::mm", at, 200 if faulty else 990)
    import_cpu(into, trace)


@case("shared-processor", "processor")
def equal_products_of_unequal_length(into: Path, faulty: bool) -> None:
    """Products of the same sizes, of which every third takes ten times as long, or none."""
    trace, at = Made(), 0.0
    for number in range(12):
        us = 2000.0 if faulty and number % 3 == 2 else 200.0
        trace.op("aten::mm", at, us, **{"Input Dims": [[64, 64]] * 2, "Input type": ["float"] * 2})
        at += us
    import_cpu(into, trace)


@case("costly-calls", "operators")
def operators_on_single_numbers(into: Path, faulty: bool) -> None:
    """A thousand additions of a microsecond each among other operators as short, or of a hundred."""
    trace, at, us = Made(), 0.0, 1.0 if faulty else 100.0
    for _ in range(200):
        for name in ("aten::add", "aten::mm", "aten::sort", "aten::sum", "aten::index_select", "aten::cumsum"):
            trace.op(name, at, us)
            at += us
    import_cpu(into, trace)


@case("fallback-convolution", "aten::_slow_conv2d_forward")
def convolution_without_onednn(into: Path, faulty: bool) -> None:
    """The convolution that torch falls back to, or oneDNN's."""
    trace = Made()
    trace.op("aten::conv2d", 0, 1000)
    inner = "aten::_slow_conv2d_forward" if faulty else "aten::mkldnn_convolution"
    trace.op(inner, 5, 990)
    import_cpu(into, trace)


@case("attention-in-steps", "aten::_softmax")
def softmax_beside_products_of_batches(into: Path, faulty: bool) -> None:
    """Attention of products and a softmax, or of one operator."""
    trace = Made()
    if faulty:
        for at, name in ((0, "aten::bmm"), (300, "aten::_softmax"), (700, "aten::bmm")):
            trace.op(name, at, 300 if name == "aten::bmm" else 400)
    else:
        trace.op("aten::_scaled_dot_product_flash_attention_for_cpu", 0, 1000)
    import_cpu(into, trace)


@case("fp64-operators", "operators")
def products_of_numpy_arrays(into: Path, faulty: bool) -> None:
    """Products in FP64, or in FP32."""
    trace = Made()
    dtype = "double" if faulty else "float"
    trace.op("aten::mm", 0, 900, **{"Input Dims": [[512, 512]] * 2, "Input type": [dtype] * 2})
    trace.op("aten::relu", 900, 100, **{"Input Dims": [[512, 512]], "Input type": [dtype]})
    import_cpu(into, trace)


@case("idle-gpu", "NVIDIA L4")
def gpu_without_work(into: Path, faulty: bool) -> None:
    """A convolution on the CPU of a machine with a GPU, or of one without."""
    trace = Made()
    trace.op("aten::mkldnn_convolution", 0, 1000)
    gpu: dict[str, object] = {"id": 0, "name": "NVIDIA L4", "computeMajor": 8, "computeMinor": 9}
    import_cpu(into, trace, *[gpu] * faulty)


def decoding(*rows: int, us: float = 100.0) -> Made:
    """Passes of two layers over as many rows each."""
    trace, at = Made(), 0.0
    for count in rows:
        for weight in ([64, 256], [256, 64]):
            dims = [[256], [count, weight[0]], weight]
            trace.op("aten::addmm", at, us, **{"Input Dims": dims, "Input type": ["float"] * 3})
            at += us
    return trace


@case("missing-kv-cache", "attention")
def passes_over_all_tokens_so_far(into: Path, faulty: bool) -> None:
    """Ten passes that get one row more each, or have one row each after the first."""
    import_cpu(into, decoding(*(range(20, 30) if faulty else [20] + [1] * 9)))


def looping(
    *ops: str, passes: int, us: float = 10.0, rest_us: float = 1000.0, at: float = 0.0, trace: Made | None = None
) -> Made:
    """The same operators as often as `passes` says from `at` on, and a product after them."""
    trace = trace or Made()
    for _ in range(passes):
        for name in ops:
            trace.op(name, at, us)
            at += us + 5
    trace.op("aten::mm", at, rest_us)
    return trace


@case("operator-loop", "aten::ge, aten::lt, aten::nonzero")
def bounds_one_by_one(into: Path, faulty: bool) -> None:
    """Sixty intervals, of which each is looked for alone, or all at once."""
    import_cpu(into, looping("aten::ge", "aten::lt", "aten::nonzero", passes=60 if faulty else 1))


def backward_of(*forward: tuple[str, float]) -> Made:
    """A product, and its node of autograd, in which operators of `forward` run before its own product."""
    trace = Made()
    trace.op("aten::linear", 0, 400)
    trace.op("aten::addmm", 10, 380)
    length = 500 + sum(us for _, us in forward)
    trace.op("autograd::engine::evaluate_function: AddmmBackward0", 500, length)
    at = 505.0
    for name, us in forward:
        trace.op(name, at, us)
        at += us
    trace.op("aten::mm", at, 480)
    return trace


@case("activation-recomputation", "backward", benign=True)
def forward_within_backward(into: Path, faulty: bool) -> None:
    """A node that computes two layers first, or its own product alone."""
    layers = (("aten::layer_norm", 100.0), ("aten::linear", 300.0), ("aten::gelu", 50.0))
    import_cpu(into, backward_of(*layers[: 3 * faulty]))


def backward_of_parts(trace: Made, at: float, parts: int, node: str = "SelectBackward0", us: float = 100.0) -> float:
    """The backward of that many parts of one tensor, each of which fills, copies and (but one) adds; when it ends."""
    for number in range(parts):
        trace.op(f"autograd::engine::evaluate_function: {node}", at, 3 * us)
        trace.op(node, at + 1, 1.5 * us)
        trace.op("aten::fill_", at + 2, us)
        trace.op("aten::copy_", at + 3 + us, us / 10)
        if number:
            trace.op("aten::add_", at + 2 + 1.5 * us, 1.4 * us)
        at += 3 * us
    return at


@case("part-gradients", "SelectBackward0")
def experts_indexed_in_a_loop(into: Path, faulty: bool) -> None:
    """The gradients of four parts of one tensor, or of one."""
    trace = Made()
    at = backward_of_parts(trace, 0.0, 4 if faulty else 1)
    trace.op("aten::mm", at, 900)
    import_cpu(into, trace)


@case("layout-copies", "aten::contiguous")
def input_made_contiguous_in_every_call(into: Path, faulty: bool) -> None:
    """A transposed input that is copied before each product, or not."""
    trace, at = Made(), 0.0
    for _ in range(5):
        if faulty:
            for name, us in (("aten::contiguous", 300), ("aten::clone", 295), ("aten::copy_", 290)):
                trace.op(name, at + (300 - us) / 2, us)
        trace.op("aten::mm", at + 300 * faulty, 600)
        at += 600 + 300 * faulty
    import_cpu(into, trace)
