"""A forecast of two runs against each other: each traced step in the run's own recipe, on the same GPU.

>>> step_time_changes(fp32, fp16, ["A100"])[["gpu", "baseline", "value", "ratio", "low", "high", "outside"]]
"""

from collections.abc import Sequence

import pandas as pd

from amp_core.analysis.steps import autocast_dtype
from amp_core.analysis.steps import recipe as recipe_of
from amp_core.forecast.efficiency import efficiency_of
from amp_core.forecast.measured_steps import step_spread
from amp_core.forecast.roofline import Work, device_time, why_not
from amp_core.forecast.step_time import UNMODELLED_FRAC
from amp_core.forecast.traced_work import traces_of_run
from amp_core.formats import FORMAT_OF_DTYPE
from amp_core.hardware.data_sheets import NAMES, named_part
from amp_core.schema import RunError
from amp_core.store.run import Run

COLUMNS = ["gpu", "baseline", "value", "ratio", "low", "high", "outside"]


def step_time_changes(base: Run, run: Run, gpus: Sequence[str]) -> pd.DataFrame:
    """The forecast step time of `run` over that of `base`, one row per GPU that can run both recipes.

    Columns: gpu; baseline, value (ms); ratio (value over baseline); low, high (its range if the GPU is slower or faster
    than assumed, which changes both runs alike); outside (whether the range excludes 1). Raises `RunError` if a run has
    no traced step, or a recipe that is not forecast.
    """
    (before, old), (now, new) = _work(base), _work(run)
    unmodelled = UNMODELLED_FRAC if old != new else 0.0
    rows = []
    for gpu in dict.fromkeys(gpus):
        name, rates = named_part(gpu)
        if why_not(rates, old) or why_not(rates, new):
            continue
        of = efficiency_of(NAMES[name])
        spreads = [step_spread(work, rates, recipe, of).spread for work, recipe in ((before, old), (now, new))]
        speeds = of.range(max(spreads))
        works = Work.of(before), Work.of(now)
        times = [
            (device_time(works[0], rates, old, at).total_us, device_time(works[1], rates, new, at).total_us)
            for at in (speeds.likely, *speeds.corners())
        ]
        ratio, *ratios = (own / other for other, own in times)
        low, high = min(ratios) * (1 - unmodelled), max(ratios) * (1 + unmodelled)
        first = [us / 1e3 for us in times[0]]
        rows.append((name, *first, ratio, low, high, not low <= 1 <= high))
    return pd.DataFrame(rows, columns=COLUMNS)


def _work(run: Run) -> tuple[pd.DataFrame, str]:
    """The traced step of a run in its own recipe, and the name of that recipe in the forecast."""
    wide, narrow = traces_of_run(run)
    recipe = recipe_of(run) or ""
    if recipe in ("fp32", "tf32"):
        return wide.work, recipe
    dtype = autocast_dtype(run)
    if dtype is None:
        raise RunError(f"recipe {recipe!r} of run {run.name!r} is not forecast; fp32, tf32 and autocast are")
    return narrow.work, FORMAT_OF_DTYPE[dtype].name
