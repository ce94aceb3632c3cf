"""Text of a run for a terminal, or for a program that reads it."""

from unicodedata import category


def printable(text: str) -> str:
    """`text` without control characters: names in a run are untrusted."""
    return "".join(c if c == "\n" or not category(c).startswith("C") else "?" for c in text)
