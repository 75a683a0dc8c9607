"""Homework 1, tasks 4 and 5: DDP under torch.profiler, on one node or on two.

    torchrun --nproc_per_node=2 pytorch_ddp_prof.py             # inside one node
    qsub submit_2nodes_prof.pbs                                 # one rank on each of two nodes

Prints the communication of the profiled steps: total, per call, and as a share of the time on the device; traces go
to ./traces/pytorch_2p8/cuda_pt_2p8_<nodes>nodes_E<epochs>_R<ranks>_<time>/. EPOCHS, SAMPLES and D_MODEL in the
environment change the job.
"""

import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # now: loaded by DDP after init, its default arguments would keep the group to the end
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

EPOCHS = int(os.environ.get("EPOCHS", 10))
SAMPLES = int(os.environ.get("SAMPLES", 2048))
D_MODEL = int(os.environ.get("D_MODEL", 512))
BATCH = 32


def draw_order(epoch):
    """The samples of an epoch, shuffled by seed and epoch alone: every rank draws the same and takes its slices."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((0, epoch))))
    return torch.from_numpy(generator.permutation(SAMPLES))


def print_communication(events):
    """Of all time on the device: NCCL's kernels. Without a device, of the profiled steps: gloo's calls."""
    if torch.cuda.is_available():
        found = [(event.count, event.self_device_time_total) for event in events if event.key.startswith("nccl")]
        everything = sum(event.self_device_time_total for event in events) / 1e6
    else:
        found = [(event.count, event.cpu_time_total) for event in events if event.key.startswith("gloo:")]
        everything = sum(event.cpu_time_total for event in events if event.key.startswith("ProfilerStep")) / 1e6
    calls, total = sum(count for count, _ in found), sum(micro for _, micro in found) / 1e6
    print(f"Total communication time: {1e3 * total:.2f} ms in {calls} calls")
    print(f"Communication overhead: {total / everything if everything else 0:.2%} of the profiled time")
    print(f"Average latency: {1e3 * total / calls if calls else 0:.2f} ms")


def main():
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)  # or barrier() and synchronize() take GPU 0 on every rank
    dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    torch.manual_seed(0)
    model = nn.Transformer(d_model=D_MODEL, batch_first=True).to(device)
    model = DistributedDataParallel(model, device_ids=[device] if has_gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(0)
    sources, targets = (torch.rand(SAMPLES, length, D_MODEL, generator=data) for length in (1, 20))

    torch.manual_seed(rank)  # other dropout masks on every rank

    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    name = f"{'cuda' if has_gpu else 'cpu'}_pt_2p8_{world_size // per_node}nodes_E{EPOCHS}_R{world_size}_{stamp}"
    place = Path("traces/pytorch_2p8") / name
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
    start = time.time()
    with profile(activities=activities, schedule=schedule(wait=1, warmup=1, active=2, repeat=1)) as profiler:
        for epoch in range(EPOCHS):
            for everyone in draw_order(epoch).split(BATCH * world_size):
                chosen = everyone[rank * BATCH : (rank + 1) * BATCH]
                source, target = sources[chosen].to(device), targets[chosen].to(device)
                loss = F.cross_entropy(model(source, target), target)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                profiler.step()
    if rank == 0:
        print(f"Profiled training on {world_size} ranks completed in {time.time() - start:.2f}s, loss={loss:.9g}")
        print_communication(profiler.key_averages())
        place.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(place / "rank0.json"))
        print(f"Traces saved to: {place}")
    del model  # gloo can hang when a DDP model outlives its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
