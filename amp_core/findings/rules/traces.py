"""Rules on imported traces: what they hold, and what there is to win."""

from dataclasses import replace

from amp_core.findings.model import SPEED_AND_MEMORY, Entry, Finding
from amp_core.findings.registry import make_finding, rule
from amp_core.store.run import Run

_ACTIVITIES = {"cuda": "CUDA", "xpu": "XPU", "hpu": "HPU", "mtia": "MTIA", "privateuseone": "PrivateUse1"}
_HOW = """\
from torch.profiler import ProfilerActivity, profile, schedule

with profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.{activity}],
    schedule=schedule(wait=5, warmup=2, active=3),
    record_shapes=True,
) as prof:
    for batch in loader:
        train_step(batch)
        prof.step()
prof.export_chrome_trace("trace.json.gz")"""


@rule(
    Entry(
        code="device-not-recorded",
        severity="warning",
        family=SPEED_AND_MEMORY,
        order=428,
        what="A trace holds no work of the device, though the program used one: times of operators are those of "
        "launching, not of computing.",
        signal="Calls that launch work, or operators that only an accelerator has, and no kernel.",
        threshold="One of them.",
        advice="Nothing can be said of the speed of the device. Record again with the device's activity; without "
        "permission for it (CUPTI_ERROR_INSUFFICIENT_PRIVILEGES, another profiler) the profiler leaves kernels out.",
        snippet=_HOW.format(activity="CUDA"),
        page="",
    )
)
def device_not_recorded(run: Run) -> list[Finding]:
    """`device-not-recorded`: an imported trace of a program that used a device, without the device's work."""
    launches = run.head.config.get("launches_without_kernels")
    if not isinstance(launches, int):
        return []
    device = str(run.head.config.get("device") or "cuda")
    seen = f"{launches:,} launches" if launches else "operators of a GPU"
    entry_snippet = _HOW.format(activity=_ACTIVITIES.get(device, "CUDA"))
    found = make_finding(
        "device-not-recorded",
        f"The device ({device}) was not recorded: the trace holds {seen} and no kernel",
        device,
        value=float(launches),
        limit=0.0,
        unit="launches without kernels",
    )
    return [replace(found, snippet=entry_snippet)]
