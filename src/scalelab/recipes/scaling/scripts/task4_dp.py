"""Task 4: the job of task1_ddp.py with nn.DataParallel: one process, one thread per GPU, GPU 0 collects everything.

    python task4_dp.py
    torchrun --nproc_per_node=4 task1_ddp.py        # what to compare with

Prints step time and its variance, the memory of every GPU, and utilisation by nvidia-smi while steps run. Without a
GPU nn.DataParallel runs the plain model: the script says so.
"""

import os
import shutil
import statistics
import subprocess
import time

import torch
from torch import nn

torch.manual_seed(0)
torch.cuda.manual_seed_all(0)

DIM = int(os.environ.get("DIM", 8192))
DEPTH = int(os.environ.get("DEPTH", 6))
GLOBAL_BATCH = int(os.environ.get("GLOBAL_BATCH", 64))
STEPS = int(os.environ.get("STEPS", 30))
WARMUP = 5


def print_utilisation():
    """What nvidia-smi says of every GPU right now."""
    query = ["nvidia-smi", "--query-gpu=index,utilization.gpu,memory.used", "--format=csv"]
    if shutil.which("nvidia-smi"):
        print(subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip())


def main():
    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda:0" if num_gpus else "cpu")
    if not num_gpus:
        print("no GPU here: nn.DataParallel has no devices to spread over and runs the plain model")
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(DIM, DIM), nn.ReLU())]
    model = nn.DataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.Adam(model.parameters())
    generator = torch.Generator().manual_seed(0)
    pairs = [[torch.randn(GLOBAL_BATCH, DIM, generator=generator).to(device) for _ in "xy"] for _ in range(4)]

    times = []
    for step in range(STEPS):
        inputs, targets = pairs[step % len(pairs)]
        if num_gpus:
            torch.cuda.synchronize()
        start = time.time()
        outputs = model(inputs)  # scatter the batch, copy the model to every GPU, gather the outputs on GPU 0
        loss = nn.functional.mse_loss(outputs, targets)
        loss.backward()  # the gradients of all replicas are summed on GPU 0
        optimizer.step()  # which alone updates
        optimizer.zero_grad()
        if num_gpus:
            torch.cuda.synchronize()
        times.append(time.time() - start)
        print(f"step={step} | time={1e3 * times[-1]:.3f} ms | loss={loss.item():.9g}", flush=True)
        if step == STEPS // 2:
            print_utilisation()

    kept = times[WARMUP:]
    mean, deviation = statistics.mean(kept), statistics.stdev(kept)
    print(f"DataParallel on {num_gpus} GPUs, global batch {GLOBAL_BATCH}, DIM={DIM}, DEPTH={DEPTH}: {len(kept)} steps")
    print(f"time/step: mean={1e3 * mean:.3f} ms, std={1e3 * deviation:.3f} ms, variance={1e6 * deviation**2:.4f}")
    for gpu in range(num_gpus):
        print(f"peak memory of GPU {gpu}: {torch.cuda.max_memory_allocated(gpu) / 2**20:.2f} MB")


if __name__ == "__main__":
    main()
