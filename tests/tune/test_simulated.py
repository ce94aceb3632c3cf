"""On a simulated busy machine a search is right or says that it is undecided; see `simulated`."""

from collections import Counter

import pytest

from tests.tune.simulated import CASES, LOADS, outcome, simulated_search

SEARCHES = 200


def test_a_search_among_bursts_of_other_work_is_right(tmp_path):
    case = CASES["modest gain"]
    assert outcome(case, simulated_search(tmp_path / "tune", case, "bursts", seed=1)) == "right"


@pytest.mark.whole
def test_of_two_hundred_searches_at_most_one_is_wrong_and_a_quarter_undecided(tmp_path):
    names, outcomes = [*CASES], Counter()
    for seed in range(SEARCHES):
        case, load = CASES[names[seed % len(names)]], LOADS[seed // len(names) % len(LOADS)]
        outcomes[outcome(case, simulated_search(tmp_path / f"{seed}", case, load, seed))] += 1
    assert outcomes["wrong"] <= 1 and outcomes["undecided"] < 0.25 * SEARCHES, outcomes
