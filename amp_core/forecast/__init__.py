"""Forecasts, not measurements: what a traced step would take on GPUs that are not available.

    from amp_core.forecast import forecast, traces_of_run

    result = forecast(traces_of_run(load_run("runs/a")), ["V100", "A100", "H100"])
    result.table[["gpu", "recipe", "step_ms", "speedup", "speedup_low", "speedup_high", "bound_by", "largest_batch"]]

A roofline over the traced operators: each takes the longest of its multiplications at the speed of the part, its bytes
at the part's bandwidth, and the minimum time of a kernel; the step takes their sum, or the host's time to launch them
all. `kernel_classes` says how the kernels of an operator use a GPU, `efficiency` what share of its data sheet each GPU
reaches, with sources, and `measured_steps` how far a forecast may be off. A measured run on a listed GPU is first
compared with its own forecast, and the ratio corrects the forecasts for other GPUs.
"""

from amp_core.forecast.baseline import step_time_changes
from amp_core.forecast.calibration import Calibration, calibrate
from amp_core.forecast.efficiency import EFFICIENCY, Efficiency, efficiency_of
from amp_core.forecast.memory import largest_batch, memory_needed
from amp_core.forecast.roofline import Speeds
from amp_core.forecast.step_time import Forecast, forecast, gpu_names, measured_factor
from amp_core.forecast.traced_work import StepMemory, StepTrace, traces_of_run

__all__ = [
    "EFFICIENCY",
    "Calibration",
    "Efficiency",
    "Forecast",
    "Speeds",
    "StepMemory",
    "StepTrace",
    "calibrate",
    "efficiency_of",
    "forecast",
    "gpu_names",
    "largest_batch",
    "measured_factor",
    "memory_needed",
    "step_time_changes",
    "traces_of_run",
]
