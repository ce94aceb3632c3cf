"""Parity: the deviation of a recipe's loss from the baseline, against the baseline's own seed-to-seed noise.

>>> judge({0: 2.01, 1: 2.05, 2: 1.98}, {0: 2.01, 1: 2.06, 2: 1.98}).parity
'within noise'

Each value is the end of one training: the mean loss over the last tenth of the common steps, or the held-out loss. With
d the mean deviation over seeds, paired by seed, and s the standard deviation of the baseline over seeds:

- *worse* (*better*): the 95 % t-interval of d excludes 0 and d is larger than s, which another seed rarely is;
- *within noise*: the 90 % t-interval of d lies within ±2 s, so that a larger deviation is ruled out at 5 % (two
  one-sided tests: Schuirmann, "A comparison of the two one-sided tests procedure", 1987);
- else, and always with fewer than `MIN_SEEDS` seeds of the baseline, *cannot tell: run more*.

Adding seeds and testing again until there is a decision inflates the error rate (Armitage, McPherson and Rowe,
"Repeated significance tests on accumulating data", 1969). `repeatedly` makes each test stricter, as Pocock did ("Group
sequential methods in the design and analysis of clinical trials", 1977): the 99 % interval of a worse d excludes 0, and
the 98 % interval of one within noise lies within ±2 s. In simulations with tests after 3, 4, 5, 6, 8, 10 and 12 seeds,
a recipe that is 2 s worse then passes in less than 5 % of searches, whatever the correlation of seeds; one that is no
worse is called worse in 2 % where the two trainings of a seed are uncorrelated, in 0.2 % where their correlation is 0.9
(`tests/analysis`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MIN_SEEDS = 3
"""Fewest seeds of the baseline from which its noise is known."""
NOISE_STDS = 2.0
"""Standard deviations over seeds up to which a deviation counts as noise."""
REPEATED_WORSE = 0.995
REPEATED_WITHIN = 0.99
"""Shares of Student's t by whose quantiles repeated tests call a recipe worse or within noise."""
_MAX_FREEDOM = 1e4
"""From here on Student's t is the normal distribution."""


@dataclass(frozen=True)
class ParityTest:
    """The test of one metric of a recipe against the baseline. NaN if there are too few seeds."""

    parity: str
    """`within noise`, `worse`, `better` or `cannot tell`."""
    deviation: float
    """Mean over seeds of recipe minus baseline, in the unit of the metric."""
    low: float
    high: float
    """Ends of the 95 % interval of the deviation."""
    noise: float
    """Standard deviation of the baseline over seeds."""
    baseline: float
    """Mean of the baseline."""
    seeds: int
    """Number of trainings of the recipe."""


def judge(baseline: Mapping[int, float], recipe: Mapping[int, float], *, repeatedly: bool = False) -> ParityTest:
    """Test final values of `recipe`, by seed, against those of `baseline`; lower is better. None may be NaN.

    `repeatedly`: the two are tested again as seeds are added, until there is a decision.
    """
    first, this = np.array(list(baseline.values())), np.array(list(recipe.values()))
    shared = [seed for seed in recipe if seed in baseline]
    paired = np.array([recipe[seed] - baseline[seed] for seed in shared])
    noise = float(first.std(ddof=1)) if len(first) >= MIN_SEEDS else np.nan
    whole = len(shared) == len(recipe) and len(shared) > 0
    deviation = float(paired.mean()) if whole else float(this.mean() - first.mean())
    error, freedom = _error(first, this, paired if whole else np.zeros(0))
    reach = t_quantile(freedom, 0.975) * error if freedom >= 1 else np.nan
    low, high = deviation - reach, deviation + reach
    outer = t_quantile(freedom, REPEATED_WORSE) * error if freedom >= 1 and repeatedly else reach
    inner = t_quantile(freedom, REPEATED_WITHIN if repeatedly else 0.95) * error if freedom >= 1 else np.nan
    parity = "cannot tell"
    if np.isfinite(noise) and np.isfinite(reach):
        if deviation > max(noise, outer):
            parity = "worse"
        elif -deviation > max(noise, outer):
            parity = "better"
        elif len(this) > 1 and abs(deviation) + inner <= NOISE_STDS * noise:
            parity = "within noise"
    return ParityTest(parity, deviation, low, high, noise, float(first.mean()), len(this))


def mean_interval(values: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, float]:
    """The 95 % interval of the mean of `values`, one per seed; NaN with fewer than two."""
    if len(values) < 2:
        return np.nan, np.nan
    reach = t_quantile(len(values) - 1, 0.975) * float(values.std(ddof=1)) / np.sqrt(len(values))
    return float(values.mean() - reach), float(values.mean() + reach)


@lru_cache(maxsize=4096)
def t_quantile(freedom: float, share: float) -> float:
    """The quantile of Student's t at `share`, 0.5 to 1, for `freedom` from 1 on, whole or not.

    With t = √freedom · tan(angle), the density over the angle is proportional to cos(angle)^(freedom - 1).
    """
    freedom = min(max(freedom, 1.0), _MAX_FREEDOM)
    angle = np.linspace(0.0, np.pi / 2, 20001)
    density = np.cos(angle) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    at = float(np.interp(2 * share - 1, below / below[-1], angle))
    return float(np.sqrt(freedom) * np.tan(at))


def _error(
    first: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    this: "np.ndarray[tuple[int], np.dtype[np.float64]]",
    paired: "np.ndarray[tuple[int], np.dtype[np.float64]]",
) -> tuple[float, float]:
    """Standard error of the deviation and its degrees of freedom, 0 where it is unknown.

    That of the differences for pairs; otherwise Welch's. A single training is a draw from the baseline's own spread, so
    its own variance adds to that of the mean.
    """
    if len(paired) > 1:
        return float(paired.std(ddof=1) / np.sqrt(len(paired))), len(paired) - 1
    if len(first) < MIN_SEEDS:
        return np.nan, 0
    a = float(first.var(ddof=1)) / len(first)
    if len(this) < 2:
        return float(np.sqrt(first.var(ddof=1) * (1 + 1 / len(first)))), len(first) - 1
    b = float(this.var(ddof=1)) / len(this)
    if a + b == 0:
        return 0.0, len(first) + len(this) - 2
    return float(np.sqrt(a + b)), (a + b) ** 2 / (a**2 / (len(first) - 1) + b**2 / (len(this) - 1))
