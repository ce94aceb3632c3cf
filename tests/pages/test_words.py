"""Numbers and states in words."""

import math

import pytest

from amp_core.analysis.comparison.answer import in_one_line
from amp_core.text.formatting import amount
from pages.parts import words


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (0.0, "0"),
        (2.34567, "2.35"),
        (-0.5, "−0.500"),
        (1234.5, "1,234"),
        (0.00012345, "1.23 × 10⁻⁴"),
        (98765432.0, "9.88 × 10⁷"),
    ],
)
def test_a_number_has_three_significant_digits(value, expected):
    assert words.number(value) == expected


def test_loss_scales_are_written_as_powers_of_two_if_they_are():
    assert [words.scale(v) for v in (65536.0, 1.0, 0.5, 2.0**-24, 1000.0, None)] == [
        "2¹⁶",
        "1",
        "2⁻¹",
        "2⁻²⁴",
        "1,000",
        "–",
    ]


def test_sizes_and_times_have_units():
    assert [words.size(v) for v in (512, 3_400_000, 5 * 2**30, None)] == ["512 bytes", "3.24 MiB", "5.00 GiB", "–"]
    assert [words.duration(v) for v in (0.0123, 12.0, 75, 7260)] == ["12.3 ms", "12.0 s", "1 min 15 s", "2 h 1 min"]
    assert [words.about(v) for v in (0.2, 61, 400, 8000)] == [
        "about 1 s",
        "about 61 s",
        "about 7 min",
        "about 2 h 13 min",
    ]


def test_a_count_of_one_is_in_the_singular():
    assert [amount(v, "skipped steps") for v in (1, 2)] == ["1 skipped step", "2 skipped steps"]
    assert amount(1, "backward passes") == "1 backward pass" and amount(1, "cosine") == "1 cosine"


def test_memory_is_compared_in_percent_or_as_a_ratio():
    row = {"recipe": "b", "precision": "fp16", "speed_ratio": 1.0, "speed_verdict": "not measured", "parity": "worse"}
    page_text = [in_one_line(row | {"memory_ratio": ratio}).split(", ")[1] for ratio in (0.6, 1.01, 1.5, 8.2)]
    assert page_text == ["40.0 % less memory", "the same memory", "50.0 % more memory", "8.20 × the memory"]


def test_a_nan_loss_is_distinguished_from_a_missing_one():
    assert (words.loss(math.nan), words.loss(None), words.loss(2.0)) == ("NaN", "–", "2.00")


def test_a_message_ends_as_a_sentence():
    assert words.sentence("steps=-4 is not possible") == "steps=-4 is not possible."
    assert words.sentence("Is it?") == "Is it?"


def test_markup_in_names_is_text():
    assert words.escape("a_b[c]\n*d*") == r"a\_b\[c\] \*d\*"


def test_every_status_has_a_colour_and_an_icon():
    states = {"queued", "starting", "running", "finished", "stopped", "failed", "lost", "damaged"}
    assert states == set(words.STATUS_LOOK)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0999755859375, "0.0999755859375"),
        (65504.0, "65504"),
        (2.0**-24, "2⁻²⁴"),
        (-(2.0**-24), "−2⁻²⁴"),
        (1.0, "1"),
        (-0.25, "−0.25"),
        (3.0e-8, "3 × 10⁻⁸"),
        (0.0, "0"),
        (-math.inf, "−∞"),
        (math.nan, "–"),
    ],
)
def test_stored_values_keep_all_digits(value, expected):
    assert words.exactly(value) == expected


def test_numbers_stay_with_their_units():
    page_text = words.unbroken("1 step of 400 (0.25 %) in 10 s, 3 MiB, 4.5 × as fast; 4 steps, 2 samples, 5 min 20 s")
    together = "1 step of 400 (0.25_%) in 10_s, 3_MiB, 4.5_× as fast; 4 steps, 2 samples, 5_min 20_s"
    assert page_text.replace("\u00a0", "_") == together


def test_powers_in_a_text_are_superscript():
    assert words.raised("from 2^−24 to 2^15, 1e-8") == "from 2⁻²⁴ to 2¹⁵, 1e-8"


def test_a_users_script_is_named_without_its_folder():
    assert words.workload({"workload": "/home/me/tasks/my_task.py:build", "size": None}) == "my_task.py:build"
    assert words.workload({"workload": "text-gpt", "size": "tiny"}) == "text-gpt tiny" and words.workload({}) == ""


def test_a_share_of_a_few_is_written_by_its_counts():
    """One of 400 is not 0.250 %: one more would double it."""
    assert words.share_of(1, 400) == "1 of 400" and words.share_of(0, 400) == "0 of 400"
    assert words.share_of(40, 400) == "40 of 400 (10.0 %)" and words.share_of(0, 0) == "0 of 0"
    assert words.share_of(float("nan"), 400) == words.NONE


def test_an_estimated_range_of_whole_numbers_has_two_digits_and_is_rounded_outwards():
    assert words.whole_range(74_932, 96_235) == "74,000–97,000"
    assert words.whole_range(7, 12) == "7–12" and words.whole_range(5, 5) == "5" and words.whole_range(0, 3) == "0–3"
    assert words.whole_range(None, None) == words.NONE


def test_prose_shows_code_and_escapes_the_rest():
    assert words.prose("call `a_b(x)` *now*") == r"call `a_b(x)` \*now\*"
    assert words.prose("a `stray *b*") == r"a \`stray \*b\*"
