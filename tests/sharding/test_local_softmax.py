"""A softmax that each rank takes of its own columns is refused: its probabilities are of as many
distributions as there are ranks."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from helpers import local_softmax
from helpers.ranks import launch

pytestmark = [pytest.mark.cpu, pytest.mark.torch]
SAID = "a softmax must be of all classes"


@pytest.mark.parametrize("low", [False, True])
def test_a_softmax_of_a_shard_is_refused_on_every_rank(low: bool) -> None:
    """A10: of a teacher, of labels that are probabilities, of given logits; in 16 bits too. One of
    all classes is right."""
    first, second = launch(2, local_softmax.of_rank, low)
    assert first == second
    assert [text for text in first if SAID not in text] == []
    assert len(first) == 7


def test_where_nothing_is_read_it_is_nan() -> None:
    """A10: as on a device, on every rank."""
    for found in launch(2, local_softmax.of_rank, False, False):
        assert found == [True] * 7
