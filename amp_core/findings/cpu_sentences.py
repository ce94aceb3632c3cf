"""What the first sentence says of the CPU, in traces without the work of a device.

cpu_sentence(run)     # 'The trace contains no device activity: on the CPU, aten::addmm takes 62.4 % of the ...'
"""

import numpy as np

from amp_core.analysis.performance.kernels import is_trace, kernel_rows, on_cpu, window_rows
from amp_core.analysis.performance.savings import MIN_SAVED_FRAC
from amp_core.store.run import Run
from amp_core.text.formatting import number, percent

MAX_OUTSIDE_FRAC = 0.5
"""With more of the time outside operators, that comes before the longest operator."""
_SLOW_CONVOLUTIONS = ("aten::_slow_conv2d", "aten::slow_conv")
_WITHOUT_ONEDNN = (
    " It is the convolution that torch takes where oneDNN is missing, disabled, or lacks the dtype: check "
    "torch.backends.mkldnn.is_available()."
)
"""Of the backends that aten/src/ATen/native/Convolution.cpp selects among, the last one on a CPU."""


def cpu_sentence(run: Run) -> str:
    """What takes longest in a trace of a CPU: loading data, the time outside operators, or an operator. Empty for other
    runs."""
    rows = kernel_rows(run)
    if not is_trace(run) or rows.empty or not on_cpu(rows):
        return ""
    everything = kernel_rows(run, everything=True)  # allocations too, which start the device at their first call
    us = everything[everything["phase"] != "watch"].groupby("name")["total_us"].sum()
    longest = str(us.idxmax())
    advice = _WITHOUT_ONEDNN if longest.startswith(_SLOW_CONVOLUTIONS) else ""
    operator = f"{longest} takes {percent(us.max() / us.sum())} of the operators' time.{advice}"
    return f"The trace contains no device activity: on the CPU, {_beside_operators(run, float(us.max()), operator)}"


def _beside_operators(run: Run, longest_us: float, operator: str) -> str:
    """The sentence on an operator, with the time in which data is loaded or no operator runs. The longest comes
    first."""
    windows = window_rows(run)
    wall_us = float(windows["wall_us"].sum())
    data_us, idle_us, idle_data_us = (
        float(np.nan_to_num(windows[name]).sum()) for name in ("data_us", "idle_us", "idle_data_us")
    )
    outside_us = idle_us - idle_data_us
    if data_us > max(longest_us, outside_us):
        return f"loading data takes {percent(data_us / wall_us)} of the time; {operator}"
    if outside_us > max(MAX_OUTSIDE_FRAC * wall_us, longest_us):
        share, wall = percent(outside_us / wall_us), number(wall_us / 1e3, "ms")
        return f"no operator runs for {share} of the {wall}, in which Python or other code does; {operator}"
    if data_us >= MIN_SAVED_FRAC * wall_us:
        return f"{operator} Loading data takes {percent(data_us / wall_us)} of the time."
    return operator


def host_alone(run: Run) -> str:
    """Of a trace that lacks the device's work: what takes longest on the device by torch's events around operators, or
    on the host, as a further sentence. Empty if nothing takes long."""
    config = run.head.config
    if isinstance(timed := config.get("timed_op"), str) and isinstance(
        share := config.get("timed_op_frac"), int | float
    ):
        return f" By torch's events around operators, {timed} takes {percent(share)} of the time on the device."
    name, share = config.get("host_op"), config.get("host_op_frac")
    if not isinstance(name, str) or not isinstance(share, int | float):
        return ""
    what = _HOST_PARTS.get(str(config.get("host_part")), "{name} takes {share} of the time, and launches nothing.")
    return f" On the host, {what.format(name=name, share=percent(share))}"


_HOST_PARTS = {
    "data": "loading data takes {share} of the time.",
    "calls": "the most time, {share}, goes to calls into the device's runtime ({name}).",
    "optimizer": "the optimizer's steps take {share} of the time.",
    "any-op": "{name} takes {share} of the time: launching, waiting for the device, or its first call.",
}
"""By `HostPart.kind`; what remains is an operator that launches nothing."""
