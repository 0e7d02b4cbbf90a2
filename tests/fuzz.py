"""Random calls of the three functions, for as long as asked: both backends against the oracle, and
the oracle against the losses of torch and of optax in float64.

    python tests/fuzz.py --seed 1 --seconds 60        (`make fuzz`)
    python tests/fuzz.py --seed 1 --only 4711         one case again, as a failure says it

A case is drawn from (seed, number) alone. What a compiler must know (sizes, dtype, options) is the
same for PERIOD / 2 even numbers, as JAX compiles for each; odd numbers have sizes of their own, and
run in PyTorch alone. Where the contract claims nothing, a check is left out under a name of
UNCLAIMED and counted. Not drawn: shards, heads that are spread, operands of two dtypes.

What is drawn, what is right, what is held and what others say of it stand in `fuzzing/`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fuzzing.draw import PERIOD, Drawn, draw, problem_of, shaped
from fuzzing.findings import UNCLAIMED, Findings
from fuzzing.held import between, held, same_chunks
from fuzzing.others import others_agree
from fuzzing.shrink import shrunken
from fuzzing.truth import truth_of
from xentlib.contract import failures
from xentlib.tools.harness.backends import run, run_given, run_logprobs
from xentlib.tools.harness.device import contract_settings
from xentlib.tools.harness.problems import Upstream, upstream_of

__all__ = ["PERIOD", "RUN", "attempt", "draw", "fuzz", "hold", "problem_of"]

RUN: dict[str, Callable[..., Any]] = {
    "chunked_nll": run,
    "chunked_logprobs": run_logprobs,
    "vocab_parallel_logprobs": run_given,
}


def hold(d: Drawn, runs: Mapping[str, Callable[..., Any]], left_out: Counter[str]) -> list[str]:
    """Sentences of what falls short."""
    given, findings = problem_of(d), Findings(left_out)
    upstream = None
    if d.function != "chunked_nll":
        drawn = upstream_of(given, d.seed + d.number)
        upstream = Upstream(*(g if use else None for g, use in zip(drawn, d.used)))
    truth = truth_of(d, given, upstream)
    if not findings.claims("float16 range", truth.fits):
        return []
    called = shaped(given, d.leading)
    inputs: list[Any] = [called]
    if upstream is not None:
        cut = called.labels.shape
        inputs.append(Upstream(*(None if g is None else g.reshape(cut) for g in upstream)))
    more: dict[str, Any] = {"audit": d.audit}
    if d.function == "vocab_parallel_logprobs":
        more["label_smoothing"] = given.options.get("label_smoothing", 0.0)
    outcomes = {}
    for backend in d.backends:
        call = partial(runs[d.function], backend, *inputs, **more)
        outcomes[backend] = outcome = call(chunk_tokens=d.chunk)
        held(findings, d, given, truth, backend, outcome)
        if d.chunk is not None and backend == "torch" and not d.audit:
            same_chunks(findings, d, outcome, call())
    if len(outcomes) == 2:
        between(findings, d, truth, *outcomes.values())
    others_agree(findings, d, truth, upstream)
    return failures(findings.measurements)


class Report(NamedTuple):
    """How many cases and calls, how many checks were left out, sentences of what falls short."""

    calls: Counter[str]
    left_out: Counter[str]
    failed: list[str]


def attempt(runs: Mapping[str, Callable[..., Any]], left_out: Counter[str], d: Drawn) -> list[str]:
    """As `hold`; what is raised falls short too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy, about inf and NaN
        try:
            return hold(d, runs, left_out)
        except Exception as error:  # noqa: BLE001 - whatever it is, it was looked for
            return [f"raised: {type(error).__name__}: {error} ({d.text})"]


def fuzz(
    seed: int,
    numbers: Iterable[int],
    *,
    seconds: float = np.inf,
    runs: Mapping[str, Callable[..., Any]] = RUN,
    say: Callable[[str], None] = print,
    shrink: bool = True,
) -> Report:
    """Cases of a seed by their numbers, until time is up. The caller sets what `main` sets."""
    report, count = Report(Counter(), Counter(), []), 0
    started = time.monotonic()
    for number in numbers:
        if time.monotonic() - started >= seconds:
            break
        d = draw(seed, number)
        report.calls["cases"] += 1
        report.calls.update(f"{d.function} in {backend}" for backend in d.backends)
        found = attempt(runs, report.left_out, d)
        if found:
            count += 1
            say(f"--seed {seed} --only {number}: {found[0]}")
            if shrink:
                say("  shrunken: " + shrunken(d, found[0], partial(attempt, runs, Counter())))
            for more in found[1:6]:
                say(f"  and {more}")
        report.failed.extend(f"--seed {seed} --only {number}: {text}" for text in found)
        if report.calls["cases"] % 1000 == 0:
            spent = time.monotonic() - started
            say(f"{report.calls['cases']} cases, {count} failed, {spent:.0f} s")
    return report


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Random calls against the oracle.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="so many, whatever time they take")
    parser.add_argument("--seconds", type=float, help="60 if nothing else is said")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one case of the seed")
    parser.add_argument("--no-shrink", action="store_true", help="do not look for simpler cases")
    asked = parser.parse_args(arguments)
    numbers: Iterable[int] = itertools.count()
    seconds = np.inf if asked.seconds is None else asked.seconds
    if asked.only is not None:
        numbers = [asked.only]
    elif asked.cases is not None:
        numbers = range(asked.cases)
    elif asked.seconds is None:
        seconds = 60.0
    # What the contract's rows hold under; JAX reads it when it is first loaded.
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_allow_excess_precision=false".strip()
    started = time.monotonic()
    with contract_settings(("torch", "jax")):
        report = fuzz(asked.seed, numbers, seconds=seconds, shrink=not asked.no_shrink)
    spent = time.monotonic() - started
    for name, count in sorted(report.left_out.items()):
        print(f"{count:7d}  left out, {name}: {UNCLAIMED[name]}")
    for name, count in sorted(report.calls.items()):
        print(f"{count:7d}  {name}")
    rate = report.calls["cases"] / spent
    failed = {line.split(":")[0] for line in report.failed}
    print(f"seed {asked.seed}: {len(failed)} failed, {spent:.0f} s, {rate:.1f} cases a second")
    return int(bool(report.failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
