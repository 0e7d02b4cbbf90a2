"""Random calls with class probabilities, kept sets, further classes and divergences from each
teacher: both backends against full logits in float64.

    python tests/fuzz_pairs.py --seed 1 --cases 1000        (`make fuzz-pairs`)
    python tests/fuzz_pairs.py --seed 1 --only 4711         one case again, as a failure says it

Even numbers have the sizes and options of the 64 cases beside them, as JAX compiles for each; odd
ones run in PyTorch alone. Not drawn: shards, heads that are spread. Modules are in `fuzzing/`.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from fuzzing.pairs import draw
from fuzzing.pairs_held import held, run_jax, run_torch

RUN: dict[str, Callable[..., Any]] = {"torch": run_torch, "jax": run_jax}


def attempt(
    seed: int,
    number: int,
    backends: Iterable[str],
    ran: Counter[str],
    after: Callable[[Any], Any] = lambda outcome: outcome,
) -> list[str]:
    """Sentences of what falls short, and of what is raised; `after` changes what a call gives."""
    pair = draw(seed, number)
    found = []
    for backend in backends:
        if backend == "jax" and not pair.jax:
            continue
        ran[f"{pair.call.function} in {backend}"] += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found += held(backend, pair, after(RUN[backend](pair)))
        except Exception as error:  # noqa: BLE001 - whatever it is, it was looked for
            found.append(f"{backend} raised {type(error).__name__}: {error} ({pair.text})")
    return [f"--seed {seed} --only {number}: {text}" for text in found]


def fuzz(
    seed: int, numbers: Iterable[int], backends: Iterable[str] = ("torch", "jax"), **more: Any
) -> tuple[Counter[str], list[str]]:
    """How often each function ran, and what fell short."""
    ran, found = Counter[str](), list[str]()
    for number in numbers:
        found += attempt(seed, number, backends, ran, **more)
    return ran, found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one case of the seed")
    parser.add_argument("--backends", nargs="+", default=["torch", "jax"], choices=list(RUN))
    asked = parser.parse_args(arguments)
    numbers = range(asked.cases) if asked.only is None else [asked.only]
    ran, found, started = Counter[str](), 0, time.monotonic()
    for number in numbers:
        texts = attempt(asked.seed, number, asked.backends, ran)
        found += bool(texts)
        print("\n".join(texts[:4]), end="\n" * bool(texts), flush=True)
    for name, count in sorted(ran.items()):
        print(f"{count:7d}  {name}")
    print(f"seed {asked.seed}: {found} failed, {time.monotonic() - started:.0f} s")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
