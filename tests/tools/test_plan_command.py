"""`xentlib plan`: heads by name and from a config.json; the table, JSON, plot, and the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.scripts import load
from xentlib.plan import Rates, crossover_tokens, head_routes
from xentlib.tools.bench.cases import REAL
from xentlib.tools.cli import main
from xentlib.tools.cli.plan import sizes_of

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--vocab", "1003", "--hidden", "64")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1, "one sentence"
    return output.err.removeprefix("xentlib: ").rstrip("\n")


@pytest.mark.parametrize("head", REAL, ids=lambda head: head.name)
def test_heads_of_the_bench_by_name(head) -> None:
    want = (head.name, head.vocab_size, head.hidden_size, "bfloat16", head.softcap is not None)
    assert sizes_of(head.name) == sizes_of(head.name.replace("-", "").upper()) == want


@pytest.mark.parametrize(
    ("config", "dtype", "capped"),
    [
        ({"vocab_size": 1003, "hidden_size": 64, "torch_dtype": "float32"}, "float32", False),
        (
            {"text_config": {"vocab_size": 1003, "d_model": 64}, "final_logit_softcapping": 30.0},
            "bfloat16",
            True,
        ),
    ],
)
def test_a_head_of_a_configuration(tmp_path, capsys, config, dtype, capped) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = json.loads(said(capsys, "--model", str(tmp_path), "--json"))
    assert found["head"] == {"name": tmp_path.name, "vocab_size": 1003, "hidden_size": 64}
    assert found["setup"]["dtype"] == found["setup"]["head_dtype"] == dtype
    assert found["setup"]["options"] == (["softcap"] if capped else [])


def test_json_is_the_plan(capsys) -> None:
    """Every argument reaches it."""
    arguments = (
        *(*SIZES, "--tokens", "500", "--ranks", "12", "--nodes", "3", "--replicas", "2"),
        *("--micro-batches", "4", "--dtype", "float32", "--head-dtype", "bfloat16"),
        *("--reduce-dtype", "bfloat16", "--param-dtype", "bfloat16", "--recompute", "--module"),
        *("--kept", "--options", "entropy", "lse", "--max-chunk-mib", "3", "--block-rows", "7"),
        *("--chunk-tokens", "56"),
        *("--gemm-rate", "2", "--node-rate", "3", "--network-rate", "0.5", "--latency", "7"),
        *("--latency-step", "0.5", "--memory-rate", "4", "--bias", "--low-rank", "6", "--json"),
    )
    found = json.loads(said(capsys, *arguments))
    more = {
        "nodes": 3,
        "replicas": 2,
        "tensor_parallel": 1,
        "zero3": False,
        "bias": True,
        "low_rank": 6,
        "dtype": "float32",
        "head_dtype": "bfloat16",
        "reduce_dtype": "bfloat16",
        "param_dtype": "bfloat16",
        "micro_batches": 4,
        "recompute": True,
        "module": True,
        "kept": True,
        "options": ["entropy", "lse"],
        "max_chunk_bytes": 3 << 20,
        "chunk_tokens": 56,
        "block_rows": 7,
        "rates": Rates(2e12, 3e9, 0.5e9, 7e-6, 0.5e-6, 4e9),
    }
    routes = head_routes(500, 1003, 64, 12, **more)
    assert found["setup"] == {**more, "rates": more["rates"]._asdict()}
    assert found["crossover_tokens"] == crossover_tokens(1003, 64, 12, **more)
    assert [x["name"] for x in found["routes"]] == list(routes)
    for x in found["routes"]:
        route = routes[x["name"]]
        assert x["peak"] == dict(route.peak)
        for name in ("peak_bytes", "seconds", "overlapped_seconds", "compute_seconds"):
            assert x[name] == getattr(route, name)
        assert (x["state"], x["max_chunk_bytes"], x["fits"]) == (route.state, 3 << 20, True)
        assert sum(one["bytes"] for one in x["exchanges"]) == route.bytes()
    ours = [route for name, route in routes.items() if name != "full logits"]
    assert found["fastest"] == min(ours, key=lambda route: route.overlapped_seconds).name
    away = crossover_tokens(1003, 64, 12, overlapped=False, **more)
    assert found["crossover_tokens_not_overlapped"] == away
    assert found["smallest"] == min(ours, key=lambda route: route.peak_bytes).name


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (("--tensor-parallel", "4"), "tensor_parallel", 4),
        (("--zero3", "--ranks", "17"), "zero3", True),
    ],
)
def test_arguments_that_do_not_go_with_others(capsys, arguments, name, value) -> None:
    found = json.loads(said(capsys, *SIZES, *arguments, "--json"))
    assert found["setup"][name] == value
    ranks, more = found["ranks"], {name: value}
    assert [x["name"] for x in found["routes"]] == list(head_routes(8192, 1003, 64, ranks, **more))


def test_the_table(capsys) -> None:
    """The verdict, a line for each route, what its peak is made of, and what is assumed."""
    text = said(capsys, "--model", "llama-3-8b", "--ranks", "64", "--tokens", "4096")
    verdict, _, call, _, first, _, titles, *rest = text.splitlines()
    routes = head_routes(4096, 128_256, 4096, 64)
    head, near = (f"{1e3 * routes[x].overlapped_seconds:.1f}" for x in ("head", "hybrid"))
    assert verdict == (
        f"Take head: {head} ms a call, as far as its links overlap, where hybrid takes {near}; "
        "5.37 GB at the peak, where hybrid needs 1.30."
    )
    assert call == '    chunked_nll(hidden, head.weight, labels, gather="head")'
    assert first.startswith(
        "llama3-8b: V = 128,256, H = 4,096, 4,096 tokens a rank and call, 64 ra"
    )
    assert first.endswith("64 ranks on 8 nodes")
    assert titles.split()[0] == "route"
    names = ["full logits", "head", "hidden", "stream", "hybrid"]
    assert [row[:11].rstrip() for row in rest[:5]] == names
    seconds = ("seconds", "overlapped_seconds", "compute_seconds", "link_seconds")
    for row, name in zip(rest, names, strict=False):
        assert row[11:].split()[:4] == [f"{1e3 * getattr(routes[name], x):.1f}" for x in seconds]
    assert rest[1].split()[5:8] == ["3.10", "5.37", "0.13"]
    assert text.count("GB at the peak: ") == 5
    assert "GiB" not in text
    assert "parameter 0.03, gradient 0.03, moments of Adam 0.07" in text
    up_to = crossover_tokens(128_256, 4096, 64)
    without = crossover_tokens(128_256, 4096, 64, overlapped=False)
    assert (
        f"hidden before head up to {up_to:,} tokens; with nothing overlapped hidden before head up "
        f"to {without:,} tokens. Seconds are predicted, at 650 TFLOP/s, 350 GB/s within a node, "
        "50 GB/s between nodes, and 10 us a collective with 2 us a step of its ring."
    ) in text
    assert "hybrid is `gather='hidden'` with a mesh [nodes, ranks of a node]" in text
    assert "hybrid" not in said(capsys, *SIZES)
    assert "hybrid" not in said(capsys, *SIZES, "--nodes", "2", "--replicas", "2")


EIGHT = ("--model", "llama3-8b", "--ranks", "8", "--tokens", "16384", "--node-rate", "30")


@pytest.mark.parametrize(
    ("arguments", "chosen", "begins"),
    [
        ((), "head", "Take head: "),
        (("--memory", "80GB"), "head", "Take head: "),
        (("--memory", "3 GB"), "stream", "Take stream: "),
        (("--memory", "1GiB"), "stream", "No route fits 1.074 GB: stream needs least, "),
    ],
)
def test_the_verdict_is_the_fastest_that_fits(capsys, arguments, chosen, begins) -> None:
    """The peak and what the head has between calls: a third of 3 GB is its state."""
    found = json.loads(said(capsys, *EIGHT, *arguments, "--json"))
    assert found["chosen"] == chosen
    text = said(capsys, *EIGHT, *arguments)
    assert text.startswith(begins), text.splitlines()[0]
    memory = found["memory"]
    assert ("which does not fit" in text) == (memory == 3 * 10**9)
    state = 128_256 // 8 * 4096 * 4 * 4
    for x in found["routes"]:
        assert x["state_bytes"] == state
        assert x["fits"] == (memory is None or x["peak_bytes"] + state <= memory)
        told = found["setup"]["max_chunk_bytes"] or x["max_chunk_bytes"]
        more = {"rates": Rates(node=3e10), "max_chunk_bytes": told}
        route = head_routes(16_384, 128_256, 4096, 8, **more)[x["name"]]
        assert (x["peak_bytes"], x["seconds"]) == (route.peak_bytes, route.seconds)
        if memory is None or not x["fits"]:
            assert x["max_chunk_bytes"] is None
            continue
        # No other power of two that fits is faster.
        for power in range(20, 34):
            other = head_routes(16_384, 128_256, 4096, 8, **more | {"max_chunk_bytes": 1 << power})
            if other[x["name"]].peak_bytes + state <= memory:
                assert other[x["name"]].overlapped_seconds >= x["overlapped_seconds"]
    line = next(x for x in found["routes"] if x["name"] == chosen)
    budget = line["max_chunk_bytes"]
    assert (f"max_chunk_bytes=1 << {(budget or 1).bit_length() - 1})" in text) == bool(budget)


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        (("--ranks", "2"), 'chunked_nll(hidden, head.weight, labels, gather="hidden")'),
        (
            ("--recompute", "--bias"),
            "chunked_logprobs(hidden, head.weight, labels, bias=head.bias,",
        ),
        (
            ("--low-rank", "4"),
            "chunked_nll(hidden, LowRankHead(head.weight, a, b), labels, gather=",
        ),
        (("--module",), 'head(hidden, labels, gather="hidden")'),
        (("--max-chunk-mib", "3"), 'gather="hidden", max_chunk_bytes=3145728)'),
        (("--tensor-parallel", "2"), 'gather="hidden", vocab_parallel=mesh["tp"])'),
        (
            ("--ranks", "64", "--tokens", "32768"),
            'gather="hidden", tokens_parallel=init_device_mesh("cuda", (8, 8)))',
        ),
    ],
)
def test_the_line_to_paste(capsys, arguments, call) -> None:
    text = said(capsys, "--model", "llama3-8b", *arguments)
    line = text.splitlines()[2]
    assert call in line
    compile(line.strip(), "<the line>", "eval")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "lama3-8b"), "got 'lama3-8b'; did you mean 'llama3-8b'?"),
        (("--modle", "gpt2"), "unrecognized arguments: --modle gpt2; did you mean `--module`?"),
        ((*SIZES, "--token", "5"), "unrecognized arguments: --token 5; did you mean `--tokens`?"),
        ((*SIZES, "--options", "softcaps"), "argument --options: invalid choice: 'softcaps'"),
        ((*SIZES, "--dtype", "bf16"), "argument --dtype: invalid choice: 'bf16'"),
        ((*SIZES, "--tokens", "0"), "argument --tokens: must be a whole number, 1 or more; got"),
        ((*SIZES, "--gemm-rate", "nan"), "argument --gemm-rate: must be a positive number; got"),
        (
            (*SIZES, "--memory", "80"),
            "argument --memory: must be a size with its unit (GB, GiB, M",
        ),
        ((*SIZES, "--memory", "0GB"), "such as 80GB; got '0GB'"),
        (
            (*SIZES, "--zero3", "--replicas", "2"),
            "`replicas` must be 1 with `zero3`, as both together are not planned; got 2.",
        ),
        ((*SIZES, "--ranks", "12", "--nodes", "5"), "`ranks` must be spread over `nodes` evenly"),
        ((*SIZES, "--plot", "routes.gif"), "`--plot` must end with .svg, .png or .pdf; got"),
        (("--vocab", "5"), "the head must be named by `--model`, or by `--vocab` and `--hidden`"),
        ((), "`--vocab` and `--hidden`; got none of them."),
        (("--model", "gpt2", *SIZES), "got `--model` and `--vocab` and `--hidden`."),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(capsys, arguments, message) -> None:
    """D12."""
    assert message in refused(capsys, *arguments)


def test_files_that_are_no_head_or_cannot_be_written(tmp_path, capsys) -> None:
    (tmp_path / "config.json").write_text("{}")
    told = refused(capsys, "--model", str(tmp_path))
    assert told.startswith("`--model` must name a `vocab_size` and a `hidden_size`; '")
    (tmp_path / "config.json").write_text("[")
    assert "`--model` must be a folder with a config.json" in refused(
        capsys, "--model", str(tmp_path / "config.json")
    )
    pytest.importorskip("matplotlib")
    assert main(["plan", *SIZES, "--plot", str(tmp_path / "none" / "x.svg")]) == 2
    assert "`--plot` must be a file that can be written" in capsys.readouterr().err


def test_a_plot_needs_matplotlib(monkeypatch, capsys) -> None:
    monkeypatch.setattr("xentlib.tools.cli.plan_plot.find_spec", lambda name: None)
    assert "`--plot` needs matplotlib" in refused(capsys, *SIZES, "--plot", "x.svg")


def test_rates_of_this_machine_need_torch(monkeypatch, capsys) -> None:
    monkeypatch.setattr("xentlib.tools.cli.plan.find_spec", lambda name: None)
    assert "`--measure` needs torch" in refused(capsys, *SIZES, "--measure")


def test_the_plot_shows_every_route_and_where_two_cross(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    from xentlib.tools.cli.plan_plot import TOKENS, draw

    sizes = sizes_of("llama3-8b")
    crossover = crossover_tokens(sizes.vocab, sizes.hidden, 8)
    assert crossover == 1 << 24
    rates = {"rates": Rates(node=10e9)}
    crossover = crossover_tokens(sizes.vocab, sizes.hidden, 8, **rates)
    figure = draw((sizes.vocab, sizes.hidden, 8), rates, crossover)
    time, memory = figure.axes
    names = ["full logits", "head", "hidden", "stream"]
    for axes, value in (
        (time, lambda x: 1e3 * x.overlapped_seconds),
        (memory, lambda x: x.peak_bytes / 1e9),
    ):
        *lines, mark = axes.get_lines()
        assert [line.get_label() for line in lines] == names
        assert set(mark.get_xdata()) == {crossover}
        for k in (0, len(TOKENS) - 1):
            routes = head_routes(TOKENS[k], sizes.vocab, sizes.hidden, 8, **rates)
            assert [line.get_ydata()[k] for line in lines] == [value(routes[x]) for x in names]
    paths = [tmp_path / f"{k}.svg" for k in (1, 2)]
    for path in paths:
        assert main(["plan", "--model", "gpt2", "--plot", str(path)]) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_the_page_has_what_is_planned_today() -> None:
    source = ROOT / ".ci" / "routes.py"
    if not source.is_file():
        pytest.skip("the documentation is not beside the tests")
    made = load(source)
    found = json.loads(made.DATA.read_text(encoding="utf-8"))
    assert found == made.found(), "run `make routes`"
    plans = [(plan["head"]["name"], plan["ranks"]) for plan in found["plans"]]
    assert len(plans) == 6 * 3 == len(set(plans))
