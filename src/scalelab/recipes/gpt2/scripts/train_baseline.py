"""Training on one GPU: global batch 32 in four passes of 8, AdamW, cosine schedule, 20 steps.

    CUDA_VISIBLE_DEVICES=0 python train_baseline.py

Losses of all steps go to outputs/losses_baseline.csv.
"""

import argparse
import time
from pathlib import Path

import torch
from gpt2 import GPT2, SHAPES, SHARD, cosine, read_shard, take_batch

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="large", choices=SHAPES)
parser.add_argument("--data", default=SHARD)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--micro-batch", type=int, default=8)
flags = parser.parse_args()

SEED = 42
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 0.1


def main():
    torch.manual_seed(SEED)
    torch.cuda.manual_seed_all(SEED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shard = read_shard(flags.data)
    print(f"Tokens in shard: {len(shard):,}")
    sequence = SHAPES[flags.model][4]
    num_passes = flags.batch // flags.micro_batch

    model = GPT2(flags.model, is_checkpointed=True, shard=shard).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, flags.steps))
    torch.manual_seed(SEED)  # dropout masks

    losses = []
    start = time.time()
    for step in range(flags.steps):
        total = 0.0
        for number in range(num_passes):
            batch = take_batch(shard, step * num_passes + number, flags.micro_batch, sequence, device)
            loss = model(*batch) / num_passes
            loss.backward()
            total = total + loss.detach()
        rate = scheduler.get_last_lr()[0]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total.item())
        if step % 10 == 0:
            print(f"step={step} | loss={losses[-1]:.4f} | lr={rate:.2e} | time={time.time() - start:.1f}s", flush=True)

    print(f"Training completed in {time.time() - start:.1f}s")
    Path("outputs").mkdir(exist_ok=True)
    rows = [f"{step},{loss!r}\n" for step, loss in enumerate(losses)]
    Path("outputs/losses_baseline.csv").write_text("step,loss\n" + "".join(rows))
    print("Baseline training completed!")


if __name__ == "__main__":
    main()
