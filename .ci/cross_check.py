"""What a checked step costs beside one that is not: docs/data/cross_check.json.

Each way is a process of its own, which makes two steps that are not checked and two that are, and
says their seconds and its peak memory. Written by `make cross-check`.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve()
DATA = HERE.parents[1] / "docs" / "data" / "cross_check.json"
TOKENS, WIDTH, VOCAB = 1024, 256, 8192
WAYS = {
    "no check": None,
    "oracle, tokens=64": {"tokens": 64},
    "oracle, all tokens": {},
    "other": {"against": "other"},
}


def measured(way: str) -> dict[str, float]:
    """In this process."""
    import torch

    from xentlib.torch import CrossCheck, chunked_nll

    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
    hidden, labels = torch.randn(TOKENS, WIDTH), torch.randint(VOCAB, (TOKENS,))
    hidden.requires_grad_()
    options = WAYS[way]
    check = CrossCheck(every=1 if options is not None else 10**9, **(options or {}))
    if options is None:
        check.first = False
    seconds = []
    for step in range(1, 4):
        start = time.perf_counter()
        with check.step(step):
            chunked_nll(hidden, head, labels).loss.backward()
        seconds.append(time.perf_counter() - start)
        head.weight.grad = hidden.grad = None
    assert all(x.passed for x in check.results)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": min(seconds), "peak_bytes": peak}


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
        "threads": torch.get_num_threads(),
        "tokens": TOKENS,
        "width": WIDTH,
        "vocab": VOCAB,
    }
    DATA.write_text(json.dumps({**about, "ways": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
