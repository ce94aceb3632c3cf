"""How many seeds a verdict takes, told from those that there are."""

from types import SimpleNamespace

import pytest

from amp_core.tune.confirm import INTERIM_SEEDS, seeds_to_decide

SEEDS = INTERIM_SEEDS[1]
NEXT = next(look for look in INTERIM_SEEDS if look > SEEDS)


def row(deviation, reach, noise):
    """A recipe's loss beside FP32's: its change, half the interval of that, and what FP32's own seeds differ by."""
    return SimpleNamespace(loss_change_frac=deviation, loss_change_high=deviation + reach, noise_frac=noise)


@pytest.mark.parametrize(
    ("deviation", "reach", "noise", "told"),
    [
        (0.0, 0.01, 0.05, NEXT),  # whatever it is, it is within the noise
        (0.5, 0.01, 0.05, NEXT),  # far beyond it
        (-0.5, 0.01, 0.05, NEXT),
        (0.0, 10.0, 1e-6, INTERIM_SEEDS[-1]),  # no number of seeds is enough
        (0.0, 0.01, 0.0, INTERIM_SEEDS[0]),  # nothing is known of the noise yet
        (0.0, float("nan"), 0.05, INTERIM_SEEDS[0]),
    ],
)
def test_parity_is_decided_if_the_interval_is_within_the_noise_or_the_deviation_outside(deviation, reach, noise, told):
    assert seeds_to_decide(row(deviation, reach, noise), SEEDS) == told


def test_the_wider_the_interval_the_more_seeds():
    asked = [seeds_to_decide(row(0.0, reach, 0.01), SEEDS) for reach in (0.01, 0.03, 0.05, 0.1)]
    assert asked == sorted(asked) and len(set(asked)) >= 3
