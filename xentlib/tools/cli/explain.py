"""`xentlib explain FILE`: why a sampler's log-probabilities are not what a trainer computes."""

from __future__ import annotations

import argparse
from pathlib import Path

from xentlib.tools.cli.command import Row, number, whole
from xentlib.tools.errors import UsageError, writing
from xentlib.tools.explain import explain
from xentlib.tools.explain.compare import NUMBERS
from xentlib.tools.explain.file import read

DESCRIPTION = (
    "Compare a sampler's log-probabilities with those of the float64 oracle, and name what "
    "explains the difference, in order of size. Exit status 1 if there is any."
)
FILE = (
    "a .npz or .safetensors file with hidden [N, H], weight [V, H], ids [N] and sampler_logprobs "
    "[N]; and, where there are any, bias, kept_ids, old_weight, trainer_logprobs and the options "
    "below, by their names"
)
TOP_P = "probability of the nucleus that the softmax is restricted to; `kept_ids` is better"
ARGUMENTS: tuple[Row, ...] = (
    ("file", Path, None, "FILE", FILE),
    ("--temperature", float, None, "X", "number that divides the logits"),
    ("--logit-scale", number, None, "X", "number that multiplies the logits"),
    ("--softcap", number, None, "X", "softcap of the logits"),
    ("--top-p", number, None, "P", TOP_P),
    ("--top-k", whole, None, "K", "number of classes that the softmax is restricted to"),
    ("--vocab-size", whole, None, "V", "classes of the tokenizer, where the head has padding"),
    ("--max-tokens", whole, None, "N", "tokens to use (default: as many as make 2^25 logits)"),
    ("--out", Path, None, "FILE", "write the report as JSON too"),
)


def run(args: argparse.Namespace) -> int:
    try:
        arguments = read(args.file)
    except OSError as error:
        raise UsageError(
            f"FILE must be a file that can be read; got '{args.file}': {error.strerror}."
        ) from error
    except ValueError as error:
        raise UsageError(f"{error}") from error
    for name in (*NUMBERS, "max_tokens"):
        if getattr(args, name) is not None:
            arguments[name] = getattr(args, name)
    if args.out is not None:
        with writing("--out", args.out):  # before it is computed, not after it
            args.out.write_text("", encoding="utf-8")
    try:
        report = explain(**arguments)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{error}") from error
    print(report, flush=True)
    if args.out is not None:
        with writing("--out", args.out):
            args.out.write_text(report.to_json(), encoding="utf-8")
    return 0 if report.passed else 1
