"""Advice on channels-last memory format, with what AMD's GPUs need beside it.

>>> for_miopen(run, Remedy(advice, "model = model.to(memory_format=torch.channels_last)")).snippet
'os.environ["PYTORCH_MIOPEN_SUGGEST_NHWC"] = "1"   # before the first convolution\\nmodel = model.to(…)'
"""

from dataclasses import replace

from amp_core.analysis.performance.gpus import profiled_gpu
from amp_core.analysis.performance.kernels import kernel_rows, window_rows
from amp_core.findings.model import Remedy
from amp_core.findings.signals import facts
from amp_core.hardware.gpus import is_amd
from amp_core.store.run import Run

NHWC_BY_DEFAULT_SINCE = 7
"""From this version of ROCm on PyTorch gives MIOpen channels-last tensors as they are; before, it does so only where
`PYTORCH_MIOPEN_SUGGEST_NHWC` is set (`miopen_conv_use_channels_last` in `aten/src/ATen/native/ConvUtils.h`; pull
requests 63617 and 170947 of PyTorch)."""
_HIP_MAJOR = 10_000_000
"""`hip_runtime_version` is 10,000,000 times the major version and more (`HIP_VERSION` in `hip_version.h`)."""
_ADVICE = (
    "Before ROCm 7.0, PyTorch turns channels-last tensors back to channels first for MIOpen, unless the environment "
    "asks it not to."
)
_OF_CONVOLUTIONS = 'os.environ["PYTORCH_MIOPEN_SUGGEST_NHWC"] = "1"   # before the first convolution'
_OF_NORMS = 'os.environ["PYTORCH_MIOPEN_SUGGEST_NHWC_BATCHNORM"] = "1"'
_BATCH_NORM = r"(?i)batch_?norm"


def for_miopen(run: Run, remedy: Remedy) -> Remedy:
    """The remedy with AMD's words, where the run's GPU is AMD's, and with the settings that channels-last convolutions
    and batch norms need there, where HIP is below `NHWC_BY_DEFAULT_SINCE` or its version is not known. Unchanged for
    other GPUs, and without settings where the remedy does not change the memory format."""
    if not on_amd(run):
        return remedy
    advice = remedy.advice.replace("Tensor-core", "Matrix-core").replace("tensor cores", "matrix cores")
    if "torch.channels_last" not in remedy.snippet or _hip_major(run) >= NHWC_BY_DEFAULT_SINCE:
        return replace(remedy, advice=advice)
    rows = kernel_rows(run)
    norms = rows["name"].str.contains(_BATCH_NORM) | rows["op"].str.contains(_BATCH_NORM)
    settings = [_OF_CONVOLUTIONS, *([_OF_NORMS] if norms.any() else [])]
    return replace(remedy, advice=f"{advice} {_ADVICE}", snippet="\n".join([*settings, remedy.snippet]))


def on_amd(run: Run) -> bool:
    """Whether a run's GPU is one of AMD's, by its name or that of the device in a trace."""
    names = window_rows(run)["device_name"].drop_duplicates().tolist()
    return is_amd(profiled_gpu(run, str(run.head.config.get("device") or ""), str(names[0]) if names else "").name)


def _hip_major(run: Run) -> int:
    """The major version of HIP; 0 where it is not known."""
    version = facts(run.head.environment, "profiler").get("hip_runtime_version")
    if isinstance(version, int):
        return version // _HIP_MAJOR
    major = str(run.head.environment.get("hip") or "").partition(".")[0]  # of a watched run, as torch.version.hip
    return int(major) if major.isdecimal() and len(major) < 4 else 0
