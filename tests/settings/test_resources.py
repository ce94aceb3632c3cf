"""What a job requests: time limits, and what each place takes."""

import pytest

from amp_core import RunError
from amp_core.settings.resources import PLACES, Resources, takes


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        (None, None),
        ("90", 5400),
        ("0:05", 5),
        ("2:00:00", 7200),
        ("1-06", 108_000),
        ("1-06:30", 109_800),
        ("2-00:00:01", 172_801),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(limit: str | None, seconds: int | None) -> None:
    assert Resources(on="slurm", time=limit).time_s == seconds


@pytest.mark.parametrize("place", PLACES)
def test_a_place_refuses_what_it_does_not_take(place: str) -> None:
    wanted = {"partition": "gpu", "gpus": 1, "nodes": 2, "time": "1", "account": "a", "setup": ("x",), "requeue": True}
    for name, value in wanted.items():
        if name in takes(place):
            assert getattr(Resources(on=place, **{name: value}), name) == value
        else:
            with pytest.raises(RunError, match=f"^{name}=.* not to on='{place}'"):
                Resources(on=place, **{name: value})
