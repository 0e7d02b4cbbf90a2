"""What a call of `pairs.py` gives, from full logits in float64 and by autograd; and how far that
moves where logits move as far as rounding moves them, which bounds what a correct result is off by.

Shapes: N tokens, V vocabulary, H hidden width, K classes of a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fuzzing.pairs import OF_LOGITS, Pair
from xentlib.contract import U
from xentlib.labels import SoftLabels
from xentlib.teacher import TeacherHead, TeacherLogits, TeacherTopK

INF = float("inf")
JOLTS, OF_FEW_CLASSES = 6, 48  # of two classes it is one number, which six may all miss
# As far as float64 reaches beyond float32, where what is right is rounded as well: by as much as
# the terms that it is a difference of.
FINE, FINE_TERMS = 2.0**-22, 2.0**-26


class FullLogits:
    """One call's values and gradients. `jolt` moves each logit by its rounding, up or down."""

    def __init__(self, pair: Pair, jolt: Any = None, top_ids: Any = None) -> None:
        self.call, self.how, self.jolt = pair.call, pair.call.keywords, jolt
        leaves = self.call.leaves
        first = leaves["logits" if self.call.function in OF_LOGITS else "hidden"]
        self.leading, self.top_ids = first.shape[:-1], top_ids
        self.count = int(np.prod(self.leading, dtype=int))
        self.out: dict[str, Any] = {}
        # Of dz's terms: those of labels that are a distribution, and the largest log-ratio.
        self.coefficients: Any = 0.0
        self.slope: Any = 0.0
        self.teacher_p: Any = 0.0
        labels, where = self.call.labels, self.how.get("where")
        self.valid = torch.ones(self.count, dtype=torch.bool)
        if where is not None:
            self.valid &= torch.tensor(np.asarray(where).reshape(-1))
        self.labels = None
        if isinstance(labels, np.ndarray) and labels.dtype.kind == "i":
            self.labels = self.flat(labels, torch.long)
            self.valid &= self.labels != -100
        if self.call.function in OF_LOGITS:
            self.x = self.flat(first).clone()
            self.exact_x = self.x.abs() * 0
        else:
            hidden = torch.where(self.valid[:, None], self.flat(first), 0.0)
            bias = leaves.get("bias")
            self.x, self.exact_x = product(
                hidden, leaves["weight"], bias, self.how.get("weight_layout", "VH")
            )
            self.hidden, self.weight = hidden, wide(leaves["weight"])
        self.x.requires_grad_()
        z = self.x * self.how.get("logit_scale", 1.0)
        error = self.exact_x * abs(self.how.get("logit_scale", 1.0))
        if "softcap" in self.how:
            z = self.how["softcap"] * torch.tanh(z / self.how["softcap"])
        self.plain = z  # before its temperature
        self.tau = self.temperature(self.how.get("temperature", 1.0))
        self.z = self.jolted(z / self.tau, error / self.tau)
        if "vocab" in self.how:  # of the first classes, as many as both have
            there = torch.arange(self.z.shape[1]) < self.teacher_logits()[0].shape[1]
            self.z = torch.where(there, self.z, -INF)
        self.log_p, self.lse = soft(self.z)
        getattr(self, "of_" + self.call.function)()
        self.gradients(pair.upstream)

    # --- what a call has ------------------------------------------------------------------------

    def flat(self, x: Any, dtype: Any = torch.float64) -> Any:
        x = np.asarray(x)
        x = x.astype(np.float64) if x.dtype.kind not in "ib" else x
        return torch.tensor(x.reshape(self.count, *x.shape[len(self.leading) :])).to(dtype)

    def temperature(self, t: Any) -> Any:
        return self.flat(t)[:, None] if np.ndim(t) or isinstance(t, np.ndarray) else float(t)

    def jolted(self, z: Any, error: Any) -> Any:
        if self.jolt is None:
            return z
        sign = torch.tensor(self.jolt.uniform(-1.5, 1.5, z.shape))
        lse = z.detach().logsumexp(1, keepdim=True)
        size = error + torch.where(z.isinf(), 0.0, z.detach().abs()) + lse.abs() + 1
        return torch.where(z.isinf(), z, z + U * sign * size)

    def per_token(self, x: Any, where: Any = None) -> Any:
        """0 where a token is not valid."""
        valid = self.valid.reshape(-1, *[1] * (x.ndim - 1))
        return torch.where(valid if where is None else where & valid, x, 0.0)

    def probabilities(self) -> Any:
        labels = self.call.labels
        if self.labels is not None:
            ids = torch.where(self.valid, self.labels, 0)[:, None]
            dense = torch.zeros_like(self.log_p).scatter(1, ids, 1.0)
        elif isinstance(labels, SoftLabels):
            ids, probs = self.flat(labels.ids, torch.long), self.flat(labels.probs)
            dense = torch.zeros_like(self.log_p)
            there = torch.where(ids >= 0, probs, 0.0)
            dense = dense.scatter_add(1, ids.clamp(min=0), there)
        else:
            dense = self.flat(labels)
        return torch.where(self.valid[:, None], dense, 0.0)

    def largest(self, of: Any) -> Any:
        """|lse|, of a token or of all, as an output `of` it is broadcast."""
        lse = self.per_token(self.lse.detach()).abs()
        if of.ndim == 0:
            return lse.max() if lse.numel() else 0.0
        return lse.reshape(-1, *[1] * (of.ndim - 1))

    def at(self, ids: Any, of: Any) -> Any:
        """[N, K], 0 where there is no class."""
        return self.per_token(of.gather(1, ids.clamp(min=0)), ids >= 0)

    # --- the functions --------------------------------------------------------------------------

    def likelihood(self) -> Any:
        """Of the labels, smoothed and weighed or not: for a loss, and for the output."""
        q, smoothing = self.probabilities(), self.how.get("label_smoothing", 0.0)
        weights = torch.ones(q.shape[1], dtype=torch.float64)
        if "class_weights" in self.how:
            weights = wide(self.how["class_weights"])
        a = weights * ((1 - smoothing) * q + smoothing / q.shape[1])
        self.coefficients, self.slope = a, 1.0
        return summed(a, self.log_p), summed(q, self.log_p)

    def of_chunked_nll(self) -> None:
        loglik, local = self.likelihood()
        nll = -loglik + self.how.get("z_loss", 0.0) * self.lse**2
        self.moments(local)
        self.reduced(nll)

    def of_vocab_parallel_logprobs(self) -> None:
        if self.labels is None:
            self.moments(self.likelihood()[0])
        else:
            self.of_chunked_logprobs()

    def of_chunked_logprobs(self) -> None:
        if "kept" in self.how:
            kept = self.flat(self.how["kept"], torch.long)
            there = torch.zeros(*self.z.shape, dtype=torch.bool)
            there = there.scatter(1, kept.clamp(min=0), kept >= 0)
            # A first class that stands where -1 does would be taken away again.
            there[:, 0] = (kept == 0).any(1)
            there |= ~(kept >= 0).any(1, keepdim=True) | ~self.valid[:, None]
            self.z = torch.where(there, self.z, -INF)
            self.log_p, self.lse = soft(self.z)
        labels = torch.where(self.valid, self.labels, 0)[:, None]
        self.moments(self.log_p.gather(1, labels)[:, 0])
        if "ids" in self.how:
            self.out["ids_logprobs"] = self.at(self.flat(self.how["ids"], torch.long), self.log_p)
        if "top_k" in self.how:
            best = self.log_p.detach().sort(1, descending=True)
            values, ids = (x[:, : self.how["top_k"]] for x in best)
            self.best = self.per_token(values)
            if self.top_ids is not None:  # of two that are nearly equal either
                ids = self.flat(self.top_ids, torch.long)
                self.out["top_logprobs"] = torch.where(
                    ids >= 0, self.at(ids, self.log_p), self.best
                )

    def moments(self, logprobs: Any) -> None:
        p = self.log_p.exp()
        entropy = -torch.where(p > 0, p * torch.where(p > 0, self.log_p, 0.0), 0.0).sum(1)
        values = {"logprobs": logprobs, "entropy": entropy, "lse": self.lse}
        self.out |= {name: self.per_token(x) for name, x in values.items()}

    def reduced(self, loss: Any) -> None:
        weights = torch.ones(self.count, dtype=torch.float64)
        if "token_weights" in self.how:
            weights = self.flat(self.how["token_weights"])
        weights = self.per_token(weights)
        loss = self.per_token(loss) * weights
        self.out |= {"weight_sum": weights.sum(), "num_tokens": self.valid.sum()}
        self.terms = loss.detach().abs()
        if self.how["reduction"] != "none":
            mean = self.how["reduction"] == "mean"
            divisor = self.how.get("denominator", float(weights.sum()) or 1.0 if mean else 1.0)
            loss, self.terms = loss.sum() / divisor, self.terms.sum() / divisor
        self.out["loss"] = loss

    def of_vocab_parallel_divergence(self) -> None:
        self.out["divergence"] = self.per_token(self.divergence(self.log_p, self.of_teacher()))
        self.out |= {"weight_sum": self.valid.double().sum(), "num_tokens": self.valid.sum()}

    def teacher_logits(self) -> tuple[Any, Any]:
        """And the sum of their absolute terms."""
        teacher = self.how["teacher"]
        if isinstance(teacher, TeacherLogits):
            z, error = self.flat(teacher.logits), 0.0
        else:
            hidden = self.flat(teacher.hidden)
            z, error = product(hidden, teacher.weight, teacher.bias, teacher.weight_layout)
            z, error = z * teacher.logit_scale, error * teacher.logit_scale
            if teacher.softcap is not None:
                z = teacher.softcap * torch.tanh(z / teacher.softcap)
        return z, torch.zeros_like(z) + error

    def of_teacher(self) -> Any:
        teacher, (z, error) = self.how["teacher"], self.teacher_logits()
        more = self.z.shape[1] - z.shape[1]
        z, error = z[:, : self.z.shape[1]], error[:, : self.z.shape[1]]
        z = torch.nn.functional.pad(z, (0, max(0, more)), value=-INF)
        error = torch.nn.functional.pad(error, (0, max(0, more)))
        own = teacher.temperature
        tau = self.tau if own is None else self.temperature(own)
        z = self.jolted(z / tau, error / tau)
        self.teacher_log_p = soft(z)[0]
        self.teacher_p = self.teacher_log_p.exp()
        return self.teacher_log_p

    def of_chunked_divergence(self) -> None:
        few = isinstance(self.how["teacher"], TeacherTopK)
        value = self.of_few() if few else self.divergence(self.log_p, self.of_teacher())
        value = self.per_token(value)
        squared = self.tau**2 if self.how.get("temperature_squared") else 1.0
        squared = squared[:, 0] if torch.is_tensor(squared) else squared
        loss, plain = value * squared, soft(self.jolted(self.plain, self.exact_x))[0]
        label = torch.where(self.valid, self.labels if self.labels is not None else 0, 0)
        if self.how.get("nll_weight"):
            loss = loss - self.how["nll_weight"] * plain.gather(1, label[:, None])[:, 0]
        self.reduced(loss)
        self.moments(self.log_p.gather(1, label[:, None])[:, 0])
        self.out["divergence"] = value
        del self.out["lse"]
        if self.labels is None:
            del self.out["logprobs"]
        if isinstance(self.how["teacher"], (TeacherHead, TeacherLogits)):
            q = self.teacher_log_p.exp()
            entropy = -torch.where(q > 0, q * torch.where(q > 0, self.teacher_log_p, 0.0), 0.0)
            self.out["teacher_entropy"] = self.per_token(entropy.sum(1))

    def divergence(self, log_p: Any, log_q: Any) -> Any:
        if self.jolt is not None:  # a rounded lse moves all classes of a token by as much
            sign = torch.tensor(self.jolt.uniform(-1.5, 1.5, (self.count, 1)))
            log_p = log_p + U * sign * self.lse.detach()[:, None]
        p, q = log_p.exp(), log_q.exp()
        if self.how["kind"] == "forward_kl":
            return kl(q, p)
        apart = torch.where(counts_of(log_p, log_q), log_p - log_q, 0.0).detach().abs()
        self.slope = self.slope + apart.amax(1, keepdim=True)
        if self.how["kind"] == "reverse_kl":
            return kl(p, q)
        beta = self.how["beta"]
        m = beta * q + (1 - beta) * p
        return beta * kl(q, m) + (1 - beta) * kl(p, m)

    def of_few(self) -> Any:
        """From the teacher's classes and their tail."""
        teacher = self.how["teacher"]
        ids, log_q = self.flat(teacher.ids, torch.long), self.flat(teacher.logprobs)
        ids = torch.where(self.valid[:, None], ids, -1)
        again = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(2)  # counts once
        counts = (ids >= 0) & ~again
        log_p = torch.where(counts, self.log_p.gather(1, ids.clamp(min=0)), -INF)
        log_q = torch.where(counts, log_q, -INF)
        if teacher.tail == "class":
            others = torch.ones_like(self.log_p, dtype=torch.bool)
            rows, columns = counts.nonzero(as_tuple=True)
            others[rows, ids[rows, columns]] = False
            rest = 1 - log_q.exp().sum(1, keepdim=True)
            there = others.any(1, keepdim=True)
            z = torch.where(others, self.log_p, -INF)
            z = torch.where(there, z, 0.0).logsumexp(1, keepdim=True)
            log_p = torch.cat((log_p, torch.where(there, z, -INF)), 1)
            log_q = torch.cat((log_q, torch.where(there, rest.clamp(min=1e-9).log(), -INF)), 1)
            log_q = soft(log_q)[0]  # where these are all classes nothing is left to be the rest
        if teacher.tail == "renormalize":
            some = counts.any(1, keepdim=True)
            log_p, log_q = (
                torch.where(counts, x - torch.where(some, x, 0.0).logsumexp(1, keepdim=True), -INF)
                for x in (log_p, log_q)
            )
        self.slope = 1.0
        value = self.divergence(log_p, log_q)
        if teacher.tail == "renormalize":  # of p that may be 1 where that of all classes is small
            p = torch.where(counts, log_p.detach().exp() * self.slope, 0.0)
            zeros = torch.zeros_like(self.log_p)
            self.coefficients = zeros.scatter_add(1, ids.clamp(min=0), p)
        return value

    # --- gradients ------------------------------------------------------------------------------

    def gradients(self, upstream: dict[str, Any]) -> None:
        total = sum(
            (torch.where(self.out[name].isinf(), 0.0, self.out[name]) * self.shaped(g, name)).sum()
            for name, g in upstream.items()
            if name in self.out
        )
        dz = capped = torch.zeros_like(self.x)
        if torch.is_tensor(total) and total.requires_grad:
            dz, capped = torch.autograd.grad(total, (self.x, self.plain))
        self.out |= self.products(dz, lambda x: x)
        # What is rounded: dz, of terms, which the slope of a softcap multiplies. That is the
        # difference of two numbers of 1.
        p, capped = self.log_p.detach().exp(), capped.abs() * self.how.get("logit_scale", 1.0)
        sizes = capped + p * capped.sum(1, keepdim=True)
        each = torch.zeros(self.count, 1, dtype=torch.float64)
        for name, g in upstream.items():
            x = self.shaped(g, name).abs()
            each = each + (x if x.ndim == 0 else x[:, None] if x.ndim == 1 else x.sum(1, True))
        outer = self.how.get("logit_scale", 1.0) / self.tau
        terms = each * (p * self.slope + self.coefficients) * outer
        lse = torch.where(self.valid, self.lse.detach().abs(), 0.0)[:, None]
        # Of p, from a rounded lse; of a teacher's, which is p times e to a difference of logits.
        size_of_z = torch.where(self.valid[:, None], self.z.detach().abs().nan_to_num(posinf=0), 0)
        sizes = sizes + each * (p * lse + self.teacher_p * (lse + size_of_z)) * outer
        self.sizes = self.products(sizes, torch.abs)
        self.terms_of_dz = self.products(terms, torch.abs)
        self.fine_terms = self.products(terms + each * p * outer, torch.abs)

    def products(self, dz: Any, of: Any) -> dict[str, Any]:
        if self.call.function in OF_LOGITS:
            return {"d_logits": dz}
        by_rows = self.how.get("weight_layout", "VH") == "VH"
        w = of(self.weight if by_rows else self.weight.T)
        d_weight = dz.T @ of(self.hidden)
        found = {"d_hidden": dz @ w, "d_weight": d_weight if by_rows else d_weight.T}
        return found | ({"d_bias": dz.sum(0)} if "bias" in self.call.leaves else {})

    def shaped(self, g: Any, name: str) -> Any:
        return torch.tensor(np.asarray(g, np.float64).reshape(self.out[name].shape))


def counts_of(*log: Any) -> Any:
    return ~(log[0].isinf() | log[1].isinf())


def wide(x: Any) -> Any:
    return torch.tensor(np.asarray(x).astype(np.float64))


def soft(z: Any) -> tuple[Any, Any]:
    lse = z.logsumexp(1)
    return z - lse[:, None], lse


def summed(a: Any, log_p: Any) -> Any:
    return torch.where(a != 0, a * torch.where(a != 0, log_p, 0.0), 0.0).sum(1)


def product(hidden: Any, weight: Any, bias: Any, layout: str) -> tuple[Any, Any]:
    """Logits, and the sum of their absolute terms."""
    w = wide(weight) if layout == "HV" else wide(weight).T
    b = torch.zeros(w.shape[1], dtype=torch.float64) if bias is None else wide(bias)
    return hidden @ w + b, hidden.abs() @ w.abs() + b.abs()


def kl(a: Any, b: Any) -> Any:
    there = a > 0
    x, y = (torch.where(there, v, 1.0) for v in (a, b))
    return torch.where(there, x * (x.log() - y.log()), 0.0).sum(1)


def bounded(pair: Pair, top_ids: Any = None, seed: int = 0) -> tuple[FullLogits, dict[str, Any]]:
    """What is right, and in units of u how far a correct result may be from it."""
    right = FullLogits(pair, top_ids=top_ids)
    rng, moved = np.random.default_rng(seed), dict.fromkeys(right.out, 0.0)
    jolts = OF_FEW_CLASSES if right.z.shape[1] < 9 else JOLTS
    for _ in range(jolts):
        other = FullLogits(pair, rng, top_ids).out
        for name, x in right.out.items():
            apart = (other[name] - x).abs().detach().nan_to_num(posinf=0.0)
            moved[name] = moved[name] + apart * (JOLTS / jolts)
    dtype = next(iter(pair.call.leaves.values())).dtype.name
    audit = "compute_dtype" in pair.call.keywords
    fine = FINE if audit or dtype == "float64" else 1.0
    low = dtype == "bfloat16"
    found = {}
    for name, x in right.out.items():
        size, value = right.sizes.get(name), x.detach().abs().nan_to_num(posinf=0.0)
        off: Any = moved[name]
        if size is not None:
            if x.ndim > 1 and x.numel():  # one sign for a row of a product
                off = off + off.amax(1 if name != "d_weight" or rows_first(pair) else 0, True)
            off = fine * (off + 2 * U * (size + right.terms_of_dz[name]))
            off = off + U * FINE_TERMS * right.fine_terms[name]
            off = off + (2.0**-8 * ((0 if audit else size) + value) if low else 0.0)
        else:
            # lse of an offset of 1e3 is off by 1e-13 in float64, and a logprob near 0 by as much.
            off = fine * (off + 2 * U * value) + U * FINE_TERMS * (1 + value + right.largest(x))
        if name == "loss":
            off = off + (fine + FINE_TERMS) * 2 * U * right.terms
        if dtype != "float64":
            off = off + 2 * U * value
        found[name] = (off / U).numpy() + 1e-30
    return right, found


def rows_first(pair: Pair) -> bool:
    return bool(pair.call.keywords.get("weight_layout", "VH") == "VH")
