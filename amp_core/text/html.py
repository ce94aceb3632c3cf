"""HTML by construction: what is not `Html` already is text, and is escaped.

>>> tag("p", "a run named ", tag("b", "<script>"))
'<p>a run named <b>&lt;script&gt;</b></p>'
"""

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML. Made by `tag` and `join` alone, from parts that were escaped."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Html:
    """One element. In names of attributes `_` is `-`, at their end nothing (`class_`); None and False leave one out."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    written = "".join(
        f" {key}" if value is True else f' {key}="{escape(str(value))}"'
        for key, value in given.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[object]) -> Html:
    """Parts one after another; None is left out."""
    return Html("".join(p if isinstance(p, Html) else escape(str(p)) for p in parts if p is not None))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> Html:
    """A table; its first column names the rows. It may be scrolled sideways where the page is narrow."""
    header = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))) if any(head) else None
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    caption_tag = tag("caption", caption) if caption else None
    return tag("div", tag("table", caption_tag, header, tag("tbody", *body)), class_="scroll")
