"""Task 2: tokens per second, what they would mean for a model of 1T parameters, and a sweep of the batch size.

    CUDA_VISIBLE_DEVICES=0 python throughput.py

Every batch size has its own model; one that does not fit is reported, and the sweep continues.
"""

import argparse
import gc
import time

import torch
from gpt2 import GPT2, SHAPES

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="small", choices=SHAPES)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 8, 16, 32, 64])
parser.add_argument("--steps", type=int, default=20)
flags = parser.parse_args()

WARMUP = 5
TARGET_PARAMETERS, TARGET_TOKENS = 1e12, 1e13
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
vocabulary, sequence = SHAPES[flags.model][3:]


def wait():
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(batch):
    """Tokens per second at a batch size, with its own model."""
    torch.manual_seed(42)
    model = GPT2(flags.model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    tokens = torch.randint(vocabulary, (batch, sequence + 1), device=device)
    print("Warming up...")
    for step in range(WARMUP + flags.steps):
        if step == WARMUP:
            print(f"Measuring throughput over {flags.steps} steps...")
            wait()
            start = time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    wait()
    seconds, total = time.perf_counter() - start, flags.steps * batch * sequence
    print("\n--- Throughput Results ---")
    print(f"Total tokens processed: {total:,}")
    print(f"Time elapsed: {seconds:.2f} seconds")
    print(f"Tokens per second: {total / seconds:.1f}")
    print(f"Steps per second: {flags.steps / seconds:.2f}\n")
    return total / seconds


def main():
    num_parameters = sum(parameter.numel() for parameter in GPT2(flags.model).parameters())
    name = f"GPT-2 {flags.model.title()}"
    print("Task 2: Throughput Measurement & Scaling")
    print("=" * 50)
    print(f"Device: {device.type}")
    print(f"Model: {name} ({num_parameters:,} parameters)")
    print(f"Batch size: {flags.batch}")
    print(f"Sequence length: {sequence}")
    rate = measure(flags.batch)

    larger = rate * num_parameters / TARGET_PARAMETERS  # the same FLOP/s, and 6 FLOPs per parameter and token
    days = TARGET_TOKENS / larger / 86_400
    print("--- Modern LLM Training Extrapolation ---")
    print(f"{name}: {rate:,.0f} tokens/sec")
    print(f"1T Model throughput: {larger:.3f} tokens/sec")
    print(f"\nTraining 10T tokens:\n  Time: {days:,.0f} days ({days / 365:.1f} years)")

    print("\n--- Batch Size Analysis ---")
    rows = []
    for batch in flags.batches:
        print(f"\nTesting batch_size={batch}...")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()  # or small batches show the peak of a larger one before
        try:
            found = measure(batch)
        except torch.OutOfMemoryError:
            print(f"  OOM at batch_size={batch}")
            continue
        memory = f"{torch.cuda.max_memory_allocated() / 2**20:.0f}" if device.type == "cuda" else "needs a GPU"
        rows.append((batch, f"{found:.0f}", memory))
    print("\n--- Batch Size Results ---")
    for row in (("Batch Size", "Tokens/sec", "Memory (MB)"), "-" * 40, *rows):
        print(row if isinstance(row, str) else "".join(f"{cell:<13}" for cell in row))


if __name__ == "__main__":
    main()
