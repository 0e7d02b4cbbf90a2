"""DeepSpeed ZeRO-3 with the head as a module: `model.head = NLLHead.from_linear(model.head)`.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/zero3.py

Two CPU ranks train a small transformer on the Python standard library's own sources. The head's own
forward takes the labels, so that DeepSpeed's hooks gather it and reduce its gradient. The first
step's gradients are compared with those of one process that has the whole batch. Half a minute on
two cores, and 20 s more the first time, when DeepSpeed compiles an operator with g++; needs
`pip install 'xentlib[deepspeed,cli]'`.
"""

from __future__ import annotations

import copy
import gc

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from library_text import library_tokens
from small_transformer import LanguageModel, uneven_batches
from xentlib.torch import NLLHead

VOCAB, HIDDEN, LENGTH, BATCH, STEPS = 4096, 128, 128, 8, 20
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH // 2,
    "gradient_clipping": 0.0,
    # Parameters below the threshold are never partitioned: here the whole model would not be.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}
CHUNK = 4 << 20  # bytes of logits that exist at once: 256 tokens, two chunks of a rank's batch


class WithLoss(LanguageModel):
    def forward(self, tokens: Tensor, labels: Tensor, denominator: float) -> Tensor:
        """The loss, taken inside the model's forward, where the hooks of its head run."""
        hidden = super().forward(tokens)
        loss: Tensor = self.head(hidden, labels, denominator=denominator).loss
        return loss


def train() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    text = library_tokens(VOCAB, 2_000_000)
    torch.manual_seed(0)
    model = WithLoss(VOCAB, HIDDEN)
    model.head = NLLHead.from_linear(model.head, max_chunk_bytes=CHUNK)
    alone = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]

    for step, (tokens, labels) in zip(range(STEPS), uneven_batches(text, BATCH, LENGTH)):
        # DeepSpeed takes the mean over ranks: with the valid tokens of all ranks over their number
        # as the denominator, the gradient is that of the mean over all tokens.
        count = int((labels != -100).sum())
        mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        loss = engine(tokens[mine], labels[mine], count / world)
        engine.backward(loss)
        if step == 0:
            alone(tokens, labels, count).backward()
            for (name, p), q in zip(engine.module.named_parameters(), alone.parameters()):
                got = safe_get_full_grad(p)
                apart = float((got - q.grad).norm() / q.grad.norm())
                assert apart < 1e-5, f"{name}: relative distance {apart:.1e} to one process"
                if rank == 0 and name == "head.weight":
                    print(f"the head's gradient, relative distance to one process: {apart:.1e}")
        engine.step()
        dist.all_reduce(loss := loss.detach())
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1:3}   loss {loss / world:.3f}", flush=True)


def main() -> None:
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    train()
    # A model that is still there keeps gloo's threads, which need Python after Python has ended.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
