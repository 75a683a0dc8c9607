"""Task 1: where the memory of a training step goes.

    CUDA_VISIBLE_DEVICES=0 python memory_analysis.py

Estimates parameters, gradients and AdamW's two moments (4, 4 and 8 bytes per parameter), then measures a step and
saves a snapshot for https://pytorch.org/memory_viz. torch counts allocations on GPUs only: without one, the script
ends after the estimate and one step.
"""

import argparse
from pathlib import Path

import torch
from gpt2 import GPT2, SHAPES

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="small", choices=SHAPES)
parser.add_argument("--batch", type=int, default=8)
flags = parser.parse_args()

MB = 2**20
SNAPSHOT = Path("outputs/task1_memory_snapshot.pickle")


def take_steps(model, optimizer, tokens, targets, steps=3):
    for _ in range(steps):
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main():
    torch.manual_seed(42)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vocabulary, sequence = SHAPES[flags.model][3:]
    model = GPT2(flags.model).to(device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"Model: GPT-2 {flags.model.title()}")
    print(f"Batch size: {flags.batch}")
    print(f"Sequence length: {sequence}")
    print(f"Device: {device.type.upper()}")
    print(f"Model parameters: {num_parameters:,}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    tokens = torch.randint(vocabulary, (flags.batch, sequence + 1), device=device)
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        torch.cuda.reset_peak_memory_stats()
    loss = take_steps(model, optimizer, tokens[:, :-1], tokens[:, 1:])
    if device.type == "cuda":
        SNAPSHOT.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(SNAPSHOT))
        print(f"Memory snapshot saved: {SNAPSHOT}")
        print("View at: https://pytorch.org/memory_viz")

    states = {"Parameters": 4, "Gradients": 4, "Optimizer States": 8}
    estimated = sum(states.values()) * num_parameters / MB
    print("\n--- Memory Breakdown ---")
    print("Estimated Memory:")
    for name, num_bytes in states.items():
        print(f"  {name + ':':<17} {num_bytes * num_parameters / MB:.2f} MB")
    print(f"  Total Estimated:  {estimated:.2f} MB")
    if device.type != "cuda":
        print(f"\nActual Memory: needs a GPU (three steps on the CPU, loss={loss:.9g})")
        return
    # The peak inside the steps. memory_allocated() after zero_grad() would miss activations and gradients.
    peak = torch.cuda.max_memory_allocated() / MB
    print("\nActual Memory:")
    print(f"  Peak Allocated:   {peak:.2f} MB")
    print(f"  Reserved:         {torch.cuda.memory_reserved() / MB:.2f} MB")
    print("\nDifference:")
    print(f"  Allocated vs Estimated: {peak - estimated:.2f} MB")


if __name__ == "__main__":
    main()
