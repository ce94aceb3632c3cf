"""Forecast, not measured: what a traced step would take on GPUs that one does not have.

    from amp_core.forecast import forecast, traces_of_run

    found = forecast(traces_of_run(load_run("runs/a")), ["V100", "A100", "H100"])
    found.table[["gpu", "recipe", "step_ms", "speedup", "speedup_low", "speedup_high", "bound_by", "largest_batch"]]

A roofline over the traced operators: each takes the longest of its multiplications at the part's peak, its bytes at the
part's bandwidth, and the shortest a kernel can be; the step takes that or the host's time to launch it all. How much of
a peak is reached is a range with its sources (`EFFICIENCY`), so every figure is one; a run recorded on a listed GPU is
first held against its own forecast, and the forecast corrected by what that was off.
"""

from amp_core.forecast.memory import largest_batch, memory_needed
from amp_core.forecast.roofline import EFFICIENCY, Speeds
from amp_core.forecast.step_time import Forecast, forecast, measured_factor, parts
from amp_core.forecast.traced_work import StepMemory, StepTrace, traces_of_run

__all__ = [
    "EFFICIENCY",
    "Forecast",
    "Speeds",
    "StepMemory",
    "StepTrace",
    "forecast",
    "largest_batch",
    "measured_factor",
    "memory_needed",
    "parts",
    "traces_of_run",
]
