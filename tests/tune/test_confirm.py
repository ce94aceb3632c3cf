"""The number of seeds that decide parity, predicted from the seeds so far."""

from types import SimpleNamespace

import pytest

from amp_core.tune.confirm import INTERIM_SEEDS, seeds_to_decide

SEEDS = INTERIM_SEEDS[1]
NEXT = next(look for look in INTERIM_SEEDS if look > SEEDS)


def row(deviation, reach, noise):
    """A recipe's loss relative to FP32: its change, half the width of its interval, and the noise between FP32's
    seeds."""
    return SimpleNamespace(loss_change_frac=deviation, loss_change_high=deviation + reach, noise_frac=noise)


@pytest.mark.parametrize(
    ("deviation", "reach", "noise", "seeds"),
    [
        (0.0, 0.01, 0.05, NEXT),  # certainly within the noise
        (0.5, 0.01, 0.05, NEXT),  # far beyond the noise
        (-0.5, 0.01, 0.05, NEXT),
        (0.0, 10.0, 1e-6, INTERIM_SEEDS[-1]),  # no number of seeds is enough
        (0.0, 0.01, 0.0, INTERIM_SEEDS[0]),  # the noise is still unknown
        (0.0, float("nan"), 0.05, INTERIM_SEEDS[0]),
    ],
)
def test_parity_is_decided_if_the_interval_is_within_the_noise_or_the_deviation_outside(deviation, reach, noise, seeds):
    assert seeds_to_decide(row(deviation, reach, noise), SEEDS) == seeds


def test_a_wider_interval_needs_more_seeds():
    needed = [seeds_to_decide(row(0.0, reach, 0.01), SEEDS) for reach in (0.01, 0.03, 0.05, 0.1)]
    assert needed == sorted(needed) and len(set(needed)) >= 3
