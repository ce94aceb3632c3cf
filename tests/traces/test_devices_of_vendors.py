"""What is said of devices whose profilers write the categories of CUDA's, but which are neither NVIDIA's nor AMD's."""

import pandas as pd
import pytest

from amp_core import diagnose
from amp_core.analysis.performance.step_cost import part_labels
from amp_core.findings import first_sentence
from amp_core.hardware.gpus import core_names, gpu_of
from amp_core.store.run import load_run
from amp_core.traces import import_traces
from tests.traces.made import Made, finding_of, write


def run_of_vendor(tmp_path, prefix, **properties):
    """A step of an operator without a known kernel, whose calls begin with `prefix`."""
    trace = Made()
    trace.event("mark", "ProfilerStep#3", 0, 1_000, 1)
    for at in range(0, 900, 100):
        trace.op("aten::custom", at, 20, **{"Input type": ["float"], "Input Dims": [[4]]})
        trace.kernel("_head_compute_mix_bwd_kernel_2d", at + 15, 6, at + 5)
    for event in trace.events:
        event["name"] = event["name"].replace("cudaLaunch", f"{prefix}Launch")
    document = trace.document()
    document["deviceProperties"] = (
        [{"id": 0, "totalGlobalMem": 2**34, "numSms": 104, **properties}] if properties else []
    )
    return load_run(import_traces([write(tmp_path / "t.json", document)], tmp_path / "run"))


METAX = {"name": "MetaX C500", "computeMajor": 8, "computeMinor": 0, "warpSize": 64}


def test_a_named_device_of_another_vendor_keeps_its_name_and_is_neither_nvidias_nor_amds(tmp_path):
    run = run_of_vendor(tmp_path, "mc", **METAX)
    (gpu,) = run.head.environment["gpus"]
    assert gpu["name"] == "MetaX C500" and gpu["capability"] is None
    assert run.head.config["device"] == "cuda:0" and "the GPU is idle" in first_sentence(run)
    advice = finding_of(run, "unknown-kernels").advice
    assert "Nsight" not in advice and "rocprof" not in advice and "the device's vendor" in advice


@pytest.mark.parametrize(
    ("prefix", "device"), [("musa", "musa:0"), ("tops", "gcu:0"), ("mc", "cuda:0"), ("cuda", "cuda:0")]
)
def test_the_type_of_a_device_is_told_by_the_calls_into_its_runtime(tmp_path, prefix, device):
    run = run_of_vendor(tmp_path, prefix)
    assert run.head.config["device"] == device
    assert any("CUDA graphs" in finding.advice for finding in diagnose(run)) == device.startswith("cuda")


@pytest.mark.parametrize(
    ("name", "profiler", "snippet"),
    [("NVIDIA A100-SXM4-40GB", "Nsight Compute", "ncu "), ("AMD Instinct MI210", "rocprofv3", "rocprofv3 ")],
)
def test_kernels_of_unknown_names_are_profiled_with_the_vendors_tool(tmp_path, name, profiler, snippet):
    finding = finding_of(run_of_vendor(tmp_path, "cuda", name=name, warpSize=32), "unknown-kernels")
    assert f"alone, as with {profiler}, which" in finding.advice and finding.snippet.startswith(snippet)
    assert "on AMD" not in finding.snippet


@pytest.mark.parametrize("name", ["MetaX C500", "MTT S4000", "Iluvatar BI-V150", "Intel(R) Data Center GPU Max 1550"])
def test_a_compute_capability_of_another_vendor_tells_nothing_of_tensor_cores(name):
    assert gpu_of(name, "8.0").has_tensor_cores is None and gpu_of(name, "8.0").architecture is None
    assert core_names(name) == ("matrix cores", "vector units")
    labels = part_labels(name, False, pd.DataFrame())
    assert (labels["tensor"], labels["matrix"]) == ("GEMM/conv, on matrix cores", "GEMM/conv, on vector units")
