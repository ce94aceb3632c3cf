"""On a simulated busy machine a search is right or says that it is undecided; see `simulated`."""

import pytest

from tests.tune.simulated import CASES, CROWD, LOADS, outcome, outcomes, simulated_search


def test_a_search_among_bursts_of_other_work_is_right(tmp_path):
    case = CASES["modest gain"]
    assert outcome(case, simulated_search(tmp_path / "tune", case, "bursts", seed=1)) == "right"


def test_two_recipes_of_equal_speed_are_raced_until_the_simpler_one_is_as_fast(tmp_path):
    case = CASES["equal 16 bits"]
    result = simulated_search(tmp_path / "tune", case, CROWD, seed=0)
    assert outcome(case, result) == "right", result.answer
    raced = {row.name: row for row in result.tried if row.stage == "rivals"}
    assert list(raced) == ["bf16", "fp16"] and raced["fp16"].speed_ratio_high < 1.06


def test_a_rival_that_is_surely_faster_takes_the_place_of_the_confirmed_recipe(tmp_path):
    case = CASES["slightly faster rival"]
    result = simulated_search(tmp_path / "tune", case, CROWD, seed=0)
    assert outcome(case, result) == "right", result.answer
    assert [row.name for row in result.tried if row.stage == "confirm"] == ["fp32", "bf16", "fp16"]


@pytest.mark.whole
def test_no_search_is_wrong_and_less_than_a_quarter_undecided(tmp_path):
    searches = len(CASES) * len(LOADS)
    counts = outcomes(tmp_path, searches)
    assert counts["wrong"] == 0 and counts["undecided"] < 0.25 * searches, counts
