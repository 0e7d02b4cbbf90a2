"""The calls that messages of windows and of token counts print, made where they were refused: of
each the gradient that it gives, and the one that is right.

Shapes: N tokens, H width, V classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from helpers.advice import code_of, keywords_of

N, H, V = 6, 3, 7
CASES: dict[str, tuple[str, Callable[[], tuple[Any, Any]]]] = {}
Case = Callable[[], tuple[Any, Any]]


def case(name: str, backend: str = "torch") -> Callable[[Case], Case]:
    def keep(function: Case) -> Case:
        CASES[f"{name}, {function.__name__}"] = (backend, function)
        return function

    return keep


def arrays() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, N, H), (V, H)))
    return x, w, rng.integers(0, V, (2, N))


class Window:
    """A head, and two micro-batches."""

    def __init__(self, **options: Any) -> None:
        import torch

        from xentlib.torch import TokenNormalizer

        self.x, w, self.y = map(torch.from_numpy, arrays())
        self.head = torch.nn.Linear(H, V, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(w)
        self.norm = TokenNormalizer(self.head, **options)

    def out(self, m: int, **how: Any) -> Any:
        from xentlib.torch import chunked_nll

        return chunked_nll(self.x[m], self.head.weight, self.y[m], **how)

    def run(self, window: Any, body: Callable[[Any, int], None]) -> Any:
        """The gradient, with `body(window, m)` for each micro-batch."""
        self.head.zero_grad()
        with window as opened:
            for m in opened.micro_batches(range(2)):
                body(opened, m)
        return self.head.weight.grad.numpy().copy()

    def of_sums(self, opened: Any, m: int) -> None:
        opened.backward(self.out(m, reduction="sum"))

    def labels(self) -> list[Any]:
        return list(self.y)

    def right(self, where: Any = None) -> Any:
        """Of one batch."""
        from xentlib.torch import chunked_nll

        weight = self.head.weight.detach().clone().requires_grad_()
        chunked_nll(self.x, weight, self.y, where=where).loss.backward()
        return weight.grad.numpy()


@case("WINDOWS.labels")
def of_no_labels() -> tuple[Any, Any]:
    w = Window()
    code = code_of(lambda: w.run(w.norm.window(), w.of_sums), "WINDOWS.labels", "norm.window")
    window = eval(code.replace("...", "*labels"), {"norm": w.norm, "labels": w.labels()})
    return w.run(window, w.of_sums), w.right()


@case("WINDOWS.shape")
def of_one_column() -> tuple[Any, Any]:
    import torch

    w = Window()
    where = [torch.tensor([True]), torch.tensor([False])]

    def masked(opened: Any, m: int) -> None:
        opened.backward(w.out(m, where=where[m].expand(N), reduction="sum"))

    def window(of: Any) -> Any:
        return w.norm.window(labels=w.labels(), where=of)

    code = code_of(lambda: w.run(window(where), masked), "WINDOWS.shape", "where")
    expanded = [eval(code, {"where": m, "labels": y}) for m, y in zip(where, w.labels())]
    return w.run(window(expanded), masked), w.right(torch.stack(expanded))


@case("WINDOWS.one_number")
def of_a_loss_of_each_token() -> tuple[Any, Any]:
    import torch

    w = Window()

    def each(m: int) -> Any:
        logits = w.x[m] @ w.head.weight.T
        return torch.nn.functional.cross_entropy(logits, w.y[m], reduction="none")

    def window() -> Any:
        return w.norm.window(labels=w.labels())

    code = code_of(
        lambda: w.run(window(), lambda opened, m: opened.backward(each(m), N)), "WINDOWS.one_number"
    )
    got = w.run(window(), lambda opened, m: opened.backward(eval(code, {"loss": each(m)}), N))
    return got, w.right()


@case("WINDOWS.as_made")
def of_a_loss_that_was_reduced() -> tuple[Any, Any]:
    w = Window()

    def body(opened: Any, m: int, log: Callable[[Any], Any]) -> None:
        out = w.out(m, reduction="sum")
        log(out).mul_(2.0)
        opened.backward(out)

    def run(log: Callable[[Any], Any]) -> Any:
        return w.run(w.norm.window(labels=w.labels()), lambda opened, m: body(opened, m, log))

    code = code_of(lambda: run(lambda out: out.loss.data), "WINDOWS.as_made")
    return run(lambda out: eval(code, {"out": out})), w.right()


@case("WINDOWS.denominator")
def of_a_mean_of_each_micro_batch() -> tuple[Any, Any]:
    w = Window()

    def run(how: Callable[[Any], dict[str, Any]]) -> Any:
        def body(opened: Any, m: int) -> None:
            opened.backward(w.out(m, **how(opened)), normalized=True)

        return w.run(w.norm.window(labels=w.labels()), body)

    code = code_of(lambda: run(lambda _: {}), "WINDOWS.denominator")
    return run(lambda opened: keywords_of(code, window=opened)), w.right()


@case("WINDOW_TYPES.tensors")
def of_lists() -> tuple[Any, Any]:
    import torch

    w = Window()

    def run(labels: Any) -> Any:
        return w.run(w.norm.window(labels=labels), w.of_sums)

    lists = [y.tolist() for y in w.labels()]
    code = code_of(lambda: run(lists), "WINDOW_TYPES.tensors")
    return run(eval(code, {"torch": torch, "labels": lists})), w.right()


# --- JAX ------------------------------------------------------------------------------------------


class Step:
    """A step of optax with a rate of 1, whose difference of parameters is the gradient."""

    def __init__(self) -> None:
        import jax
        import optax

        self.jax, self.optax = jax, optax
        self.x, self.w, self.y = (x[0] if x.ndim > 1 and len(x) == 2 else x for x in arrays())
        self.sgd = optax.sgd(1.0)

    def state(self, tx: Any) -> Any:
        from xentlib.jax.integrations.flax import TrainState

        return TrainState.create(apply_fn=None, params=self.params(), tx=tx)

    def params(self) -> dict[str, Any]:
        return {"w": self.jax.numpy.asarray(self.w)}

    def of(self, reduction: str = "sum") -> tuple[Any, Any]:
        """The gradient and the output."""
        from xentlib.jax import chunked_nll

        def loss(params: Any) -> tuple[Any, Any]:
            out = chunked_nll(self.x, params["w"], self.y, reduction=reduction)
            return out.loss, out

        grads, out = self.jax.grad(loss, has_aux=True)(self.params())
        return grads, out

    def moved(self, state: Any, grads: Any, **how: Any) -> Any:
        return self.w - np.asarray(state.apply_gradients(grads=grads, **how).params["w"])

    def right(self) -> Any:
        return np.asarray(self.of("mean")[0]["w"])


@case("WINDOWS.count_of_sum", "jax")
def of_the_count_of_a_mean() -> tuple[Any, Any]:
    s = Step()
    grads, out = s.of("mean")
    code = code_of(
        lambda: s.moved(s.state(s.sgd), grads, token_count=out.num_tokens),
        "WINDOWS.count_of_sum",
        "token_count",
    )
    grads, out = s.of("sum")
    return s.moved(s.state(s.sgd), grads, **keywords_of(code, out=out)), s.right()


@case("WINDOW_TYPES.outermost", "jax")
def of_a_chain_around() -> tuple[Any, Any]:
    from xentlib.jax import token_normalized

    s = Step()
    parts = s.optax.clip(1e9), s.sgd
    inside = s.optax.chain(parts[0], token_normalized(parts[1]))
    code = code_of(lambda: s.state(inside), "WINDOW_TYPES.outermost")
    names = {"token_normalized": token_normalized, "optax": s.optax, "parts": parts}
    state = s.state(eval(code.replace("...", "*parts"), names))
    grads, out = s.of()
    return s.moved(state, grads, token_count=out), s.right()


@case("WINDOW_TYPES.token_normalized", "jax")
def of_a_state_made_by_hand() -> tuple[Any, Any]:
    from xentlib.jax import token_normalized
    from xentlib.jax.integrations.flax import TrainState

    s = Step()
    grads, out = s.of()

    def made(tx: Any) -> Any:
        params = s.params()
        return TrainState(step=0, apply_fn=None, params=params, tx=tx, opt_state=tx.init(params))

    code = code_of(
        lambda: s.moved(made(s.sgd), grads, token_count=out),
        "WINDOW_TYPES.token_normalized",
        "tx=",
    )
    wrapped = keywords_of(code, token_normalized=token_normalized, tx=s.sgd)
    return s.moved(made(wrapped["tx"]), grads, token_count=out), s.right()


@case("WINDOWS.count_of_all", "jax")
def of_the_count_of_a_device() -> tuple[Any, Any]:
    import jax
    from jax.sharding import PartitionSpec as P

    from xentlib.jax import chunked_nll

    s = Step()
    mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def run(count: Callable[[Any], Any]) -> Any:
        def local(state: Any, x: Any, y: Any) -> Any:
            def loss(params: Any) -> tuple[Any, Any]:
                out = chunked_nll(x, params["w"], y, reduction="sum")
                return out.loss, out

            grads, out = jax.grad(loss, has_aux=True)(state.params)
            return state.apply_gradients(grads=grads, token_count=count(out)).params

        specs = (P(), P("data"), P("data"))
        body = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
        return s.w - np.asarray(jax.jit(body)(s.state(s.sgd), s.x, s.y)["w"])

    code = code_of(lambda: run(lambda out: out), "WINDOWS.count_of_all")
    return run(lambda out: eval(code, {"jax": jax, "out": out})), s.right()
