"""Measure and draw the figure that the README and the site open with; draw committed benchmarks.

    python .ci/figures.py              (`make figures`) draws from what is committed
    python .ci/figures.py --measure    measures first: docs/data/tokens.json, five minutes

The figure is loss and gradients in PyTorch against the number of tokens: full logits, chunks, and
one rank of two vocabulary shards. Every number of tokens has processes of its own, with one thread
each. Memory is the allocator's count. Time is the processor's, which other programs on the machine
disturb least: the least of some rounds in which the ways of one process take turns, added up over
ranks.

Shapes: N tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "data" / "tokens.json"
FIGURES = ROOT / "docs" / "figures"
BENCH = ROOT / "bench" / "results"

TOKENS = (256, 512, 1024, 2048, 4096, 8192)
HIDDEN, VOCAB = 512, 32_000
ROUNDS = 5
FULL, CHUNKS, SHARDS = "full logits", "xentlib", "xentlib, vocabulary on two ranks"


# --- what is measured -----------------------------------------------------------------------------


def alone(rank: int, world: int, folder: str, tokens: int) -> dict[str, dict[str, float]]:
    """Full logits and chunks, in one process."""
    import torch
    from torch.nn.functional import cross_entropy, linear

    from xentlib.torch import chunked_nll

    torch.set_num_threads(1)
    hidden_NH, weight_VH, labels_N = inputs(tokens)
    return taken(
        {
            FULL: lambda: cross_entropy(linear(hidden_NH, weight_VH), labels_N),
            CHUNKS: lambda: chunked_nll(hidden_NH, weight_VH, labels_N).loss,
        },
        (hidden_NH, weight_VH),
    )


def sharded(rank: int, world: int, folder: str, tokens: int) -> dict[str, dict[str, float]]:
    """One rank's half of the vocabulary."""
    import torch
    import torch.distributed as dist

    from xentlib.torch import chunked_nll

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    hidden_NH, weight_VH, labels_N = inputs(tokens)
    rows = weight_VH.detach().tensor_split(world)[rank].clone().requires_grad_()
    group = dist.group.WORLD
    run = {SHARDS: lambda: chunked_nll(hidden_NH, rows, labels_N, vocab_parallel=group).loss}
    try:
        return taken(run, (hidden_NH, rows))
    finally:
        dist.destroy_process_group()


def inputs(tokens: int) -> tuple[Any, Any, Any]:
    """Logits with a standard deviation of 2, as `xentlib bench` has them."""
    import torch

    torch.manual_seed(0)
    hidden_NH = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight_VH = (2 * torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5).requires_grad_()
    return hidden_NH, weight_VH, torch.randint(VOCAB, (tokens,))


def taken(ways: dict[str, Any], leaves: tuple[Any, Any]) -> dict[str, dict[str, float]]:
    """Peak bytes beside the inputs and least processor time of each way, gradients included."""
    import torch

    from xentlib.tools.bench.implementations_torch import cpu_peak_bytes
    from xentlib.tools.bench.worker import order_of_round

    def call(way: Any) -> Any:
        loss = way()
        return loss, torch.autograd.grad(loss, leaves)

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses = {name: float(call(way)[0]) for name, way in ways.items()}  # warm-up
    for index in range(ROUNDS):
        for name in order_of_round(list(ways), index):
            start = time.process_time()
            result = call(ways[name])
            seconds[name].append(time.process_time() - start)
            del result
    return {
        name: {
            "peak_bytes": cpu_peak_bytes(lambda way=way: call(way)),
            "seconds": min(seconds[name]),
            "loss": losses[name],
        }
        for name, way in ways.items()
    }


def measure() -> None:
    """Write `DATA`."""
    sys.path.insert(0, str(ROOT / ".ci"))
    import figures  # what ranks can import

    from xentlib.processes import launch

    rows = []
    for tokens in TOKENS:
        (found,) = launch(figures.alone, 1, tokens, seconds=900)
        first, second = (rank[SHARDS] for rank in launch(figures.sharded, 2, tokens, seconds=900))
        found[SHARDS] = first | {"seconds": first["seconds"] + second["seconds"]}
        for name, row in found.items():
            rows.append({"way": name, "tokens": tokens, **row})
            print(
                f"{tokens:6} {name:28} {row['peak_bytes'] >> 20:6} MiB {row['seconds']:7.3f} s",
                flush=True,
            )
    DATA.write_text(json.dumps(document(rows), indent=1) + "\n", encoding="utf-8")


def document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows, what they were measured on, and the figure's caption."""
    from xentlib.tools.harness.environment import environment

    found = environment()
    about = (
        f"Loss and gradients in PyTorch {found['torch']}, float32, hidden width {HIDDEN}, "
        f"vocabulary {VOCAB:,}, on an {found['cpu']}. Memory excludes the inputs. Time is CPU time "
        f"on one thread, best of {ROUNDS} calls. With the vocabulary on two ranks, memory "
        "is that of one rank and time the sum of both. Full logits are multiplied with MKL, "
        "xentlib's chunks with oneDNN, which is faster on this CPU."
    )
    return {"about": about, "environment": found, "rows": rows}


# --- what is drawn --------------------------------------------------------------------------------

# Ink and grid on a light page, and on a dark one; lines that are legible on both.
INK = {"light": ("#3d444d", "#d8dde3"), "dark": ("#c3cad2", "#3f4650")}
LINES = {
    FULL: ({"light": "#b4430f", "dark": "#f2955a"}, "s"),
    CHUNKS: ({"light": "#0b7a75", "dark": "#4fc3bb"}, "o"),
    SHARDS: ({"light": "#4a5fc1", "dark": "#93a5f5"}, "^"),
}
MIB = 1 << 20


def panel(axes: Axes, mode: str, rows: list[dict[str, Any]], measured: str) -> None:
    """Memory in MiB, or milliseconds of CPU time per 1,000 tokens, of each way."""
    ink, grid = INK[mode]
    for name, (colours, marker) in LINES.items():
        mine = [row for row in rows if row["way"] == name]
        xs = [row["tokens"] for row in mine]
        if measured == "memory":
            ys = [row["peak_bytes"] / MIB for row in mine]
        else:
            ys = [1e6 * row["seconds"] / row["tokens"] for row in mine]
        axes.plot(
            xs, ys, color=colours[mode], marker=marker, markersize=4, linewidth=1.6, label=name
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(TOKENS, [f"{n:,}" for n in TOKENS])
    axes.set_xlabel("tokens", color=ink)
    if measured == "memory":
        axes.set_yscale("log", base=2)
        ticks = (64, 128, 256, 512, 1024, 2048, 4096)
        axes.set_yticks(ticks, [f"{n:,}" for n in ticks])
        axes.set_title("extra memory, MiB", loc="left", color=ink, fontsize=9)
    else:
        axes.set_ylim(bottom=0)
        axes.set_title("CPU time, ms per 1,000 tokens", loc="left", color=ink, fontsize=9)
    axes.minorticks_off()
    axes.grid(color=grid, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=ink, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(grid)
    axes.legend(frameon=False, labelcolor=ink, fontsize=8, loc="best")


def draw() -> None:
    """Each panel a file, so that on a phone they are one below the other; for light and dark."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = json.loads(DATA.read_text(encoding="utf-8"))["rows"]
    FIGURES.mkdir(exist_ok=True)
    style = {"font.family": "sans-serif", "font.size": 8.5, "svg.hashsalt": "xentlib"}
    for measured in ("memory", "time"):
        for mode in INK:
            with mpl.rc_context(style):
                figure = Figure((3.75, 2.8), layout=ConstrainedLayoutEngine())
                panel(figure.subplots(), mode, rows, measured)
                path = FIGURES / f"{measured}-{mode}.svg"
                figure.savefig(path, transparent=True, metadata={"Date": None})


def draw_benchmarks() -> None:
    """The plots of `bench/results`, from the JSON beside them."""
    from xentlib.tools.bench.plot import save
    from xentlib.tools.bench.report import from_json

    for path in sorted(BENCH.glob("*.json")):
        report = from_json(json.loads(path.read_text(encoding="utf-8")))
        save(report, BENCH, path.stem, ("svg",))


def main() -> None:
    """Measure if asked to, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--measure", action="store_true", help="before drawing")
    if parser.parse_args().measure:
        measure()
    draw()
    draw_benchmarks()


if __name__ == "__main__":
    main()
