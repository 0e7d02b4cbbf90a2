"""parity.html and its plots: they show what was measured, and nothing that it says is markup."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from helpers.parity_runs import FAILURES, HOSTILE, STATEMENTS, a_run, failed, measured, unfinished
from xentlib.tools.parity.report.document import to_json
from xentlib.tools.parity.report.page import render_page
from xentlib.tools.parity.report.plots import (
    Series,
    histogram_bins,
    histogram_plot,
    histogram_reach,
    line_plot,
)
from xentlib.tools.parity.report.summary import value_text
from xentlib.tools.parity.result import Histogram, Measurement, ParityResult, Section, TrainingCurve

# --- parity.html ---------------------------------------------------------------------------------


class Outline(HTMLParser):
    """What a page is made of: elements, attributes, and whether every tag is closed."""

    VOID = frozenset({"meta", "br", "hr", "link", "img", "input"})
    SHAPES = frozenset({"path", "rect"})

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("failure", [None, *FAILURES])
@pytest.mark.parametrize("change", [lambda run: run, failed, unfinished])
def test_page_is_well_formed_and_fetches_nothing(failure, change):
    run = change(a_run(*([FAILURES[failure]] if failure else [])))
    page = render_page(run, STATEMENTS)
    outline = Outline(page)
    assert outline.open == []
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(outline.tags)
    names = [name for name, _ in outline.attributes]
    assert "src" not in names
    assert not [name for name in names if name.startswith("on")]
    assert not re.search(r"https?:|//[a-z]|url\(|@import|src=", page)
    links = [value for name, value in outline.attributes if name == "href"]
    ids = {value for name, value in outline.attributes if name == "id"}
    assert all(link[:1] == "#" and link[1:] in ids for link in links)


@pytest.mark.parametrize("field", ["case", "quantity", "metric", "backend", "row"])
def test_page_escapes_what_a_measurement_says(field):
    hostile = measured("A5", 5.0, 4.0)
    hostile = Measurement(
        **{name: getattr(hostile, name) for name in hostile.__slots__} | {field: HOSTILE}
    )
    assert "<script" not in render_page(a_run(hostile), STATEMENTS)


def test_page_escapes_environment_statements_and_histograms():
    run = a_run()
    run.environment[HOSTILE] = HOSTILE
    run.environment["training"] = f"left out, {HOSTILE}"
    hostile = Section(
        HOSTILE,
        histograms=(Histogram(HOSTILE, HOSTILE, HOSTILE, (0.0, 1.0), (3,)),),
        curves=(TrainingCurve(HOSTILE, (1.0, 2.0), (3, 4), 1.0),),
    )
    run.planned = [*run.planned, HOSTILE]
    run.add(hostile)
    run.add(Section("training", error=f"{HOSTILE}\n{HOSTILE}"))
    page = render_page(run, {**STATEMENTS, "A5": HOSTILE})
    assert "<script" not in page
    assert "alert(&quot;1&quot;)" in page


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_shows(failure):
    m = FAILURES[failure]
    good, bad = a_run(), a_run(m)
    assert "✓ xentlib parity</title>" in render_page(good, STATEMENTS)
    assert "fails" not in re.sub(
        r"<style>.*</style>", "", render_page(good, STATEMENTS), flags=re.DOTALL
    )
    page = render_page(bad, STATEMENTS)
    assert "✗ xentlib parity</title>" in page
    assert f"{m.row} falls short</h1>" in page
    assert f'<details class="row fails" id="{m.row}" open>' in page
    assert page.count("✗ fails") == 1
    assert f"✗ {value_text(m)}</td>" in page
    assert json.loads(to_json(bad, STATEMENTS))["passed"] is False


def test_page_of_a_section_that_could_not_be_run():
    page = render_page(failed(a_run()), STATEMENTS)
    assert "✗ xentlib parity</title>" in page
    assert "✓</span>" not in page
    assert "<b>operators</b> RuntimeError: 2 ranks were late</summary><pre>" in page
    assert "Traceback of &lt;it&gt;</pre>" in page
    assert "<dt>9.0 s</dt><dd>operators, could not be run</dd>" in page
    assert "<dt>1 min 00 s</dt><dd>training</dd>" in page


def test_page_of_a_run_that_is_under_way():
    page = render_page(unfinished(a_run()), STATEMENTS)
    assert "… xentlib parity</title>" in page
    assert "2 of 4 sections have been run; what was measured holds</h1>" in page
    assert "<dt>not run</dt><dd>most</dd>" in page
    assert not re.search("✓</span>|✗</span>", page)
    short = render_page(unfinished(a_run(FAILURES["NaN"])), STATEMENTS)
    assert "✗ xentlib parity</title>" in short


def test_page_of_a_row_that_was_not_run():
    page = render_page(a_run(), STATEMENTS)
    assert re.search(r'<div class="row empty" id="A13">.*?not run</span></div>', page)
    assert "hold all 5 rows of the contract" in page


def test_page_of_an_empty_run_and_of_one_backend():
    empty = render_page(ParityResult(), STATEMENTS)
    assert "Nothing was measured</h1>" in empty
    assert "✓" not in empty
    run = a_run()
    alone = tuple(m for m in run.measurements if m.backend == "torch")
    run.add(Section("training", alone, curves=run.sections[1].curves[:1]))
    run.add(Section("operators"))
    page = render_page(run, STATEMENTS)
    assert "PyTorch holds all 2 rows" in page
    assert "Relative difference" not in page
    assert "Training on real text" in page


def test_page_has_each_training_by_its_name():
    run = a_run()
    one, _ = run.sections[1].curves
    twice = (one, replace(one, backend="jax"))
    run.add(replace(run.sections[1], name="distillation", curves=twice))
    training, distillation = render_page(run, STATEMENTS).split("Distillation on real text")
    assert "Training on real text" in training
    for part in (training, distillation):
        assert part.count(">Relative difference<") == part.count("A9, d weight: rho / u<") == 1
    assert "equal in 3 of 3 steps" in distillation
    assert "equal in 2 of 3 steps" in training


def test_page_plots_the_head_gradient_of_every_step():
    page = render_page(a_run(), STATEMENTS)
    plot = page[page.index("A9, d weight: rho / u") :]
    assert [f"step {s}, d weight, rho / u: {30 + s}" in plot for s in (1, 2, 3)] == [True] * 3
    assert "bound ≤ 64" in plot


def test_page_shows_no_long_floats():
    text = "".join(Outline(render_page(a_run(), STATEMENTS)).text)
    assert "3.10" in text
    assert not re.search(r"\d\.\d{7}", text.split("</style>")[-1])


# --- plots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((0, 0, 0), "empty"),
        ((7, 0, 0), "all below 0.5 ULP"),
        ((7, 2, 0), "all below 1 ULP"),
        ((0, 0, 1), "some at 1 ULP or more"),
    ],
)
def test_how_far_a_histogram_goes_is_said(counts, said):
    edges = (0.0, 0.5, 1.0, math.inf)
    assert histogram_reach(Histogram("A5", "torch", "d hidden", edges, counts)) == said


def test_histogram_has_a_bar_for_every_bin_that_holds_something():
    drawing = histogram_plot(
        Histogram("A5", "torch", "d hidden", (0.0, 0.5, 1.0, math.inf), (9000, 0, 1)), 9000
    )
    heights = [float(h) for h in re.findall(r'<rect [^>]*height="([\d.]+)"', drawing)]
    assert len(heights) == 2
    assert heights[0] > heights[1] > 30  # one entry is seen beside thousands
    assert "0 to 0.5 ULP: 9,000" in drawing
    assert "1 to ∞ ULP: 1<" in drawing
    assert "some at 1 ULP or more" in drawing


ULP_EDGES = (0.0, 0.5, *(2.0**k for k in range(25)), math.inf)


@pytest.mark.parametrize("last", range(len(ULP_EDGES) - 1))
def test_labels_below_a_histogram_do_not_touch(last):
    """In 200 pixels, which a panel has where it is narrowest; a letter has 6.2 of them or less."""
    counts = [0] * (len(ULP_EDGES) - 1)
    counts[last] = 3
    histogram = Histogram("A5", "torch", "d hidden", ULP_EDGES, tuple(counts))
    bins = histogram_bins([histogram])
    assert bins == max(last + 1, 4)
    drawing = histogram_plot(histogram, 3, bins)
    found = re.findall(r'<span style="left:([\d.]+)%">([^<]*)<', drawing)
    assert len(found) >= 3
    ends = [(2 * float(left), 6.2 * len(text) / 2) for left, text in found]
    for (left, half), (right, other) in pairwise(ends):
        assert left + half + 3 < right - other


@pytest.mark.parametrize(
    ("bound", "bins", "at"), [(0.25, 4, 125), (0.5, 4, 250), (1.0, 4, 500), (5.0, 5, 850)]
)
def test_histogram_shows_its_bound_where_it_is(bound, bins, at):
    """Bins of equal width: 5 is a quarter into that from 4 to 8, which is shown for it alone."""
    histogram = Histogram("A3", "jax", "lse", ULP_EDGES, (5, 1, *[0] * (len(ULP_EDGES) - 3)))
    assert histogram_bins([histogram], bound) == bins
    drawing = histogram_plot(histogram, 5, bins, bound)
    assert re.findall(r'class="bound" d="M([\d.]+) 0V1000"', drawing) == [f"{at:.1f}"]
    assert "bound" not in histogram_plot(histogram, 5, bins)


def test_page_says_the_bounds_of_each_histogram_and_draws_those_in_ulp():
    run = a_run()
    rounded = {"quantity": "d bias", "backend": "jax"}
    run.add(
        Section(
            "more",
            (
                measured("A7", 0.9991, 0.995, at_least=True, metric="correctly rounded", **rounded),
                measured("A7", 1.0, 1.0, metric="bf16 ULP unless cancelled", **rounded),
            ),
            (Histogram("A7", "jax", "d bias", (0.0, 0.5, 1.0, 2.0, math.inf), (9, 1, 0, 0)),),
        )
    )
    page = render_page(run, STATEMENTS)
    drawn = page[page.index("How far, in ULP") : page.index("Training on real text")]
    drawn = drawn.replace("\N{NO-BREAK SPACE}", " ")
    assert drawn.count('class="bound"') == 1
    assert 'class="bound" d="M500.0 0V1000"' in drawn  # the two of A5 are in tau and rho
    for said in (
        "<span>rho / u 34.5 (≤ 64)</span><span>tau 3.10 (≤ 4)</span>",
        "<span>bf16 ULP unless cancelled 1 (≤ 1)</span><span>correctly rounded 99.91 % (≥ 99.5 %)<",
    ):
        assert said in drawn


@pytest.mark.parametrize(
    "values",
    [(1.0,), (0.0, 0.0), (2.0, 2.0), (math.nan, 1.0), (math.inf, 3.0), (1e-9, 1e3), (-1, 5)],
)
@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("bound", [None, 1e-3, 64.0])
def test_lines_stay_inside_their_drawing(values, log, bound):
    drawing = line_plot(
        [Series("torch", "torch", values)], label="x", kind="low", bound=bound, log=log
    )
    assert "nan" not in drawing.replace("NaN", "")
    found = re.findall(r"([ML])([\d.-]+) ([\d.-]+)", drawing)
    assert found
    assert all(0 <= float(x) <= 1000 and 0 <= float(y) <= 1000 for _, x, y in found)
    assert drawing.count('class="lost') == sum(not math.isfinite(v) for v in values)


def test_no_line_leads_to_a_value_that_is_not_on_the_axis():
    drawing = line_plot(
        [Series("x", "both", (1e-6, 1e-5, 0.0, 1e-6, math.nan, 1e-6, 1e-5))],
        label="x",
        kind="low",
        log=True,
    )
    (line,) = re.findall(r'class="line both" d="([^"]*)"', drawing)
    assert re.sub(r"[^ML]", "", line) == "MLMML"
    assert drawing.count('class="zero') == 1
