"""What the head of a model needs, and what `patch` makes of its class, from its configuration.

Nothing is downloaded, no weight is read, and no code of the model's own is run: with transformers
the class is built on the meta device, without it the numbers of the file are all there is.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from xentlib.options import FLOATS, ITEMSIZE
from xentlib.plan import plan_chunks
from xentlib.plan.memory import peak_bytes
from xentlib.plan.split import default_chunk_bytes
from xentlib.tools.doctor.imports import error_line
from xentlib.tools.doctor.packages import Finding, there
from xentlib.tools.errors import UsageError

# What a configuration calls a soft cap of its logits, and a factor: some multiply, some divide.
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "softcap")
SCALES = (
    *("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"),
    "logits_mup_width_multiplier",
)
# `patch` takes these classes, and their first call with labels raises.
FAIL_IN_A_CALL = {"ProphetNetForCausalLM": "its loss is the log-softmax of two streams at once"}
GIB = 2**30
NAMES = ("vocab_size", "hidden_size")
LONGEST = 200  # characters of what a class says of its configuration


class Head(NamedTuple):
    """V, H and what stands behind the product."""

    vocab: int
    hidden: int
    tied: bool | None  # None: the file does not say
    dtype: str
    options: dict[str, Any]  # of the configuration: soft caps and factors
    of_class: tuple[str, ...] = ()  # sizes that the file does not say, and the class fills in


def read_config(path: Path) -> dict[str, Any]:
    """`config.json`, or the one in a folder."""
    file = path / "config.json" if path.is_dir() else path
    try:
        if file.is_file() and file.suffix != ".json":  # weights, which are not read
            raise ValueError
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no JSON"
        cure = "Download the model's config.json first."
        if (path / "adapter_config.json").is_file():
            why, cure = "an adapter's folder", "Pass the folder of the model that it adapts."
        raise UsageError(
            f"`--model` must be a folder with a config.json, or such a file; got '{file}': {why}. "
            f"{cure}"
        ) from error
    if not isinstance(config, dict):
        raise UsageError(
            f"`--model` must be a configuration of transformers, a JSON object; got '{file}', "
            f"which holds a {type(config).__name__}."
        )
    return config


def findings(config: dict[str, Any], tokens: int, broken: Collection[str] = ()) -> list[Finding]:
    """The head, its memory for so many tokens, and `patch`; `broken` are packages that cannot be
    imported."""
    head, built = None, None
    words = "not tried, as it needs PyTorch and transformers"
    patched = Finding("model", "patch", "absent", words, "pip install 'xentlib[hf]'")
    of_patch = [name for name in ("torch", "transformers") if name in broken]
    if of_patch:
        words = f"not tried, as {' and '.join(of_patch)} cannot be imported"
        patched = Finding("model", "patch", "bad", words)
    elif there("transformers") and there("torch"):
        head, built, patched = _built(config)
    head = head or head_of_file(config)
    if head is None or head.vocab < 1 or head.hidden < 1:
        words = "the configuration names no `vocab_size` and `hidden_size` of 1 or more"
        cure = "pass the config.json of a causal language model"
        return [Finding("model", "head", "bad", words, cure), patched]
    kind = type(built).__name__ if built is not None else _architecture(config)
    return [_head(kind, head), *_memory(head, tokens), patched]


def _architecture(config: dict[str, Any]) -> str:
    named = config.get("architectures") or config.get("model_type", "a model")
    return str(named[0] if isinstance(named, list) else named)


def head_of_file(config: dict[str, Any]) -> Head | None:
    """From the numbers of the file; an inner configuration of the text where there is one."""
    text: dict[str, Any] = next(
        (config[k] for k in ("text_config", "llm_config") if isinstance(config.get(k), dict)), {}
    )
    merged = {**config, **text}
    vocab = merged.get("vocab_size")
    hidden = merged.get("hidden_size", merged.get("n_embd", merged.get("d_model")))
    if not isinstance(vocab, int) or not isinstance(hidden, int):
        return None
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return Head(vocab, hidden, tied, _dtype(merged), _options(merged))


def _dtype(config: dict[str, Any]) -> str:
    named = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return named if named in FLOATS else "bfloat16"


def _options(config: dict[str, Any]) -> dict[str, Any]:
    """Those that do something: none where a factor is 1 or a cap is not set."""
    options = {name: config.get(name) for name in (*SOFTCAPS, *SCALES)}
    return {name: x for name, x in options.items() if x not in (None, False, 0, 1)}


def _built(config: dict[str, Any]) -> tuple[Head | None, Any, Finding]:
    """The class of the configuration, on the meta device, and what `patch` says of it."""
    import torch
    import transformers
    from transformers import AutoConfig

    from xentlib.torch.integrations.transformers import patch

    name = _architecture(config)
    if not config.get("architectures"):
        words = "the configuration names no class in `architectures`"
        cure = "name it there, as the model's own config.json does, or call `chunked_nll`"
        return None, None, Finding("model", "patch", "bad", words, cure)
    try:
        kind = getattr(transformers, name, None)
    except Exception as error:  # noqa: BLE001 - it is imported now, with all that it needs
        words = f"{name} cannot be imported: {error_line(error)}"
        cure = "install what it lacks"
        return None, None, Finding("model", "patch", "bad", words, cure)
    if kind is None:
        words = f"transformers {transformers.__version__} has no class {name}"
        if config.get("auto_map"):
            words += "; code of the model's own is not run"
        cure = "name the class in `architectures` of the config.json, or call `chunked_nll`"
        return None, None, Finding("model", "patch", "bad", words, cure)
    try:
        rest = {k: x for k, x in config.items() if k not in ("model_type", "auto_map")}
        made = AutoConfig.for_model(config.get("model_type", ""), **rest)
        if not isinstance(made, kind.config_class):
            made = made.get_text_config()
        with torch.device("meta"):
            model = kind(made)
            model.tie_weights()  # transformers 5.0 ties none on the meta device
    except Exception as error:  # noqa: BLE001 - whatever a class makes of its configuration
        why = " ".join(f"{error}".split())
        words = f"{name} cannot be built: {type(error).__name__}: {why[:LONGEST]}"
        cure = "compare the config.json with the installed version of transformers"
        return None, None, Finding("model", "patch", "bad", words, cure)
    text = made.get_text_config()
    said_of_it = {**vars(made), **vars(text)}
    output = model.get_output_embeddings()
    head = None
    if output is not None and getattr(output, "weight", None) is not None:
        rows, width = output.weight.shape
        tied = output.weight is model.get_input_embeddings().weight
        of_class = tuple(x for x in NAMES if not _named(config, {x, *_names_of(made, text, x)}))
        head = Head(rows, width, tied, _dtype(said_of_it), _options(said_of_it), of_class)
    try:
        patch(model)
    except (TypeError, ValueError) as error:
        cure = "docs/transformers.md has every class; `chunked_nll` takes its hidden states"
        return head, model, Finding("model", "patch", "bad", f"refused: {error}", cure)
    words = f"takes {name} of transformers {transformers.__version__}"
    if name in FAIL_IN_A_CALL:
        words = f"refused in the first step: {FAIL_IN_A_CALL[name]}"
        cure = "call `chunked_nll` with its hidden states"
        return head, model, Finding("model", "patch", "bad", words, cure)
    words += "; its loss is computed without logits, a softcap and factors as the model has them"
    return head, model, Finding("model", "patch", "ok", words)


def _named(config: Any, names: set[str]) -> bool:
    """Whether a configuration, or one inside of it, has one of the names."""
    if not isinstance(config, dict):
        return False
    return not names.isdisjoint(config) or any(_named(x, names) for x in config.values())


def _names_of(made: Any, text: Any, name: str) -> set[str]:
    """What the classes of configurations call it."""
    return {x.attribute_map[name] for x in (made, text) if name in x.attribute_map}


def _head(kind: str, head: Head) -> Finding:
    tied = {True: "tied to the embedding", False: "not tied", None: "tied or not is not said"}
    words = f"{kind}: V = {head.vocab:,}, H = {head.hidden:,}, {tied[head.tied]}, {head.dtype}"
    cures = []
    if head.of_class:
        names = " and ".join(f"`{name}`" for name in head.of_class)
        words += f"; the file names no {names}, so that is the default of the class"
        cures.append("Compare with the model's own config.json")
    if head.options:
        cures.append(
            "`patch` takes them as the model has them. For `chunked_nll` a soft cap is `softcap=`, "
            "a factor `logit_scale=`, or 1 / it where the model's forward divides by it"
        )
    given = ", ".join(f"{name}={x}" for name, x in head.options.items())
    words += f"; {given or 'no softcap, no factor on the logits'}"
    return Finding("model", "head", "note" if cures else "ok", words, ". ".join(cures))


def _memory(head: Head, tokens: int) -> list[Finding]:
    """Full logits beside what a call needs, in both backends, on the CPU and on a GPU."""
    logits = tokens * head.vocab
    full = (
        f"{logits * ITEMSIZE[head.dtype] / GIB:.2f} GiB in {head.dtype}, "
        f"{logits * 4 / GIB:.2f} GiB in float32, and as much again for their gradient"
    )
    findings = [Finding("model", "full logits", "ok", f"{tokens:,} tokens: {full}")]
    sizes = tokens, head.vocab, head.hidden
    places: tuple[tuple[Literal["cpu", "gpu"], str, int | None], ...] = (
        ("cpu", "on the CPU", None),
        ("gpu", "on a GPU", default_chunk_bytes("cuda")),
    )
    backends: tuple[Literal["torch", "jax"], ...] = ("torch", "jax")
    for backend in backends:
        needs = []
        for platform, where, budget in places:
            plan = plan_chunks(*sizes, dtype=head.dtype, max_chunk_bytes=budget)
            need, less = (
                peak_bytes(
                    plan, backend=backend, dtype=head.dtype, platform=platform, recompute=recompute
                )
                / GIB
                for recompute in (False, True)
            )
            chunks = "1 chunk" if plan.num_chunks == 1 else f"{plan.num_chunks} chunks"
            needs.append(f"{need:.2f} GiB {where} in {chunks} ({less:.2f} with recompute=True)")
        words = f"{', '.join(needs)}, gradients of hidden and weight included"
        findings.append(Finding("model", f"chunked_nll in {backend}", "ok", words))
    return findings
