"""Lightning's `Trainer`: a sum of losses from `training_step`, and the callback `TokenMean`.

    python examples/lightning_module.py
    torchrun --nproc-per-node 2 examples/lightning_module.py

The callback makes each step's gradient that of the mean over all its tokens, of all micro-batches
and ranks. Needs `pip install 'xentlib[torch]' lightning`. The lines to add or to change end in
`# xentlib`.
"""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

from xentlib.torch import chunked_nll, next_token_labels  # xentlib
from xentlib.torch.integrations.lightning import TokenMean  # xentlib

VOCAB, LENGTH, BATCH, ACCUMULATE, STEPS = 256, 64, 2, 3, 6


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 64)
        self.body = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, VOCAB, bias=False)

    def training_step(self, batch, index):
        tokens, labels = batch
        hidden = self.body(self.embedding(tokens))[0]
        out = chunked_nll(hidden, self.head, labels, reduction="sum")  # xentlib
        self.print(f"loss {out.loss / out.num_tokens:.3f}")
        return out  # xentlib

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


# Rows of tokens that go up by 3; the labels are the next tokens, -100 in the padding.
torch.manual_seed(0)
tokens = (torch.randint(VOCAB, (72, 1)) + 3 * torch.arange(LENGTH)) % VOCAB
padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH, (72, 1))
labels = next_token_labels(tokens.masked_fill(padding, -100))  # xentlib
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ.get("WORLD_SIZE", "1")),
    accumulate_grad_batches=ACCUMULATE,
    callbacks=[TokenMean()],  # xentlib
    max_steps=STEPS,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(Model(), DataLoader(list(zip(tokens, labels)), batch_size=BATCH))
