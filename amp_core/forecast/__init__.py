"""Forecasts, not measurements: what a traced step would take on GPUs that are not available.

    from amp_core.forecast import forecast, traces_of_run

    result = forecast(traces_of_run(load_run("runs/a")), ["V100", "A100", "H100"])
    result.table[["gpu", "recipe", "step_ms", "speedup", "speedup_low", "speedup_high", "bound_by", "largest_batch"]]

A roofline over the traced operators: each takes the longest of its multiplications at the part's peak, its bytes at the
part's bandwidth, and the minimum time of a kernel; the step takes their sum or the host's time to launch them all. The
efficiency is a range with its sources (`EFFICIENCY`), so every figure is a range. A run recorded on a listed GPU is
first compared with its own forecast, and the ratio corrects the forecasts for other GPUs.
"""

from amp_core.forecast.memory import largest_batch, memory_needed
from amp_core.forecast.roofline import EFFICIENCY, Speeds
from amp_core.forecast.step_time import Forecast, forecast, gpu_names, measured_factor
from amp_core.forecast.traced_work import StepMemory, StepTrace, traces_of_run

__all__ = [
    "EFFICIENCY",
    "Forecast",
    "Speeds",
    "StepMemory",
    "StepTrace",
    "forecast",
    "gpu_names",
    "largest_batch",
    "measured_factor",
    "memory_needed",
    "traces_of_run",
]
