"""HTML from its parts: what is no markup is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Markup(str):
    """HTML, which is not escaped again."""

    __slots__ = ()


def element(name: str, *content: str, **attributes: str | bool) -> Markup:
    """`element("p.lead", "a < b", id="x")` is `<p class="lead" id="x">a &lt; b</p>`.

    Classes stand behind dots. Hyphens of an attribute are written as `_`; one that is True has no
    value, and one that is False is left out.
    """
    tag, _, classes = name.partition(".")
    written = f' class="{classes.replace(".", " ")}"' if classes else ""
    for attribute, value in attributes.items():
        if value is not False:
            written += f" {attribute.replace('_', '-')}"
            written += "" if value is True else f'="{escape(value)}"'
    inside = "".join(part if isinstance(part, Markup) else escape(part) for part in content)
    if tag == "path" and not inside:
        return Markup(f"<{tag}{written}/>")
    return Markup(f"<{tag}{written}>{inside}</{tag}>")


def lines(parts: Iterable[Markup]) -> Markup:
    """Each on a line of its own."""
    return Markup("\n" + "".join(f"{part}\n" for part in parts))
