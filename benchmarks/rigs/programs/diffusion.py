"""A denoising diffusion model on `accelerate`: a small U-Net, a running average of its weights that images are sampled
from every few steps, and saved states."""

import argparse
import copy
import math
import tempfile
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    """Discs of random size and place."""

    def __len__(self):
        return 20_000

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x, y, size = torch.rand(3, generator=generator).tolist()
        rows, columns = torch.meshgrid(torch.linspace(0, 1, 16), torch.linspace(0, 1, 16), indexing="ij")
        return {"image": (((rows - x) ** 2 + (columns - y) ** 2) < (0.1 + 0.2 * size) ** 2).float()[None] * 2 - 1}


class ResidualBlock(nn.Module):
    def __init__(self, channels, time_dim):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.GroupNorm(4, channels), nn.GroupNorm(4, channels)
        self.embed = nn.Linear(time_dim, channels)

    def forward(self, x, emb):
        h = self.conv1(nn.functional.silu(self.norm1(x))) + self.embed(emb)[:, :, None, None]
        return x + self.conv2(nn.functional.silu(self.norm2(h)))


class UNet(nn.Module):
    def __init__(self, width=16, time_dim=32):
        super().__init__()
        self.time_dim = time_dim
        self.first, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 4, 2, 1)
        self.blocks = nn.ModuleList(ResidualBlock(width, time_dim) for _ in range(3))
        self.up, self.last = nn.ConvTranspose2d(width, width, 4, 2, 1), nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, sample, timestep):
        rates = torch.exp(-math.log(10_000) * torch.arange(self.time_dim // 2) / (self.time_dim // 2))
        angles = timestep[:, None] * rates
        emb = torch.cat([angles.sin(), angles.cos()], dim=-1)
        skip = self.blocks[0](self.first(sample), emb)
        return self.last(self.blocks[2](self.up(self.blocks[1](self.down(skip), emb)) + skip, emb))


class EMAModel:
    def __init__(self, model, decay=0.995):
        self.averaged, self.decay = copy.deepcopy(model).requires_grad_(False), decay

    @torch.no_grad()
    def step(self, model):
        for kept, new in zip(self.averaged.parameters(), model.parameters(), strict=True):
            kept.lerp_(new, 1 - self.decay)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", type=int, default=16)
    parser.add_argument("--num_epochs", type=int, default=50)
    parser.add_argument("--save_images_steps", type=int, default=7)
    parser.add_argument("--checkpointing_steps", type=int, default=20)
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = UNet()
    ema = EMAModel(model)
    betas = torch.linspace(1e-4, 0.02, 100)
    alphas = (1 - betas).cumprod(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=1e-6)
    loader = DataLoader(Shapes(), batch_size=args.train_batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    global_step = 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.num_epochs):
            for batch in loader:
                clean = batch["image"]
                noise, steps = torch.randn_like(clean), torch.randint(0, 100, (len(clean),))
                scale = alphas[steps][:, None, None, None]
                loss = nn.functional.mse_loss(model(scale.sqrt() * clean + (1 - scale).sqrt() * noise, steps), noise)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                ema.step(accelerator.unwrap_model(model))
                global_step += 1
                if accelerator.is_main_process:
                    print(f"loss={loss.detach().item()!r} time={time.perf_counter()!r}")
                if global_step % args.save_images_steps == 0 and accelerator.is_main_process:
                    with torch.no_grad():
                        image = torch.zeros(2, 1, 16, 16)
                        for t in (99, 50, 1):
                            image -= betas[t] * ema.averaged(image, torch.full((2,), t))
                if global_step % args.checkpointing_steps == 0 and accelerator.is_main_process:
                    accelerator.save_model(model, folder)
    accelerator.end_training()


if __name__ == "__main__":
    main()
