"""What a call of `xentlib.jax` runs on a device: microseconds of each of its programs.

python .ci/gpu_jax.py --out FILE [--shape N H V]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp

from xentlib.jax import chunked_nll


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", type=int, nargs=3, default=(8192, 4096, 128_256))
    args = parser.parse_args()
    count, width, vocab = args.shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (count, width), jnp.bfloat16)
    w = jax.random.normal(keys[1], (vocab, width), jnp.bfloat16) * jnp.bfloat16(2 / width**0.5)
    y = jax.random.randint(keys[2], (count,), 0, vocab)

    @jax.jit
    def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return jax.value_and_grad(lambda x, w: chunked_nll(x, w, y).loss, (0, 1))(x, w)

    for _ in range(3):
        jax.block_until_ready(step(x, w))
    taken: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(step(x, w))
        (file,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines:
                if "/device:" in plane.name and line.name.startswith("Stream"):
                    for event in line.events:
                        taken[event.name] += event.duration_ns / 1e3
                        counts[event.name] += 1
    rows = [(round(us, 1), counts[name], name[:100]) for name, us in taken.most_common(40)]
    args.out.write_text(json.dumps({"shape": args.shape, "programs": rows}, indent=1) + "\n")
    print(sum(taken.values()), *rows, sep="\n")


if __name__ == "__main__":
    main()
