"""TRL's `SFTTrainer`: inside `use()`, its loss is computed by `chunked_logprobs`.

    python examples/trl_sft.py
    torchrun --nproc-per-node 2 examples/trl_sft.py

Needs `pip install 'xentlib[trainers]'`. The lines to add or to change end in `# xentlib`.
"""

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from xentlib.torch.integrations.trl import use  # xentlib

VOCAB, LENGTH, BATCH, ACCUMULATE, STEPS = 256, 64, 2, 3, 6

# Rows of 5 to LENGTH tokens that go up by 3.
torch.manual_seed(0)
starts, lengths = torch.randint(VOCAB, (72,)), torch.randint(5, LENGTH + 1, (72,))
rows = [((a + 3 * torch.arange(n)) % VOCAB).tolist() for a, n in zip(starts, lengths)]
words = Tokenizer(models.WordLevel({str(k): k for k in range(VOCAB)}, unk_token="0"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_attention_heads=4, **sizes))
arguments = SFTConfig(
    output_dir=tempfile.gettempdir(),
    use_cpu=True,  # leave this and the next line out on a GPU
    bf16=False,
    gradient_checkpointing=False,
    per_device_train_batch_size=BATCH,
    gradient_accumulation_steps=ACCUMULATE,
    max_steps=STEPS,
    learning_rate=1e-2,
    logging_steps=1,  # prints the loss
    save_strategy="no",
    report_to="none",
)
data = Dataset.from_list([{"input_ids": row} for row in rows])
trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
with use():  # xentlib
    trainer.train()  # xentlib
