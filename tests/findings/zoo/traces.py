"""Faults that an imported trace shows, as traces of a few kernels."""

import tempfile
from pathlib import Path

from amp_core.traces import import_traces
from tests.findings.zoo.case import case
from tests.traces import made
from tests.traces.made import Made


def import_into(into: Path, trace: Made, **head: object) -> None:
    """The run that importing `trace` makes."""
    with tempfile.TemporaryDirectory() as folder:
        import_traces([made.write(Path(folder) / "trace.json", trace.document(**head))], into)


@case("device-not-recorded", "cuda")
def kernels_missing(into: Path, faulty: bool) -> None:
    """Two launches; the profiler lacked the permission to record what they launched."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 412, 1)
    for at in (0, 200):
        trace.op("aten::mm", at, 20)
        trace.kernel(made.GEMM, at + 10, 200, at + 5)
    if faulty:
        trace.events = [event for event in trace.events if event["cat"] != "kernel"]
    import_into(into, trace)


def step(length: int = 1000, gpu: str = "Tesla V100-SXM2-32GB") -> tuple[Made, dict[str, object]]:
    """A trace of one step of `length` µs, and the GPU of its head."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, length, 1)
    properties = {"name": gpu, "computeMajor": 8 if "A100" in gpu else 7, "computeMinor": 0, "numSms": 108}
    return trace, {"deviceProperties": [properties]}


def product(
    trace: Made, at: float, us: float, name: str = made.GEMM, dtype: str = "c10::Half", size: int = 4096
) -> None:
    """A product of square matrices that is launched early enough."""
    trace.op("aten::mm", at - 9, 4, **{"Input Dims": [[size, size]] * 2, "Input type": [dtype] * 2})
    trace.kernel(name, at, us, at - 8)


@case("invalid-times", "cuda:0")
def kernels_that_start_nowhere(into: Path, faulty: bool) -> None:
    """A driver that writes 0 as the start of kernels; copies start where they did."""
    trace, head = step()
    trace.op("aten::mm", 1, 8, **{"Input Dims": [[4096, 4096]] * 2, "Input type": ["c10::Half"] * 2})
    trace.kernel(made.GEMM, -1e12 if faulty else 10, 960, 2)
    trace.kernel(made.COPY, 990, 5, 20, sort="copy")
    import_into(into, trace, **head)


@case("waiting-for-data", "data loading")
def loader_on_the_loops_thread(into: Path, faulty: bool) -> None:
    """Half of the step passes in the loader."""
    trace, head = step()
    loading = 500 if faulty else 10
    trace.event("mark", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, loading, 1)
    product(trace, loading + 12, 988 - loading)
    import_into(into, trace, **head)


@case("host-bound", "host")
def python_between_long_kernels(into: Path, faulty: bool) -> None:
    """The second product is launched long after the first has ended."""
    trace, head = step()
    product(trace, 10, 400)
    product(trace, 900 if faulty else 411, 100 if faulty else 580)
    import_into(into, trace, **head)


@case("unexplained-idle", "host")
def kernels_without_launches(into: Path, faulty: bool) -> None:
    """Kernels that somebody cut out of a trace, with a gap between them."""
    trace, head = step()
    product(trace, 10, 400)
    product(trace, 700 if faulty else 411, 300 if faulty else 580)
    trace.events = [event for event in trace.events if event["cat"] in ("kernel", "user_annotation")]
    import_into(into, trace, **head)


@case("kernel-wait", "streams")
def launched_work_waits(into: Path, faulty: bool) -> None:
    """The second product is launched with the first and begins late."""
    trace, head = step()
    product(trace, 10, 400)
    trace.op("aten::mm", 20, 10)
    trace.kernel(made.GEMM, 800 if faulty else 411, 200 if faulty else 580, 25)
    import_into(into, trace, **head)


@case("exposed-communication", made.NCCL)
def collective_alone(into: Path, faulty: bool) -> None:
    """An all-reduce after the products, or beside them."""
    trace, head = step()
    product(trace, 10, 600 if faulty else 990)
    trace.kernel(made.NCCL, 610 if faulty else 100, 390, 20)
    import_into(into, trace, **head)


@case("copies", made.COPY)
def copy_after_the_products(into: Path, faulty: bool) -> None:
    """A copy that takes a third of the step."""
    trace, head = step()
    product(trace, 10, 600 if faulty else 980)
    trace.kernel(made.COPY, 610 if faulty else 991, 390 if faulty else 5, 20, sort="copy")
    import_into(into, trace, **head)


@case("fp32-products", made.SIMT)
def products_in_fp32(into: Path, faulty: bool) -> None:
    """A product in FP32 on a V100."""
    trace, head = step()
    product(trace, 10, 990, made.SIMT if faulty else made.GEMM, "float" if faulty else "c10::Half")
    import_into(into, trace, **head)


@case("slow-products", "aten::mm")
def product_far_below_the_rate(into: Path, faulty: bool) -> None:
    """2 × 4096³ operations in 990 µs are 139 TFLOP/s; of a matrix half as wide, an eighth of it."""
    trace, head = step(gpu="NVIDIA A100-SXM4-80GB")
    product(trace, 10, 990, size=2048 if faulty else 4096)
    import_into(into, trace, **head)


@case("memory-bound-kernels", "aten::relu")
def kernel_per_operator(into: Path, faulty: bool) -> None:
    """Half of the step in elementwise kernels."""
    trace, head = step()
    product(trace, 10, 490 if faulty else 950)
    trace.op("aten::relu", 300, 10)
    trace.kernel(made.RELU, 500 if faulty else 960, 500 if faulty else 40, 305)
    import_into(into, trace, **head)


@case("unfused-optimizer", "aten::_foreach_add_")
def optimizer_in_many_kernels(into: Path, faulty: bool) -> None:
    """A quarter of the step in the optimizer, with and without the fused implementation."""
    trace, head = step()
    trace.event("mark", "Optimizer.step#AdamW.step", 700, 250, 1)
    product(trace, 10, 690)
    trace.op("aten::_foreach_add_" if faulty else "aten::_fused_adamw_", 701, 20)
    trace.kernel(made.ADAM, 710, 290, 705)
    import_into(into, trace, **head)


@case("unknown-kernels", "my_kernel", benign=True)
def names_that_tell_nothing(into: Path, faulty: bool) -> None:
    """Half of the kernel time is in a kernel of the program's own."""
    trace, head = step()
    product(trace, 10, 490 if faulty else 940)
    trace.kernel("my_kernel", 500 if faulty else 950, 500 if faulty else 50, 20)
    import_into(into, trace, **head)


@case("batchnorm-in-training-mode", "aten::batch_norm")
def batch_norm_that_trains(into: Path, faulty: bool) -> None:
    """Inference whose batch norm computes the statistics of the batch, or takes the running ones."""
    trace, head = step()
    product(trace, 10, 950)
    mode = "bn_fw_tr_1C11_singleread" if faulty else "bn_fw_inf_1C11_kernel_NCHW"
    trace.op("aten::batch_norm", 20, 20)
    trace.op("aten::cudnn_batch_norm", 22, 16)
    trace.kernel(f"void cudnn::{mode}<float, 512, true, 1, 2, 0>(float)", 960, 38, 25)
    import_into(into, trace, **head)


@case("uneven-device", "cuda:0")
def kernels_that_get_slower(into: Path, faulty: bool) -> None:
    """Six steps of the same products, the last three of which take half as long again."""
    trace, head = step(0)
    trace.events, at = [], 0.0
    for number in range(6):
        us = 1500.0 if faulty and number > 2 else 1000.0
        trace.event("mark", f"ProfilerStep#{number}", at, us, 1)
        product(trace, at + 10, us - 15)
        at += us
    import_into(into, trace, **head)


@case("scattered-writes", "aten::_index_put_impl_")
def writes_by_an_index(into: Path, faulty: bool) -> None:
    """A third of the step writes rows by an index, or little of it does."""
    trace, head = step()
    product(trace, 10, 640 if faulty else 940)
    trace.op("aten::_index_put_impl_", 20, 5)
    us = 340 if faulty else 40
    trace.kernel("void at::native::index_elementwise_kernel<128, 4>(int)", 992 - us, us, 22)
    import_into(into, trace, **head)
