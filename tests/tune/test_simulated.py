"""On a simulated busy machine a search is right or says that it is undecided; see `simulated`."""

import pytest

from tests.tune.simulated import CASES, LOADS, outcome, outcomes, simulated_search


def test_a_search_among_bursts_of_other_work_is_right(tmp_path):
    case = CASES["modest gain"]
    assert outcome(case, simulated_search(tmp_path / "tune", case, "bursts", seed=1)) == "right"


@pytest.mark.whole
def test_no_search_is_wrong_and_less_than_a_quarter_undecided(tmp_path):
    searches = len(CASES) * len(LOADS)
    counts = outcomes(tmp_path, searches)
    assert counts["wrong"] == 0 and counts["undecided"] < 0.25 * searches, counts
