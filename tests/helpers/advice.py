"""The calls that messages of the package print, taken out of the message that was raised."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from typing import Any

import pytest

from xentlib.checks.validators import Refusals

# A call, or a keyword with its value, between backticks.
PRINTED = re.compile(r"`([^`]*\([^`]*\)[^`]*|[a-z_]+=[^`]+)`")


def tables() -> dict[str, str]:
    """Every message of the package, as "TABLE.name"."""
    import xentlib

    found = {}
    for module in pkgutil.walk_packages(xentlib.__path__, "xentlib."):
        if module.name.startswith("xentlib.checks."):
            for name, table in vars(importlib.import_module(module.name)).items():
                if isinstance(table, Refusals):
                    found |= {f"{name}.{key}": text for key, text in table.messages.items()}
    return found


def advised(text: str) -> list[str]:
    """What stands after "got", where a message says the way out."""
    return PRINTED.findall(text.partition("; got")[2])


def with_advice() -> dict[str, list[str]]:
    return {name: codes for name, text in tables().items() if (codes := advised(text))}


def refusal(call: Callable[[], Any], name: str) -> str:
    """What `call` is refused with, which is the message of this name."""
    opening = tables()[name].partition("; got")[0]
    pattern = re.sub(r"\\\{.*?\\\}", ".*", re.escape(opening))
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    said = str(raised.value)
    assert re.search(pattern, said, re.DOTALL), f"{name}: {said}"
    return said


def code_of(call: Callable[[], Any], name: str, opening: str = "") -> str:
    """The code that the refusal of `call` prints, the one that begins so."""
    codes = [code for code in advised(refusal(call, name)) if code.startswith(opening)]
    assert len(codes) == 1, f"{name}: {codes}"
    return codes[0]


def keywords_of(code: str, **names: Any) -> dict[str, Any]:
    """Of `name=value`, or several."""
    found: dict[str, Any] = eval(f"dict({code})", names)
    return found
