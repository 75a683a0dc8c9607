"""The training run of train_ddp.py with FullyShardedDataParallel, and a trace of three steps.

    torchrun --nproc_per_node=2 train_fsdp.py --strategy FULL_SHARD
    torchrun --nproc_per_node=2 train_fsdp.py --strategy SHARD_GRAD_OP

FULL_SHARD gathers a block before its forward and again before its backward; SHARD_GRAD_OP keeps it in between. Losses
of all steps go to outputs/losses_fsdp_STRATEGY.csv, traces of rank 0 to outputs/traces/fsdp_STRATEGY/.
"""

import argparse
import gc
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # now: loaded by DDP after init, its default arguments would keep the group to the end
from gpt2 import GPT2, SHAPES, SHARD, Block, cosine, read_shard, take_batch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="FULL_SHARD", choices=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
parser.add_argument("--model", default="large", choices=SHAPES)
parser.add_argument("--data", default=SHARD)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--micro-batch", type=int, default=8)
flags = parser.parse_args()

SEED = 42
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 0.1


def main():
    shard = read_shard(flags.data)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)  # or barrier() and synchronize() take GPU 0 on every rank
    dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"Tokens in shard: {len(shard):,}")
    sequence = SHAPES[flags.model][4]
    num_passes = flags.batch // world_size // flags.micro_batch

    torch.manual_seed(SEED)  # the same weights on every rank
    model = GPT2(flags.model, is_checkpointed=True, shard=shard).to(device)
    sharding = {"sharding_strategy": ShardingStrategy[flags.strategy], "auto_wrap_policy": ModuleWrapPolicy({Block})}
    model = FullyShardedDataParallel(model, **sharding, device_id=device, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, flags.steps))
    torch.manual_seed(SEED + rank)  # other dropout masks on every rank

    place = Path(f"outputs/traces/fsdp_{flags.strategy.lower()}")
    profiler = torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1))
    losses = []
    start = time.time()
    if rank == 0:
        profiler.start()
    for step in range(flags.steps):
        total = 0.0
        for number in range(num_passes):
            index = (step * num_passes + number) * world_size + rank  # ranks read neighbouring batches
            batch = take_batch(shard, index, flags.micro_batch, sequence, device)
            is_last = number == num_passes - 1
            with nullcontext() if is_last else model.no_sync():
                loss = model(*batch) / num_passes
                loss.backward()
            total = total + loss.detach()
        rate = scheduler.get_last_lr()[0]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total.item())
        if rank == 0:
            profiler.step()
        if rank == 0 and step % 10 == 0:
            print(f"step={step} | loss={losses[-1]:.4f} | lr={rate:.2e} | time={time.time() - start:.1f}s", flush=True)

    if rank == 0:
        print(f"Training completed in {time.time() - start:.1f}s")
        profiler.stop()
        place.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(place / "rank0.json"))
        rows = [f"{step},{loss!r}\n" for step, loss in enumerate(losses)]
        Path(f"outputs/losses_fsdp_{flags.strategy.lower()}.csv").write_text("step,loss\n" + "".join(rows))
        print(f"FSDP training with {flags.strategy} completed!")
        print(f"Traces saved to: {place}/")
    del model, optimizer, scheduler, loss
    gc.collect()  # FSDP refers to itself; gloo can hang when a model outlives its process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
