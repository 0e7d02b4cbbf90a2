"""A result is a tuple, which people use as the tensor that other losses return: each such use is
refused in one sentence. Without it `out * 2` would be a tuple twice as long."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Number
from typing import Any, NoReturn, TypeVar

Kind = TypeVar("Kind", bound=type)

BINARY = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"}
BINARY |= {"pow": "**", "matmul": "@"}
LOSSES: list[type] = []  # results that have a loss, its counts and what it was divided by
ORDER = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
UNARY = {"neg": "-", "pos": "+", "abs": "abs()", "round": "round()"}
NUMBERS = {"float": "float()", "int": "int()"}


def not_a_tensor(field: str) -> Callable[[Kind], Kind]:
    """Have a class of results refuse what a tensor could do; `field` is the tensor that was meant.

    What a tuple can do stays, but for `+`, `*` and its order. `hasattr` answers False."""

    def decorate(kind: Kind) -> Kind:
        def text(used: str) -> str:
            return (
                f"`{kind.__name__}` is a tuple of results and must not be used as a tensor or an "
                f"array; got {used}. Use its `.{field}`."
            )

        def refusing(used: str) -> Callable[..., NoReturn]:
            def refuse(self: Any, *others: Any) -> NoReturn:
                raise TypeError(text(f"`{used}`"))

            return refuse

        def attribute(self: Any, name: str) -> NoReturn:
            if name.startswith("_"):  # a question of Python's or a library's, such as __deepcopy__
                raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
            raise AttributeError(text(f"`.{name}`"), name=name, obj=self)

        def compared(sign: str, as_tuple: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
            def compare(self: Any, other: Any) -> Any:
                if isinstance(other, Number) or hasattr(other, "dtype"):
                    raise TypeError(text(f"`{sign}`"))
                return as_tuple(self, other)

            return compare

        def formatted(self: Any, how: str) -> str:
            if how:
                raise TypeError(text(f"a format, '{how}'"))
            return str(self)

        def jax_array(self: Any) -> NoReturn:
            # Asked for by functions of one array, and by `jax.grad` of what a function returns,
            # which puts a TypeError into words of its own.
            raise ValueError(text("one where JAX takes an array"))

        if field == "loss":
            LOSSES.append(kind)
        for name, sign in {**BINARY, **ORDER, **UNARY, **NUMBERS}.items():
            setattr(kind, f"__{name}__", refusing(sign))
        for name, sign in BINARY.items():
            setattr(kind, f"__r{name}__", refusing(sign))
        members: dict[str, Any] = {"getattr": attribute, "format": formatted}
        members |= {"eq": compared("==", tuple.__eq__), "ne": compared("!=", tuple.__ne__)}
        members |= {"jax_array": property(jax_array), "array_ufunc": None}  # of NumPy's scalars
        for name, member in members.items():
            setattr(kind, f"__{name}__", member)
        return kind

    return decorate


def is_loss_output(x: Any) -> bool:
    """A result of a loss: `loss`, `num_tokens`, `weight_sum` and `denominator`."""
    return isinstance(x, tuple(LOSSES))
