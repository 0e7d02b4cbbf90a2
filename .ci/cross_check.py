"""What a checked step costs beside one that is not: docs/data/cross_check.json.

Each way is a process of its own, which makes steps that are checked and not in turn, and says the
median of their processor seconds on one core and of their ratios, and its peak memory. Written by
`make cross-check`.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve()
DATA = HERE.parents[1] / "docs" / "data" / "cross_check.json"
TOKENS, WIDTH, VOCAB = 1024, 256, 16000
PAIRS = 5
WAYS = {
    "no check": None,
    "oracle": {},
    "oracle, tokens=64, rows=64": {"tokens": 64, "rows": 64},
    "oracle, all tokens and rows": {"tokens": None, "rows": None},
    "other": {"against": "other"},
}


def measured(way: str) -> dict[str, float]:
    """In this process."""
    import torch

    from xentlib.torch import CrossCheck, chunked_nll

    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
    hidden, labels = torch.randn(TOKENS, WIDTH), torch.randint(VOCAB, (TOKENS,))
    hidden.requires_grad_()
    options = WAYS[way]
    check = CrossCheck(every=1, **(options or {}))
    seconds: list[list[float]] = [[], []]
    for step in range(2 * (PAIRS + 1)):
        start = time.process_time()
        checked = options is not None and step % 2 == 1
        with check.step(step) if checked else nullcontext():
            chunked_nll(hidden, head, labels).loss.backward()
        seconds[step % 2].append(time.process_time() - start)
        head.weight.grad = hidden.grad = None
    assert all(x.passed for x in check.results)
    plain, turns = (x[1:] for x in seconds)  # the first pair loads what it needs
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ratio = median(y / x for x, y in zip(plain, turns, strict=True))
    return {"seconds": median(turns), "ratio": ratio, "peak_bytes": peak}


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measured(sys.argv[1])))
        return
    found = {}
    for way in WAYS:
        done = subprocess.run(
            [sys.executable, str(HERE), way], check=True, capture_output=True, text=True
        )
        found[way] = json.loads(done.stdout.splitlines()[-1])
        print(way, found[way])
    import torch

    import xentlib

    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "xentlib": xentlib.__version__,
        "torch": torch.__version__,
        "tokens": TOKENS,
        "width": WIDTH,
        "vocab": VOCAB,
    }
    DATA.write_text(json.dumps({**about, "ways": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
