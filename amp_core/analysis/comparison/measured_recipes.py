"""Which recipe to try first, once recipes were measured on the machine: a measurement replaces what its instructions
promise.

>>> rows = measured_recipes([run, *others])
>>> after_measurement(first_recipe_on_cpu(["avx512_bf16"]), rows)
Advice(recipe='fp32', why='Measured here on text-gpt tiny, BF16 is 1.22 × slower than FP32.')
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from amp_core.analysis.baseline import TASK
from amp_core.analysis.comparison.answer import speed_in_words
from amp_core.analysis.comparison.compare import compare
from amp_core.analysis.steps import median
from amp_core.hardware.gpus import Advice
from amp_core.settings.catalog import RECIPES
from amp_core.store.run import Run

BASELINE = "fp32"
_MEASURED = ("faster", "slower", "no difference seen")
"""Verdicts on a speed that was measured well enough, and not emulated."""


def measured_recipes(runs: Sequence[Run]) -> pd.DataFrame:
    """Speeds against FP32 of those `runs` that train the task of the first one on the same machine: the rows of
    `compare(…).recipes` without the baseline, and `task`. The fastest run of each precision counts: background load and
    recording only slow runs down. Empty without FP32.
    """
    first = runs[0]
    alike = [run for run in runs if run.head.config.get("workload") and _place(run) == _place(first)]
    by_precision: dict[str, Run] = {}
    for run in sorted((run for run in alike if len(run.steps)), key=_step_ms):
        by_precision.setdefault(str(run.head.config.get("precision")), run)
    base = by_precision.pop(BASELINE, None)
    if base is None or not by_precision:
        return pd.DataFrame({"precision": [], "speed_ratio": [], "speed_verdict": [], "task": []})
    recipes = compare([base, *by_precision.values()]).recipes.iloc[1:]
    config = base.head.config
    task = " ".join(str(config[name]) for name in ("workload", "size") if config.get(name))
    return recipes[recipes["speed_verdict"].isin(_MEASURED)].assign(task=task)


def after_measurement(advised: Advice, measured: pd.DataFrame) -> Advice:
    """`advised` as it is if its recipe was not measured; else the fastest measured recipe, with the measurement of the
    advised one as the reason."""
    own = measured[measured["precision"] == advised.recipe]
    if not len(own):
        return advised
    row = own.iloc[0]
    faster = measured[measured["speed_verdict"] == "faster"].sort_values("speed_ratio")
    best = str(faster["precision"].iloc[-1]) if len(faster) else BASELINE
    why = f"Measured here on {row['task']}, {_named(row['precision'])} {_is(row.to_dict())}"
    if best not in (advised.recipe, BASELINE):
        why += f", and {_named(best)} {_is(faster.iloc[-1].to_dict())}"
    return Advice(best, f"{why}.")


def _place(run: Run) -> tuple[str, ...]:
    """The task of a run and its machine, as text: another program may have written the head."""
    config, environment = run.head.config, run.head.environment
    gpus = environment.get("gpus")
    names = [gpu.get("name") if isinstance(gpu, dict) else gpu for gpu in gpus] if isinstance(gpus, list) else gpus
    return (*(repr(config.get(name)) for name in TASK), repr(environment.get("cpu")), repr(names))


def _step_ms(run: Run) -> float:
    """The median step time; runs without one come last."""
    known = median(run.steps["step_ms"])
    return known if known is not None else math.inf


def _named(precision: str) -> str:
    recipe = RECIPES.get(precision)
    return recipe.label if recipe is not None else precision


def _is(row: Mapping[Any, Any]) -> str:
    """How fast a recipe is against FP32."""
    if row["speed_verdict"] == "no difference seen":
        return "is no faster than FP32"
    return f"is {speed_in_words(row)} than FP32"
