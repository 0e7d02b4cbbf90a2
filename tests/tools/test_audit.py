"""The audit names the defect that a step has, in both backends, and finds nothing in right steps of
different kinds. `test_audit_ranks.py` has several ranks, `test_audit_command.py` the command."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import pytest


def steps(backend):
    return importlib.import_module(f"helpers.audited_{backend}")


def audit(backend, step, **options):
    return importlib.import_module(f"xentlib.{backend}.audit").audit(step, **options)


def cases(name):
    found = []
    for backend in ("torch", "jax"):
        if find_spec(backend) is None:
            continue
        for k, case in enumerate(getattr(steps(backend), name)):
            what = case if isinstance(case, str) else case[0] or "right"
            found.append(
                pytest.param(
                    backend, k, id=f"{backend}-{what}-{k}", marks=getattr(pytest.mark, backend)
                )
            )
    return found


@pytest.mark.parametrize(("backend", "k"), cases("PLANTED"))
def test_a_planted_defect_is_named(backend, k):
    name, step, options = steps(backend).PLANTED[k]
    report = audit(backend, step, kind="step", **options)
    assert report.findings, report
    assert report.findings[0].title == name, report


@pytest.mark.parametrize(("backend", "k"), cases("RIGHT"))
def test_nothing_is_found_in_a_right_step(backend, k):
    step, options = [*steps(backend).RIGHT.values()][k]
    report = audit(backend, step, **options)
    assert report.passed, report
    assert str(report).startswith("nothing found")
    assert report.looked_for[0] not in str(report)
    text = report.text(verbose=True).replace("\n ", "")
    assert all(name in text for name in report.looked_for[:3])


@pytest.mark.parametrize(("backend", "k"), cases("RIGHT")[:1])
def test_a_kind_that_does_not_exist_is_what_is_said(backend, k):
    """And not the number of its arguments, which are those of a step."""
    step, _ = [*steps(backend).RIGHT.values()][k]
    with pytest.raises(ValueError, match="`kind` must be"):
        audit(backend, step, kind="gradient")


@pytest.mark.parametrize(("backend", "k"), cases("FUNCTIONS"))
def test_functions_of_hidden_states_head_and_labels(backend, k):
    name, function, kind, options = steps(backend).FUNCTIONS[k]
    report = audit(backend, function, kind=kind, **options)
    assert ", ".join(x.title for x in report.findings) == name, report
