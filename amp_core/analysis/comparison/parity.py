"""Did a recipe learn the same as the first? The deviation of its loss against the first one's own seed-to-seed noise.

>>> judge({0: 2.01, 1: 2.05, 2: 1.98}, {0: 2.01, 1: 2.06, 2: 1.98}).verdict
'within noise'

Each value is the end of one training: the mean loss over the last tenth of the common steps, or the held-out loss. With
d the mean deviation over seeds, paired by seed, and s the standard deviation of the reference from seed to seed:

- *worse* (*better*): the 95 % t-interval of d leaves out 0 and d is larger than s: another seed would rarely do that;
- *within noise*: the 90 % t-interval of d lies within ±2 s, so that a larger deviation is ruled out at 5 % (two
  one-sided tests: Schuirmann, "A comparison of the two one-sided tests procedure", 1987);
- else *cannot tell: run more*. So it is with fewer than `FEW_SEEDS` seeds of the reference, whatever the deviation.

Who adds a seed and judges again, until a verdict falls, gives chance more than one opening (Armitage, McPherson and
Rowe, "Repeated significance tests on accumulating data", 1969). `repeatedly` answers with stricter tests at each look,
as Pocock did ("Group sequential methods in the design and analysis of clinical trials", 1977): the 95 % interval must
lie within ±2 s. Simulated with looks after 3, 4, 5, 6, 8, 10 and 12 seeds, a recipe that is 2 s worse then passes in
less than 5 % of searches, however alike seeds fare in both; one that is no worse is called worse in about 6 % where the
two trainings of a seed have nothing in common, in less than 1 % where their correlation is 0.9 (`tests/analysis`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

FEW_SEEDS = 3
"""Seeds of the reference below which its noise is not known."""
WITHIN = 2.0
"""Deviations up to so many standard deviations from seed to seed count as noise."""
_FREEDOM = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 20, 30)
_T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.753, 1.725, 1.697)
_T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.131, 2.086, 2.042)


@dataclass(frozen=True)
class Judged:
    """One metric of one recipe against the reference. NaN where there are too few seeds to know."""

    verdict: str
    """`within noise`, `worse`, `better` or `cannot tell`."""
    deviation: float
    """Mean over seeds of recipe minus reference, in the unit of the metric."""
    low: float
    high: float
    """Ends of the 95 % interval of the deviation."""
    noise: float
    """Standard deviation of the reference from seed to seed."""
    reference: float
    """Mean of the reference."""
    seeds: int
    """Trainings of the recipe that count."""


def judge(reference: Mapping[int, float], recipe: Mapping[int, float], *, repeatedly: bool = False) -> Judged:
    """Hold final values of `recipe`, by seed, against those of `reference`; lower is better. None may be NaN.

    `repeatedly`: the same two are judged again as seeds are added, until there is a verdict.
    """
    first, this = np.array(list(reference.values())), np.array(list(recipe.values()))
    shared = [seed for seed in recipe if seed in reference]
    paired = np.array([recipe[seed] - reference[seed] for seed in shared])
    noise = float(first.std(ddof=1)) if len(first) >= FEW_SEEDS else np.nan
    whole = len(shared) == len(recipe) and len(shared) > 0
    deviation = float(paired.mean()) if whole else float(this.mean() - first.mean())
    error, freedom = _error(first, this, paired if whole else np.zeros(0))
    reach = float(t_quantile(freedom, 0.975)) * error if freedom >= 1 else np.nan
    low, high = deviation - reach, deviation + reach
    inner = float(t_quantile(freedom, 0.975 if repeatedly else 0.95)) * error if freedom >= 1 else np.nan
    verdict = "cannot tell"
    if np.isfinite(noise) and np.isfinite(reach):
        if low > 0 and deviation > noise:
            verdict = "worse"
        elif high < 0 and -deviation > noise:
            verdict = "better"
        elif len(this) > 1 and abs(deviation) + inner <= WITHIN * noise:
            verdict = "within noise"
    return Judged(verdict, deviation, low, high, noise, float(first.mean()), len(this))


def t_quantile(freedom: float, share: float) -> float:
    """Student's t at 0.95 or 0.975, from a table; between its entries interpolated in 1 / freedom."""
    table, limit = (_T95, 1.645) if share == 0.95 else (_T975, 1.960)
    inverse = np.array([0.0, *(1 / f for f in reversed(_FREEDOM))])
    return float(np.interp(1 / freedom, inverse, (limit, *reversed(table))))


def _error(
    first: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    this: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    paired: "np.ndarray[tuple[int], np.dtype[np.float64]]",
) -> tuple[float, float]:
    """Standard error of the deviation and its degrees of freedom, 0 where it cannot be known.

    Of pairs that of their differences; otherwise Welch's. One training alone is a draw from the reference's own
    spread, so that it takes two such errors to know anything of it.
    """
    if len(paired) > 1:
        return float(paired.std(ddof=1) / np.sqrt(len(paired))), len(paired) - 1
    if len(first) < FEW_SEEDS:
        return np.nan, 0
    a = float(first.var(ddof=1)) / len(first)
    if len(this) < 2:
        return float(np.sqrt(first.var(ddof=1) * (1 + 1 / len(first)))), len(first) - 1
    b = float(this.var(ddof=1)) / len(this)
    if a + b == 0:
        return 0.0, len(first) + len(this) - 2
    return float(np.sqrt(a + b)), (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(this) - 1))
