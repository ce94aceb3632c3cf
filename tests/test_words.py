"""Phrases that CONTRIBUTING's word list retires are in no text that a user or a contributor reads."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.paths import ROOT


@cache
def retired_phrases() -> list[str]:
    """The phrases in quotation marks in the third column of the table in CONTRIBUTING."""
    words = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Words")[2]
    rows = [line.strip("|").split("|") for line in words.splitlines() if line.startswith("| ")]
    return [phrase for row in rows for phrase in re.findall("“(.+?)”", row[2])]


def checked_files() -> list[Path]:
    """README, docs and all Python files of the product."""
    python = [path for folder in ("amp_core", "pages") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "app.py", ROOT / "server.py", *python]


@cache
def retired() -> re.Pattern[str]:
    """What matches any retired phrase."""
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, retired_phrases()))})\b")


def retired_in(text: str) -> list[str]:
    """The retired phrases in `text`, wherever its lines break."""
    return retired().findall(re.sub(r"[\s#]+", " ", text.lower()))


def texts(path: Path) -> Iterator[str]:
    """The text of a file in pieces: of Python, its strings with adjacent literals joined, and its comments."""
    source = path.read_text(encoding="utf-8")
    yield source
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_word_list_has_phrases_to_hold_out() -> None:
    assert len(retired_phrases()) > 40 and "matrix work" in retired_phrases()


@pytest.mark.parametrize("text", ["Most is matrix\n    work.", "# this is matrix\n# work"])
def test_a_phrase_is_recognized_across_lines(text: str) -> None:
    assert retired_in(text) == ["matrix work"]


def test_no_text_has_a_retired_phrase() -> None:
    faults = {
        f"{path.relative_to(ROOT)}: {phrase}"
        for path in checked_files()
        for text in texts(path)
        for phrase in retired_in(text)
    }
    assert faults == set()
