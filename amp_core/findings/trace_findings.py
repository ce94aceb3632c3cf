"""Findings on imported traces from possible savings.

>>> saving_finding(run, "copies")[0].title
'The GPU only copies and fills for 22 % of the step; could save up to 25.1 of 116 ms'
"""

import re
from dataclasses import replace

from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, Saving
from amp_core.analysis.performance.savings import possible_savings
from amp_core.findings.model import Finding, Remedy
from amp_core.findings.registry import make_finding
from amp_core.store.run import Run

SAVING_THRESHOLD = "Possible savings of at least 5 % of the step."
"""What a guide entry states as its threshold if its finding is one of the possible savings."""


def reported_saving(run: Run, code: str) -> Saving | None:
    """The saving of that code, if it is large enough for a finding; else None."""
    savings = possible_savings(run)
    return next((c for c in savings.ranked if c.code == code), None) if savings is not None else None


def saving_finding(
    run: Run, code: str, inference_advice: str = "", inference_snippet: str = "", *, training: bool = False
) -> list[Finding]:
    """The finding `code` if a trace has that saving. The advice and the snippet are for traces without training, or
    with `training` for all."""
    savings, saving = possible_savings(run), reported_saving(run, code)
    if savings is None or saving is None:
        return []
    remedy = None
    if inference_advice and (training or not savings.trains):
        remedy = Remedy(inference_advice, inference_snippet)
    won = saving.saved_us > 0
    whole = f"the {savings.unit} with the time before it" if saving.lead_us else f"the {savings.unit}"
    others = f", with {saving.others} other{'s' if saving.others > 1 else ''}" if saving.others else ""
    if saving.is_of_part:
        others = ", with what the host does beside it"
    finding = make_finding(
        code,
        f"{saving.what}; could save {saving.how_much()}" if won else saving.what,
        saving.where,
        value=saving.share if won else None,
        limit=MIN_SAVED_FRAC if won else None,
        unit=f"share of {whole} saved{others}" if won else "",
        remedy=remedy,
    )
    if saving.here:
        finding = replace(finding, advice=f"{finding.advice} Here: {saving.here}.")
    return [replace(finding, win_ms=float(saving.rank_us) / 1e3 if won else None)]


def for_what_runs(run: Run, findings: list[Finding]) -> list[Finding]:
    """The findings of a trace, with code that calls the model alone where the trace contains no training, and with
    torch_npu's profiler where that recorded it."""
    if str(run.head.config.get("device")).startswith("npu"):
        findings = [replace(f, advice=_for_npu(f.advice), snippet=_for_npu(f.snippet)) for f in findings]
    if trains(run):
        return findings
    return [replace(f, snippet=f.snippet.replace("train_step(batch)", "model(batch)")) for f in findings]


def _for_npu(text: str) -> str:
    """Advice or code with the profiler of NPUs, which has no sums of operators."""
    text = _TABLE.sub('prof.export_chrome_trace("trace.json")', text.replace("ProfilerActivity.CUDA", _NPU_ACTIVITY))
    return _PROFILER.sub("torch_npu.profiler", text)


_NPU_ACTIVITY = "ProfilerActivity.NPU"
_PROFILER, _TABLE = re.compile(r"\btorch\.profiler\b"), re.compile(r"print\(prof\.key_averages\(.*\)\)")


def trains(run: Run) -> bool:
    """Whether a trace contains an optimizer or much of backward; by its operators where it has no kernels."""
    savings = possible_savings(run)
    if savings is not None:
        return savings.trains
    return bool(run.ops["phase"].isin(["backward", "optimizer"]).any())
