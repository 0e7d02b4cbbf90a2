"""The case grid of the operator part, as data; the tests take their cases from here too.

Logit standard deviations 0.3, 1, 3, 6 (never sqrt(H)); odd and prime N and V; V no multiple of any
tile; 0, 20 and 100 % of the tokens ignored; confident tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.contract import SHARES
from xentlib.tools.harness.problems import Case

OPTIONS: dict[str, Any] = {
    "softcap": 5.0,
    "label_smoothing": 0.1,
    "z_loss": 1e-3,
    "logit_scale": 0.7,
}
SMOOTHED: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3}
EXTRAS: dict[str, Any] = {"token_temperature": True, "token_weights": True, "where": True}

# The case that mutants are made of: mean reduction, some tokens ignored, no weights.
BASE = Case("base", 509, 64, 1009, std=1.0)
CONFIDENT = Case("confident", 512, 64, 2048, std=6.0, confident=0.7)
WITH_OPTIONS = Case("options", 257, 96, 4099, std=1.0, options=OPTIONS, **EXTRAS)


def named(cases: Iterable[Case], *ids: str) -> tuple[Case, ...]:
    """These of the cases, in the order of the ids; KeyError where there is no such case."""
    by_id = {case.id: case for case in cases}
    return tuple(by_id[one] for one in ids)


# More classes than a block of a head that is read in them
BLOCKS = Case("blocks", 131, 48, 9001, class_weights=True, token_weights=True, options=SMOOTHED)


FEW, GIVEN = (131, 33, 509), (64, 64, 257)
NORMS = ("rho / u", "error ratio")
SHARES_OF = (*SHARES.values(), "bf16 bit-equal")
GRID = (
    BASE,
    Case("flat", 509, 64, 1009, std=0.3),
    Case("peaked", 509, 64, 1009, std=3.0),
    Case("sharp", 509, 64, 1009, std=6.0),
    CONFIDENT,
    WITH_OPTIONS,
    Case("options-peaked", 257, 96, 4099, std=3.0, options=OPTIONS, **EXTRAS),
    Case("sum", 257, 96, 4099, std=1.0, bias=False, options={"reduction": "sum"}),
    Case("denominator", 257, 96, 4099, std=1.0, options={"denominator": 100003.0}),
    Case("kernel-layout", 509, 48, 1009, std=1.0, layout="HV"),
    Case("odd-width", 131, 63, 1001, std=3.0, ignored=0.0),
    Case("all-ignored", 64, 32, 257, std=1.0, ignored=1.0),
    Case("one-token", 1, 32, 257, std=1.0, ignored=0.0),
    Case("one-class", 64, 32, 1, std=1.0, ignored=0.0),
    Case("class-weights", 131, 48, 1009, token_weights=True, class_weights=True, options=SMOOTHED),
    # Half of the logits are so far into the cap that 1 - tanh^2 has no digit left.
    Case("saturated", 61, 64, 1009, std=9.0, options={"softcap": 0.7}),
    Case("large", 1024, 256, 8192, std=1.0),
    # What a softmax without its maximum, and one whose logarithm is taken, cannot compute. With an
    # offset d hidden has 0 times it, of which the rounding errors are left: its norm says nothing.
    # 16 bits of a gradient that is off by |lse| u lie beside a tie more often.
    Case("logits-100", *FEW, std=3.0, bias=False, offset=100.0, unclaimed=(*NORMS, *SHARES_OF)),
    Case("logits-1e4", *GIVEN, std=3.0, bias=False, offset=1e4, given=True, unclaimed=NORMS),
    Case("far-label", *FEW, bias=False, below=200.0),
    Case("equal-logits", *FEW, std=0.0, bias=False),
    Case("minus-infinity", *FEW, std=3.0, dead=True),
    Case("given-logits", *GIVEN, bias=False, given=True),
)
# Sums over many tokens, in a product so narrow that a library may not cut it into blocks.
NARROW = Case("narrow", 32_771, 1, 101)
LARGE = {"wide": (256, 1024, 4096), "vocabulary": (256, 64, 32000), "tokens": (4096, 64, 2053)}
# Options at once, in two ways, no token that counts, and given logits.
QUICK_GRID = named(
    GRID,
    *("options-peaked", "class-weights", "all-ignored", "logits-1e4"),
)
FULL_GRID = (
    *GRID,
    NARROW,
    *(
        Case(f"{name}-{std:g}", *sizes, std=std, confident=0.3)
        for std in (0.3, 1.0, 3.0, 6.0)
        for name, sizes in LARGE.items()
    ),
)


SHORT = {"bfloat16": "bf16", "float16": "fp16"}


def low_precision(grid: tuple[Case, ...], dtype: str = "bfloat16") -> tuple[Case, ...]:
    """The 16-bit cases of a grid, without those that have few entries. A saturated softcap is left
    out too: its derivative multiplies the relative error of a logit by up to 26, and 1 % of the
    entries lie beside a tie; and logits of 1e4, which have no digits left in 16 bits."""
    small = ("one-token", "one-class", "all-ignored", "saturated", "logits-1e4")
    cases = (case for case in grid if case.id not in small)
    return tuple(replace(case, id=f"{case.id}-{SHORT[dtype]}", dtype=dtype) for case in cases)


# 10.7 M entries. Most of them bf16: two float64 results on either side of a rounding boundary of
# float32 are rare (4 of 57 M, all in sums of d weight that cancel), of bf16 65,536 times rarer.
AUDIT = (
    *(
        Case(
            f"audit-{index}",
            512,
            256,
            2053 if index % 5 == 0 else 4099,
            std=(0.3, 1.0, 3.0, 6.0)[index % 4],
            dtype="float32" if index % 5 == 0 else "bfloat16",
            options=OPTIONS if index % 2 else {},
            layout="HV" if index % 5 == 4 else "VH",
            **(EXTRAS if index % 2 else {}),
        )
        for index in range(10)
    ),
    Case("audit-fp16", 512, 64, 2053, std=3.0, dtype="float16"),
    Case("audit-fp16-options", 257, 64, 2053, dtype="float16", options=OPTIONS, **EXTRAS),
    Case(
        "audit-class-weights",
        256,
        64,
        2053,
        class_weights=True,
        dtype="bfloat16",
        options={"label_smoothing": 0.2},
    ),
    Case("audit-saturated", 64, 64, 2053, std=32.0, options={"softcap": 0.7}),
    # Every gradient is subnormal in float16.
    Case("audit-fp16-small", 512, 64, 2053, dtype="float16", options={"denominator": 1e5}),
)


class Extent(NamedTuple):
    """Of how much of its cases a section is."""

    seed: int = 0
    suite: str = "standard"

    @property
    def few(self) -> bool:
        return self.suite == "quick"


CHUNKS = (8, 16, 24, 40, 64, 128, 200, 512)
FEW_CHUNKS = (8, 24, 64, 200)


def chunks_of(backend: str, *, few: bool = False) -> tuple[int, ...]:
    """Rows of a chunk to ask for; half as many for functions that walk as `chunked_nll` does. In
    JAX a chunk has 64 rows at least on CPU: up to there it is one program, compiled once."""
    chunks = FEW_CHUNKS if few else CHUNKS
    return chunks if backend == "torch" else tuple(c for c in chunks if c == 8 or c > 64)


CHUNK_CASES = (
    Case("chunks", 509, 64, 1009, std=3.0),
    Case("chunks-odd", 261, 63, 1001, std=1.0),
    Case("chunks-small", 61, 24, 157, std=3.0),
    Case("chunks-kernel", 261, 48, 1001, std=1.0, layout="HV", options=OPTIONS),
    Case("chunks-bf16", 509, 64, 1009, std=3.0, dtype="bfloat16"),
)


LogitSet = tuple[str, npt.NDArray[np.float32], npt.NDArray[np.int64]]


def logit_sets(seed: int, *names: str) -> list[LogitSet]:
    """(text, logits [N, V], labels [N]): probabilities of the label from 1e-30 to 1 - 1e-30.

    Those of these names, or all. Each is drawn after the one before it: a new one comes at the end.
    """
    rng = np.random.default_rng([seed, 4])
    sets = {}
    for vocab in (2, 31, 1000):
        gap = np.linspace(-70.0, 70.0, 281)
        logits = rng.standard_normal((gap.size, vocab))
        labels = rng.integers(0, vocab, gap.size)
        rows = np.arange(gap.size)
        logits[rows, labels] = -np.inf
        logits[rows, labels] = logits.max(axis=1) + gap
        text = f"label's logit -70 to 70 above the rest, V={vocab}"
        sets[f"gaps-{vocab}"] = (text, logits.astype(np.float32), labels)
    spreads = {"flat": (1, 0.0), "sharp": (6, 0.0), "offset": (3, 1e4), "far-offset": (3, -1e6)}
    for name, (std, offset) in spreads.items():
        logits = rng.standard_normal((256, 4099)) * std + offset
        text = f"std={std} offset={offset:g} V=4099"
        sets[name] = (text, logits.astype(np.float32), rng.integers(0, 4099, 256))
    return [sets[name] for name in names or sets]
