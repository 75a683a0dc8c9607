"""A sequence-to-sequence package: `python -m translator.train data.batch_size=16`. Validates in inference mode without
switching the model to `eval`, and keeps the best weights."""

import itertools
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .config import compose
from .data import make_loader
from .model import Seq2Seq


class NoamAdam(torch.optim.Adam):
    """Adam whose learning rate rises and then falls."""

    def __init__(self, params, dim, warmup, factor):
        super().__init__(params, lr=0.0, betas=(0.9, 0.98))
        self.dim, self.warmup, self.factor, self.count = dim, warmup, factor, 0

    def step(self, closure=None):
        self.count += 1
        rate = self.factor * self.dim**-0.5 * min(self.count**-0.5, self.count * self.warmup**-1.5)
        for group in self.param_groups:
            group["lr"] = rate
        return super().step(closure)


@torch.inference_mode()
def validate(model, batches, criterion):
    losses = [criterion(model(s, t[:-1]).flatten(0, 1), t[1:].flatten()) for s, t in batches]
    return torch.stack(losses).mean().item()


def main(words):
    config = compose(words)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(config.trainer.seed)
    model = Seq2Seq(config.model.dim, config.model.vocab)
    if world_size > 1:
        model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = NoamAdam(model.parameters(), config.model.dim, config.optim.warmup, config.optim.lr)
    loader, sampler = make_loader(config.data, config.model.vocab, rank, world_size, seed=1)
    held_out = list(itertools.islice(make_loader(config.data, config.model.vocab, 0, 1, seed=2)[0], 2))
    step, best = 0, float("inf")
    for epoch in range(config.trainer.max_epochs):
        sampler.epoch = epoch
        for sources, targets in loader:
            optimizer.zero_grad()
            logits = model(sources, targets[:-1])
            loss = criterion(logits.flatten(0, 1), targets[1:].flatten())
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if rank == 0:
                print(f"[{epoch}:{step}] loss={loss.item()!r} time={time.perf_counter()!r}", flush=True)
            if step % config.trainer.val_interval == 0:
                best = min(best, validate(getattr(model, "module", model), held_out, criterion))


if __name__ == "__main__":
    main(sys.argv[1:])
