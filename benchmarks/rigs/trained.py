"""Networks trained on images from a seed, and kept: what benchmarks of trained networks begin with.

    lenet       batch 4, two epochs of CIFAR-10, SGD 0.001 with momentum 0.9, values from −1 to 1
    resnet20    batch 128, two epochs, SGD 0.1 with momentum 0.9 falling to 0, decay 5e-4, shifted and mirrored

Digits are fewer, and are gone through more often. The seed decides the first weights, the order of the images and how
they are shifted. Weights are kept in a file whose name says what they were trained on and how long; whoever changes
anything else about a training should begin with an empty directory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rigs import resnet20
from torch import nn

from scalelab.worker.models.networks import build_lenet
from scalelab.workloads.image_options import ImageOptions, LenetOptions
from scalelab.workloads.workload import BuildContext, Workload

Data = Literal["cifar10", "digits"]


@dataclass(frozen=True, kw_only=True)
class Course:
    """How long a network is trained."""

    batch: int
    epochs: int


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network to be trained."""

    name: str
    build: Callable[[Any, BuildContext], Workload]
    options: type[ImageOptions]
    is_half: bool
    """Normalised by 0.5 and 0.5."""
    courses: dict[Data, Course]
    is_decayed: bool
    """The learning rate falls to 0, in a line."""
    layout: torch.memory_format
    """Of images and weights in training: channels last, `resnet20` takes 0.7 times as long."""


LENET = Subject(
    name="lenet",
    build=build_lenet,
    options=LenetOptions,
    is_half=True,
    courses={"cifar10": Course(batch=4, epochs=2), "digits": Course(batch=4, epochs=10)},
    is_decayed=False,
    layout=torch.contiguous_format,
)
RESNET20 = Subject(
    name="resnet20",
    build=resnet20.build,
    options=ImageOptions,
    is_half=False,
    courses={"cifar10": Course(batch=128, epochs=2), "digits": Course(batch=32, epochs=3)},
    is_decayed=True,
    layout=torch.channels_last,
)


def find_options(subject: Subject, directory: Path | None) -> ImageOptions:
    if directory is None:
        return subject.options(data="digits")
    return subject.options(data="cifar10", data_path=str(directory))


def find_network(subject: Subject, seed: int, options: ImageOptions, weights: Path | None) -> nn.Module:
    """Trained, or as it was when it was trained before; in eval mode."""
    course = subject.courses[pick_data(options)]
    torch.manual_seed(seed)
    context = BuildContext(batch_size=course.batch, rank=0, num_ranks=1, seed=seed, device="cpu")
    workload = subject.build(options, context)
    name = f"{subject.name}-{options.data}-batch{course.batch}-epochs{course.epochs}-seed{seed}.pt"
    file = None if weights is None else weights / name
    if file is not None and file.is_file():
        workload.model.load_state_dict(torch.load(file, weights_only=True))
        tell(f"{subject.name}, seed {seed}: weights of {name}")
        return workload.model.eval()
    train(workload, course.epochs, subject)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        torch.save(workload.model.state_dict(), unfinished)
        unfinished.replace(file)
    return workload.model.eval()


def pick_data(options: ImageOptions) -> Data:
    return "cifar10" if options.data == "cifar10" else "digits"


def train(workload: Workload, num_epochs: int, subject: Subject) -> None:
    batches: Any = workload.batches
    loss_of: Any = workload.loss
    assert workload.optimizer is not None
    model: Any = workload.model
    model.to(memory_format=subject.layout).train()
    optimizer = workload.optimizer(model.parameters())
    num_steps = num_epochs * len(batches)
    fall = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0 if subject.is_decayed else 1.0, num_steps)
    for epoch in range(num_epochs):
        start, total = time.perf_counter(), 0.0
        batches.set_epoch(epoch)
        for images, labels in batches:
            optimizer.zero_grad()
            loss = loss_of(model(images.contiguous(memory_format=subject.layout)), labels)
            loss.backward()
            optimizer.step()
            fall.step()
            total += loss.item()
        seconds = time.perf_counter() - start
        tell(f"{subject.name}: epoch {epoch + 1} of {num_epochs}, loss {total / len(batches):.3f}, {seconds:.0f} s")
    model.to(memory_format=torch.contiguous_format)


def tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
