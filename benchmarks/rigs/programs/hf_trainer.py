"""Hugging Face `Trainer` on a small GPT-2, with accumulation; under torchrun it wraps the model in DDP by itself."""

import argparse
import tempfile
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=2)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
args = parser.parse_args()


class PrintLoss(TrainerCallback):
    def on_log(self, arguments, state, control, logs=None, **kwargs):
        if "loss" in logs and state.is_world_process_zero:
            print(f"loss={float(logs['loss'])!r} time={time.perf_counter()!r}")


torch.manual_seed(0)
tokens = torch.randint(0, 256, (4096, 32))
dataset = [{"input_ids": row, "labels": row} for row in tokens]
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=128, n_layer=2, n_head=4))
training = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=10_000,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
    ddp_backend="gloo",
    per_device_train_batch_size=args.per_device_train_batch_size,
    gradient_accumulation_steps=args.gradient_accumulation_steps,
)
Trainer(model, training, train_dataset=dataset, callbacks=[PrintLoss()]).train()
