"""`transformers.Trainer`: one line, `patch`, and the model computes its loss without logits.

    python examples/trainer.py
    torchrun --nproc-per-node 2 examples/trainer.py

Needs `pip install 'xentlib[hf]'`. The lines to add or to change end in `# xentlib`.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from xentlib.torch.integrations.transformers import patch  # xentlib

VOCAB, LENGTH, BATCH, ACCUMULATE, STEPS = 256, 64, 2, 3, 10

# Rows of tokens that go up by 3. The labels are the tokens themselves, -100 in the padding.
torch.manual_seed(0)
tokens = (torch.randint(VOCAB, (120, 1)) + 3 * torch.arange(LENGTH)) % VOCAB
labels = tokens.where(torch.arange(LENGTH) < torch.randint(4, LENGTH, (120, 1)), -100)
rows = [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels)]

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_attention_heads=4, **sizes))
patch(model)  # xentlib

arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),
    use_cpu=True,  # leave this out on a GPU
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=ACCUMULATE,
    max_steps=STEPS,
    learning_rate=1e-2,
    logging_steps=1,  # prints the loss
    save_strategy="no",
    report_to="none",
)
Trainer(model, arguments, train_dataset=rows).train()
