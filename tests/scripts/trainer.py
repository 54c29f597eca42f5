import sys
import tempfile

import torch
from common import digest
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

torch.manual_seed(0)
config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
tokens = torch.randint(0, 64, (48, 16))
data = [{"input_ids": row, "labels": row} for row in tokens]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=12, per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[],
        disable_tqdm=True, logging_steps=4, use_cpu=True, save_strategy="no", seed=1,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.remove_callback(PrinterCallback)  # prints times
    result = trainer.train()
print(result.training_loss, digest(model))
print(model.generate(tokens[:1, :4], max_new_tokens=4, do_sample=False, pad_token_id=0).tolist())
sys.exit(0)
