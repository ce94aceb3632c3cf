"""Small hand-written GPU traces in the layouts of several versions of torch, with times that are easy to add up.

    file = write(tmp_path / "trace.json", training("new", steps=2))

One step takes 1,000 µs. On the host: loading data 0–100, a copy, forward with a cast, a matrix product and a ReLU,
backward on another thread, an unmarked norm, the optimizer, and a wait at 700–960. On the device (µs from
the start of the step): copy 150–190, cast 190–200, product 200–400, ReLU 400–450, idle, two products of backward
460–660 and 660–760, an all-reduce beside and after them 700–900, norm 900–910, optimizer 910–950, idle.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd

from amp_core import diagnose, load_run
from amp_core.traces import Trace, import_traces, read_trace

BASE = 1_700_000_000_000_000
"""Microseconds since 1970."""

GEMM = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn"
SIMT = "ampere_sgemm_128x64_nn"
CAST = "void at::native::unrolled_elementwise_kernel<at::native::float16_copy_kernel_cuda(at::TensorIteratorBase&)>"
RELU = "void at::native::vectorized_elementwise_kernel<4, at::native::launch_clamp_scalar>"
NCCL = "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
NORM = "void at::native::lpnorm_cuda_kernel<float>"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>"
COPY = "Memcpy HtoD (Pinned -> Device)"

_NEW = {"op": "cpu_op", "mark": "user_annotation", "call": "cuda_runtime", "copy": "gpu_memcpy", "kernel": "kernel"}
_OLD = {"op": "Operator", "mark": "Operator", "call": "Runtime", "copy": "Memcpy", "kernel": "Kernel"}


class Made:
    """Events in the layout `new` (PyTorch 1.11 and later), `old` (1.8 to 1.10) or `list` (a bare list of events)."""

    def __init__(self, layout: str = "new") -> None:
        self.layout = layout
        self.events: list[dict[str, Any]] = []
        self._names = _OLD if layout == "old" else _NEW
        self._external = 0

    def event(self, sort: str, name: str, start: float, duration: float, thread: Any, **args: Any) -> None:
        if self.layout == "old" and isinstance(thread, int):
            thread = str(thread)
        self._external += 1
        own = {"External id": self._external, **args}
        result = {"ph": "X", "cat": self._names.get(sort, sort), "name": name, "pid": 77, "tid": thread}
        self.events.append(result | {"ts": BASE + start, "dur": duration, "args": own})

    def op(self, name: str, start: float, duration: float, thread: int = 1, **args: Any) -> None:
        self.event("op", name, start, duration, thread, **args)

    def kernel(
        self,
        name: str,
        start: float,
        duration: float,
        launched: float,
        thread: int = 1,
        *,
        sort: str = "kernel",
        call_us: float = 2,
        stream: int = 7,
        device: int = 0,
    ) -> None:
        """A kernel and the call that launched it, which takes `call_us`."""
        call = "cudaMemcpyAsync" if sort == "copy" else "cudaLaunchKernel"
        correlation = 10_000 + len(self.events)
        self.event("call", call, launched, call_us, thread, correlation=correlation)
        self.events.append(
            {"ph": "s", "id": correlation, "cat": "ac2g", "name": "ac2g", "pid": 77, "ts": BASE + launched}
        )
        self.event(
            sort, name, start, duration, f"stream {stream}", correlation=correlation, device=device, stream=stream
        )
        self.events[-1]["pid"] = device
        # Several versions write the correlation here, which then names a wrong operator.
        self.events[-1]["args"]["External id"] = correlation

    def document(self, **head: Any) -> Any:
        if self.layout == "list":
            return self.events
        gpu = {
            "id": 0,
            "name": "NVIDIA A100-SXM4-80GB",
            "totalGlobalMem": 85 * 10**9,
            "computeMajor": 8,
            "computeMinor": 0,
        }
        return {
            "schemaVersion": 1,
            "deviceProperties": [gpu | {"numSms": 108}],
            **head,
            "traceEvents": self.events,
            "traceName": "made.json",
        }


def training(layout: str = "new", steps: int = 2, first: int = 5, modules: str | None = None, **head: Any) -> Any:
    """A training of `steps` steps. `modules`: `python` for frames of nn.Module, `ampscope` for AMPscope's marks."""
    made = Made(layout)
    old = layout == "old"
    for number in range(steps):
        at, sequence = 1000.0 * number, 100 + 2 * number
        made.event("mark", f"ProfilerStep#{first + number}", at, 990, 1)
        made.event("mark", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at, 100, 1)
        made.op("aten::copy_", at + 102, 6, **{"Input Dims": [[8, 16], [8, 16], []], "Input type": ["float"] * 2})
        made.kernel(COPY, at + 150, 40, at + 103, sort="copy")
        if modules == "python":
            made.event("python_function", "nn.Module: Net_0", at + 108, 140, 1)
            made.event("python_function", "nn.Module: Linear_3", at + 109, 95, 1)
            made.event("python_function", "torch/nn/functional.py(10): linear", at + 109, 95, 1)
        elif modules == "ampscope":
            made.event("mark", "ampscope.module:", at + 108, 140, 1)
            made.event("mark", "ampscope.module:blocks.0.fc", at + 109, 95, 1)
        forward = {"Fwd thread id": 0}
        made.op("aten::linear", at + 110, 90, **forward, **{"Sequence number": sequence})
        made.op("aten::to", at + 110.5, 9)
        made.op(
            "aten::copy_",
            at + 111,
            7,
            **{"Input Dims": [[16, 4], [16, 4], []], "Input type": ["c10::Half", "float", ""]},
        )
        made.kernel(CAST, at + 190, 10, at + 112)
        types = ["c10::Half", "c10::Half", "c10::Half"]
        shapes = [[4], [8, 16], [16, 4]]
        made.op(
            "aten::addmm",
            at + 120,
            70,
            **forward,
            **{"Sequence number": sequence, "Input Dims": shapes, "Input type": types},
        )
        made.kernel(GEMM, at + 200, 200, at + 130)
        made.op("aten::relu", at + 210, 30, **forward, **{"Sequence number": sequence + 1})
        made.kernel(RELU, at + 400, 50, at + 215)
        back = {"Fwd thread id": 1, "Sequence number": sequence}
        if not old:
            made.op("autograd::engine::evaluate_function: AddmmBackward0", at + 320, 100, 2, **back)
        made.op("AddmmBackward" if old else "AddmmBackward0", at + 320, 99, 2, **back)
        made.op("aten::mm", at + 330, 30, 2, **{"Input Dims": [[8, 4], [4, 16]], "Input type": types[:2]})
        made.kernel(GEMM, at + 460, 200, at + 335, 2)
        made.op("aten::mm", at + 370, 30, 2, **{"Input Dims": [[4, 8], [8, 16]], "Input type": ["float", "float"]})
        made.kernel(SIMT, at + 660, 100, at + 375, 2)
        made.op("c10d::allreduce_", at + 424, 18, 2)
        made.op("record_param_comms", at + 425, 15, 2)
        made.kernel(NCCL, at + 700, 200, at + 430, 2)
        made.op("aten::_foreach_norm", at + 500, 20)
        made.kernel(NORM, at + 900, 10, at + 505)
        made.event("mark", "Optimizer.step#AdamW.step", at + 600, 80, 1)
        made.op("aten::_fused_adamw_", at + 610, 60)
        made.kernel(ADAM, at + 910, 40, at + 620)
        made.event("call", "cudaStreamSynchronize", at + 700, 260, 1, correlation=5)
        made.event("call", "cudaEventQuery", at + 970, 1, 1, correlation=6)
    return made.document(**head)


def write(file: Path, document: Any) -> Path:
    """Write it as JSON, compressed if the name ends in .gz."""
    text = json.dumps(document).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return file


def read(folder: Path, document: Any, name: str = "trace.json") -> tuple[Trace, pd.DataFrame]:
    """The document as a file in `folder`, read back: the trace, and its kernels as a table."""
    trace = read_trace(write(folder / name, document))
    return trace, pd.DataFrame(trace.kernels)


def run_of(tmp_path, trace, gpu="Tesla V100-SXM2-32GB", capability=(7, 0), **head):
    """The run imported from a hand-written trace of that GPU; an empty name leaves the GPU out of the trace. `head`:
    further entries of its head."""
    major, minor = capability
    tmp_path.mkdir(exist_ok=True)
    properties = [{"name": gpu, "computeMajor": major, "computeMinor": minor}] if gpu else []
    document = trace.document(**({"deviceProperties": properties} | head))
    return load_run(import_traces([write(tmp_path / "t.json", document)], tmp_path / "run"))


def finding_of(run, code):
    """The one finding of that code."""
    (finding,) = [f for f in diagnose(run) if f.code == code]
    return finding


def runs_of(tmp_path, traces, **head):
    """The run imported from hand-written traces, one per rank."""
    files = [
        write(
            tmp_path / f"rank{rank}.json",
            trace.document(distributedInfo={"rank": rank, "world_size": len(traces)}, **head),
        )
        for rank, trace in enumerate(traces)
    ]
    return load_run(import_traces(files, tmp_path / "run"))


def products(*, backward=False, name=SIMT, dtype="float"):
    """A step of two products, the second in backward if asked for; idle for its last 200 µs."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1000, 1)
    for at in (10, 410):
        if backward and at > 10:
            trace.op("MmBackward0", 20, 10, 2)
        trace.op("aten::mm", 20, 8, 2 if backward and at > 10 else 1, **{"Input type": [dtype] * 2})
        trace.kernel(name, at, 400, 22, 2 if backward and at > 10 else 1)
    return trace
