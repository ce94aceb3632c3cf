"""Findings on imported traces from possible savings. A rule chooses the remedy for the saving.

>>> saving = reported_saving(run, "copies", Saving)
>>> saving_finding(run, saving, guides_remedy(saving)).title
'The GPU only copies and fills for 22 % of the step; could save up to 25.1 of 116 ms'
"""

import re
from dataclasses import replace
from typing import TypeVar

from amp_core.analysis.performance.saving import MIN_SAVED_FRAC, Saving, unit_of
from amp_core.analysis.performance.savings import possible_savings
from amp_core.analysis.performance.step_cost import step_cost
from amp_core.findings.model import Finding, Remedy
from amp_core.findings.registry import GUIDE, make_finding
from amp_core.store.run import Run

SAVING_THRESHOLD = "Possible savings of at least 5 % of the step."
"""What a guide entry states as its threshold if its finding is one of the possible savings."""


_Kind = TypeVar("_Kind", bound=Saving)


def reported_saving(run: Run, code: str, kind: type[_Kind]) -> _Kind | None:
    """The saving of that code, if it is large enough for a finding; None without one of that kind."""
    savings = possible_savings(run)
    return savings.reported(code, kind) if savings is not None else None


def saving_finding(run: Run, saving: Saving, remedy: Remedy) -> Finding:
    """The finding on a saving of a trace."""
    won, unit = saving.saved_us > 0, unit_of(step_cost(run))
    whole = f"the {unit} with the time before it" if saving.lead_us else f"the {unit}"
    others = f", with {saving.others} other{'s' if saving.others > 1 else ''}" if saving.others else ""
    if saving.is_of_part:
        others = ", with all else that the host does meanwhile"
    finding = make_finding(
        saving.code,
        f"{saving.what}; could save {saving.how_much()}" if won else saving.what,
        saving.where,
        value=saving.share if won else None,
        limit=MIN_SAVED_FRAC if won else None,
        unit=f"share of {whole} saved{others}" if won else "",
        remedy=remedy,
    )
    return for_what_runs(run, replace(finding, win_ms=float(saving.rank_us) / 1e3 if won else None))


def guides_remedy(saving: Saving) -> Remedy:
    """The guide's advice, and what the trace adds to it."""
    entry = GUIDE[saving.code]
    return Remedy(f"{entry.advice}{in_this_trace(saving)}", entry.snippet, entry.frameworks)


def in_this_trace(saving: Saving) -> str:
    """What the trace adds to the advice, after it; empty if nothing."""
    return f" Here: {saving.here}." if saving.here else ""


def for_what_runs(run: Run, finding: Finding) -> Finding:
    """The finding on a trace, with code that calls the model alone where the trace contains no training, and with
    torch_npu's profiler where that recorded it."""
    if str(run.head.config.get("device")).startswith("npu"):
        finding = replace(finding, advice=_for_npu(finding.advice), snippet=_for_npu(finding.snippet))
    if trains(run):
        return finding
    return replace(finding, snippet=finding.snippet.replace("train_step(batch)", "model(batch)"))


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
