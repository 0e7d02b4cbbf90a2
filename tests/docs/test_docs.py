"""README and docs/ say what is so: the table of the contract is the contract, what is put in while
they are built comes from data, and links lead somewhere. `test_docs_code.py` runs their Python,
`test_docs_errors.py` holds errors and options, `test_citations.py` the numbers that sources cite.
"""

import importlib.util
import json
import logging
import re
from pathlib import Path

import pytest

from helpers.scripts import load
from xentlib.contract import ROWS
from xentlib.tools.parity.report.document import to_json
from xentlib.tools.parity.result import Measurement, ParityResult, Section, TrainingCurve

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
if not (DOCS / "hooks.py").is_file():
    pytest.skip("the documentation is not beside the tests", allow_module_level=True)

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
LINKED = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
FRAMEWORKS = ("torch", "jax")
HIDDEN_SETUP = "<!-- run:"
UNTRIED = re.compile(r"[Oo]n one (NVIDIA )?H100")  # what is known of GPUs is of one
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


hooks = load(DOCS / "hooks.py")


def named(path):
    return path.relative_to(ROOT).as_posix()


def test_readme_shows_both_backends():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in FRAMEWORKS:
        assert f"\nfrom xentlib.{name} import" in readme


def test_readme_is_short_and_has_one_table_that_is_of_the_committed_run():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"\n\n{hooks.speed_table()}\n\n" in readme, "paste the output of `python docs/hooks.py`"
    assert len(re.findall(r"^\|[ :|-]+\|$", readme, re.MULTILINE)) == 1
    assert len(readme.splitlines()) <= 120


def test_pages_that_are_read_first_hide_no_set_up_and_say_what_is_untried():
    for path in (ROOT / "README.md", DOCS / "index.md", DOCS / "start.md"):
        text = path.read_text(encoding="utf-8")
        assert HIDDEN_SETUP not in text, named(path)
        assert UNTRIED.search(" ".join(text.split())), named(path)


def test_table_of_speed_and_memory_says_how_far_a_loss_is_off(tmp_path, monkeypatch):
    """And of several contestants the least and the most."""

    def row(name, ms, mib, loss, kind="loss + gradient"):
        times = {"time": {"median": ms / 1e3}, "ratio": {"median": 1.0}}
        return times | {"contestant": name, "kind": kind, "peak_bytes": mib << 20, "loss": loss}

    rows = [
        row("bare GEMMs", 1, 1, 2.0),
        row("xentlib", 7, 3, 2.0),
        row("xentlib", 4, 2, 2.0, "loss"),
        row("eager, full logits", 1500, 9, 2.0000001),
        row("F.linear_cross_entropy auto", 8, 5, 2.02),
        row("F.linear_cross_entropy compact", 6, 5, 2.0),
    ]
    run = {"backend": "torch", "dtype": "bfloat16", "case": {"name": hooks.SHOWN}, "rows": rows}
    other = run | {"case": {"name": "another"}}
    monkeypatch.setattr(hooks, "BENCH", tmp_path)
    (tmp_path / "cpu.json").write_text(json.dumps({"runs": [run, other]}), encoding="utf-8")
    assert hooks.speed_table().splitlines()[2:] == [
        "| torch, bfloat16 | 7 ms, 3 MiB | 1,500 ms, 9 MiB | 6 to 8 ms, 5 MiB, loss off by 1.0 % |"
    ]


def test_readme_opens_with_the_figure_and_says_what_it_shows():
    """And each file of it is there, for light and dark."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    *halves, caption = hooks.tokens_said()
    for name, said in zip(("memory", "time"), halves, strict=True):
        light, dark = (f"docs/figures/{name}-{mode}.svg" for mode in ("light", "dark"))
        assert f'srcset="{dark}"' in readme
        assert f'src="{light}" alt="{said}"' in readme, "paste the output of `python docs/hooks.py`"
        for path in (light, dark):
            assert path.removeprefix("docs/") in hooks.opening_part()
            assert (ROOT / path).is_file(), "run `make figures`"
    assert caption in " ".join(readme.split())


def test_versions_that_the_start_page_shows_are_those_of_the_constraints():
    text = (DOCS / "start.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| .* \| (\d\S+) \| (\d\S+) \| (\d\S+) \|$", text, re.MULTILINE)
    assert len(rows) == 9
    for k, which in enumerate(("-oldest", "", "-newest"), 1):
        pins = (ROOT / f"constraints{which}.txt").read_text(encoding="utf-8").splitlines()
        for row in rows:
            assert f"{row[0]}=={row[k]}" in pins, which


def test_index_and_navigation_have_every_page():
    """And what a stranger reads first is a table of no more than twelve entries."""
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    first = text.partition("## Where to look")[2].partition("\n## ")[0]
    assert 3 < len(re.findall(r"^\| ", first, re.MULTILINE)) - 1 <= 12
    index = text.partition("## All pages")[2]
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert page.name == "index.md" or re.search(rf"\]\({page.name}[#)]", index), page.name
        assert re.search(rf": {re.escape(page.name)}$", navigation, re.MULTILINE), page.name


# --- the contract ---------------------------------------------------------------------------------


def test_table_of_the_contract_has_every_row_and_bound():
    lines = hooks.contract_table().splitlines()[2:]
    cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines]
    assert [row[0] for row in cells] == list(ROWS)
    for row, bounds in zip(ROWS.values(), (row[3].split("; ") for row in cells)):
        assert len(bounds) == len(row.bounds)
        for text, bound in zip(bounds, row.bounds):
            metric, sign, value, *percent = text.rsplit(" ", 3 if text.endswith("%") else 2)
            assert metric == bound.metric
            assert sign == ("≥" if bound.at_least else "≤" if bound.value else "=")
            assert float(value) == (100 * bound.value if percent else bound.value)


def test_rows_that_pages_cite_exist():
    for page in PAGES:
        for row in re.findall(r"\bA\d+\b", page.read_text(encoding="utf-8")):
            assert row in ROWS, f"{named(page)} cites {row}"


# --- what is put in while the pages are built -----------------------------------------------------


@pytest.fixture
def warned(caplog):
    with caplog.at_level(logging.WARNING, logger=hooks.log.name):
        yield lambda: [record.getMessage() for record in caplog.records]


def a_run(value=1.5):
    found = Measurement("A5", "torch", "N=33", "d hidden", "tau", value, 4.0, value <= 4, 2112)
    curve = TrainingCurve("jax", (9.0, 8.25), (400, 401), 1.5)
    section = Section("training", (found,), curves=(curve,), seconds=90.0)
    return ParityResult([section], environment={"jax": "0.10.2"})


def test_every_marker_on_a_page_is_a_part_and_every_part_has_a_page():
    markers = [
        m for page in DOCS.glob("*.md") for m in hooks.MARKER.findall(page.read_text("utf-8"))
    ]
    assert sorted(name for name, of in markers if not of) == sorted(hooks.PARTS)
    assert sorted(of for name, of in markers if of) == sorted(recipes())


def recipes():
    """Files of examples/ with lines that are marked as those to add or to change."""
    return [path.stem for path in (ROOT / "examples").glob("*.py") if hooks.marked(path.stem)]


def test_recipes_are_measured_and_their_lines_are_marked():
    """`make recipes` knows each, and what each is said to save is more than the logits."""
    found = json.loads(hooks.RECIPES.read_text(encoding="utf-8"))
    assert sorted(found["recipes"]) == sorted(recipes())
    for name, one in found["recipes"].items():
        assert one["distance"] < 1e-5, name  # which each asserts itself
        saved = one["peak_bytes_full_logits"] - one["peak_bytes"]
        assert saved > found["vocab"] * found["length"] * 4, name
    assert 'hl_lines="' in hooks.fill(f"<!-- recipe {recipes()[0]} -->")


def test_marker_that_nobody_knows_warns(warned):
    hooks.fill("<!-- nonsense -->")
    assert "nonsense" in warned()[0]


def test_parity_page_is_the_committed_run(tmp_path, monkeypatch, warned):
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    monkeypatch.setattr(hooks, "PARITY", tmp_path / "parity.json")
    assert "parity.json` is missing" in warned_by(hooks.parity_part, warned)
    (tmp_path / "parity.json").write_text(to_json(a_run()), encoding="utf-8")
    page = hooks.parity_part()
    row = next(line for line in page.splitlines() if line.startswith("| A5 |"))
    assert row.endswith("| tau | 1.50 | ≤ 4 | 2,112 | pass |")
    assert "| JAX | 2 | 801 | 9.000000 | 8.250000 | 1.5 s |" in page
    assert "0.10.2" in page
    assert len(warned()) == 1
    (tmp_path / "parity.json").write_text(to_json(a_run(7.0)), encoding="utf-8")
    assert "**A5 falls short.**" in hooks.parity_part()


def test_parity_page_refuses_another_schema(tmp_path, monkeypatch):
    monkeypatch.setattr(hooks, "PARITY", tmp_path / "parity.json")
    (tmp_path / "parity.json").write_text(json.dumps({"schema": "other"}), encoding="utf-8")
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="schema"):
        hooks.parity_part()


@pytest.mark.torch
def test_classes_of_transformers_are_those_that_are_installed():
    """Each with the result that `test_transformers_classes.py` holds it to; and all on the page."""
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from helpers.tiny_models import CLASSES, IMAGES, refusal_of

    def said(kind):
        return {(name, x, e["refused"]) for name, e in data[kind].items() for x in e["types"]}

    def held(tried):
        refusal = refusal_of(tried)
        return refusal and refusal["why"]

    data = json.loads(hooks.CAUSAL_LM.read_text(encoding="utf-8"))
    assert data["transformers"] == transformers.__version__, "run `make classes`"
    assert said("causal") == {(name, x, held(x)) for x, name in CLASSES.items()}
    assert said("images") == {(name, x, held(name)) for name, x in IMAGES.items()}
    rows = [line for line in hooks.causal_lm_part().splitlines() if line.startswith("| `")]
    entries = {**data["causal"], **data["images"]}
    assert sorted(row.split("`")[1] for row in rows) == sorted(entries)
    for name, entry in entries.items():
        assert not entry["refused"] or f"| `{name}` | {entry['refused']} |" in rows


def test_bench_page_is_the_committed_tables_with_their_plots(tmp_path, monkeypatch, warned):
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    monkeypatch.setattr(hooks, "BENCH", tmp_path / "results")
    assert "results/*.md` is missing" in warned_by(hooks.bench_part, warned)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "cpu.md").write_text("![time](cpu.png)\n\n| a |\n", encoding="utf-8")
    assert hooks.bench_part() == "### cpu\n\n![time](bench-results/cpu.png)\n\n| a |"
    (tmp_path / "results" / "cpu.md").write_text("# Two cores\n", encoding="utf-8")
    assert hooks.bench_part() == "### Two cores"


def warned_by(part, warned):
    """The page has a note in place of the part, and a strict build a warning to fail on."""
    assert "not there yet" in part()
    return warned()[-1]


# --- the API page ---------------------------------------------------------------------------------


def api_headings():
    """The names that the API page's headings print: the entry's own, or those put in its place."""
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    for entry, options in re.findall(r"^::: (\S+)\n((?: +.*\n)*)", text, re.MULTILINE):
        given = re.search(r"heading: (.*)", options)
        yield from given[1].split(", ") if given else [entry]


# What a person imports from. `xentlib.nll` and its like define and do not compute.
BACKENDS = [f"xentlib.{name}" for name in FRAMEWORKS]
OTHERS = [f"xentlib.{name}" for name in ("plan", "interop", "contract", "budgets", "reference")]
OTHERS += [
    "xentlib.tools.audit",
    "xentlib.tools.explain",
    "xentlib.torch.audit",
    "xentlib.jax.audit",
    "xentlib.tools.crosscheck",
]
INTEGRATED = ("torchtitan", "transformers", "trl")
OTHERS += [f"xentlib.torch.integrations.{name}" for name in INTEGRATED]
OTHERS += [f"xentlib.jax.integrations.{name}" for name in ("flax", "maxtext", "tunix")]


@pytest.mark.torch
@pytest.mark.jax
def test_headings_of_the_api_page_can_be_imported():
    for package in ("torch", "jax", "flax", "transformers"):
        pytest.importorskip(package)
    modules = {name: importlib.import_module(name) for name in ["xentlib", *BACKENDS, *OTHERS]}
    for heading in api_headings():
        module, _, name = heading.rpartition(".")
        if heading not in modules:
            assert module in modules, heading
            assert name in modules[module].__all__, heading
            assert getattr(modules[module], name), heading


@pytest.mark.torch
@pytest.mark.jax
def test_the_api_page_has_every_public_name():
    for package in ("torch", "jax", "flax"):
        pytest.importorskip(package)
    names = set(api_headings())
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    for package in BACKENDS:
        public = importlib.import_module(package).__all__
        assert {f"{package}.{name}" for name in public} <= names
        shown = re.findall(rf"^from {package} import (.*)$", text, re.MULTILINE)
        assert sorted(", ".join(shown).split(", ")) == sorted(public)


# --- links ----------------------------------------------------------------------------------------


def anchors(page):
    """Of the headings, as mkdocs and forges make them; `{#d1}` is an anchor of its own."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    words = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    given = {found[1] for w in words if (found := re.search(r"\{#([\w-]+)\}$", w))}
    return given | {
        re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", w).strip().lower()) for w in words
    }


def links():
    for page in LINKED:
        text = FENCED.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^()\s]+)\)", text):
            if not re.match(r"[a-z]+:", target):
                yield pytest.param(page, target, id=f"{named(page)}-{target}")


@pytest.mark.parametrize(("page", "target"), list(links()))
def test_link_leads_somewhere(page, target):
    path, _, anchor = target.partition("#")
    there = (page.parent / path).resolve() if path else page
    assert there.exists()
    assert not path.startswith("/")
    if DOCS in page.parents:  # the site holds docs/ alone
        assert DOCS in there.parents
    if anchor:
        assert anchor in anchors(there)
