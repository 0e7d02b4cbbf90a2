"""Random calls with class probabilities, kept sets, further classes and divergences from each
teacher: both backends against full logits in float64.

    python tests/fuzz_pairs.py --seed 1 --cases 1000        (`make fuzz-pairs`)
    python tests/fuzz_pairs.py --seed 1 --only 4711         one case again, as a failure says it

Even numbers have the sizes and options of the 64 cases beside them, as JAX compiles for each; odd
ones run in PyTorch alone. `--backends ranks mesh` spreads the calls over three gloo ranks and over
host devices. Modules are in `fuzzing/`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fuzzing import pairs_spread
from fuzzing.pairs import draw
from fuzzing.pairs_held import held, run_jax, run_torch
from fuzzing.pairs_mesh import meshed, run_mesh
from xentlib.tools.harness.ranks import run_ranks

RUN: dict[str, Callable[..., Any]] = {"torch": run_torch, "jax": run_jax}
OF_RANKS, WORLD, BATCH = "ranks", 3, 100


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
        whole = backend == "mesh" and "vocab" in pair.call.keywords  # "intersect" is of such heads
        if whole or (backend != "torch" and not pair.jax):
            continue
        case = meshed(seed, number) if backend == "mesh" else None
        of = case.way + " of a mesh" if case is not None else backend
        ran[f"{pair.call.function} in {of}"] += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if case is not None:
                    found += held("jax", case.pair, after(run_mesh(case)))
                else:
                    found += held(backend, pair, after(RUN[backend](pair)))
        except Exception as error:  # noqa: BLE001 - whatever it is, it was looked for
            found.append(f"{backend} raised {type(error).__name__}: {error} ({pair.text})")
    return [f"--seed {seed} --only {number}: {text}" for text in found]


def over_ranks(
    seed: int, numbers: Iterable[int], world: int = WORLD
) -> tuple[Counter[str], list[str]]:
    """As `fuzz`, over so many ranks of gloo, which are started once."""
    return of_parts(seed, numbers, parts_of(seed, numbers, world))


def parts_of(seed: int, numbers: Iterable[int], world: int = WORLD) -> list[tuple[Any, ...]]:
    """What the ranks got, of each call."""
    items = [(seed, number, None) for number in numbers]
    return list(zip(*run_ranks("torch", pairs_spread.of_rank, items, world)))


def of_parts(
    seed: int, numbers: Iterable[int], parts: Iterable[Sequence[Any]]
) -> tuple[Counter[str], list[str]]:
    ran, found = Counter[str](), list[str]()
    for number, of_ranks in zip(numbers, parts):
        case = pairs_spread.spread(seed, number, len(of_ranks))
        ran[f"{case.pair.call.function} on ranks, {case.way}"] += 1
        texts = pairs_spread.held_together(case, list(of_ranks))
        found += [f"--seed {seed} --only {number}: {text}" for text in texts]
    return ran, found


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
    known = [*RUN, "mesh", OF_RANKS]
    parser.add_argument("--backends", nargs="+", default=list(RUN), choices=known)
    asked = parser.parse_args(arguments)
    # Before JAX is there.
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    numbers = range(asked.cases) if asked.only is None else [asked.only]
    ran, failed, started = Counter[str](), set[str](), time.monotonic()

    def told(texts: list[str]) -> None:
        print("\n".join(texts[:4]), end="\n" * bool(texts), flush=True)
        failed.update(text.split(":")[0] for text in texts)

    alone = [name for name in asked.backends if name != OF_RANKS]
    for number in numbers if alone else ():
        told(attempt(asked.seed, number, alone, ran))
    for start in range(0, len(numbers), BATCH) if OF_RANKS in asked.backends else ():
        of_ranks, found = over_ranks(asked.seed, numbers[start : start + BATCH])
        ran += of_ranks
        told(found)
    for name, count in sorted(ran.items()):
        print(f"{count:7d}  {name}")
    print(f"seed {asked.seed}: {len(failed)} failed, {time.monotonic() - started:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
