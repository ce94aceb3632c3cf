r"""Decode JSON that a profiler wrote wrongly.

    >>> decode(r'{"name": "C:\Users\me\train.py(3): step", "dur": nan}', 0)
    ({'name': 'C:\\Users\\me\\train.py(3): step', 'dur': None}, 53)

Known faults, by issue of pytorch/kineto: backslashes of Windows paths (#336, #617, #750), quotes within a text
(#1459), values that are missing or not quoted (#1213), `nan`, `inf` and `N/A` for numbers. It is far slower than
`json`, and only for values that `json` refuses.

A quote ends a text if what follows can follow a text there. The backslashes of a text that has one invalid escape are
all taken as they are, since `C:\new` has a valid one.
"""

import json
import re
from typing import Any, Literal

Place = Literal["key", "member", "item"]
"""A key, the value of a key, or an item of a list."""
_MAX_DEPTH = 64
_SPACE = re.compile(r"[ \t\r\n]*")
_STOP = re.compile(r'["\\]')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_INVALID_ESCAPE = re.compile(r'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_AFTER: dict[Place, re.Pattern[str]] = {
    "key": re.compile(r"\s*:"),
    "member": re.compile(r'\s*(?:\}|,\s*"[^"\\]{0,200}"\s*:)'),
    "item": re.compile(r'\s*(?:\]|,\s*(?:["\[{\-\d]|true|false|null))'),
}
"""What can follow a text, by its place."""
_BARE = re.compile(r'[^"{}\[\],:\\\x00-\x1f]{0,200}(?=\s*[,}\]])')
_NO_NUMBER = re.compile(r"[-+]?(?:nan|inf|infinity)|n/?a|none|", re.IGNORECASE)
_SCAN = json.JSONDecoder(strict=False).raw_decode


def decode(text: str, at: int, place: Place = "item") -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends. `place`: as what it stands there. Raises `ValueError` where no
    value can be made out, or where the text ends first."""
    return _value(text, at, place, 0)


def _value(text: str, at: int, place: Place, depth: int) -> tuple[Any, int]:
    at = _skip(text, at)
    char = text[at : at + 1]
    if depth > _MAX_DEPTH or not char:
        raise ValueError("nested too deep, or cut off")
    if char == "{":
        return _object(text, at + 1, depth)
    if char == "[":
        return _array(text, at + 1, depth)
    if char == '"':
        return _text(text, at, place)
    try:
        return _SCAN(text, at)
    except ValueError:
        bare = _BARE.match(text, at)
        if bare is None or (not bare.group().strip() and text[bare.end()] != ","):
            raise ValueError("no value") from None
        word = bare.group().strip()
        return None if _NO_NUMBER.fullmatch(word) else word, bare.end()


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    result: dict[str, Any] = {}
    while True:
        at = _skip(text, at)
        char = text[at : at + 1]
        if char == "}":
            return result, at + 1
        if char == ",":
            at += 1
        elif char == '"':
            key, at = _text(text, at, "key")
            at = _skip(text, at) + 1  # the colon, which a key's end requires
            result[key], at = _value(text, at, "member", depth + 1)
        else:
            raise ValueError("no key")


def _array(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    result: list[Any] = []
    while True:
        at = _skip(text, at)
        char = text[at : at + 1]
        if char == "]":
            return result, at + 1
        if char == ",":
            at += 1
            continue
        value, at = _value(text, at, "item", depth + 1)
        result.append(value)


def _text(text: str, start: int, place: Place) -> tuple[str, int]:
    at = start + 1
    while match := _STOP.search(text, at):
        at = match.end()
        ends = _AFTER[place].match(text, at)
        if match.group() == '"' and ends:
            return _unescaped(text[start + 1 : at - 1]), at
        if match.group() == "\\":
            closing = text[at : at + 1] == '"' and _AFTER[place].match(text, at + 1)
            if closing and _INVALID_ESCAPE.search(text, start, at - 1):  # a Windows path that ends in a backslash
                return _unescaped(text[start + 1 : at]), at + 1
            escape = _ESCAPE.match(text, at - 1)
            at = escape.end() if escape else at
    raise ValueError("a text without an end")


def _unescaped(inside: str) -> str:
    if _INVALID_ESCAPE.search(inside):
        return inside
    unquoted = re.sub(r'(\\.)|"', lambda match: match.group(1) or r"\"", inside, flags=re.DOTALL)
    result: str = json.loads(f'"{unquoted}"', strict=False)
    return result


def _skip(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
