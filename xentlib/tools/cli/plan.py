"""`xentlib plan`: what each route to a sharded head sends, needs and takes, from sizes alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from xentlib.dtypes import FLOATS
from xentlib.plan import Rates, Route, crossover_tokens, head_routes
from xentlib.plan.routes import OPTIONS, RouteOptions
from xentlib.tools.bench.cases import REAL
from xentlib.tools.cli.command import Row, number, whole
from xentlib.tools.doctor.model import SOFTCAPS, head_of_file, read_config
from xentlib.tools.errors import UsageError, writing
from xentlib.tools.harness import plot
from xentlib.tools.harness.table import aligned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCHEMA = "xentlib.plan/1"
NAMES = {head.name: head for head in REAL}
GPUS = 8  # of a node, where it is not said how many nodes there are
GIB, GB = 2**30, 1e9
PLOTS = (".svg", ".png", ".pdf")
SPLIT_AND_SECONDS = (
    *("chunk_tokens", "num_chunks", "block_rows"),
    *("gemm_seconds", "link_seconds", "seconds"),
)
# Of the plot: tokens a rank, and how each route is drawn.
TOKENS = tuple(1 << k for k in range(8, 18))
LOOKS = {
    "full logits": (plot.COLOURS[4], "--"),
    "head": (plot.COLOURS[0], "-"),
    "hidden": (plot.OURS_COLOUR, "-"),
    "stream": (plot.COLOURS[1], "-"),
    "hybrid": (plot.COLOURS[2], "-."),
}
HYBRID = " hybrid is `gather='hidden'` with a mesh [nodes, ranks of a node] as `tokens_parallel`."


class Sizes(NamedTuple):
    """A head, and what its configuration says of the call."""

    name: str
    vocab: int
    hidden: int
    dtype: str
    softcap: bool


DESCRIPTION = (
    "Bytes, products, memory and predicted time of a sharded head over ranks, by what travels: the "
    "head, the hidden states, or the head in blocks; beside full logits. Nothing is computed but "
    "numbers, for up to thousands of ranks."
)
RATES = Rates()
DTYPE = "of the hidden states (default: that of the model)"
HEAD_DTYPE = "that the head is gathered in (default: that of the hidden states)"
OPTION = f"of the call, which send something more: {', '.join(OPTIONS)}"
NETWORK = "of the network between nodes, in GB/s for each GPU"
LATENCY = "of a collective that moves nothing, in microseconds"
NODES = f"that those ranks are spread over (default: one for every {GPUS} ranks)"
HEADS = f"a head by its name ({', '.join(NAMES)}), a model's folder, or its config.json"
ARGUMENTS: tuple[Row, ...] = (
    ("--model", str, None, "NAME", HEADS),
    ("--vocab", whole, None, "V", "classes, in place of --model"),
    ("--hidden", whole, None, "H", "width of the hidden states, with --vocab"),
    ("--tokens", whole, 8192, "N", "of a rank in a call"),
    ("--ranks", whole, 8, "R", "that share the head"),
    ("--nodes", whole, None, "G", NODES),
    ("--replicas", whole, 1, "N", "of the sharded head, HSDP"),
    ("--micro-batches", whole, 1, "M", "for each reduction of gradients"),
    ("--dtype", FLOATS, None, None, DTYPE),
    ("--head-dtype", FLOATS, None, None, HEAD_DTYPE),
    ("--reduce-dtype", FLOATS, "float32", None, "of the head's gradient in its reduction"),
    ("--param-dtype", FLOATS, "float32", None, "that the parameter is held in"),
    ("--recompute", bool, None, None, "chunked_logprobs, and not chunked_nll"),
    ("--module", bool, None, None, "NLLHead in one fully_shard with other modules"),
    ("--kept", bool, None, None, "the gathered head stays whole until the backward"),
    ("--max-chunk-mib", whole, None, "MIB", "budget of a chunk of logits"),
    ("--chunk-tokens", whole, None, "T", "of a rank in a chunk, in place of a budget"),
    ("--block-rows", whole, None, "K", "of every rank in a block of the stream"),
    ("--gemm-rate", number, RATES.gemm / 1e12, "TFLOPS", "of the matrix products, in TFLOP/s"),
    ("--node-rate", number, RATES.node / GB, "GBS", "of a GPU's links within its node, in GB/s"),
    ("--network-rate", number, RATES.network / GB, "GBS", NETWORK),
    ("--latency", number, RATES.latency * 1e6, "US", LATENCY),
    ("--json", bool, None, None, "print JSON to stdout instead of the table"),
    ("--plot", Path, None, "FILE", f"time and memory against tokens, {', '.join(PLOTS)}"),
    ("--options", OPTIONS, None, "NAME", OPTION, {"nargs": "+"}),
)


def run(args: argparse.Namespace) -> int:
    """Exit status 2 where there is nothing to plan."""
    sizes = asked(args)
    if args.plot is not None:
        check_plot(args.plot)
    dtype = args.dtype or sizes.dtype
    values = vars(args) | {
        "nodes": args.nodes or (args.ranks // GPUS if args.ranks % GPUS == 0 else 1),
        "dtype": dtype,
        "head_dtype": args.head_dtype or dtype,
        "options": sorted({*(args.options or ()), *(["softcap"] if sizes.softcap else [])}),
        "max_chunk_bytes": args.max_chunk_mib and args.max_chunk_mib << 20,
        "rates": Rates(
            args.gemm_rate * 1e12, args.node_rate * GB, args.network_rate * GB, args.latency / 1e6
        ),
    }
    more: Any = {name: values[name] for name in RouteOptions.__annotations__ if name in values}
    try:
        planned = document(sizes, args.tokens, args.ranks, more)
    except ValueError as error:
        raise UsageError(f"{error}") from error
    print(json.dumps(planned, indent=1) if args.json else "\n".join(lines(planned)))
    if args.plot is not None:
        with writing("--plot", args.plot):
            figure = draw(sizes, args.ranks, more, planned["crossover_tokens"])
            plot.save_figure(figure, args.plot)
    return 0


def asked(args: argparse.Namespace) -> Sizes:
    """The head that the arguments name, in one of two ways."""
    both = args.vocab, args.hidden
    if (args.model is None) == (both == (None, None)) or (args.model is None and None in both):
        given = [f"`--{x}`" for x in ("model", "vocab", "hidden") if getattr(args, x) is not None]
        raise UsageError(
            f"the head must be named by `--model`, or by `--vocab` and `--hidden`; got "
            f"{' and '.join(given) or 'none of them'}."
        )
    if args.model is None:
        return Sizes("", *both, "bfloat16", softcap=False)
    return sizes_of(args.model)


def sizes_of(model: str) -> Sizes:
    """Of a head by its name, hyphens or not, or of a configuration."""
    plain = {name.replace("-", ""): head for name, head in NAMES.items()}
    head = plain.get(model.lower().replace("-", ""))
    if head is not None:
        capped = head.softcap is not None
        return Sizes(head.name, head.vocab_size, head.hidden_size, "bfloat16", capped)
    if not Path(model).exists():
        near = get_close_matches(model.lower(), NAMES, 1)
        raise UsageError(
            f"`--model` must be one of {', '.join(NAMES)}, a model's folder or its config.json; "
            f"got '{model}'" + (f"; did you mean '{near[0]}'?" if near else ".")
        )
    sizes = head_of_file(read_config(Path(model)))
    if sizes is None:
        raise UsageError(
            f"`--model` must name a `vocab_size` and a `hidden_size`; '{model}' has not both. Pass "
            f"`--vocab` and `--hidden` instead."
        )
    capped = any(name in sizes.options for name in SOFTCAPS)
    return Sizes(Path(model).name, sizes.vocab, sizes.hidden, sizes.dtype, capped)


def document(sizes: Sizes, tokens: int, ranks: int, more: RouteOptions) -> dict[str, Any]:
    """All there is to say, in bytes, FLOP and seconds."""
    routes = head_routes(tokens, sizes.vocab, sizes.hidden, ranks, **more)
    ours = [name for name in routes if name != "full logits"]
    setup: dict[str, Any] = {**more, "options": list(more.get("options", ()))}
    setup["rates"] = (more.get("rates") or Rates())._asdict()
    return {
        "schema": SCHEMA,
        "head": {"name": sizes.name, "vocab_size": sizes.vocab, "hidden_size": sizes.hidden},
        "tokens_per_rank": tokens,
        "ranks": ranks,
        "setup": setup,
        "crossover_tokens": crossover_tokens(sizes.vocab, sizes.hidden, ranks, **more),
        "fastest": min(ours, key=lambda name: routes[name].seconds),
        "smallest": min(ours, key=lambda name: routes[name].peak_bytes),
        "routes": [of_route(route) for route in routes.values()],
    }


def of_route(route: Route) -> dict[str, Any]:
    return {
        "name": route.name,
        "gemm_flops": route.flops,
        "exchanges": [{**asdict(x), "received": round(x.received)} for x in route.exchanges],
        "received_bytes": round(route.received),
        "peak_bytes": route.peak_bytes,
        "peak": dict(route.peak),
        **{name: getattr(route, name) for name in SPLIT_AND_SECONDS},
    }


def lines(planned: dict[str, Any]) -> Iterator[str]:
    """The table, what it is made of, and what follows from it."""
    head, setup, routes = planned["head"], planned["setup"], planned["routes"]
    name = f"{head['name']}: " if head["name"] else ""
    spread = f" on {setup['nodes']} nodes" if setup["nodes"] > 1 else ""
    replicas = f", {setup['replicas']} replicas" if setup["replicas"] > 1 else ""
    yield (
        f"{name}V = {head['vocab_size']:,}, H = {head['hidden_size']:,}, "
        f"{planned['tokens_per_rank']:,} tokens a rank and call, {planned['ranks']:,} ranks{spread}"
        f"{replicas}"
    )
    yield ""
    titles = ("route", "TFLOP", "GB received", "GiB at the peak", "ms", "products", "links")
    rows = [(*titles, "chunks")]
    for x in routes:
        seconds = (f"{1e3 * x[k]:.1f}" for k in ("seconds", "gemm_seconds", "link_seconds"))
        sent, peak = f"{x['received_bytes'] / GB:.2f}", f"{x['peak_bytes'] / GIB:.2f}"
        chunks = f"{x['num_chunks']} of {x['chunk_tokens']:,} tokens"
        rows.append((x["name"], f"{x['gemm_flops'] / 1e12:.1f}", sent, peak, *seconds, chunks))
    yield from aligned(rows, right=range(1, len(rows[0])))
    for x in routes:
        yield f"\n{x['name']}"
        for sent in x["exchanges"]:
            when = "backward" if sent["backward"] else "forward"
            often = ", once a window" if sent["per_sync"] and setup["micro_batches"] > 1 else ""
            yield (
                f"  {when:<8}  {sent['count']:>6} {sent['kind']:<14}  {sent['bytes']:>19,} bytes"
                f"  {sent['what']}{often}"
            )
        parts = sorted(x["peak"].items(), key=lambda part: -part[1])
        sizes = ", ".join(f"{what} {size / GIB:.2f}" for what, size in parts if size >= GIB / 200)
        yield f"  GiB at the peak: {sizes or 'less than 0.01'}"
    crossover = planned["crossover_tokens"]
    yield (
        f"\nfastest: {planned['fastest']}; least memory: {planned['smallest']}; "
        + (f"hidden before head up to {crossover:,} tokens" if crossover else "head before hidden")
        + ". Seconds are predicted, with nothing overlapped."
        + (HYBRID if any(x["name"] == "hybrid" for x in routes) else "")
    )


def check_plot(path: Path) -> None:
    if path.suffix not in PLOTS:
        raise UsageError(
            f"`--plot` must end with {', '.join(PLOTS[:-1])} or {PLOTS[-1]}; got '{path}'."
        )
    if find_spec("matplotlib") is None:
        raise UsageError(
            "`--plot` needs matplotlib, which is not installed; install it with "
            "`pip install 'xentlib[plot]'`."
        )


# --- the plot -------------------------------------------------------------------------------------


def draw(sizes: Sizes, ranks: int, more: RouteOptions, crossover: int) -> Figure:
    """Milliseconds, and GiB at the peak, against tokens a rank; the crossover is marked."""
    planned = [head_routes(n, sizes.vocab, sizes.hidden, ranks, **more) for n in TOKENS]
    with plot.letters():
        figure = plot.new_figure(plot.WIDTH, 2.7)
        time, memory = figure.subplots(1, 2)
        _panel(time, planned, "ms", lambda route: 1e3 * route.seconds)
        _panel(memory, planned, "GiB at the peak", lambda route: route.peak_bytes / GIB)
        if TOKENS[0] <= crossover <= TOKENS[-1]:
            for axes in (time, memory):
                axes.axvline(crossover, color=plot.INK, linewidth=0.8, linestyle=":")
            where, up = (crossover, 0.02), ("data", "axes fraction")
            time.annotate(f" {crossover:,}", where, xycoords=up, fontsize=7, color=plot.INK)
        handles, labels = time.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=7
        )
    return figure


def _panel(axes: Axes, planned: list[dict[str, Route]], title: str, value: Any) -> None:
    for name in planned[0]:
        colour, line = LOOKS[name]
        values = [value(routes[name]) for routes in planned]
        axes.plot(TOKENS, values, color=colour, linestyle=line, linewidth=1.4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(TOKENS[::3], [f"{n:,}" for n in TOKENS[::3]])
    axes.set_xlabel("tokens a rank and call")
    plot.panel(axes, title)
