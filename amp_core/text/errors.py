"""Exceptions in one line: torch's own name every backend that lacks an operator, in thousands of characters."""

MAX_LENGTH = 200


def in_one_line(error: BaseException) -> str:
    """The class of an exception and the first line of its message, as far as it is short."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:MAX_LENGTH]}" if lines else type(error).__name__
