"""Findings in the words and with the code that fit a run: its device, its settings, its optimizer.

fitted(run, findings)     # without `torch.backends.cudnn.benchmark = True` where that is on
"""

import re
from dataclasses import replace

from amp_core.analysis.performance.host_copies import of_copies
from amp_core.analysis.performance.kernels import is_trace
from amp_core.analysis.performance.saving import without_gpu
from amp_core.analysis.performance.training_part import FUSED_OPTIMIZERS
from amp_core.findings.model import Finding
from amp_core.store.run import Run

_BENCHMARK = re.compile(r"Let (?:cuDNN benchmark|the library time) its algorithms, (?:and )?(\w)")
_SET_BENCHMARK = "torch.backends.cudnn.benchmark = True\n"
_ANY_FUSED = re.compile(r"type\(optimizer\)\((.*fused=True\)) +# Adam, AdamW, SGD, Adagrad")


def fitted(run: Run, findings: list[Finding]) -> list[Finding]:
    """The findings as they fit the run."""
    return [_of_optimizer(run, _of_settings(run, _of_device(run, finding))) for finding in findings]


def _of_device(run: Run, finding: Finding) -> Finding:
    """The finding of a trace, which calls a GPU of NVIDIA's or AMD's one, and every other accelerator a device."""
    if not is_trace(run):
        return finding
    finding = replace(finding, title=of_copies(run, finding.title), advice=of_copies(run, finding.advice))
    device = str(run.head.config.get("device") or "cpu")
    if device.startswith(("cuda", "cpu", "mps")):
        return finding
    return replace(finding, title=without_gpu(finding.title), advice=without_gpu(finding.advice))


def _of_settings(run: Run, finding: Finding) -> Finding:
    """The finding without the advice to let cuDNN or MIOpen time their algorithms, where they do already."""
    if run.head.config.get("cudnn_benchmark") is not True or _SET_BENCHMARK not in finding.snippet:
        return finding
    advice = _BENCHMARK.sub(lambda match: match[1].upper(), finding.advice)
    return replace(finding, advice=advice, snippet=finding.snippet.replace(_SET_BENCHMARK, ""))


def _of_optimizer(run: Run, finding: Finding) -> Finding:
    """The finding with the class of the one optimizer of a trace that can be fused, where its code leaves it open:
    another around it may have no such argument."""
    names = run.head.config.get("optimizers")
    fused = [name for name in names if name in FUSED_OPTIMIZERS] if isinstance(names, list) else []
    if len(fused) != 1:
        return finding
    return replace(finding, snippet=_ANY_FUSED.sub(rf"torch.optim.{fused[0]}(\1", finding.snippet))
