"""Training as proof: a small language model in PyTorch and in JAX, from the same weights and text,
and a student that is distilled from it.

Each step is a window of four micro-batches of uneven token counts, one of which is empty once; the
last window is short. `TokenNormalizer` and `token_normalized` make each window one batch, AdamW
follows. What is measured:

* **Counts** (row A0): the valid tokens that a backend saw, against NumPy's own count.
* **Statistics of each window** (rows A0, A9): `TokenNormalizer`'s of the PyTorch run and those of
  `accumulate_grads` for the same hidden states, head and labels: tokens and loss.
* **Head gradients between backends** (row A9), at every step. From the second step on the two runs
  have different weights: fp32 rounding parts them and AdamW, which divides a gradient by its own
  size, amplifies that. Head gradients of two such runs would measure their drift, not the operator.
  So the hidden states, the head and the labels of the PyTorch run go through JAX's
  `accumulate_grads` as they are, and its gradient is held against the one that PyTorch stepped on.
* **Head gradients against the oracle** (row A6), at the first and the last step of each run. This
  is what there is where only one framework is installed.
* **Curves** (row "curve"). The two runs go their own ways from the same first weights; their losses
  may differ by 1e-3 relative, at every step. This is where labels off by one, a mean of means or
  another optimizer shows. Each must also learn: its last losses are below its first.

A student of half the width is trained in the same way, with `chunked_divergence` in place of
`chunked_nll`: the teacher is the first model, which one backend has trained, and both students have
its hidden states and its head. All of the above is measured of them too.

Text becomes windows, which `loop` trains on in one backend; `comparison` holds two such runs
against each other. Importing these modules loads neither framework but for the files named after
one; `train` loads the one it is asked for.

Shapes: M micro-batches, B sequences, L positions, H hidden width, V vocabulary.
"""
