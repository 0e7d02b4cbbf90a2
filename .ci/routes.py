"""What `xentlib.plan` says of the bench's sharded heads, for docs/communication.md.

    python .ci/routes.py        (`make routes`) writes docs/data/routes.json

Nothing is measured: `tests/tools/test_plan_command.py` makes the same numbers again and compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "docs" / "data" / "routes.json"
TOKENS = 8192
RANKS = (8, 64, 1024)
SAID = ("head", "ranks", "crossover_tokens", "crossover_tokens_not_overlapped", "fastest")


def found() -> dict[str, Any]:
    """Every head but GPT-2's, which nobody spreads over ranks: where hidden and head are as fast,
    and of each route what a rank receives, its peak and its seconds."""
    from xentlib.plan import Rates
    from xentlib.tools.bench.cases import REAL
    from xentlib.tools.cli.plan import document, sizes_of

    plans = []
    for head in REAL:
        for ranks in RANKS if head.name != "gpt2" else ():
            sizes = sizes_of(head.name)
            options = ("softcap",) if sizes.softcap else ()
            planned = document(sizes, TOKENS, ranks, {"options": options})
            plan = {x: planned[x] for x in SAID}
            plan["routes"] = {
                route["name"]: {
                    "received_bytes": route["received_bytes"],
                    "peak_bytes": route["peak_bytes"],
                    "milliseconds": round(1e3 * route["seconds"], 3),
                    "overlapped_milliseconds": round(1e3 * route["overlapped_seconds"], 3),
                }
                for route in planned["routes"]
            }
            plans.append(plan)
    return {"tokens_per_rank": TOKENS, "rates": Rates()._asdict(), "plans": plans}


if __name__ == "__main__":
    DATA.write_text(json.dumps(found(), indent=1) + "\n", encoding="utf-8")
