"""Steps through DeepSpeed ZeRO on two gloo ranks, audited by the command."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.torchrun import torchrun  # noqa: E402


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("stage_1", 0, "nothing found"),
        ("stage_2", 0, "nothing found"),
        ("stage_3", 0, "nothing found"),
        ("twice_over_ranks", 1, "gradients of the head: reduced twice over ranks"),
    ],
)
def test_a_step_of_deepspeed(name, status, said, tmp_path) -> None:
    """`test_audit_command.py` has torchrun itself."""
    step = f"helpers.audited_zero:{name}"
    (first, printed), (second, nothing) = torchrun(2, "helpers.audit_command", tmp_path, step)
    assert first == second == status
    assert printed.startswith(said)
    assert "2 ranks, 3 micro-batches" in printed
    assert nothing == ""
