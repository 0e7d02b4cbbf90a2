"""`xentlib plan`: what each route to a sharded head sends, needs and takes, from sizes alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from xentlib.options import FLOATS
from xentlib.plan import Rates, Route, crossover_tokens, head_routes
from xentlib.plan.routes import ALL_TOKENS, GPUS, OPTIONS, RouteOptions, in_node
from xentlib.tools.bench.cases import REAL
from xentlib.tools.cli.command import Row, number, size, whole
from xentlib.tools.cli.plan_plot import PLOTS, check_plot, draw
from xentlib.tools.doctor.model import SOFTCAPS, head_of_file, read_config
from xentlib.tools.errors import UsageError, writing
from xentlib.tools.harness import plot
from xentlib.tools.harness.table import aligned

SCHEMA = "xentlib.plan/2"
NAMES = {head.name: head for head in REAL}
GB = 1e9
BUDGETS = tuple(1 << k for k in range(20, 34))  # of a chunk's logits, from 1 MiB to 8 GiB
SPLIT_AND_SECONDS = (
    *("chunk_tokens", "num_chunks", "block_rows"),
    *("compute_seconds", "link_seconds", "seconds", "overlapped_seconds", "state_bytes"),
)
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
LATENCY = "of a collective that moves nothing and has no step, in microseconds"
STEP = "of each step of a collective's ring or tree, in microseconds"
MEMORY_RATE = "of a GPU's memory, read and written, in GB/s"
NODES = f"that those ranks are spread over (default: one for every {GPUS} GPUs)"
ZERO3 = "DeepSpeed's ZeRO-3, in place of FSDP2"
TENSOR_PARALLEL = "ranks with the same tokens that the vocabulary is cut over first"
LOW_RANK = "of adapters on a head that is frozen, LoRA"
MEMORY = "of a rank, for the call and for the head's parameter, gradient and Adam state"
MEASURE = "rates of this machine in place of those given; under torchrun of its links too"
HEADS = f"a head by its name ({', '.join(NAMES)}), a model's folder, or its config.json"
ARGUMENTS: tuple[Row, ...] = (
    ("--model", str, None, "NAME", HEADS),
    ("--vocab", whole, None, "V", "classes, in place of --model"),
    ("--hidden", whole, None, "H", "width of the hidden states, with --vocab"),
    ("--tokens", whole, 8192, "N", "of a rank in a call"),
    ("--ranks", whole, 8, "R", "that share the head"),
    ("--nodes", whole, None, "G", NODES),
    ("--replicas", whole, 1, "N", "of the sharded head, HSDP"),
    ("--tensor-parallel", whole, 1, "T", TENSOR_PARALLEL),
    ("--zero3", bool, None, None, ZERO3),
    ("--bias", bool, None, None, "the head has one"),
    ("--low-rank", whole, None, "r", LOW_RANK),
    ("--micro-batches", whole, 1, "M", "for each reduction of gradients"),
    ("--dtype", FLOATS, None, None, DTYPE),
    ("--head-dtype", FLOATS, None, None, HEAD_DTYPE),
    ("--reduce-dtype", FLOATS, "float32", None, "of the head's gradient in its reduction"),
    ("--param-dtype", FLOATS, "float32", None, "that the parameter is held in"),
    ("--recompute", bool, None, None, "chunked_logprobs, or chunked_nll with recompute=True"),
    ("--module", bool, None, None, "NLLHead in one fully_shard with other modules"),
    ("--kept", bool, None, None, "the gathered head stays whole until the backward"),
    ("--memory", size, None, "SIZE", MEMORY),
    ("--max-chunk-mib", whole, None, "MIB", "budget of a chunk of logits"),
    ("--chunk-tokens", whole, None, "T", "of a rank in a chunk, in place of a budget"),
    ("--block-rows", whole, None, "K", "of every rank in a block of the stream"),
    ("--gemm-rate", number, RATES.gemm / 1e12, "TFLOPS", "of the matrix products, in TFLOP/s"),
    ("--node-rate", number, RATES.node / GB, "GBS", "of a GPU's links within its node, in GB/s"),
    ("--network-rate", number, RATES.network / GB, "GBS", NETWORK),
    ("--memory-rate", number, RATES.memory / GB, "GBS", MEMORY_RATE),
    ("--latency", number, RATES.latency * 1e6, "US", LATENCY),
    ("--latency-step", number, RATES.step * 1e6, "US", STEP),
    ("--measure", bool, None, None, MEASURE),
    ("--json", bool, None, None, "print JSON to stdout instead of the table"),
    ("--plot", Path, None, "FILE", f"time and memory against tokens, {', '.join(PLOTS)}"),
    ("--options", OPTIONS, None, "NAME", OPTION, {"nargs": "+"}),
)


def run(args: argparse.Namespace) -> int:
    """Exit status 2 where there is nothing to plan."""
    sizes = asked(args)
    if args.plot is not None:
        check_plot(args.plot)
    rates, first = rates_of(args)
    if not first:
        return 0
    dtype = args.dtype or sizes.dtype
    values = vars(args) | {
        "nodes": args.nodes or args.ranks // in_node(args.ranks, args.tensor_parallel),
        "dtype": dtype,
        "head_dtype": args.head_dtype or dtype,
        "options": sorted({*(args.options or ()), *(["softcap"] if sizes.softcap else [])}),
        "low_rank": args.low_rank or 0,
        "max_chunk_bytes": args.max_chunk_mib and args.max_chunk_mib << 20,
        "rates": rates,
    }
    more: Any = {name: values[name] for name in RouteOptions.__annotations__ if name in values}
    try:
        planned = document(sizes, args.tokens, args.ranks, more, args.memory)
    except ValueError as error:
        raise UsageError(f"{error}") from error
    print(json.dumps(planned, indent=1) if args.json else "\n".join(lines(planned)))
    if args.plot is not None:
        with writing("--plot", args.plot):
            head = sizes.vocab, sizes.hidden, args.ranks
            figure = draw(head, more, planned["crossover_tokens"])
            plot.save_figure(figure, args.plot)
    return 0


def rates_of(args: argparse.Namespace) -> tuple[Rates, bool]:
    """Those of the arguments, or measured; and whether this process is the one that prints."""
    given = Rates(
        gemm=args.gemm_rate * 1e12,
        node=args.node_rate * GB,
        network=args.network_rate * GB,
        latency=args.latency / 1e6,
        step=args.latency_step / 1e6,
        memory=args.memory_rate * GB,
    )
    if not args.measure:
        return given, True
    if find_spec("torch") is None:
        raise UsageError(
            "`--measure` needs torch, which is not installed; install it with "
            "`pip install 'xentlib[torch]'`, or pass the rates."
        )
    from xentlib.tools.cli.measure import measure

    return measure(given)


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


def document(
    sizes: Sizes, tokens: int, ranks: int, more: RouteOptions, memory: int | None = None
) -> dict[str, Any]:
    """All there is to say, in bytes, FLOP and seconds."""
    head = sizes.vocab, sizes.hidden, ranks
    found = with_budgets((tokens, *head), more, memory)
    ours = {name: route for name, (route, _) in found.items() if name != "full logits"}
    fit = [name for name, route in ours.items() if fits(route, memory)]
    smallest = min(ours, key=lambda name: ours[name].peak_bytes)
    chosen = min(fit, key=lambda name: ours[name].overlapped_seconds, default=smallest)
    setup: dict[str, Any] = {**more, "options": list(more.get("options", ()))}
    setup["rates"] = (more.get("rates") or Rates())._asdict()
    return {
        "schema": SCHEMA,
        "head": {"name": sizes.name, "vocab_size": sizes.vocab, "hidden_size": sizes.hidden},
        "tokens_per_rank": tokens,
        "ranks": ranks,
        "setup": setup,
        "memory": memory,
        "chosen": chosen,
        "call": line_of_code(chosen, ranks, more, found[chosen][1]),
        "crossover_tokens": crossover_tokens(*head, **more),
        "crossover_tokens_not_overlapped": crossover_tokens(*head, overlapped=False, **more),
        "fastest": min(ours, key=lambda name: ours[name].overlapped_seconds),
        "smallest": smallest,
        "routes": [
            {**of_route(route), "max_chunk_bytes": budget, "fits": fits(route, memory)}
            for route, budget in found.values()
        ],
    }


def with_budgets(
    sizes: tuple[int, int, int, int], more: RouteOptions, memory: int | None
) -> dict[str, tuple[Route, int | None]]:
    """Each route by the budget of its chunks: of powers of two that fit the memory the fastest, the
    smallest of these; the one that was asked for, or the default, without a limit."""
    asked = more.get("max_chunk_bytes")
    plain = {name: (route, asked) for name, route in head_routes(*sizes, **more).items()}
    if memory is None or asked or more.get("chunk_tokens"):
        return plain
    found = dict(plain)
    for budget in BUDGETS:
        of_budget: Any = {**more, "max_chunk_bytes": budget}
        for name, route in head_routes(*sizes, **of_budget).items():
            best, of_best = found[name]
            faster = of_best is None or route.overlapped_seconds < best.overlapped_seconds
            if fits(route, memory) and faster:
                found[name] = route, budget
    return found


def fits(route: Route, memory: int | None) -> bool:
    return memory is None or route.peak_bytes + route.state_bytes <= memory


def line_of_code(name: str, ranks: int, more: RouteOptions, budget: int | None) -> str:
    """The call of a route."""
    call = "chunked_logprobs" if more.get("recompute") else "chunked_nll"
    weight = "LowRankHead(head.weight, a, b)" if more.get("low_rank") else "head.weight"
    parts = ["hidden", "labels"] if more.get("module") else ["hidden", weight, "labels"]
    if more.get("bias") and not more.get("module"):
        parts.append("bias=head.bias")
    parts.append(f'gather="{"hidden" if name == "hybrid" else name}"')
    if name == "hybrid":
        nodes = more.get("nodes") or 1
        parts.append(f'tokens_parallel=init_device_mesh("cuda", ({nodes}, {ranks // nodes}))')
    if more.get("tensor_parallel", 1) > 1:
        parts.append('vocab_parallel=mesh["tp"]')
    if budget is not None:
        exponent = budget.bit_length() - 1
        exact = budget == 1 << exponent
        parts.append(f"max_chunk_bytes={f'1 << {exponent}' if exact else budget}")
    return f"{'head' if more.get('module') else call}({', '.join(parts)})"


def of_route(route: Route) -> dict[str, Any]:
    return {
        "name": route.name,
        "gemm_flops": route.flops,
        "exchanges": [{**asdict(x), "received": round(x.received)} for x in route.exchanges],
        "received_bytes": round(route.received),
        "peak_bytes": route.peak_bytes,
        "peak": dict(route.peak),
        "state": dict(route.state),
        **{name: getattr(route, name) for name in SPLIT_AND_SECONDS},
    }


def verdict(planned: dict[str, Any]) -> str:
    """Which route, and why, in one sentence."""
    routes = {x["name"]: x for x in planned["routes"]}
    chosen = routes[planned["chosen"]]
    memory = planned["memory"]
    need = (chosen["peak_bytes"] + chosen["state_bytes"]) / GB
    if not chosen["fits"]:
        return (
            f"No route fits {memory / GB:.4g} GB: {chosen['name']} needs least, {need:.2f} GB with "
            f"the head's own state."
        )
    others = [x for x in routes.values() if x["name"] not in ("full logits", chosen["name"])]
    why = f"{_ms(chosen)} ms a call, as far as its links overlap"
    if others:
        near = min(others, key=lambda x: x["overlapped_seconds"])
        faster = near["overlapped_seconds"] < chosen["overlapped_seconds"]
        tail = f", which does not fit {memory / GB:.4g} GB" if faster else ""
        why += (
            f", where {near['name']} takes {_ms(near)}{tail}; {chosen['peak_bytes'] / GB:.2f} GB "
            f"at the peak, where {near['name']} needs {near['peak_bytes'] / GB:.2f}"
        )
    return f"Take {chosen['name']}: {why}."


def _ms(route: dict[str, Any]) -> str:
    return f"{1e3 * route['overlapped_seconds']:.1f}"


def lines(planned: dict[str, Any]) -> Iterator[str]:
    """The verdict, the table, what it is made of, and what it assumes."""
    head, setup, routes = planned["head"], planned["setup"], planned["routes"]
    yield f"{verdict(planned)}\n\n    {planned['call']}\n"
    name = f"{head['name']}: " if head["name"] else ""
    spread = f" on {setup['nodes']} nodes" if setup["nodes"] > 1 else ""
    replicas = f", {setup['replicas']} replicas" if setup["replicas"] > 1 else ""
    yield (
        f"{name}V = {head['vocab_size']:,}, H = {head['hidden_size']:,}, "
        f"{planned['tokens_per_rank']:,} tokens a rank and call, {planned['ranks']:,} ranks{spread}"
        f"{replicas}"
    )
    yield ""
    seconds = ("seconds", "overlapped_seconds", "compute_seconds", "link_seconds")
    titles = ("route", "ms", "overlapped", "computing", "links", "GB received", "GB at the peak")
    limit = planned["memory"]
    fit = [f"fits {limit / GB:.4g} GB"] if limit else []
    rows = [(*titles, "and of the head", "chunks", *fit)]
    for x in routes:
        sent, peak = f"{x['received_bytes'] / GB:.2f}", f"{x['peak_bytes'] / GB:.2f}"
        state, chunks = (
            f"{x['state_bytes'] / GB:.2f}",
            f"{x['num_chunks']} of {x['chunk_tokens']:,} tokens",
        )
        said = ["yes" if x["fits"] else "no"] if limit else []
        milliseconds = (f"{1e3 * x[k]:.1f}" for k in seconds)
        rows.append((x["name"], *milliseconds, sent, peak, state, chunks, *said))
    yield from aligned(rows, right=range(1, len(rows[0])))
    for x in routes:
        yield f"\n{x['name']}, {x['gemm_flops'] / 1e12:.1f} TFLOP of products"
        for sent in x["exchanges"]:
            when = "backward" if sent["backward"] else "forward"
            often = ", once a window" if sent["per_sync"] and setup["micro_batches"] > 1 else ""
            yield (
                f"  {when:<8}  {sent['count']:>6} {sent['kind']:<14}  {sent['bytes']:>19,} bytes"
                f"  {sent['what']}{often}"
            )
        parts = sorted(x["peak"].items(), key=lambda part: -part[1])
        sizes = ", ".join(f"{what} {size / GB:.2f}" for what, size in parts if size >= GB / 200)
        yield f"  GB at the peak: {sizes or 'less than 0.01'}"
    state = ", ".join(f"{what} {size / GB:.2f}" for what, size in routes[0]["state"].items())
    yield f"\nGB of the head on a rank between calls: {state}"
    rates = setup["rates"]
    yield (
        f"\nfastest: {planned['fastest']}; least memory: {planned['smallest']}; "
        f"{_crossing(planned['crossover_tokens'])}; with nothing overlapped "
        f"{_crossing(planned['crossover_tokens_not_overlapped'])}. Seconds are predicted, at "
        f"{rates['gemm'] / 1e12:.4g} TFLOP/s, {rates['node'] / GB:.4g} GB/s within a node, "
        f"{rates['network'] / GB:.4g} GB/s between nodes, and {rates['latency'] * 1e6:.4g} us a "
        f"collective with {rates['step'] * 1e6:.4g} us a step of its ring."
        + (HYBRID if any(x["name"] == "hybrid" for x in routes) else "")
    )


def _crossing(tokens: int) -> str:
    if tokens == ALL_TOKENS:
        return "hidden before head for any number of tokens"
    return f"hidden before head up to {tokens:,} tokens" if tokens else "head before hidden"
