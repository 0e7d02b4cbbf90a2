"""The losses of MaxText and tunix by ours, in models that have what theirs have, against full
logits; and in tunix itself where it is installed.

Shapes: B rows of L tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytest.importorskip("flax")
pytestmark = [
    pytest.mark.jax,
    # flax 0.12.8, of what tunix 0.1.7 does in its models.
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
]

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.held import hold_in_norm  # noqa: E402
from helpers.mesh_jax import mesh_of  # noqa: E402
from xentlib.jax import count_collectives  # noqa: E402
from xentlib.jax.integrations.maxtext import vocab_tiling_nnx_loss  # noqa: E402
from xentlib.jax.integrations.tunix import loss_fn, loss_fn_by  # noqa: E402

B, L, V, H = 4, 12, 64, 16
LENGTHS = np.array([12, 7, 1, 4])[:, None]  # uneven
KINDS = {"one device": None, "Auto": AxisType.Auto, "Explicit": AxisType.Explicit}
PLACE = {"kernel": P("fsdp", "tp"), "embedding": P("tp", "fsdp"), "w": P("fsdp", "tp")}
PLACE["input_embedding"] = PLACE["embedding"]


def full(logits: Any, labels: Any, weights: Any, z_loss: float = 0.0) -> tuple[Any, Any, Any]:
    """Sums over tokens, of the loss and of its part that is z-loss, and the weight of the tokens;
    with all logits."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    z = z_loss * lse * lse
    weights = weights.astype(jnp.float32)
    return ((lse - chosen + z) * weights).sum(), (z * weights).sum(), weights.sum()


def mesh_for(kind: Any) -> Any:
    return mesh_of(AxisType.Auto, fsdp=1, tp=1) if kind is None else mesh_of(kind, fsdp=2, tp=2)


# Of a head whose rows stay: the vocabulary over both axes, the width over none
ROWS = {"kernel": P(None, ("tp", "fsdp")), "w": P(None, ("tp", "fsdp"))}
ROWS["embedding"] = ROWS["input_embedding"] = P(("tp", "fsdp"), None)


def placed(model: Any, mesh: Any, place: Any = PLACE) -> Any:
    """Each head and table where its name says, the rest whole."""
    if mesh.size > 1:
        state = nnx.state(model, nnx.Param)
        put = {
            path: v.replace(jax.device_put(v[...], NamedSharding(mesh, place.get(path[-1], P()))))
            for path, v in nnx.to_flat_state(state)
        }
        nnx.update(model, nnx.from_flat_state(put))
    return model


def on(mesh: Any, x: Any) -> Any:
    return jax.device_put(x, NamedSharding(mesh, P("fsdp"))) if mesh.size > 1 else jnp.asarray(x)


def random(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def hold(got: Any, want: Any) -> None:
    """A12: the loss and all gradients, of which none is 0."""
    leaves = [[np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (got, want)]
    assert len(leaves[0]) == len(leaves[1]) > 2
    assert all(np.abs(x).max() > 0 for x in leaves[1])
    hold_in_norm(*leaves)


# --- MaxText ------------------------------------------------------------------------------


class Dense(nnx.Module):
    """What `DenseGeneral` has."""

    def __init__(self, bias: bool) -> None:
        self.kernel = nnx.Param(jnp.asarray(random(1, H, V) / 2))
        self.bias = nnx.Param(jnp.asarray(random(2, V))) if bias else None
        self.quant, self.dtype = None, jnp.float32


class Decoder(nnx.Module):
    def __init__(self, tied: bool, bias: bool) -> None:
        rngs = nnx.Rngs(0)
        self.decoder_norm = nnx.RMSNorm(H, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        if not tied:
            self.logits_dense = Dense(bias)


class Table(nnx.Module):
    def __init__(self) -> None:
        # Numbers of 8 bits, which bfloat16 holds, so that no rounding of MaxText's is in the way.
        self.embedding = nnx.Param(jnp.asarray(np.round(random(3, V, H) * 16) / 32))


class Transformer(nnx.Module):
    def __init__(self, config: Any, mesh: Any, bias: bool = False) -> None:
        self.mesh, self.decoder = mesh, Decoder(config.logits_via_embedding, bias)
        if config.logits_via_embedding:
            self.token_embedder = Table()


RULES = (
    ("activation_embed_and_logits_batch", ("data", "fsdp")),  # of which the mesh has one
    ("activation_length", None),
    ("embed_vocab", ("fsdp",)),
    ("vocab", ("tp",)),
)
ROWS_STAY = (*RULES[:2], ("embed_vocab", None), ("vocab", ("tp", "fsdp")))


def config_of(tied: bool) -> Any:
    return SimpleNamespace(
        logits_via_embedding=tied,
        normalize_embedding_logits=tied,
        final_logits_soft_cap=2.0 if tied else 0.0,
        z_loss_multiplier=0.01,
        enable_dropout=False,
        logical_axis_rules=RULES,
    )


def data_of(mesh: Any) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    targets = rng.integers(0, V, (B, L)).astype(np.int32)
    segments = (np.arange(L) < LENGTHS).astype(np.int32) * 3
    return {"targets": on(mesh, targets), "targets_segmentation": on(mesh, segments)}


def reference(model: Any, hidden: Any, data: Any, config: Any) -> tuple[Any, Any]:
    """As MaxText's `apply_output_head` and `cross_entropy_with_logits` say."""
    y = model.decoder.decoder_norm(hidden)
    if config.logits_via_embedding:
        logits = y @ model.token_embedder.embedding[...].T / jnp.sqrt(jnp.float32(H))
        cap = config.final_logits_soft_cap
        logits = cap * jnp.tanh(logits / cap)
    else:
        head = model.decoder.logits_dense
        logits = y @ head.kernel[...] + (0.0 if head.bias is None else head.bias[None, None])
    segments = data["targets_segmentation"] != 0
    return full(logits, data["targets"], segments, config.z_loss_multiplier)[:2]


def step_of(loss: Any, kind: Any, tied: bool, bias: bool) -> Any:
    mesh, config = mesh_for(kind), config_of(tied)
    model = placed(Transformer(config, mesh, bias), mesh)
    data, hidden = data_of(mesh), on(mesh, random(4, B, L, H))
    step = nnx.jit(
        nnx.value_and_grad(lambda m, h: loss(m, h, data, config), argnums=(0, 1), has_aux=True)
    )
    with jax.set_mesh(mesh), count_collectives() as count:
        (value, z), grads = step(model, hidden)
    assert loss is reference or not count.looped()
    return {"loss": value, "z_loss": z, "grads": grads}


def ours(model: Any, hidden: Any, data: Any, config: Any) -> Any:
    return vocab_tiling_nnx_loss(model, hidden, data, config, True)


@pytest.mark.parametrize("kind", KINDS)
def test_maxtext_s_loss_is_that_of_full_logits(kind: str) -> None:
    """On meshes with no collective in a loop, and the gradient where the head is."""
    got = step_of(ours, KINDS[kind], False, True)
    hold(got, step_of(reference, None, False, True))
    if KINDS[kind] is not None:
        spread = NamedSharding(mesh_for(KINDS[kind]), PLACE["kernel"])
        kernel = got["grads"][0]["decoder"]["logits_dense"]["kernel"]
        assert kernel.sharding.is_equivalent_to(spread, 2)


@pytest.mark.parametrize("tied", [False, True])
def test_maxtext_s_head_whose_rows_stay(tied: bool) -> None:
    """`gather="hidden"`, bound by `partial`: no device has more of the head than its rows."""
    mesh, config = mesh_for(AxisType.Auto), config_of(tied)
    config.logical_axis_rules = ROWS_STAY
    model = placed(Transformer(config, mesh), mesh, ROWS)
    data, hidden = data_of(mesh), on(mesh, random(4, B, L, H))
    loss = partial(vocab_tiling_nnx_loss, gather="hidden")
    step = nnx.jit(
        nnx.value_and_grad(
            lambda m, h: loss(m, h, data, config, True), argnums=(0, 1), has_aux=True
        )
    )
    with jax.set_mesh(mesh), count_collectives() as count:
        (value, z), grads = step(model, hidden)
    assert {"all_gather", "reduce_scatter"} <= {x.kind for x in count.looped()}
    got, want = {"loss": value, "z_loss": z, "grads": grads}, step_of(reference, None, tied, False)
    if not tied:
        hold(got, want)
        return
    tables = [x["grads"][0].pop("token_embedder")["embedding"] for x in (got, want)]
    hold(got, want)
    hold_in_norm(*([x.astype(jnp.bfloat16)] for x in tables))


@pytest.mark.parametrize("kind", KINDS)
def test_maxtext_s_tied_head(kind: str) -> None:
    """Its table is rounded to bfloat16, and so is the table's gradient, as in MaxText: held to the
    other's at bfloat16, the rest at float32."""
    got, want = (step_of(f, k, True, False) for f, k in ((ours, KINDS[kind]), (reference, None)))
    tables = [x["grads"][0].pop("token_embedder")["embedding"] for x in (got, want)]
    hold(got, want)
    assert np.array_equal(tables[0], tables[0].astype(jnp.bfloat16).astype(np.float32))
    hold_in_norm(*([x.astype(jnp.bfloat16)] for x in tables))


def test_maxtext_s_dropout_is_on_in_training_alone() -> None:
    mesh, config = mesh_for(None), config_of(False)
    model, data = Transformer(config, mesh), data_of(mesh)
    hidden = jnp.asarray(random(4, B, L, H))
    plain = vocab_tiling_nnx_loss(model, hidden, data, config, True)[0]
    config.enable_dropout = True
    assert vocab_tiling_nnx_loss(model, hidden, data, config, True)[0] != plain
    assert vocab_tiling_nnx_loss(model, hidden, data, config, False)[0] == plain


def test_maxtext_s_quantised_head_is_refused() -> None:
    mesh, config = mesh_for(None), config_of(False)
    model = Transformer(config, mesh)
    model.decoder.logits_dense.quant = "int8"
    with pytest.raises(TypeError, match="DenseGeneral that is quantised"):
        ours(model, jnp.asarray(random(4, B, L, H)), data_of(mesh), config)


# --- tunix --------------------------------------------------------------------------------


class Einsum(nnx.Module):
    """The untied head of tunix's models."""

    def __init__(self) -> None:
        self.w, self.dtype = nnx.Param(jnp.asarray(random(1, H, V) / 2)), jnp.float32

    def __call__(self, x: Any) -> Any:
        return x @ self.w[...]


class Embedder(nnx.Module):
    def __init__(self) -> None:
        self.input_embedding = nnx.Param(jnp.asarray(random(3, V, H) / 2))


class Model(nnx.Module):
    """Of tunix's signature, with its three kinds of heads: `w`, tied, and a layer of NNX."""

    def __init__(self, head: str, rows: Any = None) -> None:
        shardings = SimpleNamespace(
            act_btd=("fsdp", None, None), emb_vd=("tp", "fsdp"), emb_dv=("fsdp", "tp")
        )
        if rows is not None:
            shardings.emb_vd, shardings.emb_dv = (rows, None), (None, rows)
        self.config = nnx.static(SimpleNamespace(shd_config=shardings))
        self.embedder, self.norm = Embedder(), nnx.RMSNorm(H, rngs=nnx.Rngs(0))
        if head == "tied":
            self.final_logits_softcap = 2.0
        else:
            self.lm_head = Einsum() if head == "w" else nnx.Linear(H, V, rngs=nnx.Rngs(1))

    def __call__(self, tokens: Any, positions: Any, cache: Any, mask: Any, **options: Any) -> Any:
        table = self.embedder.input_embedding[...]
        x = self.norm(table[tokens] + positions[..., None] / L)
        if options.pop("output_hidden_states", False):
            self.sow(nnx.Intermediate, "all_hidden_states", x)
        assert not options
        if hasattr(self, "lm_head"):
            return self.lm_head(x), cache
        cap = self.final_logits_softcap
        return cap * jnp.tanh(x @ self.embedder.input_embedding[...].T / cap), cache


def batch_of(mesh: Any, lengths: Any = LENGTHS) -> dict[str, Any]:
    tokens = np.random.default_rng(5).integers(0, V, (B, L)).astype(np.int32)
    # As many next tokens, of weights that differ.
    mask = np.where(np.arange(L) < lengths + 1, 1 + np.arange(L) % 3 / 2, 0).astype(np.float32)
    places = np.broadcast_to(np.arange(L, dtype=np.float32), (B, L))
    causal = np.broadcast_to(np.tril(np.ones((L, L), bool)), (B, L, L))
    names = ("input_tokens", "input_mask", "positions", "attention_mask")
    return {name: on(mesh, x) for name, x in zip(names, (tokens, mask, places, causal))}


def default_loss(
    model: Any, input_tokens: Any, input_mask: Any, positions: Any, attention_mask: Any
):
    """As tunix's own says."""
    logits, _ = model(input_tokens, positions, None, attention_mask)
    total, _, count = full(logits[:, :-1], input_tokens[:, 1:], input_mask[:, 1:])
    return total / (count + 1e-8)


def tunix_step(loss: Any, kind: Any, head: str) -> Any:
    mesh = mesh_for(kind)
    model = placed(Model(head), mesh)
    with jax.set_mesh(mesh), count_collectives() as count:
        value, grads = nnx.jit(nnx.value_and_grad(loss))(model, **batch_of(mesh))
    assert loss is default_loss or not count.looped()
    assert not nnx.state(model, nnx.Intermediate)
    return {"loss": value, "grads": grads}


@pytest.mark.parametrize(
    ("head", "kind"),
    [("w", "one device"), ("w", "Auto"), ("tied", "Auto"), ("layer", "one device")],
)
def test_tunix_s_loss_is_its_own(head: str, kind: str) -> None:
    """With uneven masks; on a mesh no collective in a loop, and the gradient where the head is."""
    got = tunix_step(loss_fn, KINDS[kind], head)
    hold(got, tunix_step(default_loss, None, head))
    if KINDS[kind] is not None:  # placed, as a direct call's gradient is not
        module, name = ("lm_head", "w") if head == "w" else ("embedder", "input_embedding")
        spread = NamedSharding(mesh_for(KINDS[kind]), PLACE[name])
        assert got["grads"][module][name].sharding.is_equivalent_to(spread, 2)


def test_tunix_s_head_whose_rows_stay() -> None:
    """As MaxText's."""
    mesh = mesh_for(AxisType.Auto)
    model = placed(Model("w", ("tp", "fsdp")), mesh, ROWS)
    step = nnx.jit(nnx.value_and_grad(loss_fn_by("hidden")))
    with jax.set_mesh(mesh), count_collectives() as count:
        value, grads = step(model, **batch_of(mesh))
    assert {"all_gather", "reduce_scatter"} <= {x.kind for x in count.looped()}
    hold({"loss": value, "grads": grads}, tunix_step(default_loss, None, "w"))


def test_tunix_s_loss_makes_no_logits() -> None:
    """What the model makes of them is used by nothing, so that no program has them."""
    model, batch = Model("w"), batch_of(mesh_for(None))
    graph, state = nnx.split(model)

    def compiled(loss: Any) -> str:
        step = jax.jit(jax.grad(lambda state: loss(nnx.merge(graph, state), **batch)))
        return str(step.lower(state).compile().as_text())

    logits = f"f32[{B},{L},{V}]"
    assert logits in compiled(default_loss).replace(f"[{B},{L - 1},{V}]", f"[{B},{L},{V}]")
    text = compiled(loss_fn)
    assert logits not in text
    assert f"f32[{B},{L - 1},{V}]" not in text


def test_tunix_s_loss_without_a_token_is_0() -> None:
    mesh = mesh_for(None)
    assert float(loss_fn(Model("w"), **batch_of(mesh, LENGTHS * 0 - 1))) == 0.0


def test_tunix_s_head_with_lora_is_refused() -> None:
    model = Model("w")
    model.lm_head.w_lora_a = nnx.LoRAParam(jnp.ones((H, 2)))
    with pytest.raises(TypeError, match="Einsum of tunix with LoRA, whose adapters would be lost"):
        loss_fn(model, **batch_of(mesh_for(None)))


@pytest.mark.filterwarnings("ignore")
def test_a_step_of_peft_trainer() -> None:
    """tunix itself, a tiny Qwen 3: what one step adds to each parameter."""
    trainer_of = pytest.importorskip("tunix.sft.peft_trainer")
    qwen = pytest.importorskip("tunix.models.qwen3.model")
    sizes = {"num_layers": 1, "vocab_size": V, "embed_dim": H, "hidden_dim": 32, "num_heads": 2}
    more = {"head_dim": 8, "num_kv_heads": 1, "rope_theta": 10000, "norm_eps": 1e-6}
    mesh = mesh_for(None)
    found = []
    for loss in (None, loss_fn):
        with mesh, jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            model = qwen.Qwen3(qwen.ModelConfig(**sizes, **more), rngs=nnx.Rngs(0))
            start = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
            config = trainer_of.TrainingConfig(eval_every_n_steps=9, max_steps=1)
            trainer = trainer_of.PeftTrainer(model, optax.sgd(64.0), config)
            trainer = trainer.with_gen_model_input_fn(lambda x: x)
            trainer = trainer if loss is None else trainer.with_loss_fn(loss)
            batch = batch_of(mesh)
            batch["positions"] = batch["positions"].astype(jnp.int32)
            trainer.train([batch], None)
            after = nnx.state(model, nnx.Param)
        found.append(jax.tree.map(lambda a, b: np.asarray(a) - b, after, start))
    moved = [[x for x in jax.tree.leaves(tree) if x.any()] for tree in found]
    assert len(moved[0]) == 10  # tunix starts the four arrays of its MLP where nothing reaches
    hold(moved[1], moved[0])
