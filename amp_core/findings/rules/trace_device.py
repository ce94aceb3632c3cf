"""Rules on imported traces: a device that is throttled or shared."""

from dataclasses import replace

from amp_core.findings import step_sentences
from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding
from amp_core.findings.registry import make_finding, rule
from amp_core.findings.repeated_work import steps_of
from amp_core.store.run import Run


@rule(
    Entry(
        code="uneven-device",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=424,
        what="The device of an imported trace takes unequally long for the same kernels.",
        signal="Products of the same kernel and sizes; the kernels of steps that launch the same.",
        threshold="A fifth of the kernel time in products of three times what is usual, or a tenth beyond the pace of "
        "the fastest quarter of the steps.",
        advice="The clock is low for its temperature or power limit, or another process shares the device. Watch "
        "clocks, limits and the processes that nvidia-smi or rocm-smi names while it runs, and measure again on a "
        "device of its own.",
        snippet="print(torch.cuda.clock_rate(), torch.cuda.power_draw(), torch.cuda.temperature())   # in each step",
        page="step-cost",
    )
)
def uneven_device(run: Run) -> list[Finding]:
    """`uneven-device`: a device that is throttled or shared."""
    sentence, us = step_sentences.uneven_device(run)
    if not sentence:
        return []
    device, (steps, per_step) = str(run.head.config.get("device") or ""), steps_of(run)
    ms = us / steps / 1e3
    finding = make_finding(
        "uneven-device", sentence.rstrip("."), device, value=ms, unit=f"ms{per_step} beyond what is usual"
    )
    return [replace(finding, win_ms=ms)]
