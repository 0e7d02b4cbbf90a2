"""The simplest case that falls short as a drawn one does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzzing.draw import Drawn
from xentlib.tools.harness.problems import Case


def simpler(d: Drawn) -> Iterator[Drawn]:
    """The same case with one thing less."""
    plain = Case(d.case.id, d.case.tokens, d.case.hidden, d.case.vocab)
    for name in ("offset", "ties", "masked", "poison", "chunk", "leading"):
        if getattr(d, name):
            yield replace(d, **{name: Drawn.__dataclass_fields__[name].default})
    for name in d.case.options:
        if name != "reduction":
            rest = {k: v for k, v in d.case.options.items() if k != name}
            yield replace(d, case=replace(d.case, options=rest))
    for name in ("where", "token_weights", "class_weights", "token_temperature"):
        if getattr(d.case, name):
            yield replace(d, case=replace(d.case, **{name: False}))
    for name in ("std", "ignored", "confident", "layout"):
        value = 0.0 if name == "ignored" else getattr(plain, name)
        if getattr(d.case, name) != value:
            yield replace(d, case=replace(d.case, **{name: value}))
    if d.case.bias and not d.offset and not d.masked:
        yield replace(d, case=replace(d.case, bias=False))
    if d.leading:
        return
    for name in ("tokens", "vocab", "hidden"):
        if name == "hidden" and d.function == "vocab_parallel_logprobs":
            continue
        size = getattr(d.case, name)
        for smaller in (size // 2, size - 1):
            if smaller >= 1:
                yield replace(d, case=replace(d.case, **{name: smaller}))


def shrunken(d: Drawn, said: str, again: Callable[[Drawn], list[str]], most: int = 60) -> str:
    """The simplest case found that falls short of the same row and quantity."""

    def key(sentence: str) -> str:
        return sentence.split(": ", maxsplit=1)[0]

    while most > 0:
        for candidate in simpler(d):
            most -= 1
            found = [s for s in again(candidate) if key(s) == key(said)]
            if found:
                d, said = candidate, found[0]
                break
            if most <= 0:
                break
        else:
            break
    return said
