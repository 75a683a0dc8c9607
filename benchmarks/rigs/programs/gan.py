"""In the style of DCGAN: two networks, two optimizers, three backward passes per step."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batchSize", type=int, default=16)
parser.add_argument("--niter", type=int, default=25)
opt = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
images = TensorDataset(torch.randn(1024, 1, 16, 16).tanh())
loader = DataLoader(images, opt.batchSize, sampler=DistributedSampler(images, shuffle=True))
generator = nn.Sequential(
    nn.ConvTranspose2d(16, 32, 4),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.ConvTranspose2d(32, 16, 4, 2, 1),
    nn.ReLU(),
    nn.ConvTranspose2d(16, 1, 4, 2, 1),
    nn.Tanh(),
)
critic = nn.Sequential(
    nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 1, 4)
)
generator, critic = (DistributedDataParallel(one, broadcast_buffers=False) for one in (generator, critic))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
for _ in range(opt.niter):
    for (real,) in loader:
        ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
        critic.zero_grad()
        on_real = criterion(critic(real).flatten(), ones)
        on_real.backward()
        fake = generator(torch.randn(len(real), 16, 1, 1))
        on_fake = criterion(critic(fake.detach()).flatten(), zeros)
        on_fake.backward()
        of_critic.step()
        generator.zero_grad()
        fooled = criterion(critic(fake).flatten(), ones)
        fooled.backward()
        of_generator.step()
        if dist.get_rank() == 0:
            total = on_real.item() + on_fake.item() + fooled.item()
            print(f"loss={total!r} time={time.perf_counter()!r}")
