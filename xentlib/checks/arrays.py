"""What PyTorch users pass that is no tensor: arrays of NumPy and JAX, lists, outputs of models."""

from __future__ import annotations

from types import NoneType
from typing import Any, NoReturn

from xentlib.checks.operand import plain

__all__ = ["refuse_array"]

# What has to be a tensor, and what it is.
REQUIRED = {
    "hidden": "the states that go into the head",
    "weight": "the weight of the head",
    "labels": "class indices, one for each token",
    "logits": "one row of logits for each token",
}
OPTIONAL = frozenset(
    ["bias", "where", "token_weights", "class_weights", "segment_ids", "cu_seqlens", "position_ids"]
)
ARRAYS = ("numpy", "jax", "jaxlib")
# What may be a number too, and has checks of its own; they know of no array that is no tensor.
NUMBERS = ("logit_scale", "softcap", "temperature", "z_loss", "denominator")


def refuse_array(name: str, value: Any) -> None:
    """Refuse an argument that is no tensor and has to be one, or is an array all the same."""
    if name in REQUIRED or (value is not None and name in OPTIONAL):
        refuse(name, value)
    if name in NUMBERS:
        value = plain(value)
        # Numbers first: the compiler traces this, and knows no `__module__`.
        if not isinstance(value, (int, float, NoneType)) and framework_of(value) in ARRAYS:
            refuse(name, value)


def refuse(name: str, value: Any) -> NoReturn:
    framework = framework_of(value)
    came = type(value).__name__
    field = {"hidden": "last_hidden_state", "logits": "logits"}.get(name, "")
    if framework == "numpy":
        came, way_out = f"numpy.{came}", f"Pass `torch.from_numpy({name})`."
    elif framework in ARRAYS:
        came, way_out = "jax.Array", f"Pass `xentlib.interop.to_torch({name})`."
    elif field and hasattr(value, field):
        way_out = f"Pass `{name}.{field}`."
    elif isinstance(value, (list, tuple)) and value and framework_of(value[0]) == "torch":
        came = f"a {came} of tensors"
        last = "`hidden[-1]` of all hidden states of a model, or " if name == "hidden" else ""
        way_out = f"Pass one tensor: {last}`torch.stack({name})`."
    elif isinstance(value, (list, tuple)):
        way_out = f"Pass `torch.tensor({name})`."
    elif name in REQUIRED:
        way_out = f"Pass {REQUIRED[name]}."
    else:
        way_out = "Pass a tensor, or leave it out."
    raise TypeError(f"`{name}` must be a torch.Tensor; got {came}. {way_out}")


def framework_of(value: object) -> str:
    return type(value).__module__.partition(".")[0]
