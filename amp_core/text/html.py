"""HTML by construction: everything that is not `Html` is text, and is escaped.

>>> tag("p", "a run named ", tag("b", "<script>"))
'<p>a run named <b>&lt;script&gt;</b></p>'
"""

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML. Only `tag` and `join` make it, from escaped parts."""

    __slots__ = ()


def tag(name: str, *children: object, **attributes: object) -> Html:
    """One element. In attribute names `_` becomes `-`, and a trailing `_` is dropped (`class_`); None and False omit
    one."""
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    written = "".join(
        f" {key}" if value is True else f' {key}="{escape(str(value))}"'
        for key, value in given.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[object]) -> Html:
    """Parts one after another; None is omitted."""
    return Html("".join(p if isinstance(p, Html) else escape(str(p)) for p in parts if p is not None))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> Html:
    """A table; its first column names the rows. It scrolls sideways on a narrow page."""
    header = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))) if any(head) else None
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    caption_tag = tag("caption", caption) if caption else None
    return tag("div", tag("table", caption_tag, header, tag("tbody", *body)), class_="scroll")
