"""Myths about formats: the numbers in their corrections are those of the formats."""

import numpy as np
import pytest

from amp_core.analysis.format_lab.myths import format_myths

CLAIMS = {claim.claim: claim for claim in format_myths()}


def precisely(start: str) -> str:
    return next(c.correction for text, c in CLAIMS.items() if text.startswith(start))


def test_each_myth_has_a_rating_and_a_correction() -> None:
    assert len(CLAIMS) >= 10
    assert {c.rating for c in CLAIMS.values()} == {"true", "imprecise", "false"}
    assert all(c.correction.endswith(".") for c in CLAIMS.values())


@pytest.mark.parametrize(
    ("start", "numbers"),
    [
        ("FP16 has 1 sign", ["1 + 5 + 10", "1 + 8 + 23"]),
        ("0.125", ["0000000000", "01100", "is 12"]),
        ("Numbers below 6e-5", ["6.10 × 10⁻⁵ = 2^−14", "5.96 × 10⁻⁸ = 2^−24", "2.98 × 10⁻⁸ = 2^−25", "become 0;"]),
        ("FP16 has 40", ["FP32 has 277", "30 and 254"]),
        ("BF16 has the range", ["3.39 × 10³⁸", "3.40 × 10³⁸", "8 of 24 significant bits", "256 + 1 is 256"]),
        ("TF32", ["1 + 8 + 10", "19"]),
        ("Types", ["16,777,217", "16,777,216"]),
        ("IEEE", ["448", "57344"]),
    ],
)
def test_numbers_in_words(start: str, numbers: list[str]) -> None:
    assert [n for n in numbers if n not in precisely(start)] == []


def test_updates_are_lost_exactly_if_numpy_rounds_them_away() -> None:
    assert np.float16(1) + np.float16(1 / 2048) == 1 and "stays 1," in precisely("An update")
    assert f"{np.float16(1.5) + np.float16(1.5 / 2048):.8g}" == "1.5009766" and "1.5009766" in precisely("An update")
    near = np.float16(2047 / 1024)
    assert near + np.float16(near / 4096) == near and near + np.float16(near / 2100) != near
    assert f"stays {near:.6g}." in precisely("An update")
